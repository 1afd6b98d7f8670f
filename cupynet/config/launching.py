"""`hydra/launcher=processes`: the jobs of a sweep as processes; a launcher of Hydra's, so that any sweeper may use it.

The command line of each job says what that of the sweep says, with the job's own values in place of lists of them.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from cupynet.checks import integer
from cupynet.errors import ConfigError
from cupynet.resume import quoted

# of Hydra's own settings, what is for the sweep and not for its jobs
OF_THE_SWEEP = ("hydra.sweep", "hydra.sweeper", "hydra/sweeper", "hydra.launcher", "hydra/launcher", "hydra.mode")
OF_THE_JOB = ("hydra.run.dir", "hydra.job.num", "hydra.job.id")

Job = tuple[int, Sequence[str], Path, Sequence[str]]  # number, overrides, folder, arguments
Work = Callable[[list[tuple[Job, DictConfig]], "int | None"], "list[float | None]"]


class Processes(Launcher):
    """Runs each job as a process of its own, several side by side.

    Args:
        jobs: at once; None for one per device, or on a CPU one per core up to 4.

    Attributes:
        work: does jobs, whose settings were composed; None where no command is at work.
    """

    work: ClassVar[Work | None] = None

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = None if jobs is None else integer("hydra.launcher.jobs", jobs, 1)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self._loader.load_sweep_config(self._config, list(overrides))
            jobs.append((job_of(self._config, config, overrides, number), config))
        if Processes.work is None:
            raise RuntimeError("hydra/launcher=processes: no command is at work")
        results = Processes.work(jobs, self.jobs)
        return [_returned(job, config, result) for (job, config), result in zip(jobs, results, strict=True)]


Plugins.instance().register(Processes)
TARGET = f"{Processes.__module__}.{Processes.__name__}"


def asked_for(config: DictConfig) -> Processes | None:
    """The launcher that a sweep is to be given; None for one of Hydra's. ConfigError."""
    node = cast("dict[str, Any]", OmegaConf.to_container(config.hydra.launcher, resolve=True))
    if node.pop("_target_", None) != TARGET:
        return None
    unknown = [name for name in node if name != "jobs"]
    if unknown:
        raise ConfigError(f"hydra.launcher.{unknown[0]}: there is no such setting: only hydra.launcher.jobs")
    return Processes(**node)


@contextmanager
def launcher_at_hand() -> Iterator[None]:
    """Within this Hydra's sweepers are given `Processes` where they ask for it.

    Hydra itself builds plugins of its own package and of `hydra_plugins` alone, wherever they are registered.
    """
    build = Plugins.instantiate_launcher

    @functools.wraps(build)
    def built(self: Plugins, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Launcher:
        launcher = asked_for(config)
        if launcher is None:
            return build(self, hydra_context, task_function, config)
        launcher.setup(hydra_context=hydra_context, task_function=task_function, config=config)
        return launcher

    Plugins.instantiate_launcher = built  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plugins.instantiate_launcher = build  # type: ignore[method-assign]


def numbered(job: DictConfig, number: int) -> Path:
    """The folder of a job of a sweep, which is told its number and where it writes."""
    with open_dict(job):
        job.hydra.job.num, job.hydra.job.id = number, str(number)
        folder = Path(str(OmegaConf.select(job, "hydra.sweep.dir"))) / str(OmegaConf.select(job, "hydra.sweep.subdir"))
        job.hydra.runtime.output_dir = os.path.abspath(folder)
    return folder


def job_of(sweep: DictConfig, job: DictConfig, overrides: Sequence[str], number: int) -> Job:
    """One job, from what was composed for the sweep and for the job."""
    folder = numbered(job, number)
    of_hydra = cast("list[str]", OmegaConf.to_container(sweep.hydra.overrides.hydra, resolve=False))
    kept = [each for each in [*of_hydra, *overrides] if not _is_of(each, (*OF_THE_SWEEP, *OF_THE_JOB))]
    own = [f"hydra.run.dir={quoted(folder)}", f"hydra.job.num={number}", f"hydra.job.id={number}", "hydra.mode=RUN"]
    return number, list(overrides), folder, [*kept, *own]


def _is_of(override: str, names: Sequence[str]) -> bool:
    name = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return any(name == each or name.startswith(f"{each}.") for each in names)


def _returned(job: Job, config: DictConfig, result: Any) -> JobReturn:
    """What Hydra's sweepers are told. Failed jobs have no result here either, as where they are done in turn."""
    done = JobReturn(overrides=list(job[1]), cfg=config, status=JobStatus.COMPLETED)
    done.return_value = result
    return done
