"""`cupynet compare`: what it prints, writes and refuses, and the page."""

from __future__ import annotations

import csv
import html.parser
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupynet.commands import compare as command
from cupynet.reporting.comparison.groups import compared
from cupynet.reporting.comparison.page import compare_page
from cupynet.reporting.comparison.runs import find
from cupynet.reporting.comparison.table import FRONT, in_order
from tests.support import warm
from tests.support.compared_runs import made


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


def called(*arguments: object, code: int = 0, cwd: Path, **more: str) -> tuple[str, str]:
    """What a process of the command says on stdout and stderr."""
    done = warm.command("cupynet", ("compare", *map(str, arguments)), cwd, {**os.environ, **more}, 100, **more)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout, done.stderr


def here(
    *arguments: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["compare", *map(str, arguments)])
    code = 0
    try:
        command.main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    out, err = capsys.readouterr()
    return code, out, err


def test_a_sweep_as_a_process(sweep: Path, tmp_path: Path) -> None:
    out, err = called(sweep, "--csv", "runs.csv", cwd=tmp_path)
    assert err == "" and "\x1b" not in out and max(map(len, out.splitlines()[:-1])) <= 80
    lines = out.splitlines()
    assert lines[0].split() == ["averaging_", "test", "train", "speed-", "time", "to", "test"]
    assert lines[2].split()[:6] == ["0", "*", "1", "1", "94.00", "%"]
    assert any(line.startswith("4 (workers=4 averaging_frequency=1): damaged: summary.json") for line in lines)
    assert "Use workers=1 averaging_frequency=1: 94.00 % in 20.0 s of training" in out
    assert lines[-1] == str(sweep / "compare.html") and (sweep / "compare.html").is_file()
    with (tmp_path / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows[:4]] == ["finished"] * 4 and rows[4]["state"].startswith("damaged")
    assert [float(row["speed_up"]) for row in rows[2:4]] == [2.0, 2.0] and rows[4]["accuracy"] == ""
    assert rows[0]["parallel.averaging_frequency"] == "1" and rows[0]["folder"] == str(sweep / "0")


