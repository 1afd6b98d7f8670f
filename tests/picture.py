"""Draw the final terminal output of a training run, with its colors: `make picture`.

The command runs on a pseudo-terminal. Only rich's control sequences are interpreted: lines that are erased and written
again, and a cursor that moves up. The result is an SVG without dates, paths and host names.
"""

import argparse
import io
import os
import pty
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / ".github" / "pictures" / "terminal.svg"
COLUMNS = 104
TOKENS = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def written(command: Sequence[str]) -> str:
    """Return a command's terminal output. Raises SystemExit with the output if the command fails."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(COLUMNS=str(COLUMNS), LINES="50", TERM="xterm-256color", LC_ALL="C.UTF-8")
        os.environ.pop("NO_COLOR", None)
        os.execv(command[0], list(command))
    found = b""
    try:
        while some := os.read(terminal, 1 << 16):
            found += some
    except OSError:  # the last process has closed the terminal
        pass
    text = found.decode(errors="replace")
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
        raise SystemExit(text)
    return text


def shown(text: str) -> list[str]:
    lines, row, over = [""], 0, False
    for numbers, action, carriage, feed, plain in TOKENS.findall(text):
        if feed:
            row, over = row + 1, False
            lines += [""] * (row + 1 - len(lines))
        elif carriage:
            over = True  # the next text replaces the line
        elif action == "A":
            row = max(row - int(numbers or 1), 0)
        elif action == "K":
            lines[row], over = "", False
        elif plain or action == "m":
            if over and plain:
                lines[row], over = "", False
            lines[row] += plain or f"\x1b[{numbers}m"
    while lines and not lines[-1]:
        lines.pop()
    return lines


def drawn(lines: Sequence[str]) -> str:
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(Text.from_ansi(line), soft_wrap=True)
    svg = console.export_svg(title="cupynet", unique_id="cupynet")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.picture", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", help="of the training")
    settings = parser.parse_args().settings
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "cupynet", "train", *settings, f"hydra.run.dir={folder}/run"]
        text = written(command).replace(f"{folder}/run", "outputs/2026-11-22/12-00-00-000000")
    prompt = f'$ make train ARGS="{" ".join(settings)}"' if settings else "$ make train"
    PICTURE.write_text(drawn([prompt, *shown(text)]), "utf-8")


if __name__ == "__main__":
    main()
