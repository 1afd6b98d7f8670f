"""Losses that compare each output by itself with a target of 0 or 1, as array code: their values and slopes.

Each is (xp, outputs, targets, parameter) -> (values, slopes), all (N, O). `Backend.target_loss` takes them by name; its
kernels have the same names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from cupynet.backend.array import Array


def _squared(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    return (z - t) ** 2, 2 * (z - t)


def _logistic(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    """-t · log s - (1 - t) · log(1 - s) with s = 1 / (1 + exp(-z)), so that nothing overflows."""
    e = xp.exp(-abs(z))
    return xp.maximum(z, 0) - z * t + xp.log1p(e), xp.where(z >= 0, 1 / (1 + e), e / (1 + e)) - t


def _hinge(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    sign = 2 * t - 1
    margin = 1 - sign * z
    return xp.maximum(margin, 0), xp.where(margin > 0, -sign, xp.zeros_like(sign))


def _huber(xp: ModuleType, z: Array, t: Array, parameter: float) -> tuple[Array, Array]:
    off = z - t
    size = abs(off)
    value = xp.where(size <= parameter, off * off / 2, parameter * (size - parameter / 2))
    return value, xp.clip(off, -parameter, parameter)


TARGET_LOSSES: dict[str, Callable[[ModuleType, Array, Array, float], tuple[Array, Array]]] = {
    "squared": _squared,
    "logistic": _logistic,
    "hinge": _hinge,
    "huber": _huber,
}
