from __future__ import annotations

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.nn.activation import activation_function, split_relu
from cupynet.nn.context import Context
from cupynet.nn.init import Initializer, bias_initializer, initializer
from cupynet.nn.layer import Backward, Layer, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import Flat, InputType


class Dense(Layer):
    """Fully connected layer, activation(x W + b): (N, F) -> (N, O). Images are flattened in H, W, C order.

    Args:
        units: number of outputs, O.
        activation: identity, relu, leaky_relu, elu, gelu, silu, tanh, sigmoid, softplus or softmax.
        init: initializer of the weight (F, O): a name or an object from cupynet/nn/init.py.
        bias_init: initial bias (O,), if `bias`: a number, or an initializer that ignores the fan-in, such as `normal`.
    """

    capturable = True

    def __init__(
        self,
        units: int,
        activation: str = "identity",
        init: str | Initializer = "xavier",
        bias: bool = True,
        bias_init: float | str | Initializer = 0.0,
    ) -> None:
        self.units = checks.integer("Dense units", units, 1)
        self.activation, (self._relu, self._activation) = activation, split_relu(activation)
        self.init, self._init = init, initializer(init)
        self.use_bias = checks.flag("Dense bias", bias)
        self.bias_init, self._bias_init = bias_init, bias_initializer("Dense bias_init", bias_init)

    @property
    def output_activation(self) -> str:
        return self.activation

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.weight = params.add("weight", (input.features, self.units), self._init)
        self.bias = params.add("bias", (self.units,), self._bias_init, decay=False) if self.use_bias else None
        return Flat(self.units)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, weight, bias, activation = self.backend, self.weight, self.bias, self._activation
        rows = x.reshape(len(x), -1)  # (N, F)
        z = backend.dense(rows, weight.data, bias and bias.data, relu=self._relu)  # (N, O)
        y, kept = activation.forward(backend, z, train=context.train)
        if not context.train:
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            dy = activation.backward(backend, dy, kept)
            grads, relu_y = (weight.grad, bias and bias.grad), kept if self._relu else None
            dx = backend.dense_backward(dy, rows, weight.data, *grads, need_dx=self.needs_dx, relu_y=relu_y)
            return None if dx is None else dx.reshape(x.shape)

        return y, backward

    def multiply_adds(self) -> int:
        return self.weight.size

    def describe(self) -> str:
        return f"{self.units} units, {self.activation}"


class Flatten(Layer):
    """Flattens images without a copy: (N, H, W, C) -> (N, H·W·C). `Dense` does not need it."""

    capturable = True

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        return Flat(input.features)

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        shape = x.shape  # `backward` must not keep x, so that its buffer can be reused
        return x.reshape(len(x), -1), lambda dy: dy.reshape(shape)


class Activation(Layer):
    """An activation function as a layer.

    Args:
        name: identity, relu, leaky_relu, elu, gelu, silu, tanh, sigmoid, softplus or softmax (over the last axis).
        slope: slope for negative values, between 0 and 1, only for leaky_relu; 0.01 by default.
    """

    capturable = True

    def __init__(self, name: str, slope: float | None = None) -> None:
        self.name, self._activation = name, activation_function(name, slope)
        self.slope = self._activation.slope

    @property
    def output_activation(self) -> str:
        return self.name

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        return input

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, activation = self.backend, self._activation
        # not in place, because the previous layer's backward function may need its output
        y = activation.into(backend, x, backend.borrow(x.shape))
        kept = x if activation.of_input else y
        if not context.train:
            return y, no_backward

        def backward(dy: Array) -> Array | None:
            return activation.backward(backend, dy, kept)

        return y, backward

    def describe(self) -> str:
        return self.name
