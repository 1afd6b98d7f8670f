"""The door: how settings come in from the command line, conf/ and a finished run, and how a command leaves.

With explain.py the only file that imports Hydra and OmegaConf; behind it there are plain values (`Settings`) and typed
errors. What cannot work is refused before any work and before a folder is made: one line that names the setting, exit
code 2.

Hydra 1.3 composes a run, calls `on_run_start` of its callbacks, and only then makes the run's folder: `Gate` stands
there. Hydra swallows what callbacks raise unless it is no `Exception`, so a refusal travels past it as `_Leave`. Errors
of the composition come out of `hydra.main` as they are when HYDRA_FULL_ERROR is 1; otherwise Hydra prints them itself.

Where mpiexec started several processes, all compose the same settings. Rank 0 goes on as ever; the others do their part
of the job at the gate and leave: they make no folder, write no log, and what ends the job is told by one rank.

The file is long (over 300 lines) because nobody else may see Hydra.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Generic, Protocol, TypeVar, cast, get_args, get_type_hints

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from cupynet import __version__, resume, trust
from cupynet.checks import one_line
from cupynet.errors import ConfigError, CupynetError, DataError, Interrupted, OutputError
from cupynet.exits import BROKEN_PIPE, RankConsole, stdout_is_gone, steady_streams, tell
from cupynet.explain import GROUPS, explain
from cupynet.lock import Hold
from cupynet.mpiexec import started
from cupynet.parts import for_chosen_classes
from cupynet.settings import AS_RANKS, Group, Settings, read, without_stand_in

S = TypeVar("S", bound=Settings)  # what a command is asked for
T = TypeVar("T")  # what it makes of that before it starts

FILE = re.compile(r"\w[\w-]*(/\w[\w-]*)*")  # in a folder of conf/
LOCAL = ("data.folder", "data.shards", "devices")  # what may be another on each machine of a job

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


def _names(schema: type[Settings]) -> list[str]:
    return [each.name for each in fields(schema)]


def _spine(schema: type[Settings]) -> DictConfig:
    """The typed root that conf/config.yaml is merged into."""
    spine: DictConfig = OmegaConf.structured(_thawed(schema))
    return spine


_thawed_of: dict[type[Group], type] = {}  # OmegaConf tells a class from a second one made alike


def _thawed(kind: type[Group]) -> type:
    """The dataclass, and the groups in it, as OmegaConf can work with them.

    Not frozen, which OmegaConf takes for read-only; and what OmegaConf 2.3 gets wrong is left to the rule of the
    setting: `bool`, for which it takes 2 too, and unions, with which it cannot merge (an AssertionError of its own).
    """
    if kind in _thawed_of:
        return _thawed_of[kind]
    hints, members = get_type_hints(kind), []
    for each in fields(kind):
        hint = _thawed(each.metadata["group"]) if "group" in each.metadata else hints[each.name]
        union = isinstance(hint, UnionType) and len(set(get_args(hint)) - {type(None)}) > 1
        default = field(default=each.default, default_factory=each.default_factory)
        members.append((each.name, Any if union or hint is bool else hint, default))
    _thawed_of[kind] = make_dataclass(kind.__name__, members, kw_only=True)
    return _thawed_of[kind]


def _register(schema: type[Settings]) -> None:
    ConfigStore.instance().store(name="spine", node=_spine(schema), provider="cupynet")


_register(Settings)


def conf_folder() -> Path:
    """conf/ inside the package, where a wheel has it, else beside it, where the repository has it."""
    package = Path(__file__).resolve().parent
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), package / "conf")


def run(
    task: Callable[[T, Path], float | None],
    prepare: Callable[[S], T],
    config_name: str,
    schema: type[S],
    join: Callable[[], Ranks] | None = None,
) -> None:
    """Be a command: compose the settings the command line asks for, refuse what cannot work, do the job or the sweep.

    prepare: makes from the settings what the task works with. Called once per job, after names, types and values are
    found good, and before a folder is made and a log begun (in a sweep: when the job starts). Its ConfigError refuses
    the job.
    task: does a job with what was prepared, in the job's folder; its result goes to Hydra's sweeper. Relative paths
    stay relative to where the command was started.
    config_name: the file of conf/ to begin with.
    schema: the settings, `Settings` or more.
    join: finds the other processes, where mpiexec started several; None for a command that is one process.

    Returns when all went well, else leaves the process (SystemExit) with the exit code of the first job that failed:
    that of a `CupynetError`, which is told in one line, or 1 for a bug, which is told with its traceback.
    """
    global _door
    steady_streams()
    door = _door = _Door(task, prepare, schema, join)
    _register(schema)
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        code = _enter(door, config_name)
    finally:
        _door = None
        _register(Settings)
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
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for option in sys.argv[1:]:
        if (
            option.startswith("--")
            and "=" in option
            and option[2:].partition("=")[0].partition(".")[0] in _names(door.schema)
        ):
            return door.tell(ConfigError(f"{option}: settings are written without dashes: {option[2:]}"))
    try:
        _refuse_other_primary(sys.argv[1:], config_name)
        with door.one_voice(), door.looked_at():
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
            return door.tell(OutputError(f"the run's folder cannot be written: {failure}"))
        return door.tell(ConfigError(explain(error, overrides, door.schema)))
    except BaseException as error:
        marked = hasattr(error, "problem_mark")  # YAML's own error, which says in which file and line
        return door.tell(ConfigError(one_line(error)) if marked else error)
    finally:
        door.let_go()
    return next((code for code in door.codes if code), 0)


def _refuse_other_primary(arguments: Sequence[str], config_name: str) -> None:
    """Refuse another file to begin with: from it Hydra takes where code is found, before anything can be looked at."""
    for place, option in enumerate(arguments):
        name, _, value = option.partition("=")
        if name.startswith(("-cn", "-cp", "--config-n", "--config-p")):
            raise ConfigError(
                f"{option}: a command begins with its own settings: name a folder of yours with --config-dir"
            )
        if name.startswith(("-cd", "--config-d")):
            folder = Path(value or next(iter(arguments[place + 1 :]), ""))
            if (folder / f"{config_name}.yaml").exists():
                raise ConfigError(
                    f"{option}: {folder / config_name}.yaml would take the place of this command's own settings: put "
                    "them into a file of a group, such as experiment/"
                )


class _Leave(BaseException):
    """Carries an error (its only argument) out past Hydra, which holds back the exceptions of callbacks."""


class Gate(Callback):
    """Hydra's callback that refuses a run, or a sweep, whose folder does not exist yet (conf/config.yaml lists it)."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if _door is not None:
            _door.admit(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Refuse a sweep where one that is going on is."""
        self._compose_all(config)
        if _door is not None:
            _door.admit_sweep(config)

    def _compose_all(self, config: DictConfig) -> None:
        """Compose every job of the sweep: a name or type that is wrong in one is wrong on the command line."""
        if _door is not None and _door.started is not None:
            raise _Leave(ConfigError("-m: a sweep is not run under mpiexec: start mpiexec once for each of its jobs"))
        typed = () if _door is None else _door.typed
        trust.check_folder("hydra.sweep.dir", OmegaConf.select(config, "hydra.sweep.dir"), typed)
        if config.hydra.sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
            return  # another sweeper chooses its jobs on the way
        asked, schema = _asked(config), _door.schema if _door is not None else Settings
        loader = GlobalHydra.instance().config_loader()
        swept = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
        try:
            parsed = OverridesParser.create(loader).parse_overrides([*swept, *asked])
            jobs = BasicSweeper.split_arguments(parsed, None)[0]
        except Exception as error:
            raise _Leave(ConfigError(explain(error, asked, schema))) from error
        for overrides in jobs:
            try:
                job = loader.load_sweep_config(config, list(overrides))
                with open_dict(job):
                    job.hydra.job.num, job.hydra.job.id = 0, "0"
                trust.check_folder("hydra.sweep.subdir", OmegaConf.select(job, "hydra.sweep.subdir"), typed)
            except Exception as error:
                raise _Leave(ConfigError(explain(error, overrides, schema))) from error


class _Door(Generic[S, T]):
    """One use of `run`: what it lets in, and how its jobs ended."""

    def __init__(
        self,
        task: Callable[[T, Path], float | None],
        prepare: Callable[[S], T],
        schema: type[S],
        join: Callable[[], Ranks] | None,
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
        self._notes: list[tuple[int, str]] = []  # for the log, once there is one: level and text
        self._held: dict[Path, Hold] = {}  # the folders that are this command's alone
        self._sweep: Path | None = None  # that of all jobs of a sweep
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
            sys.argv[1:] = [argument for argument in given if argument.lstrip("+").partition("=")[0] != "resume"]
            self._notes.append((logging.INFO, "resume=latest: there is nothing to go on with: a new run begins"))
        else:
            sys.argv[1:] = resume.arguments(given, overrides_of(resume.run_of(path)), path)
            self.typed += "hydra.run.dir", "hydra.output_subdir"

    def admit(self, config: DictConfig) -> None:
        """Prepare a single run before Hydra makes its folder."""
        try:
            HydraConfig.instance().set_config(config)  # for ${hydra:...}; Hydra itself does it only later
            self._check_folder(os.path.abspath(str(OmegaConf.select(config, "hydra.run.dir"))), config)
            self._prepare(config, _asked(config), Path(str(config.hydra.run.dir)))
            offer = resume.offer() if self.schema is Settings and self._resumed is None else ""
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

    def admit_sweep(self, config: DictConfig) -> None:
        """Take the folder of a sweep before anything is written there."""
        try:
            HydraConfig.instance().set_config(config)
            folder = Path(str(config.hydra.sweep.dir))
            self._hold(folder, make=True)
            self._sweep = folder.resolve()
        except Exception as error:
            raise _Leave(error) from error

    def _hold(self, folder: Path, *, make: bool) -> None:
        """Keep others out of a folder, made if it is to be, on all ranks alike: ConfigError where somebody is there."""
        refusal = ""
        try:
            if not self.rank:
                self._take(folder, make=make)
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
        settings = _settings(config, asked, self.schema, self.typed)
        if self._resumed is not None:
            run = resume.run_of(self._resumed)
            stored = load(run, (), settings.trusted_modules)
            resume.refuse_other(_flat(asdict(settings)), _flat(asdict(stored)), self._resumed)
            trust.check_path_of_parts(settings.callbacks, run, self.typed)
        if self.started is not None and (self.join is None or settings.parallel.launcher != "mpi"):
            several = "several processes" if self.started[1] is None else f"{self.started[1]} processes"
            way_out = "start this command without mpiexec" if self.join is None else f"add {AS_RANKS}"
            raise ConfigError(f"mpiexec started {several}, and each of them would be a run of its own: {way_out}")
        if self.started is not None and self.join is not None:
            ranks = self.join()
            ranks.timeout_s = settings.parallel.timeout_s
            ranks.agree({"the version of cupynet": __version__, **_flat(asdict(settings), leave_out=LOCAL)})
        self._hold(folder, make=False)  # what is there must not change while it is looked at
        if self.schema is Settings and self._resumed is None:
            resume.refuse_unfinished(folder)
        prepared = self.prepare(settings)
        self._hold(folder, make=True)
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
        try:
            if not self._prepared:
                self._prepare(config, _asked(HydraConfig.instance().cfg), own)
            folder = "" if self.rank else str(own)
            if self.started is not None and self.join is not None:
                folder = self.join().share(folder)
            while self._notes:
                _log.log(*self._notes.pop(0))
            if self._resumed is not None and not self.rank:
                _store(config, Path(folder))
            result = self.task(self._prepared.pop(), Path(folder))
            self.codes.append(0)
            return result
        except BaseException as error:
            self.codes.append(self.tell(error, _log, f"job {now.job.num}: " if sweep else ""))
            if sweep and isinstance(error, KeyboardInterrupt | Interrupted):  # meant for the whole sweep
                raise _Leave(SystemExit(self.codes[-1])) from error
            return None
        finally:
            if own.resolve() != self._sweep:
                self.let_go(own)


# Hydra makes its callbacks itself: this is how `Gate` finds the door it belongs to
_door: _Door[Any, Any] | None = None


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


def _asked(config: Any) -> list[str]:
    """The overrides as they were written: reading them like any setting would fill in what stands in ${}."""
    return cast("list[str]", OmegaConf.to_container(config.hydra.overrides.task, resolve=False))


def _store(config: DictConfig, folder: Path) -> None:
    """Write the settings of a run that goes on over those it had: each file whole or as it was. OutputError."""
    from cupynet.files import write_whole

    asked = HydraConfig.get().overrides.task
    for name, content in (("config.yaml", config), ("overrides.yaml", asked)):
        write_whole(folder / ".hydra" / name, OmegaConf.to_yaml(content).encode())


def _settings(config: DictConfig, overrides: Sequence[str], schema: type[S], typed: Sequence[str]) -> S:
    """The composed configuration as plain, valid values; ConfigError. typed: the keys that no file gave."""
    try:
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = cast("dict[str, Any]", OmegaConf.to_container(ours, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, schema)) from error
    trust.check_text(plain)
    trust.check_trusted(plain.get("trusted_modules") or (), typed)
    asked = [(each.key_or_group, each.value()) for each in OverridesParser.create().parse_overrides(list(overrides))]
    return read(schema, without_stand_in(for_chosen_classes(plain, asked), dict(asked)))


def _flat(values: Mapping[str, Any], leave_out: Sequence[str] = (), above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, leave_out, f"{key}.")
        elif key not in leave_out:
            flat[key] = value
    return flat


def compose(overrides: Sequence[str] = ()) -> Settings:
    """The settings that such a command line asks for, without a run. ConfigError."""
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            config = hydra.compose("config", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error
    return _settings(config, overrides, Settings, trust.typed(overrides))


def load(run_folder: str | Path, overrides: Sequence[str] = (), trusted_modules: Iterable[str] = ()) -> Settings:
    """The settings of a finished run, from its `.hydra/config.yaml`, with some changed.

    overrides: settings (`batch_size=512`), or files for groups (`data=synthetic`).

    A stored configuration names classes to build but never who is trusted: its own trusted_modules are left out, and
    only the caller's count (the argument, or an override). ConfigError; DataError for a file that cannot be read.
    """
    path = Path(run_folder) / ".hydra" / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_folder}: is not the folder of a run: there is no {path}")
    stored = _stored(path)
    if not isinstance(stored, DictConfig):
        raise DataError(f"{path}: is not a configuration")
    stored["trusted_modules"] = list(trusted_modules)
    try:
        config = _spine(Settings)
        try:
            config.merge_with(stored)
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path}: {explain(error, ())}: is this a run of another version?") from error
        OmegaConf.set_struct(config, True)
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        for each in sorted(parsed, key=lambda each: each.key_or_group not in GROUPS):  # files first, as Hydra does
            if each.is_delete() or each.is_sweep_override():
                raise ConfigError(f"{each.input_line}: only single settings can be changed here, as key=value")
            key, value = each.key_or_group, each.value()
            if key in GROUPS and isinstance(value, str):
                config[key] = _group_file(key, value)
            else:
                OmegaConf.update(config, key, value, merge=True, force_add=each.is_add() or each.is_force_add())
        return _settings(config, [*overrides_of(run_folder), *overrides], Settings, ("trusted_modules",))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error


def overrides_of(folder: str | Path, schema: type[Settings] = Settings) -> list[str]:
    """What the command line of the job in `folder` asked for, as it was written; nothing where that is not stored.

    Of Hydra's own settings nothing is kept. DataError where the file cannot be read, or holds anything else.
    """
    path = Path(folder) / ".hydra" / "overrides.yaml"
    if not path.is_file():
        return []
    stored = _stored(path)
    found = OmegaConf.to_container(stored, resolve=False) if isinstance(stored, ListConfig) else None
    if not isinstance(found, list) and not (isinstance(stored, DictConfig) and not stored):
        raise DataError(f"{path}: is not a list of settings")
    kept = []
    for each in found or ():
        try:
            override = OverridesParser.create().parse_override(str(each))
        except Exception as error:
            raise DataError(f"{path}: {one_line(each)}: is not written as a setting") from error
        key, value = override.key_or_group, override.value()
        if key.startswith("hydra"):
            continue
        known = key.partition(".")[0] in {*_names(schema), *GROUPS}
        names = (value if isinstance(value, list) else [value]) if key in GROUPS else []
        plain = all(FILE.fullmatch(name) for name in names if isinstance(name, str))
        if not known or not plain or override.package is not None or override.is_sweep_override():
            raise DataError(f"{path}: {one_line(each)}: is not a setting that a run is made with")
        kept.append(str(each))
    return kept


def _stored(path: Path) -> Any:
    """What a run has stored, as OmegaConf has it. DataError where it cannot be read, or would unfold endlessly."""
    try:
        if path.is_symlink() or path.stat().st_size > 4 * trust.MOST_BYTES:
            raise DataError(f"{path}: must be a plain file of at most {trust.MOST_BYTES} characters")
        text = path.read_text(encoding="utf-8")
        trust.check_stored(text, path, _events(text))
        return OmegaConf.create(text)
    except DataError:
        raise
    except Exception as error:  # YAML, encoding, permissions
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _events(text: str) -> Iterator[tuple[str, int]]:
    """The parts of a YAML text, one after the other, before anything is made of it."""
    kinds = {
        "Alias": "alias",
        "SequenceStart": "begin",
        "MappingStart": "begin",
        "SequenceEnd": "end",
        "MappingEnd": "end",
    }
    loader = get_yaml_loader()(text)
    while loader.check_event():
        event = loader.get_event()
        yield kinds.get(type(event).__name__.removesuffix("Event"), ""), event.start_mark.line + 1


def _group_file(group: str, name: str) -> Any:
    """What `group=name` on a command line stands for: the composed content of conf/<group>/<name>.yaml."""
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra.compose("config", overrides=[f"{group}={name}"])[group]
