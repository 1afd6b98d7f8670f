"""Activations on the GPU."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cuda.device import CudaDevice
from cupynet.backend.reference.activation import NAMES, ActivationOps


class CudaActivation(CudaDevice, ActivationOps):
    """See `ActivationOps`."""

    def relu(self, x: Array) -> Array:
        self._flat(f"relu_{self._kind}", x.size, x)
        return x

    def relu_backward(self, dy: Array, y: Array) -> Array:
        self._flat(f"relu_backward_{self._kind}", dy.size, dy, y)
        return dy

    def softmax(self, x: Array) -> Array:
        columns = x.shape[-1]
        rows = x.size // max(columns, 1)
        self.kernels.rows(f"softmax_{self._kind}", rows, columns, x, rows, columns)
        return x

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        columns = y.shape[-1]
        rows = y.size // max(columns, 1)
        self.kernels.rows(f"softmax_backward_{self._kind}", rows, columns, dy, y, rows, columns)
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        self._flat(f"pointwise_{self._kind}", x.size, x, out, NAMES.index(name), slope)
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        self._flat(f"pointwise_backward_{self._kind}", dy.size, dy, kept, NAMES.index(name), slope)
        return dy
