"""The checks that the arguments of this room share: a number that is wrong is refused by name before any work."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from cupynet.errors import ConfigError


def whole(key: str, value: Any, minimum: int, why: str = "") -> int:
    """`value` as an int if it is a whole number of at least `minimum` (NumPy's integers count, True and 3.0 do not)."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ConfigError(f"{key} must be a whole number >= {minimum}{why}, got {value!r}")
    return int(value)


def positive(key: str, value: Any, unit: str) -> float:
    """`value` as a float if it is a number above zero, infinity included; `unit` is for the message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:  # `not >` refuses a NaN as well
        raise ConfigError(f"{key} must be a number of {unit} above 0, got {value!r}")
    return float(value)


def seed_number(value: Any) -> int:
    """`value` as a seed: a whole number of 64 bits, which is what a Philox key has room for."""
    seed = whole("seed", value, 0)
    if seed >= 1 << 64:
        raise ConfigError(f"seed must be below 2**64, got {seed}")
    return seed
