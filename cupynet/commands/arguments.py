"""Command-line options of commands that take no settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from cupynet.core.errors import ConfigError


class Arguments(argparse.ArgumentParser):
    """A parser of command-line options that raises ConfigError, which is reported in one line."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks of examples
        super().__init__(prog=prog, description=description, epilog=epilog, formatter_class=raw, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: {self.prog} --help shows the arguments")
