"""Compare runs: `python -m cupynet.compare outputs/sweeps/2026-11-22/09-30-00-000000`.

A table of what differs and what came of it, which of them to use, and a page that shows it: compare.html.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from cupynet.compare.answer import answer
from cupynet.compare.columns import chosen, columns, in_order, records
from cupynet.compare.found import find, is_run
from cupynet.compare.groups import Comparison, Group, compared
from cupynet.errors import ConfigError, OutputError
from cupynet.exits import Arguments, leave_after, named, say_error, steady_streams
from cupynet.files import write_whole
from cupynet.sweeps.table import Column, Screen, as_csv, as_markdown, show
from cupynet.terminal import wrapped

PAGE = "compare.html"
HIDDEN = ("state", "folder", "accuracy_low", "accuracy_high")  # on a terminal, unless they are asked for
EXAMPLES = """\
examples:
  python -m cupynet.compare outputs/latest        (after a sweep, that sweep)
  python -m cupynet.compare outputs/latest outputs/2026-11-21/17-05-12-345678
  python -m cupynet.compare 'outputs/sweeps/*/*' --sort train_s --csv runs.csv
  python -m cupynet.compare outputs/latest --to 0.99 --columns workers,time_to

Runs that differ in nothing but their seed are one row: the mean, the lowest and
the highest. * marks runs that no other beats in both accuracy and training time.
Speed-up is images/s over those of one worker with the same settings.
"""


def main() -> None:
    """The command."""
    steady_streams()
    leave_after(lambda: _compare(_parser().parse_args()))


def _parser() -> Arguments:
    about = "Compare runs: which settings differ, what came of them, and which to use."
    parser = Arguments("python -m cupynet.compare", about, EXAMPLES)
    parser.add_argument(
        "folders", nargs="+", type=named, help="of runs, of sweeps, or with such in them; patterns are looked up"
    )
    parser.add_argument(
        "--sort", metavar="COLUMN", help="order of the rows, -COLUMN for the largest first: --sort=-loss"
    )
    parser.add_argument("--columns", metavar="A,B,...", help="which columns, in this order")
    parser.add_argument("--to", type=float, metavar="ACCURACY", help="the accuracy that time_to is about, such as 0.99")
    parser.add_argument("--csv", type=named, metavar="FILE", help="write the table to a file, with all columns")
    parser.add_argument(
        "--html", type=named, metavar="FILE", help=f"write the page there; in a sweep's folder it is {PAGE}"
    )
    parser.add_argument("--no-html", action="store_true", help="write no page")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    form.add_argument("--json", action="store_true", help="print all that is known as JSON")
    return parser


def _compare(arguments: argparse.Namespace) -> None:
    if arguments.to is not None and not 0 < arguments.to <= 1:
        raise ConfigError(f"--to {arguments.to:g}: must be an accuracy above 0 and at most 1, such as 0.99")
    comparison = compared(find(arguments.folders), arguments.to)
    groups = in_order(comparison, arguments.sort)
    table = columns(comparison, groups)
    asked = (
        None if arguments.columns is None else chosen(table, [name for name in arguments.columns.split(",") if name])
    )
    page = _write_page(arguments, comparison, groups)  # before anything else: it may be refused
    if arguments.csv is not None:
        write_whole(arguments.csv, as_csv([column for column in table if column.key != "accuracy_range"]).encode())
    text, notes = answer(comparison)
    if arguments.json:
        others = [{"run": str(run.folder), "state": run.trouble} for run in comparison.others]
        found = {"varied": comparison.varied, "split": comparison.split, "target": comparison.target}
        print(
            json.dumps(
                {**found, "groups": records(comparison, groups), "others": others, "answer": text, "notes": notes},
                indent=2,
            )
        )
    elif arguments.markdown:
        print(as_markdown(asked or [column for column in table if column.key != "folder"]), text, *notes, sep="\n")
    else:
        _print(comparison, groups, table, asked, [text, *notes])
    if page is not None and not (arguments.json or arguments.markdown):
        print(f"\n{page}")


def _print(
    comparison: Comparison,
    groups: Sequence[Group],
    table: Sequence[Column],
    asked: list[Column] | None,
    said: list[str],
) -> None:
    """The table, what has no result, and the answer, for a terminal."""
    screen = Screen()
    count = len(groups)
    if asked is None:
        asked = [_first(column, count) for column in table if column.key not in HIDDEN]
    left = (
        show(asked, {place: "bold" for place, group in enumerate(groups) if group.front}, screen)
        if asked[0].cells
        else []
    )
    for run in comparison.others:
        own = " ".join(f"{key}={value}" for key, value in comparison.shown[str(run.folder)].items())
        screen.print("\n".join(wrapped(f"{run.name}{f' ({own})' if own else ''}: {run.trouble}", screen.width, "  ")))
    if left:
        names = ", ".join(column.key for column in left)
        screen.print("\n".join(wrapped(f"no room for {names}: --columns chooses, --csv has all", screen.width)))
    screen.print()
    for text in said:
        screen.print("\n".join(wrapped(text, min(screen.width, 100), "  " if text is not said[0] else "")))


def _first(column: Column, count: int) -> Column:
    """The rows of the groups alone."""
    return Column(column.key, column.title, column.cells[:count], column.values[:count], column.right, column.weight)


def _write_page(arguments: argparse.Namespace, comparison: Comparison, groups: Sequence[Group]) -> Path | None:
    """The page where it was asked for; else in the folder of a sweep that was named alone, if that can be written."""
    from cupynet.compare.page import whole

    if arguments.html is not None:
        path = Path(arguments.html)
    else:
        path = Path(arguments.folders[0]) / PAGE
        if arguments.no_html or len(arguments.folders) > 1 or not path.parent.is_dir() or is_run(path.parent):
            return None
    try:
        write_whole(path, whole(comparison, groups, path.parent).encode())
    except OutputError as error:
        if arguments.html is not None:
            raise
        say_error(f"warning: {error}")
        return None
    return path


if __name__ == "__main__":
    main()
