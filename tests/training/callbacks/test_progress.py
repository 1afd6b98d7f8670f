"""Progress: the lines, the bar, and a terminal that fails."""

from __future__ import annotations

import io
import logging
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupynet.training import Callback, EpochRecord, Evaluation, ParallelWrapper, Progress, Spent
from cupynet.training.callbacks.progress import describe
from tests.support.terminal import Screen
from tests.support.training import At, small_dataset, small_model


@pytest.fixture(autouse=True)
def a_terminal_that_can_move_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def fitted(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Run a fit and return its output on a terminal."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    data = small_dataset(60)
    with ParallelWrapper(small_model(), 1, report_every=4, **options) as wrapper:
        wrapper.fit(data, 2, batch_size=4, evaluate_on=data)
    return screen.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [(4988216032362.4961, "4.988e+12"), (0.0312345, "0.03123"), (0.0, "0")],
)
def test_a_line_describes_an_epoch(value, text):
    evaluation = Evaluation(2)
    evaluation.add(np.array([[1.0, 0.0]]), np.array([0]), np.array([value]))
    spent = Spent([1.0], [1.0], [0.0], [0.0], [0.0], [1], [0])
    record = EpochRecord(1, 1, 1, 1.0, "test", evaluation, spent, 0, value, [value], 0.01)
    line = describe(record, 2)
    assert line.startswith("epoch 1/2: ") and line.endswith(f"1 images/s, loss {text}, test 100.00 %, loss {text}")
    bare = replace(record, evaluation=None, loss=math.nan)
    assert describe(bare, 2) == "epoch 1/2: 1.0 s, 1 images/s"


@pytest.mark.parametrize(
    ("split", "epochs", "images"),
    [("test", 10, 60_000), ("validation", 100, 1_234_567), ("validation", 1000, 50_000_000)],
)
def test_the_line_of_an_epoch_fits_a_terminal_of_80_columns(split, epochs, images):
    evaluation = Evaluation(2)
    evaluation.add(np.array([[1.0, 0.0]]), np.array([0]), np.array([0.068812]))
    spent = Spent([1.0], [1.0], [0.0], [0.0], [0.0], [1], [0])
    record = EpochRecord(1, 1, images, 12.34, split, evaluation, spent, 0, 0.0234567, [0.02], 0.01)
    line = describe(record, epochs)
    assert len("[12:30:05] ") + len(line) <= 80 and "loss 0.02346" in line and "100.00 %, loss 0.06881" in line


