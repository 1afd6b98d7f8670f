"""Compare runs: `cupynet compare outputs/sweeps/2026-11-22/09-30-00-000000`.

Prints a table of the settings that differ and the results, recommends one run, and writes compare.html.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cupynet.config.sweep_table import Column, Screen, as_csv, as_markdown, show
from cupynet.core.errors import ConfigError, OutputError
from cupynet.core.exits import Arguments, leave_after, named, say_error
from cupynet.core.files import write_whole
from cupynet.core.terminal import printable, wrapped
from cupynet.reporting.comparison.answer import answer
from cupynet.reporting.comparison.groups import Comparison, Group, compared
from cupynet.reporting.comparison.runs import find, is_run
from cupynet.reporting.comparison.table import FRONT, chosen, columns, in_order, records

PAGE = "compare.html"
HIDDEN = ("state", "folder", "accuracy_low", "accuracy_high")  # columns that a terminal shows only if selected
EXAMPLES = """\
examples:
  cupynet compare outputs/latest        (after a sweep, that sweep)
  cupynet compare outputs/latest outputs/2026-11-21/17-05-12-345678
  cupynet compare 'outputs/sweeps/*/*' --sort train_s --csv runs.csv
  cupynet compare outputs/latest --to 0.99 --columns workers,time_to

Runs that differ only in their seed are one row: the mean, the lowest and the
highest. * marks the Pareto front: no other run is both more accurate and faster
to train. Speed-up is images/s relative to one worker with the same settings,
efficiency is the speed-up per worker.
"""


def main() -> None:
    """Run the command."""
    leave_after(lambda: _compare(_parser().parse_args()))


def _parser() -> Arguments:
    about = "Compare runs: which settings differ, their results, and which to use."
    parser = Arguments("cupynet compare", about, EXAMPLES)
    parser.add_argument(
        "folders", nargs="+", type=named, help="folders of runs or sweeps, folders above them, or patterns"
    )
    parser.add_argument("--sort", metavar="COLUMN", help="sort the rows; -COLUMN puts the largest first: --sort=-loss")
    parser.add_argument("--columns", metavar="A,B,...", help="the columns to show, in this order")
    parser.add_argument("--to", type=float, metavar="ACCURACY", help="the target of time_to, such as 0.99")
    parser.add_argument("--csv", type=named, metavar="FILE", help="write all columns to a file")
    parser.add_argument(
        "--html", type=named, metavar="FILE", help=f"write the page to a file; by default {PAGE} in a sweep's folder"
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


def _compare(arguments: argparse.Namespace) -> None:
    if arguments.to is not None and not 0 < arguments.to <= 1:
        raise ConfigError(f"--to {arguments.to:g}: must be an accuracy above 0 and at most 1, such as 0.99")
    comparison = compared(find(arguments.folders), arguments.to)
    groups = in_order(comparison, arguments.sort)
    table = columns(comparison, groups)
    selected = None
    if arguments.columns is not None:
        selected = chosen(table, [name for name in arguments.columns.split(",") if name])
    page = _write_page(arguments, comparison, groups)  # first: it may be refused
    if arguments.csv is not None:
        write_whole(arguments.csv, as_csv([column for column in table if column.key != "accuracy_range"]).encode())
    text, notes = answer(comparison)
    if arguments.json:
        found = {
            "varied": comparison.varied,
            "split": comparison.split,
            "target": comparison.target,
            "groups": records(comparison, groups),
            "others": [{"run": str(run.folder), "state": run.trouble} for run in comparison.others],
            "answer": text,
            "notes": notes,
        }
        print(json.dumps(found, indent=2))
    elif arguments.markdown:
        shown = selected or [column for column in table if column.key != "folder"]
        print(printable("\n".join([as_markdown(shown), text, *notes])))
    else:
        if selected is None:
            rows = slice(len(groups))  # the runs without a result follow; they are printed below the table
            selected = [
                replace(column, cells=column.cells[rows], values=column.values[rows])
                for column in table
                if column.key not in HIDDEN
            ]
        _print(comparison, groups, selected, [text, *notes])
        if page is not None:
            print(f"\n{printable(str(page))}")


def _print(comparison: Comparison, groups: Sequence[Group], table: Sequence[Column], answers: Sequence[str]) -> None:
    """Print the table, the runs without a result, and the answer on the terminal."""
    screen = Screen()

    def say(text: str, indent: str = "", width: int = screen.width) -> None:
        screen.print("\n".join(wrapped(text, width, indent)))

    left: list[Column] = []
    if table[0].cells:
        left = show(table, {place: "bold" for place, group in enumerate(groups) if group.front}, screen)
    if any(column.key == "front" and FRONT in column.cells for column in table if column not in left):
        say(f"{FRONT} Pareto front: no other run is both more accurate and faster to train", "  ")
    for run in comparison.others:
        own = " ".join(f"{key}={value}" for key, value in comparison.shown[str(run.folder)].items())
        say(f"{run.name}{f' ({own})' if own else ''}: {run.trouble}", "  ")
    if left:
        say(f"no room for {', '.join(column.key for column in left)}: --columns selects columns, --csv has all")
    screen.print()
    for text in answers:
        say(text, "  " if text is not answers[0] else "", min(screen.width, 100))


def _write_page(arguments: argparse.Namespace, comparison: Comparison, groups: Sequence[Group]) -> Path | None:
    """Write the page to the named file, or into the folder of a single sweep if that is writable. Return its path."""
    from cupynet.reporting.comparison.page import compare_page

    if arguments.html is not None:
        path = Path(arguments.html)
    else:
        path = Path(arguments.folders[0]) / PAGE
        if arguments.no_html or len(arguments.folders) > 1 or not path.parent.is_dir() or is_run(path.parent):
            return None
    try:
        write_whole(path, compare_page(comparison, groups, path.parent))
    except OutputError as error:
        if arguments.html is not None:
            raise
        say_error(f"warning: {error}")
        return None
    return path
