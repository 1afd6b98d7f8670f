"""Losses on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.device import CudaDevice
from cupynet.backend.reference.loss import LossOps


class CudaLoss(CudaDevice, LossOps):
    """See `LossOps`. A label that is not a class makes its loss NaN: the host does not wait to check."""

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        own = None if weights is None else self._constants(weights)
        return self._loss("softmax_cross_entropy", logits, labels, (own,), smoothing, len(logits))

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        return self._loss(f"{kind}_loss", prediction, labels, (), parameter, prediction.size)

    def _loss(
        self, name: str, prediction: Array, labels: Array, more: tuple[Any, ...], parameter: float, count: int
    ) -> tuple[Array, Array]:
        """Return the losses (N,) and the gradient (N, O) from a kernel. count: number of values in the mean."""
        n, outputs = prediction.shape
        labels = self.asarray(labels, np.int64)
        if n not in self._losses:  # never freed: a captured step writes to it
            self._losses[n] = self.allocate((n,), self.policy.accumulate)
        losses = self._losses[n]
        gradient = self.borrow(prediction.shape)
        scale = (self.loss_scale if self.controls is None else 1) / max(count, 1)
        arguments = prediction, labels, *more, losses, gradient, parameter, scale, self.controls, n, outputs
        self.kernels.rows(f"{name}_{self._kind}", n, outputs, *arguments)
        return losses, gradient
