"""Argument parser for commands that do not use Hydra."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from cupynet.core.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of printing its usage."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter  # keeps line breaks
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False)

    def add_run(self) -> None:
        self.add_argument("run", type=Path, help="the folder of a finished run, or one of its checkpoints")

    def add_trusted_modules(self) -> None:
        named = "comma-separated modules with classes that the run may use"
        self.add_argument("--trusted-modules", type=_names, default=[], metavar="NAMES", help=named)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("[]").split(",") if name.strip()]
