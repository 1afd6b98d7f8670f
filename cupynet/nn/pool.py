"""Pooling."""

from __future__ import annotations

from typing import TypeAlias

from cupynet import checks
from cupynet.backend import Backend, Window
from cupynet.backend.array import Array
from cupynet.nn.context import Context
from cupynet.nn.layer import Backward, Layer, check_image, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import Image, InputType

Size: TypeAlias = int | tuple[int, int] | list[int]  # one number for both, or (height, width)


class MaxPool2D(Layer):
    """The largest value of each window: (N, H, W, C) -> (N, H', W', C). Windows that do not fit are left out.

    Among equal values the first, row by row, gets the whole gradient. NaN in a window is its largest.

    Args:
        kernel: pixels of the window, a number or (height, width).
        stride: pixels from one window to the next, a number or (down, across); by default the kernel.
    """

    recordable = True

    def __init__(self, kernel: Size, stride: Size | None = None) -> None:
        sizes = checks.pair("MaxPool2D kernel", kernel, 1)
        self.window = Window(sizes, sizes if stride is None else checks.pair("MaxPool2D stride", stride, 1))

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        image = check_image("MaxPool2D", params.layer, input, self.window, "use a smaller kernel")
        return Image(*self.window.output(image.height, image.width), image.channels)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend = self.backend
        y, winners = backend.max_pool2d(x, self.window)  # (N, H', W', C)
        if not context.train:
            backend.give_back(winners)
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dx = None
            if self.needs_dx and dy is not None:
                dx = backend.max_pool2d_backward(dy, winners, x.shape, self.window)
            backend.give_back(dy, winners, y)
            return dx

        return y, backward

    def buffers(self) -> int:
        return super().buffers() + self.output.features * int(self.backend.winner_dtype(self.window).itemsize)

    def describe(self) -> str:
        return f"{by(self.window.kernel)}, stride {one_or_both(self.window.stride)}"


def by(size: tuple[int, int]) -> str:
    """A size as people write it: 3x5."""
    return f"{size[0]}x{size[1]}"


def one_or_both(size: tuple[int, int]) -> str:
    """A size in one number where both are the same: 2, or 2x1."""
    return str(size[0]) if size[0] == size[1] else by(size)
