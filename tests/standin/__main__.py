"""A command on the stand-in of CuPy: `python -m tests.standin [--devices 2] -m cupynet train backend=cupy ...`.

Its exit code is the command's; 70 where CuPy was misused.
"""

from __future__ import annotations

import runpy
import sys

from tests.standin import Misuse, installed

MISUSED = 70


def main(arguments: list[str]) -> int:
    """Run the module that is named, as Python's -m does."""
    devices = 2
    if arguments[:1] == ["--devices"]:
        devices, arguments = int(arguments[1]), arguments[2:]
    if arguments[:1] != ["-m"] or len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    sys.argv = arguments[1:]
    code = 0
    try:
        with installed(devices):
            try:
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Misuse as misuse:
        print(f"misuse of CuPy: {type(misuse).__name__}: {misuse}", file=sys.stderr)
        return MISUSED
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
