"""Nested settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return found
