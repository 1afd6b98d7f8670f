"""Batch and layer normalization on the CPU, compiled."""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.activation import NumbaActivation
from cupynet.backend.cpu.kernels import norm as norm_kernels
from cupynet.backend.reference.norm import NormOps


class NumbaNorm(NumbaActivation, NormOps):
    """See `NormOps`."""

    def channel_moments(self, x: Array) -> Array:
        moments = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        norm_kernels.channel_moments(x.reshape(-1, x.shape[-1]), moments)
        return moments

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool
    ) -> Array:
        y, factor = self.borrow(x.shape), scale / np.sqrt(variance + epsilon)
        rows = x.shape[-1]
        norm_kernels.normalize(x.reshape(-1, rows), mean, factor, shift, y.reshape(-1, rows), relu)
        return y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        sums, flat = self.borrow((2, x.shape[-1]), self.policy.accumulate), (-1, x.shape[-1])
        output = dy if y is None else y
        arrays = dy.reshape(flat), x.reshape(flat), output.reshape(flat)
        norm_kernels.normalize_sums(*arrays, mean, sums, y is not None)
        sums[1] /= np.sqrt(variance + epsilon)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float, epsilon: float
    ) -> Array:
        inverse, flat = 1 / np.sqrt(variance + epsilon), (-1, x.shape[-1])
        factor = scale * inverse
        slope, offset = factor * inverse * sums[1] * (1 / count), factor * sums[0] * (1 / count)
        norm_kernels.normalize_backward(dy.reshape(flat), x.reshape(flat), mean, factor, slope, offset)
        return dy

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        y, moments = self.borrow(x.shape), self.borrow((len(x), 2), self.policy.accumulate)
        norm_kernels.normalize_rows(x, scale, shift, x.dtype.type(epsilon), y, moments)
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        norm_kernels.normalize_rows_backward(dy, x, moments, scale, scale_grad, shift_grad, need_dx)
        return dy if need_dx else None
