"""The backend `numba`: compiled loops for operations that take NumPy several passes over memory. Products use BLAS.

Convolutions are in `conv`, and fused pairs of a convolution and a max-pool in `conv_pool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet.backend import philox
from cupynet.backend.array import Array
from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.conv import NumbaConv, window_numbers
from cupynet.backend.cpu.kernels import activation as activation_kernels
from cupynet.backend.cpu.kernels import dense as dense_kernels
from cupynet.backend.cpu.kernels import dropout as dropout_kernels
from cupynet.backend.cpu.kernels import images as images_kernels
from cupynet.backend.cpu.kernels import norm as norm_kernels
from cupynet.backend.cpu.kernels import pool as pool_kernels
from cupynet.backend.cpu.kernels import update as update_kernels
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.transfer import FRACTIONS, PixelScale
from cupynet.backend.update_rules import Rule, UpdateScalars
from cupynet.backend.window import Window


class Numba16Backend(NumpyBackend):
    """NumPy arrays in 16 bits, which numba cannot compute: only updates and fused pairs (on copies) are compiled."""

    name = "numba"

    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        return conv_pool.fuse(self, first, pool)

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        if parts[0].dtype == np.float16 or any(part.shape != parts[0].shape for part in parts):  # numba has no float16
            return super().mean_in_place(parts, shares)
        update_kernels.mean_in_place(tuple(part.reshape(-1) for part in parts), np.array(shares, np.float64))

    def squared_norm(self, grad: Array) -> Array:
        return grad.dtype.type(update_kernels.squared_norm(grad.reshape(-1)))

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        real = grad.dtype.type
        update_kernels.clip_norm(grad.reshape(-1), real(squared_norm), real(largest))

    def move_weights(
        self,
        rule: Rule,
        weight: Array,
        grad: Array,
        states: Sequence[Array],
        scalars: UpdateScalars,
        stored: Array | None = None,
    ) -> None:
        same = all(vector.shape == weight.shape for vector in (grad, *states))
        if rule.name not in update_kernels.UPDATES or not same:
            return super().move_weights(rule, weight, grad, states, scalars, stored)
        numbers = tuple(map(weight.dtype.type, scalars.in_order()))
        update_kernels.UPDATES[rule.name](weight, grad, *states, numbers)
        if stored is not None and rule.moves:
            self.convert(weight, stored)


class NumbaBackend(NumbaConv, Numba16Backend):
    """NumPy arrays in float or double."""

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # the kernel checks no bounds
            raise IndexError(f"samples {samples.min()} to {samples.max()}: there are {len(images)} images")
        as_expected = images.dtype == np.uint8 and images.flags.c_contiguous
        if not samples.size or not as_expected or len(pixels.scale) not in (1, images.shape[-1]):
            return super().load_images(images, samples, pixels)
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows, wide = images.reshape(len(images), -1), self.policy.storage.type
        rows.flags.writeable = False  # as memory-mapped files are, so that both use the same compiled kernel
        target = batch.reshape(len(samples), -1)
        repeats = rows.shape[1] // len(
            pixels.scale
        )  # repeated for the whole image, so that the kernel has a single loop
        scale, shift = (np.tile(np.array(each, wide), repeats) for each in (pixels.scale, pixels.shift))
        images_kernels.gather_scale(rows, samples, scale, shift, target)
        return batch

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        dense_kernels.add_column_sums(dy, grad)

    def hits(self, scores: Array, labels: Array) -> Array:
        return dense_kernels.count_hits(scores, labels) if labels.ndim == 1 else super().hits(scores, labels)

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

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        out = self.borrow(x.shape) if out is None else out
        rows, samples = (len(x), -1), np.ascontiguousarray(samples, np.int64)
        if not flat(x, out) or samples.shape != x.shape[:1]:
            return super().dropout(x, samples, epoch, key, rate, out)
        draw = (
            int(np.reshape(epoch, -1)[0]),
            key & philox.MASK,
            key >> 32,
            philox.dropped_below(rate),
            x.dtype.type(1 / (1 - rate)),
        )
        dropout_kernels.dropout(x.reshape(rows), out.reshape(rows), samples, *draw)
        return out

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        winners = self.borrow(y.shape, window.place_dtype)
        pool_kernels.max_pool(x, y, winners, *window_numbers(window))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.max_pool_backward(dy, winners, dx, *window_numbers(window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        pool_kernels.avg_pool(x, y, *window_numbers(window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.avg_pool_backward(dy, dx, *window_numbers(window))
        return dx

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
        sums, rows = self.borrow((2, x.shape[-1]), self.policy.accumulate), (-1, x.shape[-1])
        output = dy if y is None else y
        arrays = dy.reshape(rows), x.reshape(rows), output.reshape(rows)
        norm_kernels.normalize_sums(*arrays, mean, sums, y is not None)
        sums[1] /= np.sqrt(variance + epsilon)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float, epsilon: float
    ) -> Array:
        inverse, rows = 1 / np.sqrt(variance + epsilon), (-1, x.shape[-1])
        factor = scale * inverse
        slope, offset = factor * inverse * sums[1] * (1 / count), factor * sums[0] * (1 / count)
        norm_kernels.normalize_backward(dy.reshape(rows), x.reshape(rows), mean, factor, slope, offset)
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


def flat(*arrays: Array) -> bool:
    """Return True if kernels, which check no bounds, can use these arrays as flat vectors: equal shapes, no gaps."""
    return all(array.shape == arrays[0].shape and array.flags.c_contiguous for array in arrays)
