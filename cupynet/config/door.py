"""A command's way in and out: Hydra composes its settings, what cannot work is refused, the job or the sweep is done.

What cannot work is refused before any work and before a folder is made: one line that names the setting, exit code 2.

Hydra 1.3 composes a run, calls `on_run_start` of its callbacks, and only then makes the run's folder: `Gate` stands
there. Hydra swallows what callbacks raise unless it is no `Exception`, so a refusal travels past it as `_Leave`. Errors
of the composition come out of `hydra.main` as they are when HYDRA_FULL_ERROR is 1; otherwise Hydra prints them itself.

Where mpiexec started several processes, all compose the same settings. Rank 0 goes on as ever; the others do their part
of the job at the gate and leave: they make no folder, write no log, and what ends the job is told by one rank.

The file is long (over 300 lines) because a job's way through Hydra is read in one place.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from cupynet import __version__, resume, trust
from cupynet.checks import one_line
from cupynet.config.composing import asked_in, conf_folder, flat, names, register, settings_of
from cupynet.config.explain import explain
from cupynet.config.launching import Job, Processes, asked_for, launcher_at_hand, numbered
from cupynet.config.removed import refuse_removed
from cupynet.config.stored import load, overrides_of, own_folder_of, store
from cupynet.errors import ConfigError, CupynetError, Interrupted, OutputError
from cupynet.exits import BROKEN_PIPE, Console, RankConsole, quiet, stdout_is_gone, steady_streams, tell
from cupynet.lock import Hold
from cupynet.mpiexec import started
from cupynet.settings import AS_RANKS, Settings

S = TypeVar("S", bound=Settings)  # what a command is asked for
T = TypeVar("T")  # what it makes of that before it starts

LONGEST = 250  # characters of a setting's name: it may become that of a file
CONFIG_DIR = ("-cd", "--config-d")  # how the option that names a folder of one's own begins
LOCAL = ("data.folder", "devices")  # what may be another on each machine of a job

_log = logging.getLogger("cupynet")


class Ranks(Protocol):
    """The processes that do a job together.

    timeout_s: how long one waits for the others before it takes them for dead.
    """

    timeout_s: float

    def agree(self, settings: Mapping[str, object]) -> None:
        """Make sure that all ranks were given the same settings; ConfigError."""

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""

    def speaks(self, error: BaseException) -> bool:
        """An error ends this rank: whether it is the one, of all that end, that tells what happened."""


class Sweeping(Protocol):
    """Who keeps account of the jobs of a sweep, and shows what came of them."""

    def expected(self, jobs: Sequence[Sequence[str]]) -> None:
        """All jobs, where they are known before the first begins."""

    def checked(self, number: int, prepared: Any) -> None:
        """What a job will work with."""

    def began(self, number: int, overrides: Sequence[str], folder: Path) -> None:
        """A job begins."""

    def ended(self, number: int, code: int, error: str = "") -> Any:
        """A job has ended."""

    def side_by_side(self, program: Sequence[str], jobs: Sequence[Job], at_once: int | None) -> int:
        """Do jobs as processes; the signal that ended all of it, or 0."""

    def result(self, number: int) -> float | None:
        """What a sweeper is to choose by."""

    def code(self, number: int) -> int | None:
        """What a job ended with; None where it was not begun."""

    def close(self) -> None:
        """All jobs have ended, or no more will begin."""


def run(
    task: Callable[[T, Path], float | None],
    prepare: Callable[[S], T],
    config_name: str,
    schema: type[S],
    join: Callable[[], Ranks] | None = None,
    sweeping: Callable[[Path], Sweeping] | None = None,
) -> None:
    """Be a command: compose the settings the command line asks for, refuse what cannot work, do the job or the sweep.

    prepare: makes from the settings what the task works with. Called after names, types and values are found good, and
    before a folder is made and a log begun. Its ConfigError refuses the job; in a sweep it is called for each job
    before the first begins, and refuses all of it, and once more when the job starts.
    task: does a job with what was prepared, in the job's folder; its result goes to Hydra's sweeper. Relative paths
    stay relative to where the command was started.
    config_name: the file of conf/ to begin with.
    schema: the settings, `Settings` or more.
    join: finds the other processes, where mpiexec started several; None for a command that is one process.
    sweeping: who keeps account of the jobs of a sweep in a folder; None for nobody.

    Returns when all went well, else leaves the process (SystemExit) with the exit code of the first job that failed:
    that of a `CupynetError`, which is told in one line, or 1 for a bug, which is told with its traceback.
    """
    global _door
    steady_streams()
    door = _door = _Door(task, prepare, schema, join, sweeping)
    Processes.work = door.side_by_side
    register(schema)
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        code = _enter(door, config_name)
    finally:
        _door = Processes.work = None
        register(Settings)
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if stdout_is_gone() and not door.codes:  # jobs that did their work count as done, whoever was listening
        code = BROKEN_PIPE
    if code:
        raise SystemExit(code)


def _enter(door: _Door[Any, Any], config_name: str) -> int | str:
    """Give the command to Hydra; the exit code."""
    try:
        door.go_on()
    except CupynetError as error:
        return door.tell(error)
    written = sys.argv[1:]
    sys.argv[1:] = settings_first(written)
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    raising = logging.raiseExceptions
    try:
        refuse_removed(overrides)
        _refuse_unknown(written, names(door.schema))
        _refuse_other_primary(sys.argv[1:], config_name)
        if any(option.startswith("--info") for option in sys.argv[1:]):
            logging.raiseExceptions = False  # Hydra logs the answer: a reader who has left is told of at every line
        with door.one_voice(), door.looked_at(), launcher_at_hand():
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=config_name)(
                door.job_function()
            )()
    except _Leave as left:
        return door.tell(left.args[0])
    except BrokenPipeError as error:
        return door.tell(error)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        # jobs hand their errors to the door: an OSError out here met Hydra at the folder or the log of a run
        failure = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if isinstance(failure, OSError) and not isinstance(failure, HydraException):
            return door.tell(OutputError(explain(failure, overrides)))
        return door.tell(ConfigError(explain(error, overrides, door.schema)))
    except BaseException as error:
        marked = hasattr(error, "problem_mark")  # YAML's own error, which says in which file and line
        return door.tell(ConfigError(one_line(error)) if marked else error)
    finally:
        logging.raiseExceptions = raising
        if door.account is not None:
            door.account.close()
        door.let_go()
    return next((code for code in door.codes if code), 0)


def settings_first(arguments: Sequence[str]) -> list[str]:
    """A command line with its options behind its settings: Hydra's parser takes no setting that comes after an option
    which came after a setting."""
    settings: list[str] = []
    options: list[str] = []
    before = ""
    for argument in arguments:
        is_option = argument.startswith("-") or _is_value(argument, before)
        (options if is_option else settings).append(argument)
        before = argument
    return [*settings, *options]


def _is_value(argument: str, before: str) -> bool:
    """Whether an argument is the value of the option before it, which may be shortened."""
    if "=" in before or not before.startswith("-"):
        return False
    for each in get_args_parser()._actions:
        if any(name == before or (before.startswith("--") and name.startswith(before)) for name in each.option_strings):
            return each.nargs is None or (each.nargs == "?" and argument in (each.choices or ()))
    return False


def _parser() -> argparse.ArgumentParser:
    """Hydra's own, which refuses in one line, and knows whose version is asked for."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; --help says how settings are written")

    parser: argparse.ArgumentParser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    for option in parser._actions:
        if isinstance(option, argparse._VersionAction):
            option.version = f"cupynet {__version__}"
    return parser


