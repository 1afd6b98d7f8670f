"""`cupynet report` as a user types it."""

from pathlib import Path

from cupynet.commands.report import main
from tests.support.commands import Call
from tests.support.run_folders import finished


def test_report_writes_the_page_and_prints_its_path(tmp_path: Path, call: Call) -> None:
    folder = finished(tmp_path)
    assert call(main, folder) == (0, f"{folder}/report.html\n", "")
    assert "<svg" in (folder / "report.html").read_text() and (folder / "curves.png").is_file()
