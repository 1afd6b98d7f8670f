"""`hydra/launcher=processes`: run the jobs of a sweep in parallel processes.

A job's warnings are shown immediately, and its errors when it ends. Unlike in joblib's worker pool, killing one job
does not affect the others.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, cast

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from cupynet.config.composing import own_folder
from cupynet.config.overrides import quoted
from cupynet.core import signals
from cupynet.core.checks import integer
from cupynet.core.errors import Interrupted
from cupynet.core.exits import report_error
from cupynet.core.logs import WARNING
from cupynet.core.terminal import UNWRITABLE, printable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from cupynet.config import sweep_record  # a slow import

MAX_ON_CPU = 4  # default limit on parallel jobs on a CPU
WAKE_S = 0.2  # interval at which the waiting main thread lets Python run signal handlers
WARNED = re.compile(rf"\[[\d:]+\] {WARNING}")  # beginning of a warning on the terminal
VISIBLE = "CUDA_VISIBLE_DEVICES"


class ProcessLauncher(Launcher):
    """Runs each job in its own process, up to `jobs` in parallel; by default one per device, or per core up to 4."""

    def __init__(self, jobs: int | None = None) -> None:
        self._at_once = None if jobs is None else integer("hydra.launcher.jobs", jobs, 1)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

        from cupynet.backend import available_cores
        from cupynet.config import sweep_record

        jobs = [self._job(number, [*each]) for number, each in enumerate(job_overrides, initial_job_idx)]
        devices = _devices(self._config)
        at_once = min(self._at_once or len(devices) or min(available_cores(), MAX_ON_CPU), len(jobs))
        self._free: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # unused devices
        for place in range(at_once):
            self._free.put(devices[place % len(devices)] if devices else None)
        self._sweep = Path(str(self._config.hydra.sweep.dir))
        done: dict[int, sweep_record.Job] = {}
        running: set[Future[sweep_record.Job]] = set()
        with ThreadPoolExecutor(at_once, "cupynet-job") as pool:
            try:
                with signals.handled(signals.leave), signals.lifeline() as self._lifeline:
                    try:
                        for job in jobs:
                            running.add(pool.submit(self._run, job))
                        while running:
                            finished, running = wait(running, timeout=WAKE_S, return_when=FIRST_COMPLETED)
                            for ended in (each.result() for each in finished):
                                done[ended.number] = ended
                                sweep_record.ended(self._sweep, ended)
                    finally:
                        for each in running:  # so that no queued job starts when a running job stops
                            each.cancel()
            except KeyboardInterrupt as stopped:  # closing the lifeline stops the jobs
                signals.say("cupynet: stopping and saving running jobs. A second signal stops them immediately\n")
                pool.shutdown(cancel_futures=True)
                for each in running:
                    if not each.cancelled():
                        sweep_record.ended(self._sweep, each.result())
                raise SystemExit(
                    report_error(Interrupted.by(stopped, "saved results are in the folders of the jobs"))
                ) from None
        returned = [JobReturn(overrides=job.overrides, status=JobStatus.COMPLETED) for job in jobs]
        for of_hydra, job in zip(returned, jobs, strict=True):
            of_hydra.return_value = done[job.number].accuracy
        return returned

    def _job(self, number: int, overrides: list[str]) -> sweep_record.Job:
        from cupynet.config import sweep_record

        config = self._loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.num, config.hydra.job.id = number, str(number)
        folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
        return sweep_record.Job(number, overrides, folder, None)

    def _run(self, job: sweep_record.Job) -> sweep_record.Job:
        from cupynet.config import sweep_record

        device = self._free.get()
        sweep_record.began(self._sweep, job, sys.argv)
        try:
            code, error = self._process(job, device)
        finally:
            self._free.put(device)
        return replace(job, code=code, error=error)

    def _process(self, job: sweep_record.Job, device: str | None) -> tuple[int, str]:
        of_hydra = cast("list[str]", OmegaConf.to_container(self._config.hydra.overrides.hydra, resolve=False))
        ours = [f"hydra.run.dir={quoted(job.folder)}", f"hydra.job.num={job.number}", f"hydra.job.id={job.number}"]
        environment = os.environ | {signals.LIFELINE: "stdin"} | ({} if device is None else {VISIBLE: device})
        with TemporaryFile() as errors:
            with subprocess.Popen(
                [*_program(), *of_hydra, *job.overrides, *ours, "hydra.mode=RUN"],  # the last override wins
                env=environment, stdin=self._lifeline, stdout=subprocess.PIPE, stderr=errors, text=True,
                errors="replace", start_new_session=True,
            ) as process:  # fmt: skip
                assert process.stdout is not None
                for line in process.stdout:
                    if warning := WARNED.match(line):
                        text = f"{warning[0]}job {job.number}: {line[warning.end() :]}"
                        with suppress(*UNWRITABLE):
                            print(printable(text).strip(), flush=True)
            errors.seek(0)
            output = errors.read().decode(errors="replace")
        labelled = output.replace("cupynet: ", f"cupynet: job {job.number}: ")
        with suppress(*UNWRITABLE):
            print(printable(labelled), end="", file=sys.stderr, flush=True)
        code = process.returncode
        if code < 0:
            return 128 - code, f"killed by signal {-code}"
        return code, output.strip().rpartition("\n")[2].removeprefix("cupynet: ") if code else ""


def _program() -> list[str]:
    """Return the command line of this process without arguments, except --config-dir."""
    count = len(sys.orig_argv) - len(sys.argv) + 1
    own = own_folder()
    return [sys.executable, *sys.orig_argv[1:count], *([] if own is None else [f"--config-dir={own}"])]


def _devices(config: DictConfig) -> list[str]:
    """Return the devices for the jobs, or [] on a CPU or if the settings specify devices."""
    from cupynet.backend import device_count, select_backend

    backend = config.get("backend")
    if backend is None or config.get("devices") is not None:
        return []
    name, _ = select_backend(backend.name, gpu_priority=backend.priority.gpu, cpu_priority=backend.priority.cpu)
    count, visible = device_count(name), os.environ.get(VISIBLE)
    # CUDA ignores all devices listed after an invalid one
    return visible.split(",")[:count] if visible else [str(place) for place in range(count)]
