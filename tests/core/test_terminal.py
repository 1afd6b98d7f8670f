"""Capabilities of terminals."""

import io
import sys

import pytest

from cupynet.core.terminal import can_draw, folded, printable
from tests.support.terminal import Screen


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_a_closed_stream_is_not_a_terminal(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert not can_draw()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("\x1b]0;title\x07", "\ufffd]0;title\ufffd"),
        ("a\u202eb\u2066c\u061cd", "a\ufffdb\ufffdc\ufffdd"),
        ("\x9b5n\r\x00\x7f", "\ufffd5n\ufffd\ufffd\ufffd"),
        ("half \ud83d", "half \ufffd"),
        ("two\n\tlines, naïve 層 שלום 😀", "two\n lines, naïve 層 שלום 😀"),
    ],
    ids=["colour", "title", "bidirectional", "C1", "surrogate", "text"],
)
def test_text_from_files_cannot_control_a_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


FIRST = "[12:30:05] epoch 2/10: 60,000 images in 4.5 s (13,300/s),"
REST = "training loss 0.05, learning rate 0.01"


@pytest.mark.parametrize(
    ("stream", "kind", "columns", "lines"),
    [
        (Screen(), "xterm", 60, [FIRST, f"           {REST}"]),
        (Screen(), "xterm", 120, [f"{FIRST} {REST}"]),
        (Screen(), "xterm", 20, [f"{FIRST} {REST}"]),  # too narrow
        (Screen(), "dumb", 60, [f"{FIRST} {REST}"]),
        (io.StringIO(), "xterm", 60, [f"{FIRST} {REST}"]),
    ],
    ids=["narrow", "wide", "too narrow", "dumb", "no terminal"],
)
def test_log_lines_are_wrapped_on_a_narrow_terminal(
    stream: io.StringIO, kind: str, columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr(sys, "stdout", stream)
    assert folded(f"{FIRST} {REST}").splitlines() == lines
    assert folded(f"{FIRST} {REST}\n  below") == f"{FIRST} {REST}\n  below"
    path = f"outputs/{'x' * 200}-y"  # users copy it
    assert path in folded(f"[12:30:05] saved in {path}")