@pytest.mark.parametrize("columns", [40, 80])
def test_the_figures_of_the_bar_have_their_units(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = Shown(Progress())
    written = fitted(monkeypatch, callbacks=[shown.progress, shown])
    for text, _ in shown.texts:
        assert text in written
        assert len(text.split("  ")) == min(columns // 20 - 1, 3) and text.endswith(" images/s") == (columns >= 80)


# the bar --------------------------------------------------------------------------------------------------------------


class Shown(Callback):
    """Records the bar after each event."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.at: list[tuple[str, Any, Any]] = []
        self.texts: list[tuple[str, EpochRecord]] = []

    def on_iteration_end(self, trainer):
        (task,) = self.progress._bar.tasks
        self.at.append((task.fields["epoch"], task.completed, task.total))

    def on_epoch_end(self, trainer, record):
        (task,) = self.progress._bar.tasks
        self.texts.append((task.description, record))


def test_the_bar_shows_the_share_of_each_epoch(monkeypatch):
    monkeypatch.setattr("cupynet.training.callbacks.progress.REFRESH_S", 0)
    progress = Progress()
    shown = Shown(progress)
    written = fitted(monkeypatch, callbacks=[progress, shown])
    assert shown.at == [(f"{epoch}/2", done, 15) for epoch in (1, 2) for done in range(1, 16)]
    final = written.rpartition("epoch 2/2")[2]
    assert "100 %" in final and "00:0" in final


def test_the_bar_ends_with_the_figures_of_the_epoch(monkeypatch):
    progress = Progress()
    shown = Shown(progress)
    fitted(monkeypatch, callbacks=[progress, shown])
    for text, record in shown.texts:
        assert text.startswith(f"loss {record.loss:.4g}  accuracy {100 * record.evaluation.accuracy:.2f} %")


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch):
    monkeypatch.setattr("cupynet.core.terminal.can_draw", lambda: False)
    written = fitted(monkeypatch)
    assert "100 %" not in written and "\x1b" not in written and len(written.splitlines()) == 2


@pytest.mark.parametrize("callbacks", [[], [Progress("none")]])
def test_progress_can_be_turned_off(callbacks, monkeypatch):
    assert fitted(monkeypatch, progress="auto" if callbacks else "none", callbacks=callbacks) == ""


@pytest.mark.parametrize("style", ["lines", "none"])
def test_lines_go_to_the_log_if_it_is_configured(style, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    written = fitted(monkeypatch, callbacks=[Progress(style)])
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts if text.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert written == ""


def test_a_failed_fit_restores_the_terminal(monkeypatch):
    def fail():
        raise InterruptedError

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    wrapper = ParallelWrapper(small_model(), 1, callbacks=[At(1, fail)])
    with pytest.raises(InterruptedError):
        wrapper.fit(small_dataset(20), 1, batch_size=4)
    assert sys.stdout is screen and screen.getvalue().endswith("\x1b[?25h")  # the cursor is visible again
    wrapper.close()


# a display that fails -------------------------------------------------------------------------------------------------


def trained(callback: Progress, epochs: int = 3) -> None:
    """Run a fit that calls every event of the callback."""
    data = small_dataset(40)
    with ParallelWrapper(small_model(), workers=1, callbacks=[callback], report_every=2) as wrapper:
        wrapper.fit(data, epochs, batch_size=8, evaluate_on=data)
        assert wrapper.trainer.epoch == epochs


FAILURES = [
    UnicodeEncodeError("latin-1", "…", 0, 1, "ordinal not in range(256)"),
    BrokenPipeError(32, "Broken pipe"),
    RuntimeError("a bug of the display"),
]


@pytest.mark.parametrize(
    ("error", "takes"), list(zip(FAILURES, (0, 2, 1), strict=True)), ids=lambda value: type(value).__name__
)
def test_a_bar_that_fails_is_given_up(error, takes, monkeypatch, caplog):
    screen = Screen(error, takes)
    monkeypatch.setattr(sys, "stdout", screen)
    caplog.set_level("INFO")
    callback = Progress("bar")
    trained(callback)
    assert sys.stdout is screen and callback.style == "lines"
    texts = [record.getMessage() for record in caplog.records]
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    assert [text.split(":")[0] for text in texts if text.startswith("epoch")] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]


def test_a_terminal_that_is_closed_during_training_is_given_up_once(monkeypatch, caplog):
    class Close(Callback):
        def on_epoch_end(self, trainer, record):
            screen.error, screen.takes = OSError(5, "Input/output error"), 0

    monkeypatch.setattr("cupynet.training.callbacks.progress.REFRESH_S", math.inf)  # drawn after epochs alone
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    caplog.set_level("INFO", "cupynet.training.callbacks.progress")
    with ParallelWrapper(small_model(), 1, callbacks=[Progress("bar"), Close()]) as wrapper:
        wrapper.fit(small_dataset(40), 4, batch_size=8)
    levels = [record.levelname for record in caplog.records if record.name.endswith("progress")]
    assert levels == ["INFO", "INFO", "WARNING", "INFO", "INFO"]


@pytest.mark.parametrize("closed", [False, True])
def test_without_a_terminal_there_are_lines(closed, monkeypatch):
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stdout", gone if closed else None)
    callback = Progress()
    trained(callback, 1)
    assert callback.style == "lines"
