"""Compare runs: `cupynet compare outputs/sweeps/2026-11-22/09-30-00-000000`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cupynet.commands.arguments import Arguments
from cupynet.core.errors import ConfigError
from cupynet.core.exits import run_and_exit
from cupynet.core.files import write_output, write_whole
from cupynet.core.table import Column, Screen, as_csv, show
from cupynet.core.terminal import printable
from cupynet.reporting.comparison.answer import Answer, answer
from cupynet.reporting.comparison.groups import Comparison, Group, compared
from cupynet.reporting.comparison.page import compare_page
from cupynet.reporting.comparison.runs import find, is_run
from cupynet.reporting.comparison.table import FIGURES, FRONT, columns, in_order
from cupynet.runs.layout import check_outputs

EXAMPLES = """\
examples:
  cupynet compare outputs/latest        # the latest run or sweep
  cupynet compare outputs/latest outputs/2026-11-21/17-05-12-345678
  cupynet compare 'outputs/sweeps/*/*' --sort train_s --csv runs.csv
  cupynet compare outputs/latest --to 0.99

Runs that differ only in their seed, or in settings that had no effect, share a
row with their mean, minimum and maximum. * marks the Pareto front: no other run is
both more accurate and faster to train. Speed-up is images/s relative to one
worker with the same settings; efficiency is the speed-up per worker. Drift is how
far apart the replicas were before an averaging step.
"""


def main() -> None:
    parser = Arguments("cupynet compare", "Compare settings and results of runs, and recommend one.", EXAMPLES)
    parser.add_argument("folders", nargs="+", help="folders of runs or sweeps, their parent folders, or glob patterns")
    parser.add_argument("--sort", metavar="COLUMN", help="column to sort by; descending with a minus: --sort=-loss")
    parser.add_argument(
        "--to", type=float, metavar="ACCURACY", help="target accuracy for the column time_to, such as 0.99"
    )
    parser.add_argument("--csv", metavar="FILE", help="write all columns to a file")
    parser.add_argument("--html", metavar="FILE", help="write the HTML page to a file instead of the sweep's folder")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    run_and_exit(lambda: _compare(parser.parse_args()))


def _compare(arguments: argparse.Namespace) -> None:
    if arguments.to is not None and not 0 < arguments.to <= 1:
        raise ConfigError(f"--to {arguments.to:g}: must be an accuracy above 0 and at most 1, such as 0.99")
    check_outputs(arguments.csv, arguments.html)
    comparison = compared(find(arguments.folders), arguments.to)
    groups = in_order(comparison, arguments.sort)
    table, found = columns(comparison, groups), answer(comparison)
    if arguments.json:
        print(json.dumps(_record(comparison, groups, found), indent=2))
    else:
        _print(comparison, len(groups), table, found)
    if arguments.csv is not None:
        write_output(arguments.csv, as_csv(table))
    path = Path(arguments.html or f"{arguments.folders[0]}/compare.html")
    if arguments.html or (len(arguments.folders) == 1 and path.parent.is_dir() and not is_run(path.parent)):
        page = compare_page(comparison, groups, path.parent)
        (write_output if arguments.html else write_whole)(path, page)  # do not follow links in a sweep's folder
        if not arguments.json:
            print(f"\n{printable(str(path))}")


def _record(comparison: Comparison, groups: Sequence[Group], found: Answer) -> dict[str, Any]:
    rows = [
        {
            "settings": group.settings,
            "runs": [str(run.folder) for run in group.runs],
            "seeds": [run.summary["seed"] for run in group.runs],
            **{name: group.figures.get(name) for name, *_ in FIGURES},
            "front": group.front,
        }
        for group in groups
    ]
    return {
        "varied": comparison.varied,
        "split": comparison.split,
        "target": comparison.target,
        "groups": rows,
        "others": [{"run": str(run.folder), "state": run.trouble} for group in comparison.others for run in group.runs],
        "answer": found.text,
        "notes": found.notes,
    }


def _print(comparison: Comparison, finished: int, table: Sequence[Column], found: Answer) -> None:
    screen = Screen()
    shown = [
        replace(column, cells=column.cells[:finished]) for column in table if column.key not in ("state", "folder")
    ]
    if finished:
        show(shown, screen, "--csv writes all columns", needed=("accuracy",))
        screen.print(f"{FRONT} Pareto front: no other run is both more accurate and faster to train")
    for group in comparison.others:
        run = group.runs[0]
        own = f" ({group.name})" if group.settings else ""
        screen.print(f"{run.name}{own}: {run.trouble}")
    screen.print()
    for text in (found.text, *found.notes):
        screen.print(text, width=min(screen.width, 100))
