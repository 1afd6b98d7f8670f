"""Averages, norms and updates of flat vectors on the CPU, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import update as update_kernels
from cupynet.backend.reference.update import UpdateOps
from cupynet.backend.update_rules import Move, Rule


class NumbaUpdate(UpdateOps):
    """See `UpdateOps`."""

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        if parts[0].dtype == np.float16 or any(part.shape != parts[0].shape for part in parts):  # no half in numba
            return super().mean_in_place(parts, shares)
        update_kernels.mean_in_place(tuple(part.reshape(-1) for part in parts), np.array(shares, np.float64))

    def squared_norm(self, grad: Array) -> Array:
        return grad.dtype.type(update_kernels.squared_norm(grad.reshape(-1)))

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        real = grad.dtype.type
        update_kernels.clip_norm(grad.reshape(-1), real(squared_norm), real(largest))

    def move_weights(
        self, rule: Rule, weight: Array, grad: Array, states: Sequence[Array], move: Move, stored: Array | None = None
    ) -> None:
        same = all(vector.shape == weight.shape for vector in (grad, *states))
        if rule.name not in update_kernels.UPDATES or not same:
            return super().move_weights(rule, weight, grad, states, move, stored)
        numbers = tuple(map(weight.dtype.type, move.in_order()))
        update_kernels.UPDATES[rule.name](weight, grad, *states, numbers)
        if stored is not None and rule.moves:
            self.convert(weight, stored)
