"""The line that is drawn while a run trains: as much of it as the terminal is wide, what matters most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from rich import progress
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cupynet.core.checks import amount, percent

LEAST, MOST = 8, 40  # cells of the bar
GAP = 2  # between two parts of the line
GIVEN_UP = ("memory", "workers", "rate", "accuracy", "bar", "loss", "left", "share")  # the first of them first


def figure(value: float) -> str:
    """A loss in four digits, however large or small it is."""
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Minutes and seconds, and hours if there are any: 1:05, 2:00:30."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(frozen=True)
class State:
    """How far training is; what is None is not known, or not of interest, and not shown.

    Attributes:
        epoch, epochs: the epoch that is going on, from 1, and the last.
        share: of all rounds, 0..1.
        loss: the training loss; accuracy: 0..1, of the images of `split`.
        images_per_s: of all workers. left_s: seconds until the end, about; after it those that all took.
        memory: bytes that the pool of the first device holds.
    """

    epoch: int = 1
    epochs: int = 1
    share: float = 0.0
    loss: float | None = None
    split: str = "test"
    accuracy: float | None = None
    images_per_s: float | None = None
    left_s: float | None = None
    workers: int = 1
    memory: int | None = None

    def parts(self, *, long: bool) -> dict[str, str]:
        """What there is to show, in the order it is shown in; the bar itself without a text."""
        found = {
            "epoch": f"epoch {self.epoch}/{self.epochs}",
            "bar": "",
            "share": f"{int(100 * self.share + 1e-9):>3} %",
        }
        if self.loss is not None:
            found["loss"] = f"{'training ' * long}loss {figure(self.loss):<6}"
        if self.accuracy is not None:
            found["accuracy"] = f"{f'{self.split} ' * long}accuracy {percent(self.accuracy)}"
        if self.images_per_s is not None:
            found["rate"] = f"{self.images_per_s:,.0f}{' images' * long}/s"
        if self.left_s is not None:
            time = duration(self.left_s)
            found["left"] = f"in {time}" if self.share >= 1 else f"{time} left"
        if self.workers > 1:
            found["workers"] = f"{self.workers} workers"
        if self.memory is not None:
            found["memory"] = f"GPU {amount(self.memory)}"
        return found


def arranged(state: State, width: int) -> tuple[list[str], int]:
    """What fits into `width` columns: the texts, and how many cells the bar has after the first of them; 0 for none.

    Long names if all fit with them, else short ones, and then one part after the other is given up.
    """
    given_up = 0
    parts = state.parts(long=True)
    while True:
        least = sum(LEAST if name == "bar" else len(text) for name, text in parts.items()) + GAP * (len(parts) - 1)
        if least <= width or given_up == len(GIVEN_UP):
            break
        if parts == (short := {name: state.parts(long=False)[name] for name in parts}):
            parts.pop(GIVEN_UP[given_up], None)
            given_up += 1
        parts = {name: short[name] for name in parts}
    cells = min(MOST, LEAST + width - least) if "bar" in parts else 0
    return [text for name, text in parts.items() if name != "bar"], cells


class Line:
    """A state, drawn as wide as there is room."""

    def __init__(self, state: State) -> None:
        self.state = state

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts, cells = arranged(self.state, options.max_width)
        row: list[RenderableType] = [Text(text, no_wrap=True, overflow="crop") for text in texts]
        row[0] = Text(texts[0], style="bold", no_wrap=True, overflow="crop")
        if cells:
            row.insert(1, ProgressBar(total=1.0, completed=self.state.share, width=cells))
        grid = Table.grid(padding=(0, GAP, 0, 0), pad_edge=False)
        grid.add_row(*row)
        yield grid


class Bar(progress.Progress):
    """The line, drawn four times a second by a thread of its own.

    Args:
        console: where it is drawn.
        total, completed: rounds of the fit, and those behind it.
        fields: of `State`, what is known from the beginning.
    """

    def __init__(self, console: Console, total: int, completed: int, **known: Any) -> None:
        super().__init__(console=console, refresh_per_second=4)
        self._task = self.add_task("", total=total, completed=completed, **known)

    def show(self, completed: int | None = None, **known: Any) -> None:
        """What is known now."""
        self.update(self._task, completed=completed, **known)

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            share = task.completed / task.total if task.total else 1.0
            left = task.elapsed if task.finished else task.time_remaining
            names = {each.name for each in fields(State)}
            known = {name: value for name, value in task.fields.items() if name in names}
            yield Line(State(share=share, left_s=left, **known))
