"""The table at the end of a run."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from cupynet.runs import Run, Summary
from cupynet.training import Spent
from cupynet.training.console import _amount, result_table
from tests.test_runs import SUMMARY

SPENT = Spent([10.0, 10.0], [7.9, 8.3], [0.0, 0.1], [2.1, 1.6], [240, 240], [300_000_000, 300_000_000])
FULL: dict[str, Any] = {
    "spent": asdict(SPENT),
    "bytes_sent": 600_000_000,
    "divergence": 0.0123,
    "divergence_by_layer": {"conv1": 0.01, "dense1": 0.02},
    "advice": "averaging costs 16 % of the time: frequency 12 would cost 5 %",
}


def table(summary: Summary, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    result_table(summary, Run("outputs"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    return {line[:15].rstrip(): line[15:] for line in lines}


def test_what_workers_spent_and_sent(capsys):
    rows = table(replace(SUMMARY, **FULL), capsys)
    assert rows["replicas"] == "averaged after every epoch, 1.2 % apart, most in dense1"
    assert rows["spent"] == "averaging 16-21 %, data 0-1 %; sent 600 MB, 20 MB a round"
    assert rows["advice"] == FULL["advice"]
    before = table(SUMMARY, capsys)
    assert set(rows) - set(before) == {"spent", "advice"}


def test_what_is_too_long_for_a_row_gets_two(capsys):
    pulled = "pulled to a centre by 0.9 / workers every 10 iterations"
    rows = table(replace(SUMMARY, **FULL | {"synchronizer": pulled, "stages": 2, "epochs": 1}), capsys)
    assert (rows["replicas"], rows[""]) == (f"{pulled},", "at most 1.2 % apart, most in dense1")
    assert rows["training"].startswith("1 epoch in ")


def test_one_worker_alone_sends_nothing(capsys):
    alone = Spent([10.0], [9.0], [1.0], [0.0], [480], [0])
    rows = table(replace(SUMMARY, workers=1, spent=asdict(alone), advice="nothing stands out"), capsys)
    assert "spent" not in rows and rows["replicas"] == "-" and rows["advice"] == "nothing stands out"


def test_stages_are_workers_too(capsys):
    rows = table(replace(SUMMARY, workers=1, **FULL), capsys)
    assert rows["spent"].startswith("averaging 16-21 %")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"best_epoch": 4, "restored": True}, "4, validation loss 0.0312, restored"),
        ({"best_epoch": 12, "restored": False}, "12, validation loss 0.0312, not restored"),
        ({"best_epoch": None, "restored": False}, None),
    ],
)
def test_early_stopping_tells_the_best_epoch(found, said, capsys):
    stopping = {"monitor": "loss", "best_score": 0.03125, **found}
    early = replace(SUMMARY, stopped_by="patience: no better loss in 5 evaluations", early_stopping=stopping)
    rows = table(early, capsys)
    assert rows["stopped"] == "patience: no better loss in 5 evaluations" and rows.get("best epoch") == said


def test_the_widest_row_fits(capsys):
    widest = replace(SPENT, averaging_s=[1.0, 9.9], data_s=[1.0, 9.9])
    table(
        replace(SUMMARY, **FULL | {"spent": asdict(widest), "bytes_sent": 123_400_000_000, "iterations": 200}), capsys
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (6_900_000, "6.9 MB"), (999_600_000, "1 GB"), (2.5e13, "25 TB")],
)
def test_amounts(count, text):
    assert _amount(count) == text
