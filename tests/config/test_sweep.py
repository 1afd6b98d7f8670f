"""Sweeps: jobs that fail or are interrupted, sweep.csv, the table at the end, and what a job leaves to the next."""

import errno
import gc
import logging
import os
import shlex
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
from cupynet.core.table import Column, Screen, setting_columns, shortened, show
from tests.support.called import train_job
from tests.support.calls import watch
from tests.support.commands import Command
from tests.support.compared_runs import made
from tests.support.run_folders import sweep_rows

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
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("not started: ")]
    assert line.startswith("not started: job 1: ") and line.endswith(" workers=2")


def test_a_sweep_over_learning_rates_may_contain_a_schedule(command: Command) -> None:
    code, ran = command("-m", "optimizer.learning_rate=0.25,{name: step, initial: 0.1, every: 5, factor: 0.5}")
    number, schedule = (settings.optimizer["learning_rate"] for settings in ran)
    assert code == 0 and number == 0.25 and (schedule["_target_"], schedule["every"]) == ("cupynet.optim.StepDecay", 5)


JOBS = [
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=1"],
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=10"],
    ["data=synthetic", "workers=2", "parallel.averaging_frequency=1"],
]


def job(sweep: Path, number: int, code: int = 0, error: str = "", **figures: Any) -> None:
    if code == 0:
        made(sweep / str(number), **figures)
    sweep_record.ended(sweep, sweep_record.Job(number, JOBS[number], sweep / str(number), code, error))


@pytest.fixture(autouse=True)
def no_jobs() -> None:
    sweep_record._ended.clear()


def test_sweep_csv_is_updated_after_each_job(tmp_path: Path) -> None:
    job(tmp_path, 0, test_accuracy=0.123456789)
    (row,) = sweep_rows(tmp_path).values()
    assert (row["test_accuracy"], row["validation_accuracy"], row["exit_code"]) == ("0.123456789", "", "0")
    job(tmp_path, 2, code=3, error="loss is nan, at once")
    assert " ".join(sweep_rows(tmp_path)["2"]) == (
        "job workers test_accuracy validation_accuracy test_loss images_per_s train_s exit_code error folder"
    )
    found = [(row["job"], row["workers"], row["exit_code"], row["error"]) for row in sweep_rows(tmp_path).values()]
    assert found == [("0", "1", "0", ""), ("2", "2", "3", "loss is nan, at once")]


def test_sweep_csv_has_no_rows_of_an_earlier_sweep(tmp_path: Path) -> None:
    job(tmp_path, 0)
    job(tmp_path, 2, code=3)
    sweep_record.finish(tmp_path)
    job(tmp_path, 1)
    assert [*sweep_rows(tmp_path)] == ["1"] and sweep_record.finish(tmp_path) == 0


def test_a_job_whose_process_is_killed_has_failed_in_sweep_csv(tmp_path: Path) -> None:
    job(tmp_path, 0)
    sweep_record.began(tmp_path, sweep_record.Job(1, JOBS[1], tmp_path / "1", None), ())
    assert sweep_record.finish(tmp_path) == 1
    killed = sweep_rows(tmp_path)["1"]
    assert killed["exit_code"] == "1" and killed["error"]


def test_a_sweep_names_its_best_job_by_validation_accuracy_if_all_jobs_have_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "2", test_accuracy=0.99)  # refused because its folder holds a run
    job(tmp_path, 2, code=2)
    job(tmp_path, 0, validation_accuracy=0.0, test_accuracy=0.99)
    job(tmp_path, 1, validation_accuracy=0.5, test_accuracy=0.4)
    assert sweep_rows(tmp_path)["2"]["test_accuracy"] == "" and sweep_record.finish(tmp_path) == 2
    (best,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best: ")]
    assert "job 1," in best
    job(tmp_path / "mixed", 0, validation_accuracy=0.9, test_accuracy=0.4)
    job(tmp_path / "mixed", 1, test_accuracy=0.5)
    sweep_record.finish(tmp_path / "mixed")
    assert "best: job 1, test accuracy" in capsys.readouterr().out


def test_an_unwritable_sweep_csv_does_not_end_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.csv").mkdir()
    job(tmp_path, 0)
    assert "sweep.csv" in capsys.readouterr().err
    assert sweep_record.finish(tmp_path) == 0


@pytest.mark.parametrize(
    ("error", "reported"),
    [(OSError(errno.ENOSPC, "full"), True), (OSError(errno.EIO, "no terminal"), False), (ValueError("closed"), False)],
)
def test_a_table_that_cannot_be_printed_is_reported_if_the_disk_is_full_but_not_if_the_terminal_is_closed(
    error: Exception,
    reported: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in (0, 2):
        job(tmp_path, number)
    monkeypatch.setattr(sweep_record, "show", Mock(side_effect=error))
    assert sweep_record.finish(tmp_path) == 0
    assert (str(tmp_path / "sweep.csv") in capsys.readouterr().err) == reported


def test_a_sweep_ends_in_a_table_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, 0, code=65, error="train-images: is\n damaged")
    job(tmp_path, 1, test_accuracy=0.95, images_per_s=12345.6, train_s=3.21)
    job(tmp_path, 2, test_accuracy=0.96)
    capsys.readouterr()
    assert sweep_record.finish(tmp_path) == 65
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in lines[1:5]] == [
        "job workers frequency accuracy loss images/s time",
        "0 1 1 - - - -",
        "1 1 10 95.00 % 0.3 12,346 3.2 s",
        "2 2 1 96.00 % 0.3 1,000 10.0 s",
    ]
    failed, best = lines[5:]
    assert "job 0" in failed and "65" in failed and "job 2" in best and "96.00 %" in best
    assert shlex.split(best)[-3:] == ["cupynet", "compare", str(tmp_path)]


def test_names_are_shortened_while_they_stay_distinct() -> None:
    names = ["workers", "parallel.averaging_frequency", "a.x.units", "a.y.units", "units", "model.layers.drop.rate"]
    found = " ".join(shortened([*names, "data.seed"]).values())
    assert found == "workers averaging_frequency x.units y.units units drop.rate data.seed"
    titles = [column.title for column in setting_columns({"parallel.averaging_frequency": [], "batch_size": []})]
    assert titles == ["averaging_\nfrequency", "batch_size"]


def test_text_from_files_cannot_control_the_terminal_that_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    evil, screen = "a\x1b[2J\u202eb", Screen()
    show([Column(evil, evil, [evil], [evil])], screen, "")
    screen.print(evil)
    text = capsys.readouterr().out
    assert text.count("\ufffd") == 6 and not {"\x1b", "\u202e"} & set(text)


def test_a_long_name_is_shown_whole_and_does_not_hide_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    show([Column("run", "run", ["x" * 100]), Column("accuracy", "accuracy", ["97.00 %"])], Screen(), "")
    shown = capsys.readouterr().out
    assert "97.00 %" in shown and shown.count("x") == 100


def test_settings_are_omitted_from_a_wide_table_before_the_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [Column(name, name, ["x" * 30]) for name in ("run", "batch_size", "l2", "l1")]
    show([*settings, Column("accuracy", "accuracy", ["97.00 %"])], Screen(), "", needed=("accuracy",))
    shown = capsys.readouterr().out
    assert "97.00 %" in shown and "omitted columns: l2, l1." in shown
