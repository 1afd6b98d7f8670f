"""`hydra/launcher=processes`: the jobs of a sweep as processes, several at once.

A job is the command of the sweep with the job's own settings. If it is killed, the others are not affected: a pool of
workers, such as joblib's, breaks when one of them is killed.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from cupynet.config.composing import own_folder
from cupynet.config.resume import quoted
from cupynet.core import signals
from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError, Interrupted
from cupynet.core.exits import say_error, tell
from cupynet.core.terminal import printable

if TYPE_CHECKING:
    from cupynet.config import sweep_record

MOST_ON_CPU = 4  # jobs at once by default
WAKE_S = 0.2  # interval at which the waiting main thread lets Python run signal handlers
VISIBLE = "CUDA_VISIBLE_DEVICES"


class _Job(NamedTuple):
    number: int
    overrides: list[str]
    folder: Path
    config: DictConfig


class ProcessLauncher(Launcher):
    """Runs each job of a sweep as a process.

    Args:
        jobs: at once; None for one per device, or on a CPU one per core up to 4.
    """

    def __init__(self, jobs: int | None = None) -> None:
        self._at_once = None if jobs is None else integer("hydra.launcher.jobs", jobs, 1)
        self._running: list[subprocess.Popen[str]] = []
        self._signal = 0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from cupynet.backend import available_cores
        from cupynet.config import sweep_record

        jobs = [self._job(number, overrides) for number, overrides in enumerate(job_overrides, initial_job_idx)]
        devices = _devices(jobs[0].config)
        at_once = min(self._at_once or len(devices) or min(available_cores(), MOST_ON_CPU), len(jobs))
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # devices
        for place in range(at_once):
            self._free.put(devices[place % len(devices)] if devices else None)
        done: dict[int, sweep_record.Job] = {}
        with (
            signals.handled(self._stop),
            signals.lifeline() as self._lifeline,
            ThreadPoolExecutor(at_once, "cupynet-job") as pool,
        ):
            running = {pool.submit(self._run, job) for job in jobs}
            while running:  # wake up often: another thread may have received a signal, but only this one handles it
                finished, running = wait(running, timeout=WAKE_S, return_when=FIRST_COMPLETED)
                for ended in filter(None, (each.result() for each in finished)):
                    done[ended.number] = ended
                    sweep_record.ended(Path(str(self._config.hydra.sweep.dir)), ended)
        if self._signal:
            raise SystemExit(tell(Interrupted(self._signal, "what its jobs have saved is in their folders")))
        return [_returned(job, done[job.number]) for job in jobs]

    def _job(self, number: int, overrides: Sequence[str]) -> _Job:
        config = self._loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
        return _Job(number, list(overrides), folder, config)

    def _stop(self, number: int) -> None:
        """Pass a signal on to the jobs, which stop and save; no more begin."""
        if not self._signal:
            signals.say(f"cupynet: {signal.Signals(number).name}: running jobs stop and save; again: at once\n")
        self._signal = self._signal or number
        for process in list(self._running):
            process.send_signal(number)

    def _run(self, job: _Job) -> sweep_record.Job | None:
        """Run a job in its process; return how it ended, or None if a signal came before it began."""
        from cupynet.config import sweep_record

        if self._signal:
            return None
        device = self._free.get()
        sweep_record.began(job.number, job.overrides)
        try:
            code, error = self._process(job, device)
        finally:
            self._free.put(device)
        return sweep_record.Job(job.number, sweep_record.split(job.overrides), job.folder, code, error)

    def _process(self, job: _Job, device: str | None) -> tuple[int, str]:
        """Run the process of a job; return its exit code and its error message."""
        of_hydra = cast("list[str]", OmegaConf.to_container(self._config.hydra.overrides.hydra, resolve=False))
        ours = [f"hydra.run.dir={quoted(job.folder)}", f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        environment = os.environ | {signals.LIFELINE: "stdin"} | ({} if device is None else {VISIBLE: device})
        try:
            process = subprocess.Popen(
                [*_program(), *of_hydra, *job.overrides, *ours, "hydra.mode=RUN"],  # the last value of a setting wins
                env=environment, stdin=self._lifeline, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return 1, f"cannot be started ({error.strerror})"
        self._running.append(process)
        if self._signal:  # it may have come before the process was in the list
            process.send_signal(self._signal)
        _, printed = process.communicate()
        self._running.remove(process)
        code = process.returncode
        labelled = printed.replace("cupynet: ", f"cupynet: job {job.number}: ")
        print(printable(labelled), end="", file=sys.stderr, flush=True)
        errors = [line.removeprefix("cupynet: ") for line in printed.splitlines() if line.startswith("cupynet: ")]
        if code < 0:
            ended = f"ended by signal {-code}"
            say_error(f"job {job.number}: {ended}")
            return 128 - code, ended
        return code, errors[-1] if code and errors else ""


def _program() -> list[str]:
    """Return the words of this process's command line before its arguments, and --config-dir."""
    count = len(sys.orig_argv) - len(sys.argv) + 1
    own = own_folder(sys.argv[1:])
    return [sys.executable, *sys.orig_argv[1:count], *([] if own is None else [f"--config-dir={own}"])]


def _devices(config: DictConfig) -> list[str]:
    """Return the devices to distribute the jobs over; none on a CPU, or if the settings name devices."""
    from cupynet.backend import device_count, select_backend

    backend = OmegaConf.select(config, "backend")
    if backend is None or OmegaConf.select(config, "devices") is not None:
        return []
    try:
        name, _ = select_backend(backend.name, gpu_priority=backend.priority.gpu, cpu_priority=backend.priority.cpu)
    except ConfigError:  # the job reports it
        return []
    visible = [each for each in os.environ.get(VISIBLE, "").split(",") if each]
    return [visible[place] if place < len(visible) else str(place) for place in range(device_count(name))]


def _returned(job: _Job, ended: sweep_record.Job) -> JobReturn:
    """Return the result of a job for Hydra's sweeper: its accuracy, or None if it failed."""
    done = JobReturn(overrides=job.overrides, cfg=job.config, status=JobStatus.COMPLETED)
    done.return_value = None if ended.code else ended.accuracy(ended.split)
    return done
