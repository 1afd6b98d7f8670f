"""Convolution, bias, activation and max-pool on the GPU: a product, then the other three in one pass.

The raw product is given back at once; what is kept is the im2col rows and the winners. A winner that ReLU has closed is
noted as no place at all, so the backward pass reads neither the activation nor its output (kernels/pool.cu).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.fusion import Convolution, FusedPair, MaxPool, Weights
from cupynet.core.errors import ConfigError

NO_PLACE = 255  # in 8 bits: windows of fewer places can say that ReLU closed


class ConvPool(FusedPair):
    """One convolution, its activation and its pool, for one size of image.

    Args:
        backend: computes, and lends the buffers.
        pooled: the pool of images plus bias and its winners, `CupyBackend._pool`.
        first, second: the two operations; the activation of the first is applied here.
    """

    def __init__(
        self, backend: Backend, pooled: Callable[..., tuple[Array, Array]], first: Convolution, second: MaxPool
    ) -> None:
        self.backend, self.conv, self.pool, self._pooled = backend, first, second.window, pooled
        self.relu = first.activation == "relu"
        self.activates = self.relu
        few = self.pool.places <= NO_PLACE
        self.numbers = np.dtype(np.uint8 if few else np.int32) if self.relu else backend.winner_dtype(self.pool)
        self.convolved = first.window.output(*first.image[:2])  # (rows, cols) before the pool

    def _check(self, x: Array, weight: Array | None, bias: Array | None) -> None:
        """Refuse arrays that the kernels would read beyond the end of."""
        name, filters = "conv2d and max_pool2d", self.conv.filters
        shapes.shape_of(name, "the batch of images", x, (len(x), *self.conv.image))
        shapes.shape_of(name, "the weight", weight, (*self.conv.window.kernel, self.conv.image[2], filters))
        if bias is not None:
            shapes.shape_of(name, "the bias", bias, (filters,))

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """(N, H, W, C) -> (N, H', W', O); saved are the winners and the im2col rows."""
        weight, bias = weights
        self._check(x, weight, bias)
        backend = self.backend
        columns = backend.im2col(x, self.conv.window)
        matrix: Array = None if weight is None else weight.reshape(-1, self.conv.filters)  # checked above
        product = backend.matmul(columns, matrix)
        raw = product.reshape(len(x), *self.convolved, self.conv.filters)
        y, winners = self._pooled(raw, bias, self.pool, self.numbers, relu=self.relu)
        backend.give_back(product)
        return y, (winners, columns)

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        (weight, bias), (weight_grad, bias_grad), (winners, columns) = weights, grads, saved
        self._check(x, weight, bias)
        if weight_grad is None:
            raise ConfigError("conv2d and max_pool2d: there is no gradient to add to")
        shapes.alike("conv2d and max_pool2d", weight, weight_grad)
        if bias_grad is not None:
            shapes.shape_of("conv2d and max_pool2d", "the bias's gradient", bias_grad, (self.conv.filters,))
        backend, shape = self.backend, (len(x), *self.convolved, self.conv.filters)
        through = backend.max_pool2d_backward(dy, winners, shape, self.pool)
        dx = backend.conv2d_backward(
            through, columns, x, weight, weight_grad, bias_grad, self.conv.window, need_dx=need_dx
        )
        backend.give_back(through)
        return dx
