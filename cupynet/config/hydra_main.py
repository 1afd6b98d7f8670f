"""Command entry point: compose the settings with Hydra, validate them, then run the job or the sweep.

Hydra creates an empty run folder (`hydra.output_subdir` is null). The job validates its settings, locks the folder and
writes `.hydra/`. If validation fails, the new folders are removed. Under mpiexec only rank 0 has a folder and a log.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
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

from cupynet.config import command_line, resume
from cupynet.config.composing import as_typed, conf_folder, overrides_of_jobs, own_folder, register, settings_of
from cupynet.config.messages import refusal
from cupynet.config.overrides import is_override, quoted, without
from cupynet.config.ranks import Ranks
from cupynet.config.schema import Settings, TuneSettings
from cupynet.config.stored import changed_overrides, check_downloads, check_outputs, job_overrides, keep, load
from cupynet.core import signals
from cupynet.core.errors import ConfigError, CupynetError, Interrupted, OutputError, described
from cupynet.core.exits import BROKEN_PIPE, report_error
from cupynet.core.lock import Hold
from cupynet.core.logs import Console, quiet
from cupynet.core.mpiexec import started
from cupynet.core.settings import flat
from cupynet.core.terminal import near, stdout_is_gone, steady_streams
from cupynet.core.wording import one_line
from cupynet.runs.layout import FAILED, HYDRA, PROFILE, REOPENED, RESULTS, START, STUDY, SWEEP, TRACE

if TYPE_CHECKING:
    from cupynet.parallel import MpiJob

S = TypeVar("S", bound=Settings)
T = TypeVar("T")

OF_RUN = (START, FAILED, REOPENED, PROFILE, TRACE, *RESULTS)  # files that a new run replaces or deletes
_log = logging.getLogger("cupynet")
# Hydra searches for plugins in the namespace package hydra_plugins
sys.path.append(str(Path(__file__).parent / "plugins"))


@dataclass(eq=False)
class _Trace:
    """Results that `Entry` and the jobs pass to `run`, because Hydra returns nothing."""

    created: Sequence[Path] = ()  # new folders of the run or sweep, innermost first
    sweep: Path | None = None  # folder of the sweep; None for a single run
    planned: Callable[[], list[list[str]]] = list  # returns the overrides of all jobs of the sweep
    code: int | None = None  # exit code of the last job; None if this process ran no job


_trace: ContextVar[_Trace] = ContextVar("trace")  # global, because Hydra creates `Entry` without arguments
_postponed: ContextVar[list[Callable[[], None]]] = ContextVar("postponed")  # what the job does when training begins


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
    trace, ranks, request = _Trace(), Ranks(join), command_line.Request()
    code: int | str = 0
    _trace.set(trace)
    try:
        register(schema)
        given = command_line.checked(sys.argv[1:])
        if started() is not None:
            ranks.join()  # if MPI fails on any rank, all abort before rank 0 creates a folder
        request = command_line.read(given, schema, ranks.rank)
        sys.argv[1:] = request.arguments
        command = _Command(task, prepare, schema, request, ranks, trace)
        job = functools.update_wrapper(functools.partial(command.job), task)  # Hydra derives the job's name from `task`
        # before the first job, the handlers of `signals.command` would leave the sweep's folder behind
        with signals.handled(signals.leave) if request.is_sweep else contextlib.nullcontext():
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=config_name)(job)()
    except BaseException as error:
        code = ranks.report(_as_ours(error, schema))
    options = [each for each in request.arguments if each.startswith("--config-")]
    code = _finish(trace, code, ["cupynet", task.__name__, *options])
    if stdout_is_gone() and trace.code is None:
        code = BROKEN_PIPE
    if code:
        raise SystemExit(code)


def _finish(trace: _Trace, code: int | str, command: Sequence[str]) -> int | str:
    """Print the table of a sweep, and remove new folders if no job ran. Return `code`, or the jobs' code if it is 0."""
    of_jobs = trace.code or 0
    if trace.sweep is not None:
        from cupynet.config import sweep_record

        of_jobs = sweep_record.finish(trace.sweep, trace.planned() if code else (), command)
        if trace.code is None and trace.sweep in trace.created:
            with contextlib.suppress(OSError):
                if [each.name for each in trace.sweep.iterdir()] == [SWEEP]:
                    (trace.sweep / SWEEP).unlink()  # written before Hydra composes the jobs
    if trace.code is None:
        _remove_empty(trace.created)
    return code or of_jobs


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def in_sweep() -> bool:
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def deferred() -> Callable[[], None]:
    """Return a function to call when training begins, from any thread. Only the first call has an effect.

    It stores the changed settings of a resumed run, and links outputs/latest to the current run.
    """
    postponed = _postponed.get([])

    def begin() -> None:
        work, postponed[:] = [*postponed], []
        for each in work:
            each()

    return begin


