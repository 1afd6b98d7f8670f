"""Pooling."""

from __future__ import annotations

from cupynet.backend import Backend, out_size
from cupynet.backend.array import Array
from cupynet.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.layer import Backward, Layer, check_image, check_integer, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import Image, InputType


class MaxPool2D(Layer):
    """The largest value of each K x K window: (N, H, W, C) -> (N, H', W', C). Windows that do not fit are left out.

    Among equal values the first, row by row, gets the whole gradient.

    Args:
        kernel: K.
        stride: pixels from one window to the next; K unless told.
    """

    def __init__(self, kernel: int, stride: int | None = None) -> None:
        self.kernel = check_integer("MaxPool2D", "kernel", kernel, 1)
        self.stride = self.kernel if stride is None else check_integer("MaxPool2D", "stride", stride, 1)

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.backend = backend
        image: Image = check_image("MaxPool2D", params.layer, input)
        if self.kernel > min(image.height, image.width):
            raise ConfigError(
                f"MaxPool2D '{params.layer}' kernel={self.kernel} is larger than its input {image}: "
                "use a smaller kernel"
            )
        height = out_size(image.height, self.kernel, self.stride, 0, 0)
        return Image(height, out_size(image.width, self.kernel, self.stride, 0, 0), image.channels)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend = self.backend
        y, winners = backend.max_pool2d(x, self.kernel, self.stride)  # (N, H', W', C)
        if not context.train:
            backend.give_back(winners)
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dx = None
            if self.needs_dx and dy is not None:
                dx = backend.max_pool2d_backward(dy, winners, x.shape, self.kernel, self.stride)
            backend.give_back(dy, winners, y)
            return dx

        return y, backward

    def describe(self) -> str:
        return f"{self.kernel}x{self.kernel}, stride {self.stride}"