def _refuse_unknown(arguments: Sequence[str], settings: Sequence[str]) -> None:
    """Refuse options that there are not, such as settings written with dashes, and names that can be none."""
    options = [each for each in _parser().parse_known_args(list(arguments))[1] if each.startswith("-")]
    for option in options:
        name, _, value = option.lstrip("-").partition("=")
        if name.partition(".")[0] not in settings:
            raise ConfigError(f"{one_line(option):.60}: there is no such option; --help says how settings are written")
        after = arguments[arguments.index(option) + 1 :][:1]
        value = value or next((each for each in after if not each.startswith("-") and "=" not in each), "...")
        raise ConfigError(f"{option}: settings are written without dashes: {name}={value}")
    for argument in arguments:
        name = argument.partition("=")[0]
        if len(name) > LONGEST and not name.startswith("-"):
            raise ConfigError(f"{name[:40]}...: no setting has a name of {len(name)} characters")


def _refuse_other_primary(arguments: Sequence[str], config_name: str) -> None:
    """Refuse another file to begin with: from it Hydra takes where code is found, before anything can be looked at."""
    for option in arguments:
        if option.partition("=")[0].startswith(("-cn", "-cp", "--config-n", "--config-p")):
            raise ConfigError(
                f"{option}: a command begins with its own settings: name a folder of yours with --config-dir"
            )
    folder = own_folder(arguments)
    if folder is not None and (folder / f"{config_name}.yaml").exists():
        raise ConfigError(
            f"--config-dir={folder}: {folder / config_name}.yaml would take the place of this command's own settings: "
            "put them into a file of a group, such as experiment/"
        )


