from __future__ import annotations

from typing import Any, TypeAlias

from cupynet.backend import Backend, Window
from cupynet.backend.array import Array
from cupynet.backend.window import IntPair
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.layer import Backward, Layer, check_image, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import Flat, Image, InputType

Size: TypeAlias = int | tuple[int, int] | list[int]  # an integer, or (height, width)


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Return the padding before and after an axis for ceil(size / stride) windows, like TensorFlow's SAME."""
    total = max(((size - 1) // stride) * stride + kernel - size, 0)
    return total // 2, total - total // 2


def padding_of(what: str, padding: Any) -> tuple[int, int] | None:
    """Validate `padding`. Return the number of rows and columns on each side, or None for `same`."""
    if isinstance(padding, str) and padding in ("same", "valid"):
        return None if padding == "same" else (0, 0)
    return checks.pair(f"{what} padding", padding, 0, ", or 'same' or 'valid'")


def window_on(
    input: InputType, kernel: IntPair, stride: IntPair, padding: IntPair | None, dilation: IntPair = (1, 1)
) -> Window:
    if padding is None and isinstance(input, Image):
        extent = Window(kernel, stride, dilation=dilation).extent
        rows, columns = map(same_padding, (input.height, input.width), extent, stride)
        return Window(kernel, stride, (rows, columns), dilation)
    above, left = padding or (0, 0)
    return Window(kernel, stride, ((above, above), (left, left)), dilation)


class Pool(Layer):
    """Base class of pooling layers. Windows that exceed the padded image are dropped.

    Args:
        kernel_size: an integer or (height, width).
        stride: an integer or (vertical, horizontal); by default `kernel_size`.
        padding: padding on both sides, an integer or (vertical, horizontal) below `kernel_size`; `same`; or `valid`
            (0). Maxima and means exclude padding.
    """

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size | str = 0) -> None:
        kind = type(self).__name__
        self.kernel_size = checks.pair(f"{kind} kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else checks.pair(f"{kind} stride", stride, 1)
        self.padding = padding_of(kind, padding)
        if self.padding is not None and any(p >= k for p, k in zip(self.padding, self.kernel_size, strict=True)):
            reason = f"must be smaller than kernel_size={self.kernel_size}, or a window would contain no pixel"
            raise ConfigError(reason, f"{kind} padding", str(self.padding))

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.window = window_on(input, self.kernel_size, self.stride, self.padding)
        image = check_image(type(self).__name__, params.layer, input, self.window, "Use a smaller kernel_size")
        return Image(*self.window.output(image.height, image.width), image.channels)

    def describe(self) -> str:
        return f"kernel {self.kernel_size}, stride {self.stride}"


class MaxPool2D(Pool):
    """Max pooling: (N, H, W, C) -> (N, H', W', C). See `Pool` for the arguments.

    Of equal values, the first in row-major order gets the whole gradient. NaN counts as the largest value.
    """

    capturable = True

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend = self.backend
        y, indices = backend.max_pool2d(x, self.window)  # (N, H', W', C)
        shape = x.shape

        def backward(dy: Array) -> Array | None:
            return backend.max_pool2d_backward(dy, indices, shape, self.window) if self.needs_dx else None

        return y, backward if context.train else no_backward


class AvgPool2D(Pool):
    """Average pooling, excluding padding: (N, H, W, C) -> (N, H', W', C). See `Pool` for the arguments."""

    capturable = True

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        return _means(self, x, self.window, context)


class GlobalAvgPool2D(Layer):
    """Global average pooling (Lin et al. 2014): (N, H, W, C) -> (N, C)."""

    capturable = True

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.window = Window((input.height, input.width) if isinstance(input, Image) else (1, 1))
        return Flat(check_image("GlobalAvgPool2D", params.layer, input, self.window, "").channels)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        y, backward = _means(self, x, self.window, context)  # (N, 1, 1, C)
        return y.reshape(len(x), -1), backward


def _means(layer: Layer, x: Array, window: Window, context: Context) -> tuple[Array, Backward]:
    """Compute average pooling. The backward function accepts dy in any shape."""
    backend, y = layer.backend, layer.backend.avg_pool2d(x, window)
    shape, pooled = x.shape, y.shape

    def backward(dy: Array) -> Array | None:
        return backend.avg_pool2d_backward(dy.reshape(pooled), shape, window) if layer.needs_dx else None

    return y, backward if context.train else no_backward
