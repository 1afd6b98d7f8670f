"""`cupynet report` as a user types it. tests/reporting tests the page."""

import webbrowser
from pathlib import Path
from unittest.mock import Mock

import pytest

from cupynet.commands.report import main
from tests.support.commands import Call
from tests.support.run_folders import history, unfinished


def test_report_writes_the_page_of_a_killed_run_and_opens_it_on_request(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", opened := Mock())
    page = unfinished(tmp_path, rows=history(2)) / "report.html"
    found = call(main, page.parent)
    assert (found.code, found.out) == (0, f"{page}\n") and page.is_file() and not opened.called
    assert call(main, page.parent, "--open").code == 0
    opened.assert_called_once_with(page.as_uri())
