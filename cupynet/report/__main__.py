"""Make the page of a run: `python -m cupynet.report RUN_FOLDER [--open]`.

It shows what there is, of a run that is over, that goes on or that was killed. While a run trains it is kept fresh by
the run itself (callbacks.report); this makes it anew, or for a run that had none.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from cupynet.exits import Arguments, leave_after, named_path, say_error, stdout_is_gone, steady_streams

EXAMPLES = """for example:
  python -m cupynet.report outputs/latest --open"""


def main() -> None:
    """The command."""
    steady_streams()
    parser = Arguments(
        "python -m cupynet.report",
        "Write report.html and curves.png into the folder of a run, finished, killed or going on.",
        EXAMPLES,
    )
    parser.add_argument("run_folder", type=named_path, help="a folder that cupynet.train has written")
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--follow", type=int, metavar="NICENESS", help=argparse.SUPPRESS)  # started so by training
    leave_after(lambda: _report(parser.parse_args()))


def _report(asked: argparse.Namespace) -> None:
    if asked.follow is None:
        _make(asked.run_folder, show=asked.open)
        return
    from cupynet.report.follow import follow

    follow(asked.run_folder, asked.follow)


def _make(folder: Path, *, show: bool) -> None:
    from cupynet.report.make import Maker

    maker = Maker(folder)
    seen = maker.make()
    if maker.missing:
        say_error(maker.missing)
    print(seen.run.report_path)
    stdout_is_gone()
    if show and not webbrowser.open(seen.run.report_path.resolve().as_uri()):
        say_error(f"no browser was found: open {seen.run.report_path}")


if __name__ == "__main__":
    main()
