"""Command entry point: compose the settings with Hydra, validate them, then run the job or the sweep.

Hydra creates an empty run folder (`hydra.output_subdir` is null). The job validates its settings, locks the folder and
writes `.hydra/`. If validation fails, the new folders are removed. Under mpiexec only rank 0 has a folder and a log.
The rank is read from the environment, and confirmed by MPI before anything is written.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import hydra
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cupynet.config import resume
from cupynet.config.composing import (
    as_typed,
    conf_folder,
    opened,
    overrides_of_jobs,
    own_folder,
    register,
    settings_of,
)
from cupynet.config.messages import refusal
from cupynet.config.overrides import is_override, last_value, name_of, quoted, without
from cupynet.config.schema import AS_RANKS, Settings, TuneSettings
from cupynet.config.stored import check_downloads, check_outputs, job_overrides, keep, load, overrides_of
from cupynet.core import signals
from cupynet.core.errors import ConfigError, CupynetError, Interrupted, OutputError, described, exit_code
from cupynet.core.exits import BROKEN_PIPE, report_error
from cupynet.core.lock import Hold
from cupynet.core.logs import Console, quiet
from cupynet.core.mpiexec import rank, started
from cupynet.core.settings import flat
from cupynet.core.terminal import near, stdout_is_gone, steady_streams
from cupynet.core.version import __version__
from cupynet.core.wording import nearest, one_line
from cupynet.runs import layout
from cupynet.runs.layout import FAILED, HYDRA, RESULTS, START, STUDY

if TYPE_CHECKING:
    from cupynet.parallel import MpiJob

S = TypeVar("S", bound=Settings)
T = TypeVar("T")

PER_MACHINE = ("data.folder", "devices")  # settings that may differ between ranks
SWEEP = {"-m", "--multirun"}
# Hydra's options; long options may be abbreviated, and short options may be joined with their values
LONG = [
    *("--help", "--hydra-help", "--version", "--cfg", "--resolve", "--package", "--run", "--multirun", "--info"),
    *("--shell-completion", "--config-path", "--config-name", "--config-dir", "--experimental-rerun"),
]
SHORT, VALUED = ("-h", "-r", "-m", "-sc"), ("-c", "-p", "-i")

_log = logging.getLogger("cupynet")
# Hydra searches for plugins in the namespace package hydra_plugins
sys.path.append(str(Path(__file__).parent / "plugins"))


def run(
    task: Callable[[T, Path], float | None],
    prepare: Callable[[S], T],
    config_name: str,
    schema: type[S],
    join: Callable[[], MpiJob] | None = None,
) -> None:
    """Run a command: compose the settings, then run the job, or each job of a sweep.

    Args:
        task: runs a job, given the result of `prepare` and the job's folder. Its return value is passed to Hydra's
            sweeper.
        prepare: validates the settings and builds the objects, before anything is written.
        config_name: the primary configuration file in conf/.
        join: returns the ranks started by mpiexec; None for a command that runs in a single process.

    Raises:
        SystemExit: the exit code is not 0. In a completed sweep, it is the exit code of the first failed job.
    """
    steady_streams()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # makes Hydra raise errors instead of printing them and exiting
    command = _Command(task, prepare, schema, join)
    before = _command.set(command)
    try:
        code = command.main(config_name)
    finally:
        _command.reset(before)
    if stdout_is_gone() and command.code is None:
        code = BROKEN_PIPE
    if code:
        raise SystemExit(code)


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def deferred() -> Callable[[], None]:
    """Return a function to call when training begins, from any thread.

    It stores the changed settings of a resumed run, and links outputs/latest to the current run.
    """
    command = _command.get()
    return (lambda: None) if command is None else command.training_begins


class Entry(Callback):
    """Hydra callback of every command (see conf/config.yaml). Hydra turns any Exception raised here into a warning."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        command = _command.get()
        assert command is not None
        command.created = _missing(_folder(config, "hydra.run.dir"))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        from cupynet.config import sweep_record

        command = _command.get()
        assert command is not None
        folder = _folder(config, "hydra.sweep.dir")
        command.created = _missing(folder)
        try:
            sweep_record.begin(folder)
        except (CupynetError, OSError) as error:
            raise SystemExit(report_error(_as_ours(error, command.schema))) from error
        command.sweep, command.planned = folder, functools.partial(overrides_of_jobs, config)


