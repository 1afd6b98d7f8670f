from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cuda.conv_pool import CudaConvPool
from cupynet.backend.cuda.graph_capture import Recorder
from cupynet.backend.cuda.norm import CudaNorm
from cupynet.backend.cuda.transfer import CudaBatches
from cupynet.backend.cuda.update import CudaUpdate
from cupynet.backend.reference.activation import NAMES
from cupynet.backend.reference.loss import has_weights


class CupyBackend(CudaBatches, CudaConvPool, CudaNorm, CudaUpdate, Backend):
    """Operations on one GPU (see `CudaDevice`). An out-of-range label makes the loss NaN."""

    def recorder(self) -> Recorder:
        return Recorder(self)

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

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        out = self.borrow(x.shape) if out is None else out
        size = x.size // max(len(x), 1)
        epoch_array = self.asarray(np.full(1, epoch, np.int64)) if isinstance(epoch, int) else epoch
        parameters = key & philox.MASK, key >> 32, philox.dropped_below(rate), 1 / (1 - rate)
        arguments = x, out, self.asarray(samples), epoch_array, *parameters, len(x), size
        self.kernels.images(f"dropout_{self._kind}", len(x), -(-size // 4), *arguments)
        return out

    def hits(self, scores: Array, labels: Array) -> Array:
        if "hits" not in self._totals:
            self._totals["hits"] = self.allocate((), np.int64)
        arguments = scores, *self._given(labels), self._totals["hits"], *scores.shape, _columns(labels, scores)
        self.kernels.launch(f"count_hits_{self._kind}", (1,), (self.kernels.threads,), *arguments)
        return self._totals["hits"]

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        class_weights = None if weights is None else self._constants(weights)
        if labels.ndim == 2:
            labels_and_weights, sizes = (self.asarray(labels, np.float32), class_weights), (_columns(labels, logits),)
            return self._loss("soft_cross_entropy", logits, labels_and_weights, smoothing, len(logits), sizes)
        labels_and_weights = self.asarray(labels, np.int64), class_weights
        return self._loss("softmax_cross_entropy", logits, labels_and_weights, smoothing, len(logits))

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        sizes = (_columns(labels, prediction),)
        return self._loss(f"{kind}_loss", prediction, self._given(labels), parameter, prediction.size, sizes)

    def _given(self, labels: Array) -> tuple[Array | None, Array | None]:
        return (self.asarray(labels, np.int64), None) if labels.ndim == 1 else (None, self.asarray(labels, np.float32))

    def _loss(
        self, name: str, prediction: Array, labels: tuple[Any, ...], parameter: float, count: int, sizes: Any = ()
    ) -> tuple[Array, Array]:
        """Launch a loss kernel. Return losses (N,), and the scaled gradient (N, O) of the mean of `count` values."""
        n, outputs = prediction.shape
        if n not in self._losses:  # never freed, because captured steps write to it
            self._losses[n] = self.allocate((n,), self.policy.accumulate)
        losses = self._losses[n]
        gradient = self.borrow(prediction.shape)
        scale = (self.loss_scale if self.controls is None else 1) / max(count, 1)
        arguments = prediction, *labels, losses, gradient, parameter, scale, self.controls, n, outputs, *sizes
        self.kernels.rows(f"{name}_{self._kind}", n, outputs, *arguments)
        return losses, gradient


def _columns(labels: Array, outputs: Array) -> int:
    """Return the number of columns of targets (N, O) or (N, O + 1); 0 for class indices."""
    return outputs.shape[1] + has_weights(labels, outputs.shape[1]) if labels.ndim == 2 else 0
