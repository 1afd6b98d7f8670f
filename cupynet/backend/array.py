from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from cupynet.core import wording
from cupynet.core.errors import ConfigError

Array: TypeAlias = Any  # a NumPy or CuPy array; they have no common base class


class Subset:
    """Lazy selection of rows (N,) from a NumPy array `base` (S, ...). Indexing copies the rows."""

    def __init__(self, base: Array, rows: Array) -> None:
        self.base, self.rows, self.dtype = base, rows, base.dtype
        self.shape = (len(rows), *base.shape[1:])
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.rows)

    def origin(self) -> Array:
        """Return the rows (N,) in the innermost array, if `base` is a `Subset` too."""
        return self.base.origin()[self.rows] if isinstance(self.base, Subset) else self.rows

    def __getitem__(self, index: Any) -> Array:
        return self.base[self.rows[index]]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a Subset cannot be converted to an array without a copy")
        return np.asarray(self[:], dtype)


def looks_channels_first(shape: Sequence[int]) -> bool:
    """Return True if an image shape is probably (C, H, W) instead of (H, W, C)."""
    channels, height, width = shape
    return channels <= 4 < min(height, width) and max(height, width) <= 4 * min(height, width)


def layout_hint(found: Sequence[int], expected: Sequence[int]) -> str:
    """Return a hint on transposing or reshaping the images, to append to an error message, or ""."""
    if len(found) == 2 and found[1] == math.prod(expected):
        return f". Reshape the flattened images: np.asarray(x).reshape{(-1, *expected)}"
    if len(expected) != 3 or len(found) not in (3, 4) or tuple(found[-3:]) != (expected[2], *expected[:2]):
        return ""
    return f". The images are channels-first: use x.transpose({'0, 2, 3, 1' if len(found) == 4 else '1, 2, 0'})"


def on_host(value: Any) -> Array:
    """Convert a list or an array of any library (CuPy, `__array__`, `__dlpack__`) to NumPy."""
    if hasattr(value, "__cuda_array_interface__") and hasattr(value, "get"):
        return value.get()
    pictures = value if isinstance(value, list | tuple) else [value]
    if any(getattr(each, "mode", "") == "P" and hasattr(each, "getpalette") for each in pictures):
        raise ConfigError("a picture with a palette holds indices, not pixel values. Use picture.convert('RGB')")
    if isinstance(value, Iterator):
        raise ConfigError(
            f"{wording.one(type(value).__name__)} is not an array. Join its batches: np.concatenate([*x])"
        )
    if np.ma.is_masked(value):
        raise ConfigError("an array has masked values, which cannot be left out. Fill them: x.filled(0)")
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:  # rows of different lengths; tensors
        raise ConfigError(f"{wording.one(type(value).__name__)} cannot be converted to an array ({error})") from error
