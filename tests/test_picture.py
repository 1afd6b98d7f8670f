"""The picture of a terminal: what stands there in the end, and nothing that a reader's browser would fetch."""

from __future__ import annotations

import re
import sys

import pytest

from tests.picture import PICTURE, drawn, shown, written


def test_carriage_returns_overwrite_lines_as_on_a_terminal() -> None:
    text = "one\r\n\x1b[?25lbar 10 %\r\x1b[2Kbar 20 %\n\r\x1b[1A\x1b[2Klog line\nbar 30 %\rbar 40 %\n\x1b[?25hend"
    assert shown(text) == ["one", "log line", "bar 40 %", "end"]


def test_colours_are_kept_and_no_font_is_fetched() -> None:
    svg = drawn(shown("\x1b[1mtest accuracy\x1b[0m  \x1b[32m99 %\x1b[0m"), "title")
    assert "font-weight: bold" in svg and "test&#160;accuracy" in svg
    assert set(re.findall(r"https?://[^\"' ]+", svg)) <= {"http://www.w3.org/2000/svg", "https://www.textualize.io"}


def test_a_command_has_a_terminal_and_one_that_fails_is_no_picture() -> None:
    asks = "import sys, shutil; print(sys.stdout.isatty(), shutil.get_terminal_size().columns)"
    assert written([sys.executable, "-c", asks]).split() == ["True", "104"]
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        written([sys.executable, "-c", "1 / 0"])


def test_the_picture_shows_a_successful_run() -> None:
    svg = PICTURE.read_text("utf-8").replace("&#160;", " ")
    assert "$ make train" in svg and "test accuracy" in svg and "run folder" in svg
    assert "Traceback" not in svg and "url(http" not in svg and "/root" not in svg and "/tmp" not in svg
