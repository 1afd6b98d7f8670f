from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy or CuPy array; they have no common base class


class Subset:
    """Rows (N,) of a NumPy array `base` (S, ...), which are copied only when they are indexed."""

    def __init__(self, base: Array, rows: Array) -> None:
        self.base, self.rows, self.dtype = base, rows, base.dtype
        self.shape = (len(rows), *base.shape[1:])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: Any) -> Array:
        return self.base[self.rows[which]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a Subset becomes an array only as a copy")
        return np.asarray(self[:], dtype)


def looks_channels_first(shape: Sequence[int]) -> bool:
    """Return True if an image shape that should be (H, W, C) is probably (C, H, W)."""
    channels, height, width = shape
    return channels <= 4 < min(height, width) and max(height, width) <= 4 * min(height, width)


def layout_hint(found: Sequence[int], expected: Sequence[int]) -> str:
    """Return a hint for the end of an error message: how to transpose or reshape the images, or ""."""
    if len(found) == 2 and found[1] == math.prod(expected):
        return f". Reshape vectors: np.asarray(x).reshape{(-1, *expected)}"
    if len(expected) != 3 or len(found) not in (3, 4) or tuple(found[-3:]) != (expected[2], *expected[:2]):
        return ""
    return f". Channels are first: use x.transpose({'0, 2, 3, 1' if len(found) == 4 else '1, 2, 0'})"
