"""Arguments of the kernels for a convolution followed by max pooling. P is the number of pooling windows.

A patch is the part of an image that one window of the convolution covers.
"""

from __future__ import annotations

from typing import NamedTuple

from cupynet.backend.array import Array


class Patches(NamedTuple):
    """Offsets of patches in a flat image.

    Attributes:
        corners: (P,) int32, offset of the first patch of each pooling window.
        places: (pixels,) int32, offsets of the patches of a pooling window from its corner.
        height, row: number of rows in a patch, and of values in each row.
        step: values between the starts of a patch's rows in the image.
    """

    corners: Array
    places: Array
    height: int
    row: int
    step: int


class Passed(NamedTuple):
    """Gradients of the pool's output, dy (N, P, O), and indices of the maxima in their windows, (N, P, O)."""

    dy: Array
    indices: Array


class Block(NamedTuple):
    """Block of a weight gradient: `lines` rows of the patch, from row `line` on, starting at `value` and `filter`."""

    line: int
    lines: int
    value: int
    filter: int
