"""`cupynet compare`: its output, files, errors, and page."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from cupynet.commands.compare import main
from cupynet.reporting.comparison import page
from cupynet.reporting.comparison.groups import compared
from cupynet.reporting.comparison.page import compare_page
from cupynet.reporting.comparison.runs import find
from cupynet.reporting.comparison.table import FRONT, in_order
from tests.support.commands import Call, run
from tests.support.compared_runs import made
from tests.support.pages import Page, check_alone


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = tmp_path / "sweep"
    for number, (workers, every) in enumerate(((1, 1), (1, 10), (2, 1), (2, 10))):
        made(
            folder / str(number), workers=workers, averaging_frequency=every, images_per_s=1000.0 * workers,
            test_accuracy=0.95 - 0.01 * workers, train_s=20.0 / workers,
        )  # fmt: skip
    (made(folder / "4", workers=4, averaging_frequency=1) / "summary.json").write_text("{")
    return folder


def test_compare_prints_a_table_with_a_recommendation_and_writes_compare_html(sweep: Path, tmp_path: Path) -> None:
    out, err = run(tmp_path, str(sweep), command="compare", COLUMNS="80")
    lines = out.splitlines()
    assert err == "" and "\x1b" not in out and max(map(len, lines[:-1])) <= 80
    assert lines[2].split()[:6] == ["0", "*", "1", "1", "94.00", "%"]
    assert sum(line.startswith("4 (workers=4 averaging_frequency=1): ") for line in lines) == 1
    assert sum(line.split()[:1] == ["4"] for line in lines) == 1  # it is not a row of the table
    assert FRONT in out and "Use workers=1 parallel.averaging_frequency=1" in out
    assert lines[-1] == str(sweep / "compare.html") and (sweep / "compare.html").is_file()


def test_compare_csv_has_all_runs_and_columns(sweep: Path, tmp_path: Path, call: Call) -> None:
    assert call(main, sweep, "--csv", tmp_path / "runs.csv").code == 0
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [row["state"] for row in rows[:4]] == ["finished"] * 4 and rows[4]["state"].startswith("damaged")
    assert [float(row["speed_up"]) for row in rows[2:4]] == [2.0, 2.0] and rows[4]["accuracy"] == ""
    assert rows[0]["parallel.averaging_frequency"] == "1" and rows[0]["folder"] == str(sweep / "0")


def test_compare_json_has_the_groups_in_order_and_the_other_runs(sweep: Path, call: Call) -> None:
    found = json.loads(call(main, sweep, "--json", "--sort=-workers", "--to", "0.9").out)
    assert [group["settings"]["workers"] for group in found["groups"]] == ["2", "2", "1", "1"]
    assert found["target"] == 0.9 and [each["run"] for each in found["others"]] == [str(sweep / "4")]
    assert (sweep / "compare.html").is_file()  # the JSON does not mention it


def test_a_single_run_gets_no_compare_html_but_the_file_of_option_html(sweep: Path, tmp_path: Path, call: Call) -> None:
    for options in ((), ("--html", tmp_path / "a.html")):
        assert call(main, sweep / "0", *options).code == 0 and not (sweep / "0" / "compare.html").exists()
        assert (tmp_path / "a.html").is_file() == bool(options)


def page_of(folder: Path) -> tuple[str, Page]:
    comparison = compared(find([str(folder)]))
    text = compare_page(comparison, in_order(comparison, None), folder).decode()
    return text, Page(text)


def test_compare_html_needs_no_network_and_shows_every_run_including_failed_and_stopped_ones(sweep: Path) -> None:
    pytest.importorskip("matplotlib")
    (sweep / "2" / "report.html").write_text("a report")
    made(sweep / "5", workers=8, stop_reason="signal", stopped_by="SIGTERM")
    (made(sweep / "6", workers=16) / "summary.json").unlink()
    (sweep / "6" / "train.log").write_text("2026-11-22 10:00:01,000 ERROR cupynet: the disk has failed\n")
    text, page = page_of(sweep)
    links = [each["href"] for each in page.all("a")]
    assert links == ["./0/", "./1/", "./2/report.html", "./3/", "./4/", "./5/", "./6/"]
    check_alone(text, links)
    assert (
        "Use workers=1 parallel.averaging_frequency=1" in page.text
        and "damaged" in page.text
        and "SIGTERM" in page.text
    )
    assert "the disk has failed" in page.text
    assert page.text.count("94.00 %") >= 2 and page.text.count("93.00 %") >= 2  # two runs each, as in summary.json
    assert text.count("<svg") == 4


def test_compare_html_shows_a_result_for_all_values_of_a_setting_without_effect(tmp_path: Path) -> None:
    for number, (workers, every) in enumerate(((1, 1), (2, 1), (2, 10))):
        accuracy = 0.9 + 0.01 * number
        target = "cupynet.parallel.ParameterAveraging"
        made(tmp_path / str(number), workers=workers, averaging_frequency=every, synchronizer=target,
             test_accuracy=accuracy)  # fmt: skip
    text, page = page_of(tmp_path)
    (first, *_) = page.text.partition("together")[2].split("images/s")
    assert first.count("90.00 %") == 2 and first.count("91.00 %") == first.count("92.00 %") == 1


@pytest.mark.parametrize(("option", "name"), [("--csv", "0/summary.json"), ("--html", "sweep.csv")])
def test_compare_overwrites_no_file_of_a_run_or_sweep(option: str, name: str, sweep: Path, call: Call) -> None:
    for own in ("multirun.yaml", "sweep.csv"):
        (sweep / own).write_text("")
    before = (sweep / name).read_bytes()
    found = call(main, sweep, option, sweep / name)
    assert found.code == 2 and str(sweep / name) in found.error and (sweep / name).read_bytes() == before


def test_compare_does_not_write_two_results_to_one_file(sweep: Path, tmp_path: Path, call: Call) -> None:
    found = call(main, sweep, "--csv", tmp_path / "a", "--html", tmp_path / "." / "a")
    assert found.code == 2 and "a" in found.error and not (tmp_path / "a").exists()


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_no_control_characters_reach_the_terminal_or_compare_html(form: list[str], tmp_path: Path, call: Call) -> None:
    evil = "a\x1b[2J\x07\u202eb"
    for number, workers in enumerate((1, 2)):
        extra = f"x{number}: {json.dumps(evil)}\n{json.dumps(evil)}: {number}\n"
        made(tmp_path / f"{number}{evil}", workers=workers, dataset=evil, extra=extra)
    made(tmp_path / "other", workers=4, dataset=evil, stop_reason="signal", stopped_by=evil)
    found = call(main, tmp_path, *form)
    page = (tmp_path / "compare.html").read_text()
    assert found.code == 0 and not {"\x1b", "\x07", "\u202e"} & {*found.out, *found.err, *page}


RUNS = ((1, 0.1, 0.90, 20.0), (2, 0.1, 0.95, 10.0), (1, 0.2, 0.80, 40.0), (2, 0.2, 0.85, 30.0))


def test_curves_points_tiles_and_colors_of_compare_html_match_the_runs(tmp_path: Path) -> None:
    for number, (workers, rate, accuracy, train_s) in enumerate(RUNS):
        made(tmp_path / str(number), workers=workers, rate=rate, test_accuracy=accuracy, train_s=train_s)
    comparison = compared(find([str(tmp_path)]))
    chart = page._curves(comparison, comparison.groups, "time", "seconds", "train_s")
    assert [line.y[-1] for line in chart.lines] == pytest.approx([90, 95, 80, 85])
    points = [point for line in page._pareto(comparison).lines for point in zip(line.x, line.y, strict=True)]
    assert sorted(points) == [(10.0, 95.0), (20.0, 90.0), (30.0, 85.0), (40.0, 80.0)]
    figures = {title: figure for title, figure, _ in page._tiles(comparison)}
    assert (figures["best test accuracy"], figures["shortest training"]) == ("95.00 %", "10.0 s")
    grid: Any = page._grid(comparison)
    strongest = [max((c for _, row in t["rows"] for c in row), key=lambda c: c.strength).text for t in grid["tables"]]
    assert (strongest[0], strongest[2]) == ("95.00 %", "10.0 s")
