"""Time-outs of workers that wait for each other, also when processes are suspended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from cupynet.parallel import ThreadLauncher, WorkerTimeout
from cupynet.parallel.communicators import base
from cupynet.parallel.communicators.base import LOOK_S, Timeout
from cupynet.parallel.launchers import threads as launch
from tests.support.mpi import ROOT, mpiexec, needs_mpi

TIMEOUT_S, STOPPED_S = 1.5, 2.5


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(base.time, "monotonic", lambda: self.now)

    def looks(self, timeout: Timeout, *pauses: float) -> list[bool]:
        found = []
        for pause in pauses:
            self.now += pause
            found.append(timeout.expired())
        return found


def test_time_runs_out(monkeypatch):
    clock, timeout = Clock(monkeypatch), Timeout(0.25)
    assert clock.looks(timeout, 0.1, 0.1, 0.06) == [False, False, True]


def test_time_in_which_the_process_was_suspended_counts_little(monkeypatch):
    clock, timeout = Clock(monkeypatch), Timeout(1.0)
    assert clock.looks(timeout, 3600, 3600, 0.05, 3600) == [False] * 4
    assert clock.looks(timeout, *[LOOK_S] * 7) == [False] * 6 + [True]


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


def stopped_while_training(folder, launcher: str, ranks: list[int]) -> tuple[int, str, str]:
    """Train with two workers, and stop the processes of some for a while; exit code, stdout and stderr."""
    (folder / "training.py").write_text(TRAINING)
    command = [sys.executable, "training.py", launcher, str(TIMEOUT_S)]
    if launcher == "mpi":
        command = [str(mpiexec()), "-n", "2", *command]
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 60
        while not (folder / "after 2").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=10)
            time.sleep(0.01)
        processes = {int((folder / f"{rank}.pid").read_text()) for rank in ranks}
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for each in processes:
                os.kill(each, number)
            time.sleep(STOPPED_S * (number == signal.SIGSTOP))
        stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["thread", pytest.param("mpi", marks=needs_mpi)])
def test_a_suspended_run_continues(tmp_path, launcher):
    """Ctrl-Z for longer than the time-out: no worker is considered dead."""
    assert stopped_while_training(tmp_path, launcher, [0, 1]) == (0, "trained 5\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [pytest.param(rank, marks=needs_mpi) for rank in (0, 1)])
def test_a_rank_suspended_alone_is_considered_dead(tmp_path, rank):
    """The others did wait for it; when it wakes it does not blame them."""
    code, stdout, stderr = stopped_while_training(tmp_path, "mpi", [rank])
    assert (code, stdout) == (1, "")
    assert stderr.count("WorkerTimeout: ") == 1
    assert f"WorkerTimeout: worker {1 - rank} waited 1.5 s for " in stderr


class Hanging:
    """A task in which one worker hangs until it is released."""

    def __init__(self, victim: int) -> None:
        self.victim, self.release, self.came_back = victim, threading.Event(), []

    def __call__(self, communicator) -> None:
        if communicator.rank == self.victim:
            self.stand_here()
        communicator.gather_numbers(0)
        self.came_back.append(communicator.rank)

    def stand_here(self) -> None:
        self.release.wait(30)


def test_a_thread_that_hung_stops_when_it_wakes(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    task = Hanging(0)
    team = ThreadLauncher(3, timeout_s=0.3)
    with team, pytest.raises(WorkerTimeout):
        team.run(task)
    (thread,) = [each for each in threading.enumerate() if each.name.startswith("cupynet worker")]
    task.release.set()
    thread.join(10)
    assert thread.name == "cupynet worker 0" and not thread.is_alive() and task.came_back == []
