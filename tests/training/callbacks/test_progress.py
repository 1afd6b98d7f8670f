"""Progress: the lines, the bar, and a terminal that fails."""

import io
import logging
import math
import sys
from contextlib import redirect_stdout
from typing import Any

import pytest

from cupynet.training import Callback, EpochRecord, Evaluation, ParallelWrapper, Progress, Spent, Trainer
from cupynet.training.callbacks import progress as module
from cupynet.training.callbacks.progress import describe
from tests.support.terminal import Screen
from tests.support.training import At, On, small_dataset, small_model

DATA = small_dataset(60)


@pytest.fixture(autouse=True)
def a_terminal_that_can_move_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def fit(stdout: io.StringIO | None, *callbacks: Callback, epochs: int = 2, **options: Any) -> None:
    """Run a fit that prints to `stdout`, and check that it restores `sys.stdout`."""
    wrapper = ParallelWrapper(small_model(), 1, log_every=4, callbacks=callbacks, **options)
    with redirect_stdout(stdout), wrapper:
        try:
            wrapper.fit(DATA, epochs=epochs, batch_size=4, evaluate_on=DATA)
            assert wrapper.trainer.epoch == epochs
        finally:
            assert sys.stdout is stdout


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the beginnings of the logged lines about epochs."""
    texts = [record.getMessage() for record in caplog.records]
    return [text.partition(":")[0] for text in texts if text.startswith("epoch")]


@pytest.mark.parametrize("columns", ["40", "80", "90", "104", "200"])
@pytest.mark.parametrize("epochs", [3, 1000])
@pytest.mark.parametrize("accuracy", [math.nan, 0.9876])
def test_the_line_of_an_epoch_fits_the_terminal_and_has_the_speed(
    columns: str, epochs: int, accuracy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    loss, evaluation = 0.0688123, Evaluation(2)
    evaluation.add([[1.0, 0.0]], [0], [loss])
    spent = Spent([1.0], [1.0], [0.0], [0.0], [0.0], [1], [0])
    record = EpochRecord(1, 1, 50_000_000, 12.34, "validation", evaluation, spent, 0, loss, accuracy=accuracy)
    line = describe(record, epochs)
    assert len("[12:30:05] ") + len(line) <= max(int(columns), 80)
    assert "4,051,864" in line and line.count("0.06881") == 2
    if columns in ("104", "200"):
        assert "12.3 s" in line and ("98.76 %" in line) == (accuracy == 0.9876)


def test_the_line_of_an_epoch_has_the_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with ParallelWrapper(small_model(), 1, metrics=["macro_f1"]) as wrapper:
        history = wrapper.fit(DATA, validation_data=DATA)
    assert f"macro_f1 {history['val_macro_f1'][0]:.4g}" in caplog.text


@pytest.mark.parametrize("style", ["lines", "none"])
@pytest.mark.parametrize("logged", [True, False])
def test_epoch_lines_go_to_the_log_or_the_terminal(style: str, logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO if logged else logging.WARNING)
    screen = Screen()
    fit(screen, Progress(style))
    assert lines(caplog) == ["epoch 1/2", "epoch 2/2"] * logged
    assert screen.getvalue().count("epoch") == (2 if style == "lines" and not logged else 0)


@pytest.mark.parametrize("closed", [False, True])
def test_progress_without_a_terminal_is_in_lines(closed: bool) -> None:
    gone = io.StringIO()
    gone.close()
    callback = Progress()
    fit(gone if closed else None, callback)
    assert callback.style == "lines"


def test_the_progress_bar_shows_the_fraction_of_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_S", 0)
    screen, progress = Screen(), Progress()
    shown: list[tuple[str, Any, Any]] = []

    def look(trainer: Trainer) -> None:
        (task,) = progress._bar.tasks  # type: ignore[union-attr]
        shown.append((task.fields["epoch"], task.completed, task.total))

    fit(screen, progress, On("on_iteration_end", look))
    assert shown == [(f"{epoch}/2", done, 15) for epoch in (1, 2) for done in range(1, 16)]
    assert "100 %" in screen.getvalue().rpartition("epoch 2/2")[2]


def test_a_failed_fit_shows_the_cursor_of_the_terminal_again() -> None:
    def fail() -> None:
        raise InterruptedError

    screen = Screen()
    with pytest.raises(InterruptedError):
        fit(screen, At(1, fail))
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


@pytest.mark.parametrize(
    ("error", "takes"),
    [(UnicodeEncodeError("latin-1", "…", 0, 1, ""), 0), (BrokenPipeError(32, ""), 2), (RuntimeError("a bug"), 1)],
    ids=["encoding", "pipe", "bug"],
)
def test_a_bar_that_fails_is_replaced_by_lines(error: Exception, takes: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    callback = Progress("bar")
    fit(Screen(error, takes), callback, epochs=3)
    assert callback.style == "lines"
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1
    assert lines(caplog) == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
