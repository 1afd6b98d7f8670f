"""The table at the end of a run: its rows, and failing terminals."""

import sys
from dataclasses import asdict

import pytest

from cupynet.commands.result_table import result_table
from cupynet.runs.run import Run, Summary
from cupynet.training import Spent
from tests.support.compared_runs import summary
from tests.support.terminal import Screen

SPENT = Spent([10.0, 10.0], [7.9, 8.3], [0.0, 0.1], [2.1, 1.6], [0.0, 0.0], [240, 240], [300_000_000, 300_000_000])


def table(results: Summary, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    result_table(results, Run("outputs"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return {line[:15].rstrip(): line[15:].rstrip() for line in lines}


def test_the_table_has_time_and_traffic_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    advice = "averaging costs 16 % of the time: frequency 12 would cost 5 %"
    rows = table(summary(spent=asdict(SPENT), bytes_sent=600_000_000, drift=0.0123, advice=advice), capsys)
    assert "1.2 %" in rows["replicas"] and rows["advice"] == advice
    assert all(figure in rows["spent"] for figure in (" 16 %", " 1 %", " 600.0 MB", " 20.0 MB"))
    assert set(rows) - set(table(summary(), capsys)) == {"spent", "advice"}


def test_the_table_has_the_validation_and_the_test_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(summary(validation_accuracy=0.875, test_accuracy=0.75), capsys)
    assert "87.50 %" in rows["validation"] and rows["test accuracy"] == "75.00 %"


def test_the_table_of_a_single_worker_has_no_traffic_or_drift(capsys: pytest.CaptureFixture[str]) -> None:
    alone = Spent([10.0], [9.0], [1.0], [0.0], [0.0], [480], [0])
    rows = table(summary(workers=1, spent=asdict(alone), advice="nothing stands out"), capsys)
    assert "spent" not in rows and "replicas" not in rows and rows["advice"] == "nothing stands out"


@pytest.mark.parametrize(("best", "expected"), [(4, "4, validation loss 0.03125"), (None, None)])
def test_the_table_has_the_best_epoch_of_early_stopping(
    best: int | None, expected: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    for monitor in ("loss", "val_loss", "validation_loss"):
        found = {"monitor": monitor, "best_score": 0.03125, "best_epoch": best, "restored": best is not None}
        rows = table(summary(stopped_by="patience", early_stopping=found), capsys)
        assert rows["stopped"] == "patience" and rows.get("best epoch") == expected


def test_a_table_that_cannot_be_printed_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen(OSError(28, "No space left on device")))
    result_table(summary(), Run("outputs"))


def test_the_name_of_a_data_set_or_folder_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    result_table(summary(dataset="a\x1b[2J\u202eb"), Run("outputs/a\x1b[2J"))
    text = capsys.readouterr().out
    assert text.count("\ufffd") == 3 and not {"\x1b", "\u202e"} & set(text)
