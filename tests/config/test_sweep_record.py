"""The jobs of a sweep: sweep.csv and the table."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from cupynet.config import sweep_record
from cupynet.core.table import Column, Screen, as_csv, heading, shortened, show
from tests.support.compared_runs import made

JOBS = [
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=1"],
    ["data=synthetic", "workers=1", "parallel.averaging_frequency=10"],
    ["data=synthetic", "workers=2", "parallel.averaging_frequency=1"],
]


def job(sweep: Path, number: int, code: int = 0, error: str = "", **figures: object) -> None:
    """A job that has ended."""
    if code == 0:
        made(sweep / str(number), **figures)  # type: ignore[arg-type]
    sweep_record.ended(sweep, sweep_record.Job(number, JOBS[number], sweep / str(number), code, error))


@pytest.fixture(autouse=True)
def no_jobs() -> None:
    sweep_record._ended.clear()


def rows(sweep: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((sweep / "sweep.csv").read_text().splitlines()))


def test_a_sweep_ends_in_a_table_and_names_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path, 0, code=65, error="train-images: is\n damaged")
    job(tmp_path, 1, test_accuracy=0.95, images_per_s=12345.6, train_s=3.21)
    job(tmp_path, 2, test_accuracy=0.96)
    capsys.readouterr()
    assert sweep_record.finish(tmp_path) == 65
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["job", "workers", "frequency", "accuracy", "loss", "images/s", "time"]
    assert [line.split() for line in lines[2:5]] == [
        ["0", "1", "1", "-", "-", "-", "-"],
        ["1", "1", "10", "95.00", "%", "0.3", "12,346", "3.2", "s"],
        ["2", "2", "1", "96.00", "%", "0.3", "1,000", "10.0", "s"],
    ]
    failed, best = lines[5:]
    assert "job 0" in failed and "65" in failed and "job 2" in best and "96.00 %" in best
    assert shlex.split(best)[-3:] == ["cupynet", "compare", str(tmp_path)]
    assert max(map(len, lines[:6])) <= 80


def test_the_file_is_written_as_jobs_end(tmp_path: Path) -> None:
    job(tmp_path, 0, test_accuracy=0.123456789)
    (row,) = rows(tmp_path)
    assert (row["test_accuracy"], row["validation_accuracy"], row["exit_code"]) == ("0.123456789", "", "0")
    job(tmp_path, 2, code=3, error="loss is nan, at once")
    assert list(rows(tmp_path)[0]) == [
        "job", "workers", "test_accuracy", "validation_accuracy", "test_loss", "images_per_s", "train_s", "exit_code",
        "error", "folder",
    ]  # fmt: skip
    found = [(row["job"], row["workers"], row["exit_code"], row["error"]) for row in rows(tmp_path)]
    assert found == [("0", "1", "0", ""), ("2", "2", "3", "loss is nan, at once")]


def test_a_sweep_has_its_own_rows(tmp_path: Path) -> None:
    job(tmp_path, 0)
    job(tmp_path, 2, code=3)
    sweep_record.finish(tmp_path)
    job(tmp_path, 1)
    assert [row["job"] for row in rows(tmp_path)] == ["1"] and sweep_record.finish(tmp_path) == 0


def test_the_best_job_is_chosen_by_validation_images_if_there_are_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(tmp_path, 0, validation_accuracy=0.0, test_accuracy=0.99)
    job(tmp_path, 1, validation_accuracy=0.5, test_accuracy=0.4)
    job(tmp_path, 2, code=3)
    assert [each.accuracy for each in sweep_record._ended] == [0.0, 0.5, None]
    assert sweep_record.finish(tmp_path) == 3
    assert "job 1, accuracy 50.00 %" in capsys.readouterr().out.splitlines()[-1]


def test_a_refused_job_has_no_result_whatever_its_folder_holds(tmp_path: Path) -> None:
    made(tmp_path / "0", test_accuracy=0.99)
    job(tmp_path, 0, code=2, error="holds a run")
    assert [row["test_accuracy"] for row in rows(tmp_path)] == [""]


def test_a_fast_dev_run_is_never_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1):
        job(tmp_path, number, test_accuracy=0.9, fast_dev_run=1)
    assert sweep_record.finish(tmp_path) == 0
    assert "best" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("datasets", "column"),
    [
        ([("mnist", False), ("mnist", False)], None),
        ([("synthetic", True), ("synthetic", True)], ["synthetic (fallback)"] * 2),
        ([("mnist", False), ("synthetic", False)], ["mnist", "synthetic"]),
    ],
)
def test_the_table_says_on_which_data(
    datasets: list[tuple[str, bool]], column: list[str] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (dataset, fallback) in enumerate(datasets):
        job(tmp_path, number, dataset=dataset, fallback=fallback)
    sweep_record.finish(tmp_path)
    stdout = capsys.readouterr().out
    assert [row.get("dataset") for row in rows(tmp_path)] == (column or [None] * 2)
    (best,) = [line for line in stdout.splitlines() if line.startswith("best: ")]
    assert f" on {column[0] if column else 'mnist'}." in best
    assert (" data" in stdout.split("best")[0]) == (column is not None)


def test_a_file_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.csv").mkdir()
    job(tmp_path, 0)
    assert "sweep.csv" in capsys.readouterr().err
    assert sweep_record.finish(tmp_path) == 0


def test_a_sweep_without_jobs_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep_record.finish(tmp_path) == 0 and capsys.readouterr() == ("", "")


def test_overrides_as_settings(tmp_path: Path) -> None:
    found = sweep_record.Job(0, ["workers=1", "+model.x={a:1}", "++y=a=b"], tmp_path, 0).settings
    assert found == {"workers": "1", "model.x": "{a:1}", "y": "a=b"}


def test_a_wide_table_names_the_columns_it_omits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        made(tmp_path / str(number))
        settings = [f"optimizer.averylongnameofasetting{place}={number}" for place in range(5)]
        sweep_record.ended(tmp_path, sweep_record.Job(number, settings, tmp_path / str(number), 0))
    capsys.readouterr()
    sweep_record.finish(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert "optimizer.averylong" in " ".join(lines) and "sweep.csv" in " ".join(lines)
    assert len(lines[0]) <= 80


# tables ---------------------------------------------------------------------------------------------------------------


def test_names_are_shortened_while_they_stay_distinct() -> None:
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


def test_columns_that_do_not_fit_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column(name, name, ["x" * 10]) for name in "abcdefgh"]  # 80 characters hold six, and the space between
    show(columns, Screen(), "see elsewhere")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list("abcdef") and lines[2] == "no room for g, h: see elsewhere"
    show([Column("a", "a", ["x" * 100])], Screen(), "")
    assert "no room" not in capsys.readouterr().out


def test_tables_as_csv() -> None:
    columns = [
        Column("a", "a\nb", ["1", "x|y"], [1, "x|y"]),
        Column("c", "c_\nd", ["p,q", ""], ["p,q", None], right=False),
    ]
    assert as_csv(columns) == 'a,c\n1,"p,q"\nx|y,\n'


def test_no_cell_is_a_formula_to_a_spreadsheet() -> None:
    values = ["=1+1", "+1+1", "-1+1", "@x", "\t=1", " =1", "-1e-3", "+5", "-", -2, -0.5, None, "a=b"]
    (_, *rows) = csv.reader(as_csv([Column("x", "x", [], values), Column("y", "y", [], values)]).splitlines())
    assert [cell for cell, _ in rows[:6]] == [f"'{value}" for value in values[:6]]
    assert [cell for cell, _ in rows[6:]] == ["-1e-3", "+5", "-", "-2", "-0.5", "", "a=b"]


def test_text_from_files_cannot_control_the_terminal_that_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    evil, screen = "a\x1b[2J\u202eb", Screen()
    show([Column(evil, evil, [evil], [evil])], screen, "")
    screen.print(evil)
    text = capsys.readouterr().out
    assert text.count("\ufffd") == 6 and not {"\x1b", "\u202e"} & set(text)
