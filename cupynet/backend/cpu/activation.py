"""Activations on the CPU, compiled."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.device import flat
from cupynet.backend.cpu.kernels import activation as activation_kernels
from cupynet.backend.reference.activation import ActivationOps


class NumbaActivation(ActivationOps):
    """See `ActivationOps`."""

    def relu_backward(self, dy: Array, y: Array) -> Array:
        if not flat(dy, y):
            return super().relu_backward(dy, y)
        activation_kernels.relu_backward(dy.reshape(-1), y.reshape(-1))
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        if name not in activation_kernels.FORWARD or not flat(x, out):
            return super().pointwise(name, x, out, slope)
        activation_kernels.FORWARD[name](x.reshape(-1), out.reshape(-1), x.dtype.type(slope))
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        if name not in activation_kernels.BACKWARD or not flat(dy, kept):
            return super().pointwise_backward(name, dy, kept, slope)
        activation_kernels.BACKWARD[name](dy.reshape(-1), kept.reshape(-1), dy.dtype.type(slope))
        return dy
