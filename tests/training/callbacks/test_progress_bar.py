"""The progress bar of a fit, and the lines it leaves."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any

import pytest

from cupynet.core.errors import ConfigError
from cupynet.training import Callback, ParallelWrapper, Progress
from cupynet.training.callbacks.progress import figure
from tests.support.training import small_dataset, small_model


class Shown(Callback):
    """Records the fields of the bar after each iteration."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.rows = progress, list[dict[str, Any]]()

    def on_iteration_end(self, trainer):
        self._note(trainer)

    def on_epoch_end(self, trainer, record):
        self._note(trainer, record)

    def _note(self, trainer, record=None):
        assert self.progress._bar is not None
        (task,) = self.progress._bar.tasks
        self.rows.append({"iteration": trainer.iteration, "at": task.completed, "record": record, **task.fields})


def fitted(monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Run a fit and return its output on a terminal."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    data = small_dataset(60)
    with ParallelWrapper(small_model(), 1, report_every=4, **options) as wrapper:
        wrapper.fit(data, 2, batch_size=4, evaluate_on=data)
    return screen.getvalue()


def test_the_bar_ends_with_the_loss_of_the_epoch(monkeypatch):
    progress = Progress()
    shown = Shown(progress)
    written = fitted(monkeypatch, callbacks=[progress, shown])
    by_iteration = {row["iteration"]: row for row in shown.rows if row["record"] is None}
    assert by_iteration[29]["loss"] is not None and by_iteration[30]["loss"] is None  # reported at 28
    first, last = (row for row in shown.rows if row["record"] is not None)
    assert (first["epoch"], first["epochs"], first["at"]) == (2, 2, 0) and first["loss"] == first["record"].loss
    assert (last["epoch"], last["at"], last["loss"]) == (2, 15, last["record"].loss)
    assert last["accuracy"] == last["record"].evaluation.accuracy
    final = written.rpartition("epoch 2/2")[2]
    assert "100 %" in final and f"loss {figure(last['record'].loss)}" in final and "00:0" in final


def test_a_fit_in_python_draws_a_bar_and_leaves_a_line_per_epoch(monkeypatch):
    written = fitted(monkeypatch)
    assert "100 %" in written
    for epoch in (1, 2):
        assert written.count(f"epoch {epoch}/2: 60 images in") == 1


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch):
    monkeypatch.setattr("cupynet.core.terminal.can_draw", lambda: False)
    written = fitted(monkeypatch)
    assert "100 %" not in written and "\x1b" not in written and len(written.splitlines()) == 2


@pytest.mark.parametrize("callbacks", [[], [Progress("none")]])
def test_progress_can_be_turned_off(callbacks, monkeypatch):
    assert fitted(monkeypatch, progress="auto" if callbacks else "none", callbacks=callbacks) == ""


def test_lines_go_to_the_log_if_it_is_configured(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    written = fitted(monkeypatch, progress="lines")
    texts = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in texts if text.startswith("epoch")] == ["epoch 1/2", "epoch 2/2"]
    assert written == ""


def test_a_style_none_leaves_the_lines_in_the_log(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    assert fitted(monkeypatch, callbacks=[Progress("none")]) == ""
    assert sum(record.getMessage().startswith("epoch ") for record in caplog.records) == 2


def test_a_failed_fit_restores_the_terminal(monkeypatch):
    class Fails(Callback):
        def on_iteration_end(self, trainer):
            raise RuntimeError("no more")

    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    screen.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", screen)
    wrapper = ParallelWrapper(small_model(), 1, callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="no more"):
        wrapper.fit(small_dataset(20), 1, batch_size=4)
    assert sys.stdout is screen and screen.getvalue().endswith("\x1b[?25h")  # the cursor is seen again
    wrapper.close()


def test_a_progress_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="progress=loud: must be one of auto, bar, lines, none"):
        ParallelWrapper(small_model(), 1, progress="loud")
