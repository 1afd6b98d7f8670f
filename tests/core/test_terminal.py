"""Capabilities of terminals."""

import io
import os
import sys
from pathlib import Path

import pytest

from cupynet.core.terminal import can_draw, near, printable
from tests.support.terminal import Screen


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_nothing_is_drawn_on_a_closed_stdout(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert not can_draw()


@pytest.mark.parametrize(("kind", "draws"), [("xterm", True), ("dumb", False), ("", False)])
def test_lines_are_redrawn_only_on_terminals_that_can(kind: str, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Screen())
    monkeypatch.setenv("TERM", kind)
    assert can_draw() == draws


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
    ids=["color", "title", "bidirectional", "C1", "surrogate", "text"],
)
def test_control_characters_are_replaced_in_printed_text(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_paths_inside_the_current_folder_are_shown_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [near(path) for path in (tmp_path / "a" / "b", Path("a"))] == [os.path.join("a", "b"), "a"]
    assert [near(path) for path in (tmp_path, tmp_path.parent)] == [str(tmp_path), str(tmp_path.parent)]
