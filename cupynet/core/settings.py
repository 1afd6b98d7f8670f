from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        result |= flat(value, f"{key}.") if isinstance(value, Mapping) and value else {key: value}
    return result