def _folder(config: DictConfig, key: str) -> Path:
    """Return a folder that Hydra will create. If its name cannot be resolved, Hydra reports the error later."""
    HydraConfig.instance().set_config(config)
    return Path(str(OmegaConf.select(config, key, throw_on_resolution_failure=False)))


def _missing(folder: Path) -> list[Path]:
    return [each for each in (folder, *folder.parents) if not os.path.exists(each)]


def _as_ours(error: BaseException, schema: type[Settings]) -> BaseException:
    """Convert errors from Hydra, YAML files and the run folder to CupynetError. Return other errors unchanged."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return refusal(error, schema)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return OutputError(f"the run folder: {one_line(error)}")
    if isinstance(error, yaml.YAMLError):
        return ConfigError(one_line(error))  # the message contains the file name
    if isinstance(error, ValueError) and not isinstance(error, CupynetError):  # from Hydra's parser or logging.config
        return ConfigError(one_line(f"{' '.join(sys.argv[1:])}: {error}"))
    return error


@dataclass(eq=False)
class _Command(Generic[S, T]):
    """The state of one call to `run`. Hydra calls `job` for each job."""

    task: Callable[[T, Path], float | None]
    prepare: Callable[[S], T]
    schema: type[S]
    join: Callable[[], MpiJob] | None
    code: int | None = None  # exit code of the last job; None if this process ran no job
    created: list[Path] = field(default_factory=list)  # folders created by this command, innermost first
    sweep: Path | None = None  # folder of the sweep; None for a single run
    planned: Callable[[], list[list[str]]] = list
    resumed: Path | None = None  # the run or checkpoint to resume
    changes: list[str] = field(default_factory=list)  # overrides to apply to the resumed run
    postponed: list[Callable[[], None]] = field(default_factory=list)  # functions to call when training begins
    arguments: list[str] = field(default_factory=list)
    ranks: MpiJob | None = None  # None before MPI is started, and without mpiexec

    @property
    def rank(self) -> int:
        """The rank of this process, from MPI if it was started, and otherwise from the environment."""
        return rank() if self.ranks is None else self.ranks.rank

    @property
    def alone(self) -> bool:
        return started() is None if self.ranks is None else self.ranks.size == 1

    def main(self, config_name: str) -> int | str:
        job = functools.update_wrapper(
            functools.partial(self.job), self.task
        )  # Hydra derives the job's name from `task`
        code: int | str = 0
        try:
            register(self.schema)
            sys.argv[1:] = self.arguments = self.read(sys.argv[1:])
            # before the first job, the handlers of `signals.command` would leave the sweep's folder behind
            with signals.handled(signals.leave) if SWEEP & {*self.arguments} else contextlib.nullcontext():
                hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=config_name)(job)()
        except BaseException as error:
            code = self.report_error(_as_ours(error, self.schema))
        of_jobs = self.code
        if self.sweep is not None:
            from cupynet.config import sweep_record

            of_jobs = sweep_record.finish(self.sweep, self.planned() if code else (), self.arguments)
        if self.code is None:
            self.clean_up()
        return code or of_jobs or 0

    def clean_up(self) -> None:
        """Remove the empty folders that this command created, including the folder of a sweep without jobs."""
        for folder in self.created:
            with contextlib.suppress(OSError):
                if folder == self.sweep and [each.name for each in folder.iterdir()] == [layout.SWEEP]:
                    (folder / layout.SWEEP).unlink()  # written before Hydra composes the jobs
                folder.rmdir()

    # the command line -----------------------------------------------------------------------------------------------

    def read(self, arguments: Sequence[str]) -> list[str]:
        """Check the command line and return it for Hydra. Raise SystemExit if there is nothing left to resume."""
        given = sorted(arguments, key=lambda each: not is_override(each))  # Hydra's parser expects options last
        if last_value(given, "hydra.output_subdir") is not None:
            reason = (
                "cannot be changed, because settings are stored in the run folder's .hydra. Set hydra.run.dir instead"
            )
            raise ConfigError(reason, "hydra.output_subdir")
        for option in (each.partition("=")[0] for each in given if each.startswith("-")):
            longer = [each for each in LONG if option.startswith("--") and each.startswith(option)]
            if not longer and option not in SHORT and option[:2] not in VALUED:
                reason = f"unknown option{nearest(option, LONG)} (see --help). Settings have no dashes: epochs=3"
                raise ConfigError(reason, option)
        if started() is not None and SWEEP & set(given):
            raise ConfigError("sweeps do not support mpiexec. Start each job with its own mpiexec", "-m")
        if started() is not None and self.join is not None:
            self.ranks = self.join()  # if MPI fails on any rank, all abort before rank 0 creates a folder
        given = self._resuming(opened(given))
        if self.rank:  # only rank 0 has a log
            given = ["hydra.run.dir=.", "hydra/job_logging=none", *without(given, "hydra.run.dir")]
        return given

    def _resuming(self, given: list[str]) -> list[str]:
        """Move the overrides of a resumed run from the command line to `changes`, to merge with stored settings."""
        value = resume.asked(given)
        if value is None:
            return given
        if self.schema is not Settings:
            raise ConfigError("only cupynet train can resume runs. Remove this setting", "resume", value)
        if SWEEP & set(given):
            raise ConfigError("resumes a single run. Remove -m", "resume", value)
        self.resumed = resume.find(value, given)
        if self.resumed is None:
            own = last_value(given, "hydra.run.dir")
            if own is not None and resume.finished(Path(own)):
                if not self.rank:
                    print(f"resume=latest: the run in {own} ended without a checkpoint")
                raise SystemExit(0)
            if not self.rank:
                print("resume=latest: there is no run to resume. Starting a new run")
            return without(given, "resume")
        folder = quoted(resume.run_of(self.resumed))
        kept = without(given, "resume", "hydra.run.dir")
        settings = [each for each in kept if is_override(each) and not each.lstrip("+~").startswith("hydra")]
        self.changes = [*settings, f"resume={quoted(self.resumed)}"]
        return [f"hydra.run.dir={folder}", *(each for each in kept if each not in settings)]

    # a job ----------------------------------------------------------------------------------------------------------

    def job(self, config: DictConfig) -> float | None:
        """Run a job and report its errors. Hydra's launcher may call this in another process."""
        elsewhere = _command.get() is not self
        _command.set(self)
        folder = Path(HydraConfig.get().runtime.output_dir)
        if in_sweep():
            return self._job_of_sweep(config, folder, elsewhere)
        result, _ = self._attempt(config, folder)
        return result

    def _job_of_sweep(self, config: DictConfig, folder: Path, elsewhere: bool) -> float | None:
        from cupynet.config import sweep_record

        now = HydraConfig.get()
        here = Path(now.runtime.cwd)
        sweep, label = here / now.sweep.dir, f"job {now.job.num}: "
        self.created = [each for each in (folder, *folder.parents) if sweep in each.parents]
        shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
        record = sweep_record.Job(now.job.num, job_overrides(), shown, None)
        sweep_record.began(sweep, record, self.arguments)
        Console.label = label if elsewhere else ""  # other jobs may log concurrently
        quiet()
        try:
            result, error = self._attempt(config, folder, label)
        finally:
            Console.label = ""
        sweep_record.ended(sweep, replace(record, code=self.code, error="" if error is None else described(error)))
        if isinstance(error, KeyboardInterrupt | Interrupted):
            raise SystemExit(self.code) from error
        return result

    def _attempt(self, config: DictConfig, folder: Path, label: str = "") -> tuple[float | None, BaseException | None]:
        """Validate the settings, run the task, and report errors. Return the result and the error, if any."""
        begun = False
        with contextlib.ExitStack() as locks:
            try:
                settings = self._settings(config)
                ranks = self._joined(settings)
                prepared = self._prepared(settings, config)
                if ranks is not None:  # the settings are now known to be valid on all ranks
                    folder = Path(ranks.share(str(folder)))
                self._begin(settings, folder, ranks, locks)
                begun = True
                result = self.task(prepared, folder)
                self.code = 0
                return result, None
            except BaseException as raised:
                error = raised
                code = self.report_error(error, _log if begun else None, label)
                self.code = code if isinstance(code, int) else 1
        if not begun:
            self.clean_up()
        return None, error

    def _prepared(self, settings: S, config: DictConfig) -> T:
        try:
            return self.prepare(settings)
        except ConfigError as error:
            raise as_typed(error, config, job_overrides()) from error

    def _settings(self, config: DictConfig) -> S:
        if self.resumed is None:
            return settings_of(config, job_overrides(), self.schema)
        run = resume.run_of(self.resumed)
        settings = load(run, self.changes, folder=own_folder())
        resume.check_same_settings(asdict(settings), asdict(load(run, (), settings.trusted_modules)), self.resumed)
        check_outputs(settings, run, self.changes)
        check_downloads(settings, run, self.changes)
        return settings  # type: ignore[return-value]  # `schema` is Settings

    def _joined(self, settings: S) -> MpiJob | None:
        """Return the ranks after checking that their settings are equal; None for a single process."""
        as_ranks = self.join is not None and settings.parallel.launcher == "mpi"
        known = self.ranks is not None or started() is not None
        if self.join is not None and as_ranks:
            self.ranks = self.join()
        if self.alone:
            return None
        if self.ranks is None or not as_ranks:
            alone = self.join is None or self.resumed is not None  # a resumed run keeps its launcher
            remedy = "start this command without mpiexec" if alone else f"add {AS_RANKS}"
            raise ConfigError(
                f"several processes were started, but they would not work together. To fix this, {remedy}"
            )
        ranks = self.ranks
        if not known:  # each rank has already created its own folder and log
            remedy = f"use the mpiexec of {ranks.library}, or set PMI_RANK and PMI_SIZE for each rank"
            reason = f"{ranks.size} ranks were started, but no environment variable indicates this. To fix it, {remedy}"
            raise ConfigError(reason, "parallel.launcher", "mpi")
        ranks.ranks.timeout_s = settings.parallel.timeout_s
        own = {key: value for key, value in flat(asdict(settings)).items() if key not in PER_MACHINE}
        ranks.agree({"the version of cupynet": __version__, **own})
        return ranks

    def _begin(self, settings: S, folder: Path, ranks: MpiJob | None, locks: contextlib.ExitStack) -> None:
        """On rank 0, lock the folder and store the settings. If it is taken, raise ConfigError on all ranks."""
        refused, shown = "", Path(near(folder))
        if not self.rank:
            try:
                hold = Hold(shown)
                locks.callback(hold.release)
                if self.resumed is None:
                    resume.check_untaken(shown, (START, FAILED, *RESULTS) if self.schema is Settings else ())
            except ConfigError as error:
                refused = str(error)
        if ranks is not None:
            refused = ranks.share(refused)
        if refused:
            raise ConfigError(refused)
        if self.rank:
            return
        overrides = job_overrides()
        if self.resumed is not None:
            overrides = [*without(overrides_of(folder), *map(name_of, self.changes)), *self.changes]
        store = functools.partial(keep, folder, settings, overrides)
        if self.resumed is not None or (folder / STUDY).is_file():
            self.postponed = [store]
        else:
            store()
            OmegaConf.save(HydraConfig.instance().cfg, folder / HYDRA)
            self.postponed = []
        if self.schema in (Settings, TuneSettings):
            latest = Path(HydraConfig.get().sweep.dir) if in_sweep() else folder
            self.postponed.append(functools.partial(resume.mark_latest, latest))
        if flat(settings.callbacks).get("progress.style") == "none":
            quiet()
        if hold.warning:
            _log.warning("%s", hold.warning)

    def training_begins(self) -> None:
        postponed, self.postponed = self.postponed, []
        for work in postponed:
            work()

    def report_error(self, error: BaseException, log: logging.Logger | None = None, label: str = "") -> int | str:
        """Report an error, on one rank only, and return the exit code."""
        if self.alone or (isinstance(error, SystemExit) and log is None):
            return report_error(error, log, label)
        code, log = exit_code(error), None if self.rank else log
        if self.join is None:
            return code if self.rank else report_error(error, log, label)
        try:
            ranks = self.join()
            speaks = ranks.speaks(error)
        except ConfigError:  # MPI does not work on this rank
            return report_error(error, log, f"rank {self.rank}: ")
        if speaks:
            report_error(error, log, f"rank {self.rank}: " if self.rank else label)
        return ranks.exit_code


# the running command; global because Hydra creates `Entry` without arguments
_command: ContextVar[_Command[Any, Any] | None] = ContextVar("command", default=None)
