"""A job that asks: in a process of its own, which may end in any way, as may who started it."""

from __future__ import annotations

import os
import select
import sys
import time
from pathlib import Path

import pytest

from cupynet.sweeps.jobs import Asking, Job
from cupynet.sweeps.shares import Share

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no cores can be told apart here")


def started(folder: Path, how: str) -> Job:
    core = min(os.sched_getaffinity(0))
    return Job("tests.tune.asks", [str(folder / "said"), how], Share((core,)))


@pytest.mark.parametrize(
    "how, code, reason",
    [
        ("well", 0, ""),
        ("fails", 1, "it has failed"),
        ("killed", 137, "ended by SIGKILL, as the system does where no memory is left"),
    ],
    ids=["well", "fails", "killed"],
)
def test_a_job_asks_and_ends(tmp_path: Path, how: str, code: int, reason: str) -> None:
    job = started(tmp_path, how)
    try:
        assert job.asked() == [{"epoch": 1, "text": "it's\n"}]
        job.answer("go on")
        assert job.asked() is None
        assert job.end() == (code, reason)
        job.answer("too late")
    except OSError as error:
        assert error.errno == 9 and how  # the pipe is closed with the job
    finally:
        job.close()
    assert (tmp_path / "said").read_text() == "go on 1 False"


def test_a_job_hears_that_nobody_listens_any_more(tmp_path: Path) -> None:
    job = started(tmp_path, "waits")
    assert job.asked() is not None
    job.answer("go on")
    assert job.asked() == [{"epoch": 2}]
    os.close(job._answers)  # as the system does for a process that is killed
    os.close(job._asks)
    job._answers, job._asks = os.pipe()
    assert job._process.wait(60) == 0
    assert (tmp_path / "said").read_text() == "''"
    job.close()


def test_a_job_that_is_let_go_of_is_ended(tmp_path: Path) -> None:
    job = started(tmp_path, "well")
    select.select([job], [], [], 60)
    began = time.monotonic()
    job.close()
    job.close()
    assert job._process.returncode == -9 and time.monotonic() - began < 30


def test_a_job_that_cannot_be_started_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        Job("tests.tune.asks", [], Share())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_command_that_is_no_job_has_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYNET_ASKS", raising=False)
    assert Asking().ask({"epoch": 1}) == ""
