"""Teams of worker threads: results, failures, lifetimes."""

from __future__ import annotations

import random
import threading
import time
import traceback

import pytest

from cupynet.errors import ConfigError
from cupynet.parallel import ThreadLauncher, launch


@pytest.mark.parametrize("workers", [1, 4])
def test_the_result_is_rank_0s(workers):
    def task(c):
        time.sleep(0.01 * (3 - c.rank))
        return c.rank * 10 + 1

    with ThreadLauncher(workers) as team:
        assert team.run(task) == 1


def test_threads_live_as_long_as_the_team():
    with ThreadLauncher(2) as team:
        first, again = {}, {}
        team.run(lambda c: first.update({c.rank: threading.get_ident()}))
        team.run(lambda c: again.update({c.rank: threading.get_ident()}))
        assert first == again and len(set(first.values())) == 2
    deadline = time.monotonic() + 5
    while any(t.ident in first.values() for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.ident in first.values() for t in threading.enumerate())


def test_one_worker_runs_in_the_calling_thread():
    with ThreadLauncher(1) as team:
        assert team.run(lambda c: threading.current_thread()) is threading.current_thread()


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2"])
def test_bad_counts_are_refused(workers):
    with pytest.raises(ConfigError, match=f"workers={workers!r}: must be an integer of at least 1"):
        ThreadLauncher(workers)


def deliberate_failure():
    raise ZeroDivisionError("on purpose")


def test_the_first_failure_is_raised_with_its_own_traceback():
    def task(c):
        if c.rank == 2:
            deliberate_failure()
        c.barrier()

    with ThreadLauncher(3) as team:
        with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
            team.run(task)
        assert "deliberate_failure" in "".join(traceback.format_tb(caught.value.__traceback__))
        with pytest.raises(RuntimeError, match="have failed"):
            team.run(task)


def test_fifty_failures_at_random_moments_never_hang():
    rng = random.Random(7)
    for _ in range(50):
        workers, victim, moment = rng.randint(2, 4), rng.randint(0, 1), rng.randint(0, 6)

        def task(c, victim=victim, moment=moment):
            for turn in range(7):
                if (c.rank, turn) == (victim, moment):
                    deliberate_failure()
                c.gather_numbers(turn)

        began = time.monotonic()
        with ThreadLauncher(workers, timeout_s=60) as team, pytest.raises(ZeroDivisionError):
            team.run(task)
        assert time.monotonic() - began < 10


def test_a_worker_that_does_not_notice_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_S", 0.1)
    release = threading.Event()

    def task(c):
        if c.rank == 0:
            deliberate_failure()
        release.wait(30)

    with ThreadLauncher(2) as team, pytest.raises(ZeroDivisionError):
        team.run(task)
    release.set()
