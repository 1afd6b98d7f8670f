"""Fused convolution, bias, activation and max pooling on the GPU.

Small patches (few channels, as in the first layer) are convolved directly from the image (kernels/conv_pool.cu). Others
use im2col and cuBLAS, followed by one kernel for bias, activation and pooling. If ReLU zeroes a maximum, its index
refers to no pixel, so the backward pass does not need the activation's output.
"""

from __future__ import annotations

import math

from cupynet.backend.array import Array
from cupynet.backend.cuda.conv import CudaConv
from cupynet.backend.cuda.pool import CudaPool
from cupynet.backend.fusion import Convolution, FusedPair, Weights
from cupynet.backend.window import Window

DIRECT_VALUES = 75  # values in the largest patch that is convolved directly: 5 x 5 with three channels
DIRECT_PARTS = 512  # maximum number of partial sums of a direct weight gradient
TAPS = 5  # weights per thread, as in conv_pool.cu


class CudaConvPool(CudaConv, CudaPool):
    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        return ConvPool(self, first, pool) if first.groups == 1 else None


class ConvPool(FusedPair):
    """Fused convolution, bias, activation (identity or ReLU) and max pooling, for one image size."""

    def __init__(self, backend: CudaConvPool, first: Convolution, pool: Window) -> None:
        self.backend, self.conv, self.pool = backend, first, pool
        self.relu = self.activates = first.activation == "relu"
        self.convolved = first.window.output(*first.image[:2])  # (rows, cols) before pooling
        values, small = first.window.size * first.image[2], pool.size <= 255  # indices fit in 8 bits
        self.direct = values <= DIRECT_VALUES and small and not first.window.dilates

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """Map (N, H, W, C) to (N, H', W', O). Save the indices of the maxima, and the im2col rows unless `direct`."""
        backend, (weight, bias) = self.backend, weights
        if self.direct:
            y = backend.borrow((len(x), *self.pool.output(*self.convolved), self.conv.filters))
            indices = backend.borrow(y.shape, self.pool.index_dtype)
            threads = math.prod(y.shape[1:]) // backend._channels_at_once(self.conv.filters, 4)
            arguments = x, weight, bias, y, indices, *self._geometry(x), int(self.relu)
            backend.kernels.images(f"conv_pool_{backend._kind}", len(x), threads, *arguments)
            return y, (indices,)
        columns = backend.im2col(x, self.conv.window)
        product = backend.matmul(columns, weight.reshape(-1, self.conv.filters))
        raw = product.reshape(len(x), *self.convolved, self.conv.filters)
        y, indices = backend._pool(raw, bias, self.pool, relu=self.relu)
        return y, (indices, columns)

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        backend, weight, indices = self.backend, weights[0], saved[0]
        if self.direct:
            self._add_gradients(dy, indices, x, grads)
            if not need_dx:
                return None
        conv_dy = backend.max_pool2d_backward(dy, indices, (len(x), *self.convolved, self.conv.filters), self.pool)
        if self.direct:
            dx = backend._images_gradient(conv_dy.reshape(-1, self.conv.filters), x.shape, weight, self.conv.window)
        else:
            arguments = conv_dy, saved[1], x, weight, *grads, self.conv.window
            dx = backend.conv2d_backward(*arguments, need_dx=need_dx)
        return dx

    def _add_gradients(self, dy: Array, indices: Array, x: Array, grads: Weights) -> None:
        backend, weight_grad = self.backend, grads[0]
        parts = max(1, min(len(x) * dy.shape[1], DIRECT_PARTS))
        sums = [grad if grad is None else backend.borrow((parts, grad.size), grad.dtype) for grad in grads]
        height, width, channels, filters = weight_grad.shape
        threads = (height * -(-width * channels // TAPS) + 1) * filters
        arguments = x, dy, indices, *sums, *self._geometry(x), parts
        backend.kernels.images(f"conv_pool_weight_{backend._kind}", parts, threads, *arguments)
        for grad, partial in zip(grads, sums, strict=True):
            if grad is not None:
                backend._column_sums(backend._wide, partial, grad.reshape(-1), parts, 1, add=True)

    def _geometry(self, x: Array) -> tuple[int, ...]:
        pool, ((top, _), (left, _)) = self.pool, self.pool.padding
        pooled = pool.output(*self.convolved)
        return (
            *self.backend._geometry(x.shape, self.conv.window),
            *(*pooled, *pool.kernel, *pool.stride, top, left, self.conv.filters),
        )