def own_folder(arguments: Sequence[str]) -> Path | None:
    """The folder of files of one's own that a command line names with --config-dir, last; None where it names none."""
    found = None
    for place, option in enumerate(arguments):
        name, _, value = option.partition("=")
        if name.startswith(CONFIG_DIR):
            found = Path(value or next(iter(arguments[place + 1 :]), ""))
    return found


class _Leave(BaseException):
    """Carries an error (its only argument) out past Hydra, which holds back the exceptions of callbacks."""


class Gate(Callback):
    """Hydra's callback that refuses a run, or a sweep, whose folder does not exist yet (conf/config.yaml lists it)."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if _door is not None:
            _door.admit(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a sweep where one that is going on is, or one of whose jobs cannot work."""
        jobs = self._compose_all(config)
        if _door is not None:
            _door.admit_sweep(config, jobs)

    def _compose_all(self, config: DictConfig) -> list[tuple[list[str], DictConfig]] | None:
        """Compose every job of the sweep: a name or type that is wrong in one is wrong on the command line.

        None where jobs are not known beforehand.
        """
        if _door is not None and _door.started is not None:
            raise _Leave(ConfigError("-m: a sweep is not run under mpiexec: start mpiexec once for each of its jobs"))
        typed = () if _door is None else _door.typed
        try:
            trust.check_folder("hydra.sweep.dir", OmegaConf.select(config, "hydra.sweep.dir"), typed)
        except ConfigError as error:
            raise _Leave(error) from error
        if config.hydra.sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
            return None  # another sweeper chooses its jobs on the way
        asked, schema = asked_in(config), _door.schema if _door is not None else Settings
        loader = GlobalHydra.instance().config_loader()
        swept = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
        try:
            parsed = OverridesParser.create(loader).parse_overrides([*swept, *asked])
            jobs = BasicSweeper.split_arguments(parsed, None)[0]
        except Exception as error:
            raise _Leave(ConfigError(explain(error, asked, schema))) from error
        composed = []
        folders: dict[Path, int] = {}
        for number, overrides in enumerate(jobs):
            try:
                job = loader.load_sweep_config(config, list(overrides))
                folder = numbered(job, number).resolve()
                subdir = OmegaConf.select(job, "hydra.sweep.subdir")
                trust.check_folder("hydra.sweep.subdir", subdir, typed)
                other = folders.setdefault(folder, number)
                if other != number:
                    raise ConfigError(
                        f"hydra.sweep.subdir={subdir}: jobs {other} and {number} would have one folder: put "
                        "${hydra.job.num} into it, or leave it out"
                    )
            except Exception as error:
                raise _Leave(ConfigError(explain(error, overrides, schema))) from error
            composed.append((list(overrides), job))
        return composed


