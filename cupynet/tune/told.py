"""What people are shown of a search, and the files it leaves: a table, tune.csv, tune.json, experiment/best.yaml."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cupynet import config
from cupynet.checks import percent
from cupynet.config import Searched
from cupynet.files import write_json, write_whole
from cupynet.sweeps.table import Column, Screen, as_csv, heading, shortened, show
from cupynet.tune.search import folder_of
from cupynet.tune.tried import COMPLETE, INTERRUPTED, PRUNED, REPEATED, Tried

MOST_SHOWN = 10  # of the best
LONGEST = 60  # characters of a reason, in a line; tune.csv has all of it
BEST = "experiment/best.yaml"


def figure(value: float | None, objective: str) -> str:
    """What a trial came to: shares of images in percent."""
    if value is None:
        return "-"
    return percent(value) if objective == "accuracy" else f"{value:.4f}" if objective == "f1" else f"{value:.4g}"


def line(tried: Tried, count: str, objective: str, best: Tried | None, keys: Mapping[str, str]) -> str:
    """A trial that has ended, in a line. count: how many have, of how many; keys: setting -> a short name."""
    what = figure(tried.figure, objective)
    if tried.outcome == PRUNED:
        what = f"{what}, pruned {tried.reason}"
    elif tried.outcome == INTERRUPTED:
        what = INTERRUPTED
    elif tried.outcome not in (COMPLETE, REPEATED):
        reason = tried.reason if len(tried.reason) <= LONGEST else f"{tried.reason[: LONGEST - 3]}..."
        what = f"{tried.outcome}: {reason}"
    elif tried.outcome == REPEATED:
        what += f", {tried.reason}"
    elif best is not None and best.number == tried.number:
        what += ", the best so far"
    values = " ".join(f"{keys[key]}={value}" for key, value in tried.values.items())
    return f"trial {tried.number} ({count}): {values}: {what} ({tried.wall_s:.1f} s)"


def columns(rows: Sequence[Tried], space: Sequence[Searched], objective: str, *, short: bool) -> list[Column]:
    """A table of trials. short: for people, who need no seconds."""
    keys = shortened([each.name for each in space])
    made = [
        Column("trial", "trial", [str(each.number) for each in rows], [each.number for each in rows], weight=9),
        Column(objective, objective, [figure(each.figure, objective) for each in rows],
               ["" if each.figure is None else each.figure for each in rows], weight=8),
        Column("epochs", "epochs", [str(each.epochs) for each in rows], [each.epochs for each in rows]),
    ]  # fmt: skip
    for each in space:
        values = [row.values.get(each.key, "") for row in rows]
        made.append(Column(each.name, heading(keys[each.name]), [_shown(value) for value in values], values, weight=5))
    if not short:
        made += [
            Column(name, name, [], [getattr(row, name) for row in rows]) for name in ("outcome", "wall_s", "reason")
        ]
    return made


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Tried], space: Sequence[Searched], objective: str) -> None:
    """The best trials, on the terminal; what had no room beside the rest stands in tune.csv."""
    screen = Screen()
    left = show(columns(rows[:MOST_SHOWN], space, objective, short=True), {0: "bold"}, screen)
    if left:
        screen.print(f"(no room for {', '.join(column.key for column in left)}: see tune.csv)")


def write_csv(folder: Path, rows: Sequence[Tried], space: Sequence[Searched], objective: str) -> None:
    """All trials, in order, as tune.csv. OutputError."""
    write_whole(folder / "tune.csv", as_csv(columns(rows, space, objective, short=False)).encode())


def settings_of(tried: Tried, space: Sequence[Searched]) -> list[str]:
    """What a trial tries, as it is written on a command line."""
    return [each.override(tried.values[each.key]) for each in space]


def command(arguments: Sequence[str]) -> str:
    """The command line that makes a trial's run again."""
    return shlex.join(["python", "-m", "cupynet.train", *arguments])


def write_best(
    folder: Path, best: Tried, fixed: Sequence[str], space: Sequence[Searched], objective: str, test: Mapping[str, Any]
) -> None:
    """The best setting, for `--config-dir FOLDER experiment=best`, and what it came to. OutputError.

    fixed: what all trials share.
    """
    chosen = [*fixed, *settings_of(best, space)]
    plain = [each for each in chosen if not each.startswith("-")]
    told = f"{objective} {figure(best.figure, objective)} of the validation images: trial {best.number} of this search"
    (folder / BEST).parent.mkdir(exist_ok=True)
    write_whole(folder / BEST, config.as_file(plain, [told]).encode())
    content = {"objective": objective, "best": asdict(best) | {"folder": str(folder_of(folder, best.number))}}
    write_json(folder / "tune.json", content | {"settings": chosen, "test": dict(test)})
