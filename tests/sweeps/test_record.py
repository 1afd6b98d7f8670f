"""What a sweep is told of its jobs, and what it writes and shows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from cupynet.sweeps import table
from cupynet.sweeps.record import Sweep, asked
from cupynet.sweeps.table import Column, as_csv, as_markdown, fitting, heading, shortened
from tests.compare.made import made

JOBS = [
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=1"],
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=10"],
    ["data=synthetic", "workers=2", "parallel.averaging_frequency=1"],
]


def job(sweep: Sweep, number: int, code: int = 0, error: str = "", **figures: object) -> None:
    """One job, from its beginning to its end."""
    folder = sweep.folder / str(number)
    sweep.began(number, JOBS[number], folder)
    if code == 0:
        made(folder, **figures)  # type: ignore[arg-type]
    sweep.ended(number, code, error)


def test_a_sweep_ends_in_a_table_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep(tmp_path)
    sweep.expected(JOBS)
    job(sweep, 0, code=65, error="train-images: is\n damaged")
    job(sweep, 1, test_accuracy=0.95, images_per_s=12345.6, train_s=3.21)
    job(sweep, 2, test_accuracy=0.96)
    told = capsys.readouterr().out.splitlines()
    assert [line.partition("] ")[2] for line in told] == [
        f"3 jobs, each into a folder of {tmp_path}",
        "job 0: workers=1 parallel.averaging_frequency=1",
        "job 1: workers=1 parallel.averaging_frequency=10",
        "job 1: test accuracy 95.00 %, 12,346 images/s, trained in 3.2 s",
        "job 2: workers=2 parallel.averaging_frequency=1",
        "job 2: test accuracy 96.00 %, 1,000 images/s, trained in 10.0 s",
    ]
    sweep.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["averaging_", "test", "test", "train"]
    assert lines[1].split() == ["job", "workers", "frequency", "accuracy", "loss", "images/s", "time"]
    assert [line.split() for line in lines[2:5]] == [
        ["1", "1", "10", "95.00", "%", "0.3", "12,346", "3.2", "s"],
        ["2", "2", "1", "96.00", "%", "0.3", "1,000", "10.0", "s"],
        ["0", "1", "1", "-", "-", "-", "-"],  # those that failed come last
    ]
    assert lines[5] == "job 0 failed: exit code 65: train-images: is damaged"
    assert lines[6] == "best: job 2 (workers=2 parallel.averaging_frequency=1), test accuracy 96.00 %"
    assert lines[7] == f"python -m cupynet.compare {tmp_path}" and len(lines) == 8
    assert max(map(len, lines[:6])) <= 80


def test_the_file_is_written_as_jobs_end(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    sweep.expected(JOBS)

    def rows() -> list[dict[str, str]]:
        with (tmp_path / "sweep.csv").open() as file:
            return list(csv.DictReader(file))

    job(sweep, 0, test_accuracy=0.123456789)
    (row,) = rows()
    assert list(row) == [
        "job", "workers", "parallel.averaging_frequency", "test_accuracy", "validation_accuracy", "test_loss",
        "images_per_s", "train_s", "exit_code", "error", "folder",
    ]  # fmt: skip
    assert (row["test_accuracy"], row["validation_accuracy"], row["exit_code"]) == ("0.123456789", "", "0")
    job(sweep, 1, code=3, error="loss is nan, at once")
    sweep.began(2, JOBS[2], tmp_path / "2")  # and there the process is killed
    assert [(row["job"], row["exit_code"], row["error"]) for row in rows()] == [
        ("0", "0", ""),
        ("1", "3", "loss is nan, at once"),
    ]


def test_jobs_are_judged_by_validation_images_where_there_are_some(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    job(sweep, 0, validation_accuracy=0.0, test_accuracy=0.99)
    job(sweep, 1, validation_accuracy=0.5, test_accuracy=0.5, train_s=20.0)
    job(sweep, 2, validation_accuracy=0.5, test_accuracy=0.4, train_s=10.0)
    assert [sweep.result(number) for number in range(4)] == [0.0, 0.5, 0.5, None]
    assert sweep.best is sweep.jobs[2]  # as good, and faster
    assert (sweep.code(0), sweep.code(4)) == (0, None)


def test_jobs_judged_by_other_images_are_chosen_from_by_those_that_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(tmp_path)
    job(sweep, 0, validation_accuracy=0.99, test_accuracy=0.9)
    job(sweep, 1, test_accuracy=0.95)
    job(sweep, 2, code=3)
    assert sweep.best is sweep.jobs[1]
    sweep.close()
    assert "best: job 1 (workers=1 parallel.averaging_frequency=10), test accuracy 95.00 %" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.csv").mkdir()
    sweep = Sweep(tmp_path)
    job(sweep, 0)
    job(sweep, 1)
    assert capsys.readouterr().err.count("sweep.csv: cannot be written (Is a directory): the sweep goes on") == 1


def test_a_table_that_cannot_be_shown_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(tmp_path)
    job(sweep, 0)
    monkeypatch.setattr(table.Table, "add_row", None)
    sweep.close()
    assert "the table of the sweep cannot be shown" in capsys.readouterr().err
    Sweep(tmp_path).close()  # no job has begun
    assert capsys.readouterr() == ("", "")


def test_overrides_as_settings() -> None:
    assert asked(["workers=1", "+model.x={a:1}", "++y=a=b"]) == {"workers": "1", "model.x": "{a:1}", "y": "a=b"}


# tables ---------------------------------------------------------------------------------------------------------------


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert shortened(["workers", "parallel.averaging_frequency"]) == {
        "workers": "workers",
        "parallel.averaging_frequency": "averaging_frequency",
    }
    assert shortened(["a.x.units", "a.y.units", "units"]) == {
        "a.x.units": "x.units",
        "a.y.units": "y.units",
        "units": "units",
    }
    assert shortened(["model.layers.drop.rate", "seed"]) == {"model.layers.drop.rate": "drop.rate", "seed": "seed"}
    assert heading("averaging_frequency") == "averaging_\nfrequency" and heading("learning_rate") == "learning_\nrate"
    assert heading("batch_size") == "batch_size" and heading("workers") == "workers"


def test_columns_that_have_no_room_go_the_least_first() -> None:
    columns = [
        Column(name, name, ["x" * 10], weight=weight) for name, weight in (("a", 3), ("b", 1), ("c", 1), ("d", 2))
    ]
    assert [column.key for column in fitting(columns, 46)[0]] == ["a", "b", "c", "d"]
    kept, left = fitting(columns, 45)
    assert ([column.key for column in kept], [column.key for column in left]) == (["a", "b", "d"], ["c"])
    assert [column.key for column in fitting(columns, 1)[0]] == ["a"]


def test_a_wide_table_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep(tmp_path)
    settings = [f"optimizer.averylongnameofasetting{number}" for number in range(5)]
    for number in range(2):
        sweep.began(number, [f"{name}={number}" for name in settings], tmp_path / str(number))
        made(tmp_path / str(number))
        sweep.ended(number, 0)
    capsys.readouterr()
    sweep.close()
    lines = capsys.readouterr().out.splitlines()
    assert "no room for optimizer.averylong" in " ".join(lines) and "train_s: see sweep.csv" in " ".join(lines)
    assert max(len(line) for line in lines if not line.startswith(("best", "python"))) <= 80


def test_other_forms_of_a_table() -> None:
    columns = [
        Column("a", "a\nb", ["1", "x|y"], [1, "x|y"]),
        Column("c", "c_\nd", ["p,q", ""], ["p,q", None], right=False),
    ]
    assert as_csv(columns) == 'a,c\n1,"p,q"\nx|y,\n'
    assert as_markdown(columns) == "| a b | c_d |\n|---:|---|\n| 1 | p,q |\n| x\\|y |  |\n"


def test_a_spreadsheet_takes_nothing_for_a_formula() -> None:
    values = ["=1+1", "+1+1", "-1+1", "@x", "\t=1", " =1", "-1e-3", "+5", "-", -2, -0.5, None, "a=b"]
    (_, *rows) = csv.reader(as_csv([Column("x", "x", [], values), Column("y", "y", [], values)]).splitlines())
    assert [cell for cell, _ in rows[:6]] == [f"'{value}" for value in values[:6]]
    assert [cell for cell, _ in rows[6:]] == ["-1e-3", "+5", "-", "-2", "-0.5", "", "a=b"]


def test_what_an_older_sweep_has_left_is_no_result_of_this_one(tmp_path: Path) -> None:
    made(tmp_path / "0", test_accuracy=0.99)
    sweep = Sweep(tmp_path)
    sweep.began(0, JOBS[0], tmp_path / "0")
    assert sweep.ended(0, 65, "damaged").summary is None
    with (tmp_path / "sweep.csv").open() as file:
        assert [row["test_accuracy"] for row in csv.DictReader(file)] == [""]
