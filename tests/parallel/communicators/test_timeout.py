"""Time-outs of workers that wait for each other, including when processes are suspended."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from cupynet.core.mpiexec import find_mpiexec
from cupynet.parallel import Communicator, ThreadLauncher, WorkerTimeout
from cupynet.parallel.communicators.base import POLL_S, Timeout
from cupynet.parallel.launchers import threads as launch
from tests.support.mpi import ROOT, needs_mpi

TIMEOUT_S, STOPPED_S = 1.5, 2.5


def test_time_in_which_the_process_was_suspended_counts_little(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timeout, expired = Timeout(1.0), []
    for pause in (3600, 3600, 0.05, 3600, *[POLL_S] * 7):
        now += pause
        expired.append(timeout.expired())
    assert expired == [False] * 10 + [True]


TRAINING = """
import os, sys, time
from pathlib import Path
from cupynet.training import Callback, ParallelWrapper
from tests.support.training import small_dataset, small_model

class Slow(Callback):
    '''The others wait for worker 1 nearly all of the time.'''
    every_rank = True

    def start(self, trainer, run):
        Path(f"{trainer.rank}.part").write_text(str(os.getpid()))
        os.rename(f"{trainer.rank}.part", f"{trainer.rank}.pid")

    def on_iteration_end(self, trainer):
        if trainer.rank == 1:
            Path(f"after {trainer.iteration}").touch()
            for _ in range(20):  # a sleep whose end came while it was stopped is over when it wakes
                time.sleep(0.01)

timeout_s = float(sys.argv[2])
with ParallelWrapper(
    small_model(), 2, 1, callbacks=[Slow()], timeout_s=timeout_s, launcher=sys.argv[1], progress="none"
) as wrapper:
    wrapper.fit(small_dataset(40), batch_size=4)
    if wrapper.trainer.rank == 0:
        print("trained", wrapper.trainer.iteration, flush=True)
"""


def stopped_while_training(folder: Path, launcher: str) -> tuple[int, str, str]:
    """Train with two workers, suspend their processes for a while, and return exit code, stdout and stderr."""
    (folder / "training.py").write_text(TRAINING)
    command = [sys.executable, "training.py", launcher, str(TIMEOUT_S)]
    if launcher == "mpi":
        command = [find_mpiexec(), "-n", "2", *command]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (folder / "after 2").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)
            time.sleep(0.01)
        pids = {int((folder / f"{rank}.pid").read_text()) for rank in range(2)}
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["thread", pytest.param("mpi", marks=needs_mpi)])
def test_a_run_that_was_suspended_for_longer_than_the_timeout_continues(tmp_path: Path, launcher: str) -> None:
    assert stopped_while_training(tmp_path, launcher) == (0, "trained 5\n", "")


def test_a_thread_that_hung_stops_when_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    release, hanging, came_back = threading.Event(), [], []

    def task(c: Communicator) -> None:
        if c.rank == 0:
            hanging.append(threading.current_thread())
            release.wait(30)
        c.barrier()
        came_back.append(c.rank)

    with ThreadLauncher(3, timeout_s=0.3) as launcher, pytest.raises(WorkerTimeout):
        launcher.run(task)
    release.set()
    hanging[0].join(10)
    assert not hanging[0].is_alive() and came_back == []
