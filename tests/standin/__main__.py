"""Run a command on CuPy's stand-in: `python -m tests.standin [--devices 2] -m cupynet train backend=cupy ...`.

The exit code is the command's, or 70 if CuPy was misused.
"""

import argparse
import runpy
import sys

from tests.standin import Misuse, installed

MISUSED = 70


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.standin", allow_abbrev=False)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("-m", dest="command", nargs=argparse.REMAINDER, required=True)
    given = parser.parse_args(arguments)
    sys.argv = given.command
    try:
        with installed(given.devices):
            try:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Misuse as misuse:
        print(f"misuse of CuPy: {type(misuse).__name__}: {misuse}", file=sys.stderr)
        return MISUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
