"""Sweeps in one process: failed and interrupted jobs, and what a job leaves behind for the next."""

import gc
import logging
import os
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from threadpoolctl import threadpool_info

from cupynet.config import sweep_record
from cupynet.core import lock
from cupynet.core.errors import Interrupted
from tests.support.called import train_job
from tests.support.calls import watch
from tests.support.commands import Command

TINY = ["data=synthetic", "data.train=64", "data.test=20", "batch_size=16", "model=mlp", "epochs=1", "workers=2"]
PACKAGES = tuple(f"cupynet.{name}." for name in ("backend", "nn", "optim", "data", "parallel", "training"))


def left_in_the_process() -> dict[str, Any]:
    gc.collect()
    objects = (type(each) for each in gc.get_objects())
    return {
        "objects": Counter(each.__qualname__ for each in objects if str(each.__module__).startswith(PACKAGES)),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": [each.name for each in threading.enumerate() if each.name.startswith("cupynet")],
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
        "blas": [library["num_threads"] for library in threadpool_info()],
        "handlers": [len(logging.getLogger(name).handlers) for name in (None, "cupynet", "hydra", "__main__")],
        "open": len(logging._handlerList),  # type: ignore[attr-defined]
    }


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc shows open files only on Linux")
def test_jobs_leave_no_objects_files_or_threads_to_the_next(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    watch(monkeypatch, sweep_record, "began", lambda *_: found.append(left_in_the_process()))
    assert command("-m", *TINY, "seed=1,2,3", task=train_job)[0] == 0
    assert found[1] == found[2] and not found[2]["threads"]


@pytest.mark.usefixtures("minimal_conf")
def test_a_failed_job_does_not_stop_a_sweep_which_exits_with_the_code_of_the_first_one(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-m", "epochs=1,-1,2", "hydra.sweep.subdir=a${epochs}/b")
    code, ran = command(*arguments, task=lambda settings, folder: 1 / (settings.epochs - 1))
    assert code == 1 and [settings.epochs for settings in ran] == [1, 2]
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cupynet: ")]
    assert "job 0: ZeroDivisionError" in first and "job 1: epochs=-1" in second
    (sweep,) = in_folder.glob("outputs/sweeps/*/*")
    assert sorted(path.name for path in sweep.glob("a*")) == ["a1", "a2"]  # a rejected job leaves no folder
    assert "ERROR cupynet: job 0: ZeroDivisionError" in (sweep / "a1" / "b" / "train.log").read_text()


@pytest.mark.usefixtures("minimal_conf")
def test_a_sweep_locks_its_folder_while_it_runs_and_does_not_overwrite_another(
    command: Command, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    arguments, sweep, locked = ("-m", "seed=1,2", "hydra.sweep.dir=s"), in_folder / "s", list[bool]()
    assert command(*arguments, task=lambda *_: locked.append(lock.at_work(sweep)))[0] == 0 and locked == [True, True]
    assert not lock.at_work(sweep) and not (sweep / "running.json").exists()
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    assert command(*arguments) == (2, [])
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(15), 143)])
def test_an_interrupted_sweep_exits_with_130_or_143_and_lists_the_jobs_that_did_not_start(
    error: BaseException, code: int, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, ran = command("-m", "workers=1,2", task=Mock(side_effect=error))
    assert (exit_code, [settings.workers for settings in ran]) == (code, [1])
    assert re.findall(r"^not started: (job \d): .* (workers=\d)", capsys.readouterr().out, re.M) == [
        ("job 1", "workers=2")
    ]


def test_a_sweep_over_learning_rates_may_contain_a_schedule(command: Command) -> None:
    code, ran = command("-m", "optimizer.learning_rate=0.25,{name: step, initial: 0.1, every: 5, factor: 0.5}")
    number, schedule = (settings.optimizer["learning_rate"] for settings in ran)
    assert code == 0 and number == 0.25 and (schedule["_target_"], schedule["every"]) == ("cupynet.optim.StepDecay", 5)
