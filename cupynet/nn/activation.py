"""Activation functions. Most work in place, because their derivatives need only the output."""

from __future__ import annotations

from dataclasses import dataclass

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.backend.reference.activation import NAMES, OF_INPUT
from cupynet.core import checks
from cupynet.core.errors import ConfigError

ACTIVATIONS = ("identity", "relu", "softmax", *NAMES)
LEAKY_SLOPE = 0.01  # Maas et al. 2013
ELSEWHERE = {"None": "identity", "linear": "identity", "swish": "silu"}  # names in Keras
NOT_MONOTONE = ("softmax", *OF_INPUT)


@dataclass(frozen=True)
class ActivationFunction:
    """An activation function, elementwise except for softmax (last axis). Computes in float32 for 16-bit arrays.

    - leaky_relu: x if x > 0, else slope · x (Maas et al. 2013).
    - elu: x if x > 0, else exp(x) - 1 (Clevert et al. 2016, alpha = 1).
    - softplus: log(1 + exp(x)).
    - gelu: x times the standard normal CDF of x (Hendrycks & Gimpel 2016), without the tanh approximation.
    - silu: x · sigmoid(x), also called swish (Elfwing et al. 2018).
    """

    name: str
    slope: float = LEAKY_SLOPE

    @property
    def of_input(self) -> bool:
        """True if the derivative needs x instead of y. Training then keeps both arrays."""
        return self.name in OF_INPUT

    @property
    def monotone(self) -> bool:
        return self.name not in NOT_MONOTONE

    def into(self, backend: Backend, x: Array, out: Array) -> Array:
        """Write the activation of x to `out`, which may be x, and return `out`."""
        if self.name in NAMES:
            return backend.pointwise(self.name, x, out, self.slope)
        if out is not x:
            out[...] = x
        if self.name == "identity":
            return out
        return backend.relu(out) if self.name == "relu" else backend.softmax(out)

    def forward(self, backend: Backend, x: Array, *, train: bool) -> tuple[Array, Array]:
        """Return the activation of the borrowed array x, which may be overwritten, and `kept` for `backward`."""
        out = backend.borrow(x.shape) if train and self.of_input else x
        return self.into(backend, x, out), x

    def backward(self, backend: Backend, dy: Array, kept: Array) -> Array:
        """Compute dx in place in dy. `kept` is y, or x if `of_input`."""
        if self.name in NAMES:
            return backend.pointwise_backward(self.name, dy, kept, self.slope)
        if self.name == "identity":
            return dy
        return backend.relu_backward(dy, kept) if self.name == "relu" else backend.softmax_backward(dy, kept)


def split_relu(name: str) -> tuple[bool, ActivationFunction]:
    """Return (True, identity) for ReLU, which `dense` and `conv2d` apply themselves, else (False, activation)."""
    relu = name == "relu"
    return relu, activation_function("identity" if relu else name)


def activation_function(name: str, slope: float | None = None) -> ActivationFunction:
    checks.one_of("activation", name, ACTIVATIONS, elsewhere=ELSEWHERE)
    if slope is None:
        return ActivationFunction(name)
    slope = checks.number("slope", slope, above=0, below=1)
    if name != "leaky_relu":
        raise ConfigError(f"applies only to leaky_relu, not to {name}", "slope", f"{slope:g}")
    return ActivationFunction(name, slope)
