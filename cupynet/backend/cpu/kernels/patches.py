"""Arguments of the kernels of a convolution with a max-pool. P is the number of pooling windows.

A patch is the part of an image that one window of the convolution sees.
"""

from __future__ import annotations

from typing import NamedTuple

from cupynet.backend.array import Array


class Patches(NamedTuple):
    """The places of patches in a flat image.

    Attributes:
        corners: (P,) int32, the start of the first patch of each pooling window.
        places: (pixels,) int32, the starts of all patches of a pooling window, from its corner.
        height: rows of a patch.
        row: values in a row of a patch.
        step: values of the image from one row of a patch to the next.
    """

    corners: Array
    places: Array
    height: int
    row: int
    step: int


class Passed(NamedTuple):
    """The gradients that come back through the pool, dy (N, P, O), and the pixels they are for, winners (N, P, O)."""

    dy: Array
    winners: Array


class Block(NamedTuple):
    """A block of a weight gradient: `lines` rows of the patch from `line` on, from a value and a filter on."""

    line: int
    lines: int
    value: int
    filter: int
