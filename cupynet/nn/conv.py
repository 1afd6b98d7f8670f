from __future__ import annotations

from cupynet.backend import Backend, Convolution, FusedPair
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.nn.activation import activation_function, split_relu
from cupynet.nn.context import Context
from cupynet.nn.init import Initializer, bias_initializer, grouped, initializer
from cupynet.nn.layer import Backward, Layer, check_image, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.pool import MaxPool2D, Size, padding_of, window_on
from cupynet.nn.types import Image, InputType


class Conv2D(Layer):
    """2-D convolution, activation(cross-correlation + bias): (N, H, W, C) -> (N, H', W', O).

    H' = (H + 2 padding - dilation (K_h - 1) - 1) // stride + 1, as in Deeplearning4j's Truncate mode.

    Args:
        filters: number of output channels, O.
        kernel_size: an integer or (height, width).
        stride: an integer or (vertical, horizontal).
        padding: zero padding on both sides, an integer or (vertical, horizontal); `same`; or `valid` (0).
        activation: identity, relu, leaky_relu, elu, gelu, silu, tanh, sigmoid, softplus or softmax.
        init: initializer of the weight (K_h, K_w, C / groups, O): a name or an object from cupynet/nn/init.py.
        dilation: an integer or (vertical, horizontal) (Yu & Koltun 2016).
        groups: number of groups, C for a depthwise convolution (Chollet 2017). A filter sees only its group's channels.
        bias_init: initial bias (O,), if `bias`: a number, or an initializer that ignores the fan-in, such as `normal`.
    """

    capturable = True

    def __init__(
        self,
        filters: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size | str = 0,
        activation: str = "identity",
        init: str | Initializer = "xavier",
        bias: bool = True,
        dilation: Size = 1,
        groups: int = 1,
        bias_init: float | str | Initializer = 0.0,
    ) -> None:
        self.filters = checks.integer("Conv2D filters", filters, 1)
        self.kernel_size = checks.pair("Conv2D kernel_size", kernel_size, 1)
        self.stride = checks.pair("Conv2D stride", stride, 1)
        self.padding = padding_of("Conv2D", padding)
        self.dilation = checks.pair("Conv2D dilation", dilation, 1)
        self.groups = checks.integer("Conv2D groups", groups, 1)
        self.activation, (self._relu, self._activation) = activation, split_relu(activation)
        self.init, self._init = init, initializer(init)
        self.use_bias = checks.flag("Conv2D bias", bias)
        self.bias_init, self._bias_init = bias_init, bias_initializer("Conv2D bias_init", bias_init)

    @property
    def output_activation(self) -> str:
        return self.activation

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.window = window_on(input, self.kernel_size, self.stride, self.padding, self.dilation)
        image = check_image("Conv2D", params.layer, input, self.window, "Use a smaller kernel_size or more padding")
        if image.channels % self.groups or self.filters % self.groups:
            reason = f"must divide its {image.channels} input channels and its {self.filters} filters"
            raise ConfigError(reason, f"Conv2D '{params.layer}' groups", str(self.groups))
        shape = (*self.kernel_size, image.channels // self.groups, self.filters)
        self.weight = params.add("weight", shape, grouped(self._init, self.groups))
        self.bias = params.add("bias", (self.filters,), self._bias_init, decay=False) if self.use_bias else None
        return Image(*self.window.output(image.height, image.width), self.filters)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, weight, bias, activation = self.backend, self.weight, self.bias, self._activation
        z, columns = backend.conv2d(
            x, weight.data, bias and bias.data, self.window, groups=self.groups, relu=self._relu
        )  # (N, H', W', O)
        y, kept = activation.forward(backend, z, train=context.train)
        if not context.train:
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dy = activation.backward(backend, dy, kept)
            return backend.conv2d_backward(
                dy, columns, x, weight.data, weight.grad, bias and bias.grad, self.window,
                need_dx=self.needs_dx, groups=self.groups, relu_y=kept if self._relu else None,
            )  # fmt: skip

        return y, backward

    def fuse(self, following: Layer) -> Layer | None:
        if type(self) is not Conv2D or type(following) is not MaxPool2D:  # subclasses may compute something else
            return None
        if not self._activation.monotone:
            return None
        pair = self.backend.fused_pair(self._convolution(), following.window)
        return None if pair is None else ConvMaxPool(self, following, pair)

    def _convolution(self) -> Convolution:
        height, width, channels = self.input.shape
        return Convolution((height, width, channels), self.filters, self.window, self.activation, self.groups)

    def multiply_adds(self) -> int:
        return self.weight.size * self.output.features // self.filters

    def describe(self) -> str:
        return f"kernel {self.kernel_size}, {self.filters} filters, stride {self.stride}, {self.activation}"


class ConvMaxPool(Layer):
    """A convolution fused with max pooling. The activation is applied after pooling."""

    capturable = True

    def __init__(self, conv: Conv2D, pool: MaxPool2D, pair: FusedPair) -> None:
        self.conv, self.pool, self.pair = conv, pool, pair
        self._activation = activation_function("identity" if pair.activates else conv.activation)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        conv, pair, backend, activation = self.conv, self.pair, self.conv.backend, self._activation
        weights = conv.weight.data, conv.bias and conv.bias.data
        y, saved = pair.forward(x, weights)  # (N, H', W', O)
        y = activation.into(backend, y, y)
        if not context.train:
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dy = activation.backward(backend, dy, y)
            grads = conv.weight.grad, conv.bias and conv.bias.grad
            return pair.backward(dy, saved, x, weights, grads, need_dx=conv.needs_dx)

        return y, backward