def test_json_output(sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = here(sweep, "--json", "--sort=-workers", "--to", "0.9", monkeypatch=monkeypatch, capsys=capsys)
    found = json.loads(out)
    assert [group["settings"]["workers"] for group in found["groups"]] == ["2", "2", "1", "1"]
    assert (
        found["target"] == 0.9 and found["others"][0]["run"] == str(sweep / "4") and found["answer"].startswith("Use")
    )
    assert (sweep / "compare.html").is_file()  # and not a word of it in the JSON


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing"], 2, "missing: contains no run: name the folder of a run or of a sweep"),
        (["miss*"], 2, "miss*: contains no run"),
        (["empty"], 2, "empty: contains no run"),
        (["file"], 2, "file: contains no run"),
        (["sweep", "empty"], 2, "empty: contains no run"),
        (["sweep", "--to", "98"], 2, "--to 98: must be an accuracy above 0 and at most 1, such as 0.99"),
        (["sweep", "--sort", "workrs"], 2, "--sort workrs: there is no such column; did you mean 'workers'?"),
        (["sweep", "--csv", "none/runs.csv"], 74, "none/runs.csv: cannot be written (No such file or directory)"),
        (["sweep", "--html", "none/page.html"], 74, "none/page.html: cannot be written (No such file or directory)"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_impossible_comparisons_are_refused_in_one_line(
    arguments: list[str], code: int, said: str, sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "nothing").mkdir(parents=True)
    (tmp_path / "file").write_text("{}")
    left, out, err = here(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert left == code and (out == "" or code == 74) and err.startswith(f"cupynet: {said}") and err.count("\n") == 1


def test_the_mark_of_the_pareto_front_is_explained(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = here(sweep, monkeypatch=monkeypatch, capsys=capsys)
    assert FRONT in out and f"{FRONT} Pareto front" in out


@pytest.mark.slow
def test_a_closed_pipe_on_stdout_is_no_error(sweep: Path, tmp_path: Path) -> None:
    line = f"set -o pipefail; {sys.executable} -m cupynet compare {sweep} | head -n 1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode in (0, 141) and done.stderr == "" and done.stdout.count("\n") == 1
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            arguments = [sys.executable, "-m", "cupynet", "compare", sweep]
            done = subprocess.run(arguments, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
        assert (
            done.returncode == 74 and done.stderr == "cupynet: the output cannot be written: No space left on device\n"
        )


def test_help_names_what_works(tmp_path: Path) -> None:
    out, _ = called("--help", cwd=tmp_path)
    assert "cupynet compare outputs/latest" in out and "--sort train_s" in out


# the page -------------------------------------------------------------------------------------------------------------


class Seen(html.parser.HTMLParser):
    """What stands in a page: tags that are open, links, and text."""

    VOID = ("meta", "link", "br", "wbr", "img", "path", "use", "rect", "line", "stop")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "a":
            self.links += [value or "" for name, value in attributes if name == "href"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(folder: Path) -> tuple[str, Seen]:
    comparison = compared(find([str(folder)]))
    text = compare_page(comparison, in_order(comparison, None), folder).decode()
    seen = Seen()
    seen.feed(text)
    assert seen.open == []
    return text, seen


def test_the_page_shows_every_run_and_setting(sweep: Path) -> None:
    (sweep / "2" / "report.html").write_text("a report")
    text, seen = page_of(sweep)
    assert "5 runs compared" in seen.text and "Use workers=1 averaging_frequency=1" in seen.text
    assert "workers and averaging_frequency together" in seen.text and "damaged: summary.json" in seen.text
    assert seen.links == ["./0/", "./1/", "./2/report.html", "./3/", "./4/"]
    if "matplotlib" not in seen.text:
        assert text.count("<svg") == 4
        assert all(f"{name} over " in text for name in ("accuracy", "times one worker&#x27;s images/s"))


def test_the_page_without_matplotlib_has_all_but_charts(sweep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text, seen = page_of(sweep)
    assert "<svg" not in text and "pip install 'cupynet[plots]'" in seen.text and "94.00 %" in seen.text


def test_runs_of_one_epoch_have_no_curves(sweep: Path) -> None:
    pytest.importorskip("matplotlib")
    before = page_of(sweep)[0].count("<svg")
    for path in sweep.glob("*/history.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    assert page_of(sweep)[0].count("<svg") == before - 2


def test_the_grid_shows_a_result_for_all_values_of_a_setting_without_effect(tmp_path: Path) -> None:
    for number, (workers, every) in enumerate(((1, 1), (2, 1), (2, 10))):
        accuracy = 0.9 + 0.01 * number
        target = "cupynet.parallel.ParameterAveraging"
        made(tmp_path / str(number), workers=workers, averaging_frequency=every, synchronizer=target,
             test_accuracy=accuracy)  # fmt: skip
    text, seen = page_of(tmp_path)
    (first, *_) = seen.text.partition("together")[2].split("images/s")
    assert first.count("90.00 %") == 2 and first.count("91.00 %") == first.count("92.00 %") == 1


def test_text_from_run_folders_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    made(tmp_path / "0", dataset=evil, extra=f"'{evil}': '\"><b>'\n")
    made(tmp_path / "1", workers=2, dataset=evil, extra=f"'{evil}': x\n", stop_reason="signal", stopped_by=evil)
    made(tmp_path / "2", workers=4, dataset=evil, extra=f"'{evil}': '$\\alpha$ &'\n")
    text, seen = page_of(tmp_path)
    assert "<script" not in text and "<b>" not in text and evil in seen.text


def test_runs_without_results_make_a_page(tmp_path: Path) -> None:
    (made(tmp_path / "0") / "summary.json").unlink()
    text, seen = page_of(tmp_path)
    assert "No run has finished" in seen.text and "<svg" not in text


def test_a_page_that_cannot_be_written_ends_with_an_error(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (sweep / "compare.html").mkdir()
    code, out, err = here(sweep, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 74 and "Use workers=1" in out
    assert err == f"cupynet: {sweep / 'compare.html'}: cannot be written (Is a directory)\n"


def test_control_characters_reach_neither_the_terminal_nor_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "a\x1b[2J\x07\u202eb"
    for number, workers in enumerate((1, 2)):
        extra = f"x{number}: {json.dumps(evil)}\n{json.dumps(evil)}: {number}\n"
        made(tmp_path / str(number), workers=workers, dataset=evil, extra=extra)
    made(tmp_path / "other", workers=4, dataset=evil, stop_reason="signal", stopped_by=evil)
    made(tmp_path / "data", workers=8)
    for form in ([], ["--json"]):
        code, out, err = here(tmp_path, *form, monkeypatch=monkeypatch, capsys=capsys)
        assert code == 0 and not {"\x1b", "\x07", "\u202e"} & set(out + err)
    assert (
        "\ufffd" in (tmp_path / "compare.html").read_text() and "\u202e" not in (tmp_path / "compare.html").read_text()
    )


def test_numbers_too_large_for_a_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path / "0", images=10**400)
    made(tmp_path / "1", extra=f"x: 0x{'f' * 8000}\n")
    code, out, err = here(tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert (
        code == 0 and err == "" and "images=1000" in " ".join(out.split()) and "cannot be read" in " ".join(out.split())
    )


def test_a_speed_up_below_one_is_called_slower(sweep: Path) -> None:
    for number in "23":
        path = sweep / number / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "images_per_s": 660.0}))
    text, seen = page_of(sweep)
    assert "0.66" in seen.text and "slower than one worker" in seen.text
