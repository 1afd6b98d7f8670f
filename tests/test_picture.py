"""The terminal picture in the README."""

from tests.picture import PICTURE, shown


def test_carriage_returns_overwrite_lines_as_on_a_terminal() -> None:
    text = "one\r\n\x1b[?25lbar 10 %\r\x1b[2Kbar 20 %\n\r\x1b[1A\x1b[2Klog line\nbar 30 %\rbar 40 %\n\x1b[?25hend"
    assert shown(text) == ["one", "log line", "bar 40 %", "end"]


def test_the_terminal_picture_of_the_readme_shows_a_successful_run() -> None:
    svg = PICTURE.read_text("utf-8").replace("&#160;", " ")
    assert "$ make train" in svg and "test accuracy" in svg and "run folder" in svg
    assert not any(text in svg for text in ("Traceback", "url(http", "/root", "/tmp"))
