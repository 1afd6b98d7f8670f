"""The geometry of a window that moves over an image, for convolutions and for pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

IntPair: TypeAlias = tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class Window:
    """A window of `kernel` pixels every `stride` pixels of an image with `padding` zeros around it.

    Attributes:
        kernel: (K_h, K_w), height and width in pixels.
        stride: pixels from one window to the next, (down, across).
        padding: rows of zeros (above, below) and columns of zeros (left, right); pools leave them out.
        dilation: pixels from one of the window's pixels to the next, (down, across); 1: they are neighbours.
    """

    kernel: IntPair
    stride: IntPair = (1, 1)
    padding: tuple[IntPair, IntPair] = ((0, 0), (0, 0))
    dilation: IntPair = (1, 1)

    @property
    def extent(self) -> IntPair:
        """The rows and columns of an image from the window's first pixel to its last, with the gaps."""
        rows, cols = ((self.kernel[i] - 1) * self.dilation[i] + 1 for i in (0, 1))
        return rows, cols

    @property
    def dilates(self) -> bool:
        """Whether there are gaps between the window's pixels."""
        return self.dilation != (1, 1)

    @property
    def places(self) -> int:
        """Pixels of the window; their places are numbered row by row, ky · K_w + kx."""
        return self.kernel[0] * self.kernel[1]

    @property
    def pads(self) -> bool:
        """Whether there are any zeros around the image."""
        return any(self.padding[0]) or any(self.padding[1])

    def padded(self, height: int, width: int) -> IntPair:
        """The size of an image of `height` x `width` with its zeros."""
        return height + sum(self.padding[0]), width + sum(self.padding[1])

    def output(self, height: int, width: int) -> IntPair:
        """How many windows such an image has, (H', W'); those that do not fit are left out (0 or less: none fits)."""
        padded, extent = self.padded(height, width), self.extent
        rows, cols = ((padded[i] - extent[i]) // self.stride[i] + 1 for i in (0, 1))
        return rows, cols

    def pixels(self, height: int, width: int) -> tuple[list[int], list[int]]:
        """Rows of such an image that windows see, from the first down, and columns, from the first across; no zeros."""
        sizes, counts = (height, width), self.output(height, width)
        rows, cols = (
            [
                min(at * self.stride[i] - self.padding[i][0] + self.kernel[i], sizes[i])
                - max(at * self.stride[i] - self.padding[i][0], 0)
                for at in range(counts[i])
            ]
            for i in (0, 1)
        )
        return rows, cols

    def fits(self, height: int, width: int) -> bool:
        """Whether such an image, with its zeros, has room for at least one window."""
        return min(self.output(height, width)) > 0

    def inside(self, height: int, width: int) -> tuple[slice, ...]:
        """The index of the images in padded ones (N, H, W, C)."""
        (top, _), (left, _) = self.padding
        return slice(None), slice(top, top + height), slice(left, left + width)

    def seen(self, ky: int, kx: int, output: IntPair) -> tuple[slice, ...]:
        """The index of what place (ky, kx) of all the `output` windows sees in padded images (N, H, W, C)."""
        (down, across), (rows, cols) = self.stride, output
        ky, kx = ky * self.dilation[0], kx * self.dilation[1]
        return slice(None), slice(ky, ky + down * rows, down), slice(kx, kx + across * cols, across)
