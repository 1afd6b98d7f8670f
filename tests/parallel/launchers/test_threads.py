"""Worker threads: results, failures, interruptions, lifetime, time-outs."""

import signal
import threading
import time
import traceback
from typing import NoReturn

import numpy as np
import pytest

from cupynet.core.errors import ClosedError, ConfigError, DivergedError
from cupynet.parallel import Communicator, PeerFailed, ThreadLauncher, WorkerTimeout
from cupynet.parallel.communicators.base import POLL_S, Timeout
from cupynet.parallel.launchers import threads as launch


def deliberate_failure() -> NoReturn:
    raise ZeroDivisionError("on purpose")


def test_the_result_of_rank_0_is_returned() -> None:
    def task(c: Communicator) -> int:
        time.sleep(0.01 * (3 - c.rank))
        return c.rank * 10 + 1

    with ThreadLauncher(4) as launcher:
        assert launcher.run(task) == 1


def test_one_worker_runs_in_the_calling_thread() -> None:
    with ThreadLauncher(1) as launcher:
        assert launcher.run(lambda c: threading.current_thread()) is threading.current_thread()


@pytest.mark.parametrize("call", ["allreduce_mean", "all_gather"])
def test_workers_that_make_different_collective_calls_are_refused(call: str) -> None:
    def task(communicator: Communicator) -> None:
        vector = np.zeros(3 + communicator.rank)
        if communicator.rank == 0 or call == "allreduce_mean":
            communicator.allreduce_mean([vector], 1.0)
        else:
            communicator.all_gather(vector)

    with ThreadLauncher(2, timeout_s=20) as launcher, pytest.raises(ConfigError, match=call):
        launcher.run(task)


def test_the_first_failure_is_raised_with_its_traceback_and_closes_the_launcher() -> None:
    def task(c: Communicator) -> None:
        if c.rank == 2:
            deliberate_failure()
        c.barrier()

    with ThreadLauncher(3) as launcher:
        with pytest.raises(ZeroDivisionError) as caught:
            launcher.run(task)
        assert "deliberate_failure" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(ClosedError, match="ZeroDivisionError"):
            launcher.run(task)


def test_a_failure_that_follows_from_another_does_not_hide_it() -> None:
    def task(c: Communicator) -> None:
        if c.rank == 1:
            deliberate_failure()
        try:
            while True:
                c.check()
                time.sleep(0.001)
        except PeerFailed as stopped:
            raise KeyError("in the clean-up of worker 0") from stopped

    with ThreadLauncher(2) as launcher, pytest.raises(ZeroDivisionError):
        launcher.run(task)


def test_an_interruption_while_workers_are_started_stops_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they would wait for the missing ones until the time-out."""
    started, start = [], threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == 2:
            signal.raise_signal(signal.SIGINT)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with ThreadLauncher(2, timeout_s=60) as launcher, pytest.raises(KeyboardInterrupt):
        launcher.run(lambda c: c.barrier())
    assert not started[0].is_alive() and started[1].ident is None


def test_a_signal_that_a_worker_thread_receives_is_handled_by_the_main_thread() -> None:
    """The system may deliver a signal to any thread, but Python's handler needs the main thread, which is waiting."""
    handled = threading.Event()

    def task(c: Communicator) -> bool:
        if c.rank == 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        return handled.wait(20)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())
    try:
        with ThreadLauncher(2) as launcher:
            assert launcher.run(task)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_timeout_s_hardly_counts_time_in_which_the_process_was_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timeout, expired = Timeout(1.0), []
    for pause in (3600, 3600, 0.05, 3600, *[POLL_S] * 7):
        now += pause
        expired.append(timeout.expired())
    assert expired == [False] * 10 + [True]


def test_a_worker_that_exceeds_timeout_s_ends_the_run_and_stops_when_it_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_last_of_several_workers_that_diverge_is_reported() -> None:
    """In a pipeline, it is the nearest to the loss, although earlier stages may notice first."""

    def task(world: Communicator) -> None:
        while world.rank == 1:
            try:
                world.check()
            except PeerFailed:
                break
            time.sleep(0.001)
        raise DivergedError(f"worker {world.rank}")

    with pytest.raises(DivergedError) as caught:
        ThreadLauncher(2, 20).run(task)
    assert str(caught.value) == "worker 1"
