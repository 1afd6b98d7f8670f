"""Convolution, bias, activation and max-pool on the GPU: a product, then the other three in one pass.

The product is returned to the workspace at once; the im2col rows and the winners are saved. A window whose winner is
zeroed by ReLU is recorded as having none, so the backward pass reads neither the activation nor its output
(kernels/pool.cu).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynet.backend.array import Array
from cupynet.backend.fusion import Convolution, FusedPair, Weights
from cupynet.backend.window import Window

if TYPE_CHECKING:
    from cupynet.backend.cuda.backend import CupyBackend


class ConvPool(FusedPair):
    """One convolution, its activation and its pool, for one image size; the identity and ReLU are applied here."""

    def __init__(self, backend: CupyBackend, first: Convolution, pool: Window) -> None:
        self.backend, self.conv, self.pool = backend, first, pool
        self.relu = self.activates = first.activation == "relu"
        self.convolved = first.window.output(*first.image[:2])  # (rows, cols) before the pool

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """(N, H, W, C) -> (N, H', W', O); saved are the winners and the im2col rows."""
        backend, (weight, bias) = self.backend, weights
        columns = backend.im2col(x, self.conv.window)
        product = backend.matmul(columns, weight.reshape(-1, self.conv.filters))
        raw = product.reshape(len(x), *self.convolved, self.conv.filters)
        y, winners = backend._pool(raw, bias, self.pool, relu=self.relu)
        backend.give_back(product)
        return y, (winners, columns)

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        backend, (weight, _), (weight_grad, bias_grad), (winners, columns) = self.backend, weights, grads, saved
        through = backend.max_pool2d_backward(dy, winners, (len(x), *self.convolved, self.conv.filters), self.pool)
        dx = backend.conv2d_backward(
            through, columns, x, weight, weight_grad, bias_grad, self.conv.window, need_dx=need_dx
        )
        backend.give_back(through)
        return dx
