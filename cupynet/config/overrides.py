"""Overrides: settings as on the command line, such as `epochs=3`, `+data.folder=x` and `~callbacks.progress`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from cupynet.core.settings import flat
from cupynet.core.wording import written

PARSER = OverridesParser.create()  # Hydra's grammar
OVERRIDE = re.compile(r"~|[^-=][^=]*=")


def is_override(argument: str) -> bool:
    """Return True for an override, and False for an option such as --multirun."""
    return OVERRIDE.match(argument) is not None


def name_of(override: str) -> str:
    return override.lstrip("+~").partition("=")[0]


def without(arguments: Sequence[str], *keys: str) -> list[str]:
    return [each for each in arguments if name_of(each) not in keys]


def last_value(arguments: Sequence[str], key: str) -> str | None:
    """Return the last value of a setting on a command line, as text without quotes, or None."""
    found = [each.partition("=")[2] for each in arguments if name_of(each) == key]
    quotes = found and re.fullmatch(r"""(['"])(.*)\1""", found[-1])
    return (quotes[2] if quotes else found[-1]) if found else None


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the settings in overrides by dotted key. Mappings are flattened."""
    return flat({each.key_or_group: each.value() for each in PARSER.parse_overrides([*overrides])})


def quoted(value: object) -> str:
    """Format a value as text for Hydra's parser, in quotes."""
    return QuotedString(str(value), Quote.single).with_quotes()


def parseable(value: Any) -> str:
    """Format a value so that Hydra's parser returns it, in quotes only if necessary."""
    text = written(value)
    with suppress(HydraException):
        if PARSER.parse_override(f"x={text}").value() == value:
            return text
    return quoted(text)
