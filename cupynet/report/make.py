"""Writes the page of a run, and its curves as a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cupynet.files import write_whole
from cupynet.report import charts, curves, run
from cupynet.report.folder import Seen, look
from cupynet.report.page import Markup

PICTURED = 2  # of the charts are in curves.png: loss and accuracy


class Maker:
    """Makes the page of the run in one folder, again and again.

    Args:
        folder: of the run.

    Attributes:
        missing: why the page has no charts; "" where it can have them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.missing = ""
        self._drawn: list[tuple[charts.Chart, Markup]] = []

    def make(
        self, *, over: bool = False, draw: bool = True, picture: bool = True, ready: Callable[[], object] | None = None
    ) -> Seen:
        """Write report.html, whole or not at all.

        Args:
            over: the run is known to be over.
            draw: draw the charts anew; else they are those of the last time.
            picture: write curves.png too, where there is anything in it.
            ready: called when all is drawn and nothing is written yet.

        Raises:
            ConfigError: this is not the folder of a run.
            OutputError: it cannot be written.
        """
        seen = look(self.folder, over=over)
        shown = curves.of(seen) if draw else []
        if shown and not charts.available():
            self.missing, shown = charts.MISSING, []
        if draw:
            self._drawn = [(chart, charts.svg(chart, f"chart{index}")) for index, chart in enumerate(shown)]
        page = run.page(seen, self._drawn, self.missing).encode()
        png = charts.png(shown[:PICTURED]) if picture and shown else None
        if ready is not None:
            ready()
        write_whole(seen.run.report_path, page)
        if png is not None:
            write_whole(seen.run.curves_path, png)
        return seen
