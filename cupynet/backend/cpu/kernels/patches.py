"""What the kernels of a convolution under a max-pool are told in groups: named tuples, which compiled code takes apart.

A patch is what one window of the convolution sees of an image, and P the number of pooling windows in an image.
"""

from __future__ import annotations

from typing import NamedTuple

from cupynet.backend.array import Array


class Patches(NamedTuple):
    """Where patches lie in a flat image.

    Attributes:
        corners: (P,) int32, where the first patch of each pooling window begins.
        places: (pixels,) int32, where the window's other patches begin from there.
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
    """The gradients that come back through the pool: dy (N, P, O), and winners (N, P, O), which pixel each is for."""

    dy: Array
    winners: Array


class Block(NamedTuple):
    """A block of a weight's gradient: `lines` rows from row `line` of the patch on, from that value and filter on."""

    line: int
    lines: int
    value: int
    filter: int
