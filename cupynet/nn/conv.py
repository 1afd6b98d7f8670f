"""Convolution."""

from __future__ import annotations

from cupynet.backend import Backend, Pad, out_size
from cupynet.backend.array import Array
from cupynet.errors import ConfigError
from cupynet.nn.activation import activation_function
from cupynet.nn.context import Context
from cupynet.nn.init import initializer, zeros
from cupynet.nn.layer import Backward, Layer, check_flag, check_image, check_integer, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.pool import MaxPool2D
from cupynet.nn.types import Image, InputType

MONOTONE = ("identity", "relu")  # the largest of the activations is the activation of the largest


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after an axis so that it keeps ceil(size / stride) windows; an odd one goes after (TensorFlow's
    SAME).
    """
    total = max(((size - 1) // stride) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class Conv2D(Layer):
    """activation(cross-correlation + bias): (N, H, W, C) -> (N, H', W', O), by im2col and one 2-D product.

    H' = (H + 2 padding - K) // stride + 1: windows that do not fit are left out (Deeplearning4j's Truncate).

    Args:
        filters: O, channels out.
        kernel: K, the window is K x K.
        stride: pixels from one window to the next.
        padding: rows and columns of zeros on every side, or `same`.
        activation: identity, relu or softmax.
        init: how the weight (K, K, C, O) is drawn; the bias (O,) starts at zero.
        bias: whether there is one.
    """

    def __init__(
        self,
        filters: int,
        kernel: int,
        stride: int = 1,
        padding: int | str = 0,
        activation: str = "identity",
        init: str = "xavier",
        bias: bool = True,
    ) -> None:
        self.filters = check_integer("Conv2D", "filters", filters, 1)
        self.kernel = check_integer("Conv2D", "kernel", kernel, 1)
        self.stride = check_integer("Conv2D", "stride", stride, 1)
        if isinstance(padding, str) and padding != "same":
            raise ConfigError(f"Conv2D padding={padding!r}: must be 'same' or an integer of at least 0")
        self.padding = padding if padding == "same" else check_integer("Conv2D", "padding", padding, 0)
        self.activation, self._activation = activation, activation_function(activation)
        self.init, self._init = init, initializer(init)
        self.use_bias = check_flag("Conv2D", "bias", bias)

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.backend = backend
        image: Image = check_image("Conv2D", params.layer, input)
        self._pad = self._padding_of(image)
        top, bottom, left, right = self._pad
        if self.kernel > min(image.height + top + bottom, image.width + left + right):
            raise ConfigError(
                f"Conv2D '{params.layer}' kernel={self.kernel} is larger than its input {image}: "
                "use a smaller kernel or more padding"
            )
        shape = (self.kernel, self.kernel, image.channels, self.filters)
        self.weight = params.add("weight", shape, self._init)
        self.bias = params.add("bias", (self.filters,), zeros, decay=False) if self.use_bias else None
        height = out_size(image.height, self.kernel, self.stride, top, bottom)
        return Image(height, out_size(image.width, self.kernel, self.stride, left, right), self.filters)

    def _padding_of(self, image: Image) -> Pad:
        if isinstance(self.padding, int):
            return (self.padding,) * 4
        return (
            *same_padding(image.height, self.kernel, self.stride),
            *same_padding(image.width, self.kernel, self.stride),
        )

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, weight, bias, activation = self.backend, self.weight, self.bias, self._activation
        y, columns = backend.conv2d(x, weight.data, bias and bias.data, self.stride, self._pad)  # (N, H', W', O)
        y = activation.forward(backend, y)
        if not context.train:
            backend.give_back(columns)
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dy = activation.backward(backend, dy, y)
            dx = backend.conv2d_backward(
                dy,
                columns,
                x,
                weight.data,
                weight.grad,
                bias and bias.grad,
                self.stride,
                self._pad,
                need_dx=self.needs_dx,
            )
            backend.give_back(dy, columns, y)
            return dx

        return y, backward

    def fuse(self, following: Layer) -> Layer | None:
        if not isinstance(following, MaxPool2D) or self.activation not in MONOTONE:
            return None
        if not self.backend.fuses_conv2d_max_pool2d(following.kernel, following.stride):
            return None
        return ConvMaxPool(self, following)

    def describe(self) -> str:
        padding = "" if self.padding == 0 else f", padding {self.padding}"
        return f"{self.kernel}x{self.kernel}, {self.filters} filters, stride {self.stride}{padding}, {self.activation}"


class ConvMaxPool(Layer):
    """A built convolution and the max-pool behind it as one operation; what the pool lets through is activated."""

    def __init__(self, conv: Conv2D, pool: MaxPool2D) -> None:
        self.conv, self.pool = conv, pool

    def members(self) -> list[Layer]:
        return [self.conv, self.pool]

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        conv, backend, activation = self.conv, self.conv.backend, self.conv._activation
        weight, bias = conv.weight, conv.bias
        geometry = (conv.stride, conv._pad, self.pool.kernel, self.pool.stride)
        y, saved = backend.conv2d_max_pool2d(x, weight.data, bias and bias.data, *geometry)  # (N, H', W', O)
        y = activation.forward(backend, y)
        if not context.train:
            backend.give_back(*saved)
            return y, no_backward

        def backward(dy: Array | None) -> Array | None:
            dy = activation.backward(backend, dy, y)
            dx = backend.conv2d_max_pool2d_backward(
                dy, saved, x, weight.data, weight.grad, bias and bias.grad, *geometry, need_dx=conv.needs_dx
            )
            backend.give_back(dy, *saved, y)
            return dx

        return y, backward
