"""Draws what a command shows on a terminal as it ends, colours included: `make picture`, which does it of training.

The command runs on a pseudo-terminal of its own; what it writes there is followed as far as rich goes: lines that are
erased and written again, a cursor that moves up. What stands there in the end becomes an SVG, without the date, the
place and the host. It is drawn anew where what a run shows has changed.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / ".github" / "pictures" / "terminal.svg"
COLUMNS, ROWS = 104, 50
TOKENS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def written(command: Sequence[str]) -> str:
    """What a command writes to a terminal; SystemExit where it fails."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(COLUMNS=str(COLUMNS), LINES=str(ROWS), TERM="xterm-256color", LC_ALL="C.UTF-8")
        os.environ.pop("NO_COLOR", None)
        os.execv(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    found = io.BytesIO()
    while True:
        try:
            some = os.read(terminal, 1 << 16)
        except OSError:  # the last process that had it open is gone
            break
        if not some:
            break
        found.write(some)
    text = found.getvalue().decode(errors="replace")
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit(text)
    return text


def shown(text: str) -> list[str]:
    """The lines that stand there in the end, with their colours."""
    lines, row, over = [""], 0, False
    for numbers, action, carriage, feed, plain in TOKENS.findall(text):
        if feed:
            row, over = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif carriage:
            over = True  # what comes next stands in the place of the line
        elif action == "A":
            row = max(row - int(numbers or 1), 0)
        elif action == "K":
            lines[row], over = "", False
        elif plain or action == "m":
            if over and plain:
                lines[row], over = "", False
            lines[row] += plain or f"\x1b[{numbers}m"
    return lines


def drawn(lines: Sequence[str], title: str) -> str:
    """An SVG of these lines."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    svg = console.export_svg(title=title, unique_id="cupynet")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # a picture asks nobody for a font


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.picture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", help="of cupynet.commands.train")
    settings = parser.parse_args().settings
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cupynet", "train", *settings, f"hydra.run.dir={folder}/run"]
        text = written(command).replace(f"{folder}/run", "outputs/2026-11-22/12-00-00-000000")
    lines = shown(text)
    while lines and not lines[-1]:
        lines.pop()
    prompt = " ".join(["make train", *([f'ARGS="{" ".join(settings)}"'] if settings else [])])
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(drawn([f"$ {prompt}", *lines], "cupynet"), "utf-8")
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
