"""Teams of worker threads: results, failures, life time."""

from __future__ import annotations

import random
import threading
import time
import traceback

import pytest
from threadpoolctl import threadpool_info

from cupynet.backend.blas import threads_per_worker
from cupynet.errors import ConfigError
from cupynet.parallel import WorkerTeam, launch


def test_results_come_in_rank_order():
    def task(c):
        time.sleep(0.01 * (3 - c.rank))
        return c.rank * 10

    with WorkerTeam(4, limit_blas=False) as team:
        assert team.run(task) == [0, 10, 20, 30]


def test_threads_live_as_long_as_the_team():
    with WorkerTeam(2, limit_blas=False) as team:
        first = team.run(lambda c: threading.get_ident())
        assert team.run(lambda c: threading.get_ident()) == first
    deadline = time.monotonic() + 5
    while any(t.ident in first for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.ident in first for t in threading.enumerate())


def test_one_worker_runs_in_the_calling_thread():
    with WorkerTeam(1, limit_blas=False) as team:
        assert team.run(lambda c: threading.current_thread()) == [threading.current_thread()]


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2"])
def test_bad_counts_are_refused(workers):
    with pytest.raises(ConfigError, match=f"workers={workers!r}: must be an integer of at least 1"):
        WorkerTeam(workers)


def deliberate_failure():
    raise ZeroDivisionError("on purpose")


def test_the_first_failure_is_raised_with_its_own_traceback():
    def task(c):
        if c.rank == 2:
            deliberate_failure()
        c.barrier()

    with WorkerTeam(3, limit_blas=False) as team:
        with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
            team.run(task)
        assert "deliberate_failure" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(RuntimeError, match="has failed"):
            team.run(task)


def test_fifty_failures_at_random_moments_never_hang():
    rng = random.Random(7)
    for _ in range(50):
        workers, victim, moment = rng.randint(2, 4), rng.randint(0, 1), rng.randint(0, 6)

        def task(c, victim=victim, moment=moment):
            for turn in range(7):
                if (c.rank, turn) == (victim, moment):
                    deliberate_failure()
                c.all_gather(turn)

        began = time.monotonic()
        with WorkerTeam(workers, timeout_s=60, limit_blas=False) as team, pytest.raises(ZeroDivisionError):
            team.run(task)
        assert time.monotonic() - began < 10


def test_a_worker_that_does_not_notice_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    release = threading.Event()

    def task(c):
        if c.rank == 0:
            deliberate_failure()
        release.wait(30)

    with WorkerTeam(2, limit_blas=False) as team, pytest.raises(ZeroDivisionError):
        team.run(task)
    release.set()


def test_a_stop_signal_reaches_every_worker():
    for workers in (1, 3):
        with WorkerTeam(workers, limit_blas=False) as team:
            team.stop(15)
            assert team.run(lambda c: c.stop_signal) == [15] * workers


def test_blas_threads_are_limited_and_restored():
    def threads():
        return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]

    before = threads()
    with WorkerTeam(2) as team:
        assert team.blas_threads == threads_per_worker("numpy", 2)
        assert set(threads()) == {team.blas_threads}
    assert threads() == before


@pytest.mark.parametrize(("most", "threads"), [(2**30, 3), (1, 1)])
def test_a_worker_gets_no_more_blas_threads_than_it_can_use(most, threads, monkeypatch):
    monkeypatch.setattr(launch, "threads_per_worker", lambda name, workers: 3)
    with WorkerTeam(2, most_blas_threads=most) as team:
        assert team.blas_threads == threads
