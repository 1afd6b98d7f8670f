"""Convolution."""

from __future__ import annotations

from cupynet import checks
from cupynet.backend import Backend, Convolution, MaxPool, Pair, Window
from cupynet.backend.array import Array
from cupynet.nn.activation import activation_function
from cupynet.nn.context import Context
from cupynet.nn.init import Initializer, initializer, zeros
from cupynet.nn.layer import Backward, Layer, check_image, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.pool import MaxPool2D, Size, by, one_or_both
from cupynet.nn.types import Image, InputType

MONOTONE = ("identity", "relu")  # the largest of the activations is the activation of the largest


def same_padding(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after an axis so that it has ceil(size / stride) windows (TensorFlow's SAME).

    Where their number is odd, there is one more after than before.
    """
    total = max(((size - 1) // stride) * stride + kernel - size, 0)
    return total // 2, total - total // 2


class Conv2D(Layer):
    """activation(cross-correlation + bias): (N, H, W, C) -> (N, H', W', O).

    By im2col and one 2-D product in the reference; backends may do it otherwise, and together with a pool behind it.
    H' = (H + 2 padding - K_h) // stride + 1: windows that do not fit are left out (Deeplearning4j's Truncate).

    Args:
        filters: O, channels out.
        kernel: pixels of the window, a number or (height, width).
        stride: pixels from one window to the next, a number or (down, across).
        padding: rows and columns of zeros on every side, a number or (rows above and below, columns left and right);
            or `same`.
        activation: identity, relu or softmax.
        init: how the weight (K_h, K_w, C, O) is drawn, a name or an object, see cupynet/nn/init.py; the bias (O,)
            starts at zero.
        bias: whether there is one.
    """

    recordable = True

    def __init__(
        self,
        filters: int,
        kernel: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        activation: str = "identity",
        init: str | Initializer = "xavier",
        bias: bool = True,
    ) -> None:
        self.filters = checks.integer("Conv2D filters", filters, 1)
        self.kernel = checks.pair("Conv2D kernel", kernel, 1)
        self.stride = checks.pair("Conv2D stride", stride, 1)
        self.padding = None if padding == "same" else checks.pair("Conv2D padding", padding, 0, ", or 'same'")
        self.activation, self._activation = activation, activation_function(activation)
        self.init, self._init = init, initializer(init)
        self.use_bias = checks.flag("Conv2D bias", bias)

    @property
    def output_activation(self) -> str:
        return self.activation

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.window = self._window(input)
        image = check_image("Conv2D", params.layer, input, self.window, "use a smaller kernel or more padding")
        self.weight = params.add("weight", (*self.kernel, image.channels, self.filters), self._init)
        self.bias = params.add("bias", (self.filters,), zeros, decay=False) if self.use_bias else None
        return Image(*self.window.output(image.height, image.width), self.filters)

    def _window(self, input: InputType) -> Window:
        """The window, with as many zeros as `same` needs on this input."""
        if self.padding is not None:
            (rows, cols) = self.padding
            return Window(self.kernel, self.stride, ((rows, rows), (cols, cols)))
        if not isinstance(input, Image):
            return Window(self.kernel, self.stride)
        sizes = zip((input.height, input.width), self.kernel, self.stride, strict=True)
        rows_of_zeros, columns_of_zeros = (same_padding(*each) for each in sizes)
        return Window(self.kernel, self.stride, (rows_of_zeros, columns_of_zeros))

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, weight, bias, activation = self.backend, self.weight, self.bias, self._activation
        y, columns = backend.conv2d(x, weight.data, bias and bias.data, self.window)  # (N, H', W', O)
        y = activation.forward(backend, y)
        if not context.train:
            backend.give_back(columns)
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dy = activation.backward(backend, dy, y)
            grads = weight.grad, bias and bias.grad
            dx = backend.conv2d_backward(dy, columns, x, weight.data, *grads, self.window, need_dx=self.needs_dx)
            backend.give_back(dy, columns, y)
            return dx

        return y, backward

    def fuse(self, following: Layer) -> Layer | None:
        if not isinstance(following, MaxPool2D) or self.activation not in MONOTONE or not isinstance(self.input, Image):
            return None
        pair = self.backend.fused_pair(self._operation(), MaxPool(following.window))
        return None if pair is None else ConvMaxPool(self, following, pair)

    def multiply_adds(self) -> int:
        return self.weight.size * self.output.features // self.filters

    def buffers(self) -> int:
        rows = self.backend.conv2d_buffers(self._operation(), need_dx=self.needs_dx)
        return super().buffers() + rows

    def _operation(self) -> Convolution:
        height, width, channels = self.input.shape
        return Convolution((height, width, channels), self.filters, self.window, self.activation)

    def describe(self) -> str:
        text = f"{by(self.kernel)}, {self.filters} filters, stride {one_or_both(self.stride)}"
        padding = "same" if self.padding is None else one_or_both(self.padding)
        return f"{text}{'' if padding == '0' else f', padding {padding}'}, {self.activation}"


class ConvMaxPool(Layer):
    """A built convolution and the max-pool behind it as one operation.

    What the pool lets through is activated, by the operation itself or behind it.
    """

    recordable = True

    def __init__(self, conv: Conv2D, pool: MaxPool2D, pair: Pair) -> None:
        self.conv, self.pool, self.pair = conv, pool, pair
        self._activation = activation_function("identity" if pair.activates else conv.activation)

    def buffers(self) -> int:
        output = self.pool.output.features * self.conv.backend.policy.storage.itemsize
        return 2 * output + self.pair.buffers(need_dx=self.conv.needs_dx)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        conv, pair, backend, activation = self.conv, self.pair, self.conv.backend, self._activation
        weights = conv.weight.data, conv.bias and conv.bias.data
        y, saved = pair.forward(x, weights)  # (N, H', W', O)
        y = activation.forward(backend, y)
        if not context.train:
            backend.give_back(*saved)
            return y, no_backward

        def backward(dy: Array | None) -> Array | None:
            dy = activation.backward(backend, dy, y)
            grads = conv.weight.grad, conv.bias and conv.bias.grad
            dx = pair.backward(dy, saved, x, weights, grads, need_dx=conv.needs_dx)
            backend.give_back(dy, *saved, y)
            return dx

        return y, backward
