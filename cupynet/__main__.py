"""The command line `cupynet COMMAND`.

cupynet train workers=4             or: python -m cupynet train workers=4
cupynet report outputs/latest
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

COMMANDS = {
    "train": ("commands.train", "train a network, or run a sweep with -m"),
    "evaluate": ("commands.evaluate", "evaluate a finished run on its test set"),
    "predict": ("commands.predict", "classify pictures with a finished run"),
    "export": ("commands.export", "export a finished run to ONNX, safetensors or PyTorch"),
    "report": ("commands.report", "write the report of a run: report.html and curves.png"),
    "compare": ("commands.compare", "compare runs, and recommend one"),
    "tune": ("commands.tune.command", "search for hyperparameters"),
    "download": ("commands.download", "download a data set, for a machine without network access"),
    "find_rate": ("commands.find_rate", "run a learning-rate range test"),
    "plan": ("commands.plan", "predict the throughput with more workers or machines"),
    "bench": ("commands.bench", "benchmark operations, the training step and the training loop"),
    "doctor": ("commands.doctor", "check that this machine can train"),
}


def main() -> None:
    """Run `cupynet COMMAND ...`. The exit code is 2 if there is no such command."""
    typed = sys.argv[1] if len(sys.argv) > 1 else ""
    name = _completed() if typed == "-sc" else typed
    if name == typed:
        del sys.argv[1:2]  # the command parses the remaining arguments
    if name in COMMANDS:
        from cupynet.core import signals

        signals.command(lambda: _run(COMMANDS[name][0]))
    else:
        from cupynet.core.exits import run_and_exit

        run_and_exit(lambda: _answer(name))


def _run(module: str) -> None:
    from cupynet.core import signals

    command = import_module(f"cupynet.{module}")  # can take a second
    with signals.handled(signals.leave):
        command.main()


def _answer(name: str) -> None:
    """Print the help or the version. Raise ConfigError for any other name."""
    if name in ("", "-h", "--help"):
        print(_help())
    elif name == "--version":
        from cupynet.core.version import __version__

        print(f"cupynet {__version__}")
    else:
        from cupynet.core.errors import ConfigError
        from cupynet.core.wording import nearest

        raise ConfigError(f"there is no command '{name}'{nearest(name, COMMANDS)} (cupynet --help lists the commands)")


def _completed() -> str:
    """Return the command that is being completed. If its name is incomplete, print the matching names and exit."""
    words = os.environ.get("COMP_LINE", "").split()
    if len(words) > 1 and words[1] in COMMANDS:
        os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
        return words[1]
    start = words[1] if len(words) > 1 else ""
    print(*(name for name in COMMANDS if name.startswith(start)))
    raise SystemExit(0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: cupynet COMMAND ...", "", *lines, "", "cupynet COMMAND --help shows its arguments."])


if __name__ == "__main__":
    main()
