"""Write the report of a run: `cupynet report RUN_FOLDER [--open]`."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from cupynet.commands.arguments import Arguments
from cupynet.core.exits import run_and_exit
from cupynet.core.terminal import printable, say_error, stdout_is_gone

EXAMPLES = """example:
  cupynet report outputs/latest --open"""


def main() -> None:
    parser = Arguments(
        "cupynet report",
        "Write report.html and curves.png to the folder of a finished, killed or running run.",
        EXAMPLES,
    )
    parser.add_argument("run_folder", type=Path, help="the folder of a run")
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    run_and_exit(lambda: _report(parser.parse_args()))


def _report(arguments: argparse.Namespace) -> None:
    from cupynet.reporting.page import write_page

    path, missing = write_page(arguments.run_folder)
    if missing:
        say_error(missing)
    print(printable(str(path)))
    stdout_is_gone()
    if arguments.open and not webbrowser.open(path.resolve().as_uri()):
        say_error(f"no browser was found. Open {path} manually")