class Entry(Callback):
    """Hydra callback of every command (see conf/config.yaml). Hydra turns any Exception raised here into a warning."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        _trace.get().created = _missing(_folder(config, "hydra.run.dir"))

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        from cupynet.config import sweep_record

        trace, folder = _trace.get(), _folder(config, "hydra.sweep.dir")
        trace.created = _missing(folder)
        try:
            sweep_record.begin(folder)
        except (CupynetError, OSError) as error:
            raise SystemExit(report_error(_as_ours(error, Settings))) from error
        trace.sweep, trace.planned = folder, functools.partial(overrides_of_jobs, config)


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
        return OutputError(one_line(f"{error.filename or 'the run folder or the output'}: {error.strerror or error}"))
    if isinstance(error, yaml.YAMLError):
        return ConfigError(one_line(error))  # the message contains the file name
    if isinstance(error, UnicodeDecodeError) and (file := next(_not_utf8(), None)):
        return ConfigError(f"{file}: must be encoded in UTF-8 ({one_line(error)})")
    if isinstance(error, ValueError) and not isinstance(error, CupynetError):  # from Hydra's parser or logging.config
        return ConfigError(one_line(f"{' '.join(sys.argv[1:])}: {error}"))
    return error


def _not_utf8() -> Iterator[Path]:
    """Yield the files in conf/ and in the folder of --config-dir that are not encoded in UTF-8."""
    folders = [conf_folder(), *(Path(each.rpartition("=")[2]) for each in sys.argv[1:] if not is_override(each))]
    for path in (path for folder in folders for path in sorted(folder.glob("**/*.yaml")) if path.is_file()):
        try:
            path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            yield path


@dataclass(frozen=True)
class _Ended:
    """The end of a job: its result, or its error and exit code."""

    result: float | None = None
    error: BaseException | None = None
    code: int = 0


@dataclass(frozen=True)
class _Command(Generic[S, T]):
    """A command and its command line. Hydra calls `job` for each job. For the other attributes, see `run`."""

    task: Callable[[T, Path], float | None]
    prepare: Callable[[S], T]
    schema: type[S]
    request: command_line.Request
    ranks: Ranks
    trace: _Trace

    def job(self, config: DictConfig) -> float | None:
        """Run a job and report its errors. Hydra's launcher may call this in another process."""
        folder, sweeping = Path(HydraConfig.get().runtime.output_dir), in_sweep()
        ended = self._job_of_sweep(config, folder) if sweeping else self._attempt(config, folder, self.trace.created)
        self.trace.code = ended.code
        if sweeping and isinstance(ended.error, KeyboardInterrupt | Interrupted):
            raise SystemExit(ended.code) from ended.error
        return ended.result

    def _job_of_sweep(self, config: DictConfig, folder: Path) -> _Ended:
        from cupynet.config import sweep_record

        now = HydraConfig.get()
        here = Path(now.runtime.cwd)
        sweep, label = here / now.sweep.dir, f"job {now.job.num}: "
        created = [each for each in (folder, *folder.parents) if sweep in each.parents]
        stays = not now.job.chdir  # otherwise a relative path does not lead to the results
        shown = folder.relative_to(here) if stays and folder.is_relative_to(here) else folder
        record = sweep_record.Job(now.job.num, job_overrides(), shown, None)
        sweep_record.began(sweep, record, self.request.arguments)
        elsewhere = _trace.get(None) is not self.trace  # in a process of Hydra's launcher
        Console.label = label if elsewhere else ""  # other jobs may log concurrently
        quiet()
        try:
            ended = self._attempt(config, folder, created, label)
        finally:
            Console.label = ""
        error = "" if ended.error is None else described(ended.error)
        sweep_record.ended(sweep, replace(record, code=ended.code, error=error))
        return ended

    def _attempt(self, config: DictConfig, folder: Path, created: Iterable[Path], label: str = "") -> _Ended:
        """Validate the settings, run the task, and report errors.

        created: the folders created for this job, innermost first. They are removed if the task does not begin.
        """
        begun = False
        with contextlib.ExitStack() as closing:
            try:
                settings = self._settings(config)
                self.ranks.agree(settings, resumed=self.request.resumed is not None)
                prepared = self._prepared(settings, config)
                folder = Path(self.ranks.share(str(folder)))  # the settings are now known to be valid on all ranks
                warning = self._lock(folder, closing)
                if not self.ranks.rank:
                    token = _postponed.set(self._store(settings, folder))
                    closing.callback(_postponed.reset, token)
                    if flat(settings.callbacks).get("progress.style") == "none":
                        quiet()
                    if warning:
                        _log.warning("%s", warning)
                begun = True
                return _Ended(result=self.task(prepared, folder))
            except BaseException as raised:
                error = raised
                code = self.ranks.report(error, _log if begun else None, label)
        if not begun:
            _remove_empty(created)
        return _Ended(error=error, code=code if isinstance(code, int) else 1)

    def _settings(self, config: DictConfig) -> S:
        resumed, changes = self.request.resumed, self.request.changes
        if resumed is None:
            return settings_of(config, job_overrides(), self.schema)
        if HydraConfig.get().job.chdir:  # paths on the command line are relative to the original folder
            resumed = Path(HydraConfig.get().runtime.cwd) / resumed
            changes = [*without(changes, "resume"), f"resume={quoted(resumed)}"]
        run = resume.run_of(resumed)
        settings = load(run, changes, folder=own_folder())
        resume.check_same_settings(asdict(settings), asdict(load(run, (), settings.trusted_modules)), resumed)
        check_outputs(settings, run, changes)
        check_downloads(settings, run, changes)
        return settings  # type: ignore[return-value]  # `schema` is Settings

    def _prepared(self, settings: S, config: DictConfig) -> T:
        try:
            return self.prepare(settings)
        except ConfigError as error:
            raise as_typed(error, config, job_overrides()) from error

    def _lock(self, folder: Path, closing: contextlib.ExitStack) -> str:
        """Lock the folder on rank 0, and return a warning or "". If it is taken, raise ConfigError on all ranks."""
        refused, warning, shown = "", "", Path(near(folder))
        if not self.ranks.rank:
            try:
                hold = Hold(shown)
                closing.callback(hold.release)
                warning = hold.warning
                if self.request.resumed is None:
                    resume.check_untaken(shown, OF_RUN if self.schema is Settings else ())
            except ConfigError as error:
                refused = str(error)
        if refused := self.ranks.share(refused):
            raise ConfigError(refused)
        return warning

    def _store(self, settings: S, folder: Path) -> list[Callable[[], None]]:
        """Store the settings of a new run. Return functions to call when training begins."""
        resumed, overrides = self.request.resumed is not None, job_overrides()
        if resumed:
            from cupynet.core.files import require_folder  # imports NumPy

            require_folder(folder)
            overrides = changed_overrides(folder, self.request.changes)
        store = functools.partial(keep, folder, settings, overrides)
        postponed: list[Callable[[], None]] = []
        if resumed or (folder / STUDY).is_file():
            postponed.append(store)
        else:
            store()
            OmegaConf.save(HydraConfig.instance().cfg, folder / HYDRA)
        if self.schema in (Settings, TuneSettings):
            latest = Path(HydraConfig.get().sweep.dir) if in_sweep() else folder
            postponed.append(functools.partial(resume.mark_latest, latest))
        return postponed
