"""The table at the end of a run and the progress bar: a failing display never ends a run."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from cupynet.runs.run import Run, Summary
from cupynet.training import Callback, EpochRecord, Evaluation, ParallelWrapper, Progress, Spent
from cupynet.training.callbacks.progress import describe, figure, result_table
from tests.support.summaries import SUMMARY, changed
from tests.support.training import small_dataset, small_model

SPENT = Spent([10.0, 10.0], [7.9, 8.3], [0.0, 0.1], [2.1, 1.6], [0.0, 0.0], [240, 240], [300_000_000, 300_000_000])
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


def test_the_table_has_time_and_traffic_of_workers(capsys):
    rows = table(changed(**FULL), capsys)
    assert rows["replicas"] == "averaged after every epoch, last 1.2 % apart, most in dense1"
    assert rows["spent"] == "averaging 16-21 %, data 0-1 %; sent 600 MB, 20.0 MB a round"
    assert rows["advice"] == FULL["advice"]
    before = table(SUMMARY, capsys)
    assert set(rows) - set(before) == {"spent", "advice"}


def test_one_worker_alone_sends_nothing(capsys):
    alone = Spent([10.0], [9.0], [1.0], [0.0], [0.0], [480], [0])
    rows = table(changed(workers=1, spent=asdict(alone), advice="nothing stands out"), capsys)
    assert "spent" not in rows and rows["replicas"] == "-" and rows["advice"] == "nothing stands out"


def test_stages_are_workers_too(capsys):
    waiting = replace(SPENT, compute_s=[4.0, 3.0], waiting_s=[3.9, 5.3])
    rows = table(changed(workers=1, stages=2, **FULL | {"spent": asdict(waiting)}), capsys)
    assert rows["spent"] == "waiting 39-53 %, averaging 16-21 %, data 0-1 %; sent 600 MB,"
    assert rows["workers"] == "1 of 2 stages on cpu" and rows["replicas"] == "-"
    assert "stages" not in table(changed(workers=2, **FULL), capsys)["workers"]


@pytest.mark.parametrize(("epochs", "expected"), [(0, "7 iterations in"), (1, "1 epoch in"), (2, "2 epochs in")])
def test_epochs_are_counted_in_words(epochs, expected, capsys):
    assert table(changed(epochs=epochs, iterations=7), capsys)["training"].startswith(expected)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"best_epoch": 4, "restored": True}, "4, validation loss 0.03125, restored"),
        ({"best_epoch": 12, "restored": False}, "12, validation loss 0.03125, not restored"),
        ({"best_epoch": None, "restored": False}, None),
    ],
)
def test_the_table_has_the_best_epoch_of_early_stopping(found, expected, capsys):
    stopping = {"monitor": "loss", "best_score": 0.03125, **found}
    early = changed(stopped_by="patience: no better loss in 5 evaluations", early_stopping=stopping)
    rows = table(early, capsys)
    assert rows["stopped"] == "patience: no better loss in 5 evaluations" and rows.get("best epoch") == expected


def test_the_widest_row_fits(capsys):
    widest = replace(SPENT, averaging_s=[1.0, 9.9], data_s=[1.0, 9.9])
    widest = replace(widest, waiting_s=[1.0, 9.9])
    for stages in (1, 2):
        figures = {"spent": asdict(widest), "bytes_sent": 123_400_000_000, "iterations": 200, "stages": stages}
        table(changed(**FULL | figures), capsys)
    pool = {"device": "cuda:15", "held_bytes": 120_900_000_000, "used_bytes": 118_400_000_000}
    table(changed(memory=[pool | {"limit_bytes": 139_600_000_000}] * 16), capsys)


# A display that fails -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_terminal_that_can_move_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


class Screen(io.StringIO):
    """A terminal that accepts some writes, then raises."""

    encoding = "utf-8"

    def __init__(self, error: Exception | None = None, takes: int = 0) -> None:
        super().__init__()
        self.error, self.takes = error, takes

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.takes -= 1
        if self.error is not None and self.takes < 0:
            raise self.error
        return super().write(text)


def trained(callback: Progress, epochs: int = 3) -> None:
    """Run a fit that calls every event of the callback."""
    data = small_dataset(40)
    with ParallelWrapper(small_model(), workers=1, callbacks=[callback], report_every=2) as wrapper:
        wrapper.fit(data, epochs, batch_size=8, evaluate_on=data)
        assert wrapper.trainer.epoch == epochs


FAILURES = [
    UnicodeEncodeError("latin-1", "…", 0, 1, "ordinal not in range(256)"),
    OSError(5, "Input/output error"),
    BrokenPipeError(32, "Broken pipe"),
    ValueError("I/O operation on closed file"),
    RuntimeError("a bug of the display"),
]


@pytest.mark.parametrize(
    ("error", "takes"), list(zip(FAILURES, (0, 1, 2, 0, 1), strict=True)), ids=lambda value: type(value).__name__
)
def test_a_bar_that_fails_is_given_up(error, takes, monkeypatch, caplog):
    screen = Screen(error, takes)
    monkeypatch.setattr(sys, "stdout", screen)
    caplog.set_level("INFO")
    callback = Progress("bar")
    trained(callback)
    assert sys.stdout is screen and callback.style == "lines"
    texts = [record.getMessage() for record in caplog.records]
    given_up = f"the progress bar is given up ({type(error).__name__}: "
    assert sum(text.startswith(given_up) for text in texts) == 1
    assert [text.split(":")[0] for text in texts if text.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_a_bar_that_cannot_be_drawn_is_given_up(monkeypatch, caplog):
    """The drawing code fails, not the stream; also in the drawing thread."""

    def render(*_: Any) -> Any:
        raise ZeroDivisionError("no width")

    monkeypatch.setattr("cupynet.training.callbacks.progress.Figures.render", render)
    monkeypatch.setattr(sys, "stdout", Screen())
    trained(Progress("bar"))
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text == "the progress bar is given up (ZeroDivisionError: no width)"


def test_a_bar_that_works_is_not_given_up(monkeypatch, caplog):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    trained(Progress())
    assert "100 %" in screen.getvalue() and caplog.records == []


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_terminal_there_are_lines(closed, monkeypatch):
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone if closed else None)
    callback = Progress()
    trained(callback, 1)
    assert callback.style == "lines"


def test_a_table_that_cannot_be_printed_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", Screen(OSError(28, "No space left on device"), takes=3))
    result_table(SUMMARY, Run("outputs"))
    (record,) = caplog.records
    expected = "the results cannot be shown ([Errno 28] No space left on device): they are in outputs/summary.json"
    assert record.getMessage() == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [(4988216032362.4961, "4.988e+12"), (0.0312345, "0.03123"), (2.302585, "2.303"), (1e-9, "1e-09"), (0.0, "0")],
)
def test_a_loss_has_four_digits(value, text, capsys):
    assert figure(value) == text
    assert table(changed(test_accuracy=0.5, test_loss=value), capsys)["test loss"] == text
    evaluation = Evaluation(2)
    evaluation.add(np.array([[1.0, 0.0]]), np.array([0]), np.array([value]))
    spent = Spent([1.0], [1.0], [0.0], [0.0], [0.0], [1], [0])
    record = EpochRecord(1, 1, 1, 1.0, "test", evaluation, spent, 0, value, [value], 0.01)
    line = f"epoch 1/2: 1 image in 1.0 s (1/s), training loss {text}, learning rate 0.01"
    assert describe(record, 2) == f"{line}, test accuracy 100.00 %, loss {text}"
    bare = replace(record, evaluation=None, loss=math.nan)
    assert describe(bare, 2) == "epoch 1/2: 1 image in 1.0 s (1/s), learning rate 0.01"


def test_the_bar_shows_the_share_of_the_epoch(monkeypatch):
    shares = []

    class Looks(Callback):
        last = True

        def on_iteration_end(self, trainer):
            (task,) = callback._bar.tasks
            shares.append((task.fields["epoch"], task.completed, task.total))

    callback = Progress("bar")
    monkeypatch.setattr(sys, "stdout", Screen())
    data = small_dataset(40)
    with ParallelWrapper(small_model(), workers=1, callbacks=[callback, Looks()]) as wrapper:
        wrapper.fit(data, 2, batch_size=8)
    assert {total for *_, total in shares} == {5}
    assert [(epoch, done) for epoch, done, _ in shares if done] == [(1, 5), (2, 5)]


def test_a_name_of_data_cannot_control_the_terminal(capsys):
    result_table(changed(dataset="a\x1b[2J\u202eb"), Run("outputs/a\x1b[2J"))
    text = capsys.readouterr().out
    assert text.count("\ufffd") == 3 and not {"\x1b", "\u202e"} & set(text)
