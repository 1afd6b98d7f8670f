from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

Array: TypeAlias = Any  # NumPy's or CuPy's, which share no base class


def looks_channels_first(shape: Sequence[int]) -> bool:
    """Return True if the shape of an image, meant as (H, W, C), is probably (C, H, W)."""
    channels, height, width = shape
    return channels <= 4 < min(height, width) and max(height, width) <= 4 * min(height, width)


def layout_hint(found: Sequence[int], expected: Sequence[int]) -> str:
    """Return how to transpose channels-first images (N, C, H, W) or (C, H, W), for the end of a message, or ""."""
    if len(expected) != 3 or len(found) not in (3, 4) or tuple(found[-3:]) != (expected[2], *expected[:2]):
        return ""
    return f". Channels are first: use x.transpose({'0, 2, 3, 1' if len(found) == 4 else '1, 2, 0'})"