class _Door(Generic[S, T]):
    """One use of `run`: what it lets in, and how its jobs ended."""

    def __init__(
        self,
        task: Callable[[T, Path], float | None],
        prepare: Callable[[S], T],
        schema: type[S],
        join: Callable[[], Ranks] | None,
        sweeping: Callable[[Path], Sweeping] | None,
    ) -> None:
        self.task = task
        self.prepare = prepare
        self.schema = schema
        self.join = join
        self.started = started()
        self.rank = 0 if self.started is None else self.started[0]
        self.codes: list[int | str] = []  # one per job that has ended
        self._prepared: list[T] = []  # of a single run between the gate and its job
        self._resumed: Path | None = None  # what is gone on with
        self.keep: Callable[[], None] | None = None  # writes the settings that it goes on with
        self._notes: list[tuple[int, str]] = []  # for the log, once there is one: level and text
        self._held: dict[Path, Hold] = {}  # the folders that are this command's alone
        self._sweep: Path | None = None  # that of all jobs of a sweep
        self._sweeping = sweeping
        self.account: Sweeping | None = None  # of the sweep's jobs
        folder = own_folder(sys.argv[1:])
        self._program = [*program(), *([] if folder is None else [f"--config-dir={folder}"])]
        self.typed = trust.typed(sys.argv[1:])  # keys that no file gave

    def go_on(self) -> None:
        """Where the command line asks to resume, give Hydra that of the run that is gone on with. ConfigError."""
        given = sys.argv[1:]
        value = resume.asked(given)
        if value is None:
            return
        if self.schema is not Settings:
            raise ConfigError(f"resume={value}: only cupynet.train goes on with a run: leave it out")
        if {"-m", "--multirun"} & set(given):
            raise ConfigError(f"resume={value}: goes on with one run, and a sweep makes many: leave -m out")
        path = self._resumed = resume.find(value, given)
        if path is None:
            ended = resume.ended(given)
            if ended is not None:
                if not self.rank:
                    print(
                        f"resume=latest: the run in {ended} has come to its end, and kept no checkpoint to go on from"
                    )
                raise SystemExit(0)
            sys.argv[1:] = [argument for argument in given if argument.lstrip("+").partition("=")[0] != "resume"]
            self._notes.append((logging.INFO, f"resume=latest: {resume.nothing_left(given)}"))
        else:
            run = resume.run_of(path)
            own = None if own_folder(given) is not None else own_folder_of(run)
            folder = [] if own is None else [f"--config-dir={own}"]
            sys.argv[1:] = [*resume.arguments(given, overrides_of(run), path), *folder]
            self.typed += "hydra.run.dir", "hydra.output_subdir"

    def admit(self, config: DictConfig) -> None:
        """Prepare a single run before Hydra makes its folder."""
        try:
            HydraConfig.instance().set_config(config)  # for ${hydra:...}; Hydra itself does it only later
            self._check_folder(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))), config)
            folder = Path(str(config.hydra.run.dir))
            self._prepare(config, asked_in(config), folder)
            offer = resume.offer(folder) if self.schema is Settings and self._resumed is None else ""
            if offer:
                self._notes.append((logging.INFO, offer))
        except Exception as error:
            raise _Leave(error) from error
        if self.rank:
            sys.stdout, sys.stderr = self._streams
            for name in ("cupynet", "__main__"):
                logging.getLogger(name).addHandler(RankConsole(self.rank))
            self._job(config)
            raise _Leave(SystemExit(self.codes[-1]))

    def admit_sweep(self, config: DictConfig, jobs: Sequence[tuple[list[str], DictConfig]] | None) -> None:
        """Refuse a sweep one of whose jobs cannot work; take its folder before anything is written there."""
        try:
            HydraConfig.instance().set_config(config)
            folder = Path(str(config.hydra.sweep.dir))
            account = None if self._sweeping is None else self._sweeping(folder)
            if asked_for(config) is not None and account is None:
                raise ConfigError("hydra/launcher=processes: only jobs of cupynet.train are run as processes")
            self._hold(folder, make=False, fresh=account is not None)
            self._check_jobs(jobs or (), account)
            HydraConfig.instance().set_config(config)
            self._hold(folder, make=True, fresh=account is not None)
            self._sweep, self.account = folder.resolve(), account
            if account is not None:
                if jobs is not None:
                    account.expected([overrides for overrides, _ in jobs])
                with read_write(config.hydra), open_dict(config.hydra):  # it tells of jobs, and Hydra need not
                    OmegaConf.update(config.hydra, "hydra_logging.loggers.hydra.level", "WARNING")
        except Exception as error:
            raise _Leave(error) from error

    def _check_jobs(self, jobs: Sequence[tuple[list[str], DictConfig]], account: Sweeping | None) -> None:
        """Refuse a sweep before its first job begins, where one of them cannot work. ConfigError: which, and why."""
        refused = []
        for number, (overrides, config) in enumerate(jobs):
            HydraConfig.instance().set_config(config)
            try:
                prepared = self.prepare(self._settings_of(config, overrides))
                if account is not None:
                    account.checked(number, prepared)
            except ConfigError as error:
                refused.append(f"job {number}: {'; '.join([str(error), *getattr(error, '__notes__', ())])}")
            except Exception as error:
                _log.debug("job %d: %s", number, one_line(error))  # of its data, or of the machine: at its turn
        if refused:
            others = len(refused) - 1
            more = f" ({others} more of {len(jobs)} jobs {'are' if others > 1 else 'is'} refused too)" if others else ""
            raise ConfigError(f"{refused[0]}{more}")

    def _settings_of(self, config: DictConfig, overrides: Sequence[str]) -> S:
        """The settings of a job of a sweep. ConfigError."""
        settings = settings_of(config, list(overrides), self.schema, self.typed)
        if settings.resume is not None:
            raise ConfigError(f"resume={settings.resume}: goes on with one run, and a sweep makes many: leave it out")
        return settings

    def side_by_side(self, jobs: list[tuple[Job, DictConfig]], at_once: int | None) -> list[float | None]:
        """Do jobs of the sweep as processes; what came of each."""
        account = self.account
        assert account is not None
        try:
            for (_, overrides, _, _), config in jobs:  # whom to trust is asked here, of what was typed here
                HydraConfig.instance().set_config(config)
                self._settings_of(config, overrides)
            number = account.side_by_side(self._program, [job for job, _ in jobs], at_once)
        except Exception as error:
            raise _Leave(error) from error
        codes = [account.code(job[0]) for job, _ in jobs]
        self.codes += [code for code in codes if code is not None]
        if number:
            raise _Leave(Interrupted(number, "what its jobs have saved is in their folders"))
        return [account.result(job[0]) for job, _ in jobs]

    def _hold(self, folder: Path, *, make: bool, fresh: bool = False) -> None:
        """Keep others out of a folder, made if it is to be, on all ranks alike: ConfigError where somebody is there.

        fresh: or where somebody was, whose work would be lost.
        """
        refusal = ""
        try:
            if not self.rank:
                self._take(folder, make=make)
                if fresh:
                    resume.refuse_taken(folder)
        except ConfigError as error:
            refusal = str(error)
        if self.started is not None and self.join is not None:
            refusal = self.join().share(refusal)
        if refusal:
            raise ConfigError(refusal)

    def _take(self, folder: Path, *, make: bool) -> None:
        try:
            key = folder.resolve()
            if make:
                folder.mkdir(parents=True, exist_ok=True)
            if key in self._held or not folder.is_dir():
                return
        except (OSError, ValueError):
            return  # Hydra meets the same, and its error is told
        hold = self._held[key] = Hold(folder)
        if hold.found is not None:
            self._notes.append((logging.INFO, f"the run that had this folder was killed ({hold.found})"))
        if hold.warning:
            self._notes.append((logging.WARNING, hold.warning))

    def let_go(self, folder: Path | None = None) -> None:
        """Leave a folder, or all that are held, to others."""
        for key in [*self._held] if folder is None else [folder.resolve()]:
            hold = self._held.pop(key, None)
            if hold is not None:
                hold.release()

    def _check_folder(self, folder: str, config: DictConfig) -> None:
        """Refuse a run's folder that a file puts elsewhere, or that Hydra cannot work with. ConfigError."""
        trust.check_folder("hydra.run.dir", OmegaConf.select(config, "hydra.run.dir"), self.typed)
        if "${" in folder:
            raise ConfigError(f"{folder}: a folder with ${{ in its name cannot be a run's: it is read as a reference")

    def _prepare(self, config: DictConfig, asked: list[str], folder: Path) -> None:
        settings = settings_of(config, asked, self.schema, self.typed)
        if self._resumed is not None:
            run = resume.run_of(self._resumed)
            stored = load(run, (), settings.trusted_modules)
            resume.refuse_other(flat(asdict(settings)), flat(asdict(stored)), self._resumed)
            trust.check_path_of_parts(settings.callbacks, run, self.typed)
        if self.started is not None and (self.join is None or settings.parallel.launcher != "mpi"):
            several = "several processes" if self.started[1] is None else f"{self.started[1]} processes"
            way_out = "start this command without mpiexec" if self.join is None else f"add {AS_RANKS}"
            raise ConfigError(f"mpiexec started {several}, and each of them would be a run of its own: {way_out}")
        if self.started is not None and self.join is not None:
            ranks = self.join()
            ranks.timeout_s = settings.parallel.timeout_s
            ranks.agree({"the version of cupynet": __version__, **flat(asdict(settings), leave_out=LOCAL)})
        own = self._sweep is not None and folder.resolve() == self._sweep  # a job may have its sweep's folder
        fresh = self.schema is Settings and self._resumed is None and not own
        self._hold(folder, make=False, fresh=fresh)  # what is there must not change while it is looked at
        prepared = self.prepare(settings)
        self._hold(folder, make=True, fresh=fresh)
        self._prepared.append(prepared)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Whatever Hydra composes is looked at before it makes anything of it: it has no other place for that."""
        compose = ConfigLoaderImpl.load_configuration

        @functools.wraps(compose)
        def checked(*arguments: Any, **named: Any) -> DictConfig:
            config = compose(*arguments, **named)
            if named.get("config_name") is not None:  # else it is Hydra that is asked for help
                trust.check_hydra(_hydra_of(config), self.typed, _plugins())
            return config

        ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign]
        try:
            yield
        finally:
            ConfigLoaderImpl.load_configuration = compose  # type: ignore[method-assign]

    @contextmanager
    def one_voice(self) -> Iterator[None]:
        """While settings are composed nobody but rank 0 prints anything."""
        self._streams = sys.stdout, sys.stderr
        if self.rank:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - `admit` may put the others back before
        try:
            yield
        finally:
            sys.stdout, sys.stderr = self._streams

    def tell(self, error: BaseException, log: logging.Logger | None = None, job: str = "") -> int | str:
        """`exits.tell`, by one of the processes that were started together."""
        if self.started is None or isinstance(error, SystemExit):
            return tell(error, log, job)
        try:
            speaks = self.rank == 0 if self.join is None else self.join().speaks(error)
        except ConfigError:  # MPI cannot be used, which may be so on this rank alone
            return tell(error, None if self.rank else log, f"rank {self.rank}: ")
        if speaks:
            return tell(error, None if self.rank else log, f"rank {self.rank}: " if self.rank else job)
        if log is not None and not self.rank:
            log.info("another rank failed, and says why")
        return error.exit_code if isinstance(error, CupynetError) else 1

    def job_function(self) -> Callable[[DictConfig], float | None]:
        @functools.wraps(self.task)  # Hydra names the job after the module of the function it finds underneath
        def job(config: DictConfig) -> float | None:
            return self._job(config)

        return job

    def _job(self, config: DictConfig) -> float | None:
        """Do one job. Hydra never sees it fail: it would print lines of its own and leave with 1, whatever it was."""
        now = HydraConfig.get()
        own = Path(now.run.dir if self.rank else now.runtime.output_dir)  # the other ranks leave before Hydra has one
        sweep = now.mode == RunMode.MULTIRUN
        account, told = self.account if sweep else None, ""
        if account is not None:
            account.began(now.job.num, asked_in(HydraConfig.instance().cfg), own)
            _quiet()
        try:
            if not self._prepared:
                self._prepare(config, asked_in(HydraConfig.instance().cfg), own)
            folder = "" if self.rank else str(own)
            if self.started is not None and self.join is not None:
                folder = self.join().share(folder)
            if OmegaConf.select(config, "callbacks.progress.style") == "none":
                quiet()
            while self._notes:
                _log.log(*self._notes.pop(0))
            if self._resumed is not None and not self.rank:
                self.keep = functools.partial(store, config, Path(folder))
            if self.schema is Settings and not self.rank:
                resume.mark_latest(self._sweep if sweep and self._sweep is not None else own)
            result = self.task(self._prepared.pop(), Path(folder))
            self.codes.append(0)
            return result
        except BaseException as error:
            self.codes.append(self.tell(error, _log, f"job {now.job.num}: " if sweep else ""))
            told = str(error) if isinstance(error, CupynetError) else f"{type(error).__name__}: {error}"
            if sweep and isinstance(error, KeyboardInterrupt | Interrupted):  # meant for the whole sweep
                raise _Leave(SystemExit(self.codes[-1])) from error
            return None
        finally:
            if account is not None:
                code = self.codes[-1]
                account.ended(now.job.num, code if isinstance(code, int) else 1, told)
            if own.resolve() != self._sweep:
                self.let_go(own)


# Hydra makes its callbacks itself: this is how `Gate` finds the door it belongs to
_door: _Door[Any, Any] | None = None


def _quiet() -> None:
    """A job of a sweep shows warnings and errors on the terminal; its log has everything."""
    for name in ("cupynet", "__main__"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, Console):
                handler.setLevel(logging.WARNING)


def keep_settings() -> None:
    """Write the settings of a run that is gone on with over those it had: for its task, once there is nothing that may
    still be refused. Without such a run nothing. OutputError."""
    if _door is not None and _door.keep is not None:
        _door.keep()


def in_sweep() -> bool:
    """Whether the command at work is a sweep, whose jobs are shown in one table."""
    return _door is not None and _door.account is not None


def program() -> list[str]:
    """The words of this process's command line before its arguments, as they start the same command again."""
    count = len(sys.orig_argv) - len(sys.argv) + 1
    if sys.orig_argv[count:] == sys.argv[1:]:
        return [sys.executable, *sys.orig_argv[1:count]]
    return [sys.executable, "-m", "cupynet.train"]  # called from Python


def _hydra_of(config: DictConfig) -> dict[str, Any]:
    """Hydra's own settings as they were written, those resolved that it resolves before it builds from them."""
    plain = cast("dict[str, Any]", OmegaConf.to_container(config.hydra, resolve=False))
    for name in ("launcher", "sweeper"):
        plain[name] = OmegaConf.to_container(config.hydra[name], resolve=True)
    return plain


def _plugins() -> set[str]:
    """The classes of launchers and sweepers that are installed."""
    return {
        f"{each.__module__}.{each.__name__}"
        for kind in (Launcher, Sweeper)
        for each in Plugins.instance().discover(kind)
    }
