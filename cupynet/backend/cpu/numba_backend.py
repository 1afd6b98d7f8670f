"""The `numba` backend: compiled loops for operations that would take NumPy several passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from cupynet.backend import philox
from cupynet.backend.array import Array, Subset
from cupynet.backend.cpu import winograd_pool
from cupynet.backend.cpu.conv import window_numbers
from cupynet.backend.cpu.kernels import activation as activation_kernels
from cupynet.backend.cpu.kernels import dense as dense_kernels
from cupynet.backend.cpu.kernels import dropout as dropout_kernels
from cupynet.backend.cpu.kernels import images as images_kernels
from cupynet.backend.cpu.kernels import norm as norm_kernels
from cupynet.backend.cpu.kernels import pool as pool_kernels
from cupynet.backend.cpu.kernels import subnormals
from cupynet.backend.cpu.kernels import update as update_kernels
from cupynet.backend.cpu.kernels.narrow import bits
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cpu.small_products import SmallProducts
from cupynet.backend.fusion import Convolution, FusedPair
from cupynet.backend.transfer import FRACTIONS, PixelScale
from cupynet.backend.update_rules import Rule, UpdateScalars
from cupynet.backend.window import Window

ROW = 256  # target number of values in a row: several SIMD vectors


class NumbaBackend(SmallProducts, NumpyBackend):
    """Backend with compiled kernels, which convert 16-bit types to float for computations (`kernels/narrow.py`)."""

    name = "numba"

    def subnormals_as_zero(self) -> AbstractContextManager[Any]:
        return subnormals.as_zero()

    def fused_pair(self, first: Convolution, pool: Window) -> FusedPair | None:
        return winograd_pool.fuse(self, first, pool)

    def convert(self, source: Array, target: Array) -> None:
        if not flat(source, target):
            return super().convert(source, target)
        update_kernels.convert(bits(source.reshape(-1)), bits(target.reshape(-1)))

    def add(self, a: Array, b: Array, out: Array) -> Array:
        if out.itemsize > 2 or not flat(a, b, out):
            return super().add(a, b, out)
        if out is not a:
            out[...] = a
        update_kernels.accumulate(bits(out.reshape(-1)), bits(b.reshape(-1)))
        return out

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        if any(part.shape != parts[0].shape for part in parts):
            return super().mean_in_place(parts, shares)
        update_kernels.mean_in_place(tuple(bits(part.reshape(-1)) for part in parts), np.array(shares, np.float64))

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
        if scalars.norm is not None:
            self.clip_norm(grad, *scalars.norm)
        numbers = tuple(map(weight.dtype.type, scalars.in_order()))
        update_kernels.UPDATES[rule.name](weight, grad, *states, numbers)
        if stored is not None and rule.moves:
            self.convert(weight, stored)

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # the kernel does not check bounds
            raise IndexError(f"samples {samples.min()} to {samples.max()} are out of bounds for {len(images)} images")
        while isinstance(images, Subset):
            images, samples = images.base, images.rows[samples]
        as_expected = images.dtype == np.uint8 and images.flags.c_contiguous
        if not samples.size or not as_expected or len(pixels.scale) not in (1, images.shape[-1]):
            return super().load_images(images, samples, pixels)
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows, wide = images.reshape(len(images), -1), self.policy.accumulate.type
        rows.flags.writeable = False  # like memory-mapped files, so that both use the same compiled kernel
        target = batch.reshape(len(samples), -1)
        repeats = rows.shape[1] // len(pixels.scale)  # to cover the whole image, so that the kernel has a single loop
        scale, shift = (np.tile(np.array(numbers, wide), repeats) for numbers in (pixels.scale, pixels.shift))
        images_kernels.gather_scale(rows, samples, scale, shift, bits(target))
        return batch

    def dense(self, x: Array, weight: Array, bias: Array | None, *, relu: bool = False) -> Array:
        if bias is None or x.itemsize > 2:
            return super().dense(x, weight, bias, relu=relu)
        y = self.borrow((len(x), weight.shape[1]))
        dense_kernels.add_bias(self._product(x, weight), bits(bias), bits(y))
        return self.relu(y) if relu else y

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        dense_kernels.add_column_sums(bits(dy), grad)

    def relu(self, x: Array) -> Array:
        if x.itemsize > 2 or not flat(x):
            return super().relu(x)
        activation_kernels.relu(bits(x.reshape(-1)))
        return x

    def hits(self, scores: Array, labels: Array) -> Array:
        return dense_kernels.count_hits(bits(scores), labels) if labels.ndim == 1 else super().hits(scores, labels)

    def relu_backward(self, dy: Array, y: Array) -> Array:
        if not flat(dy, y):
            return super().relu_backward(dy, y)
        activation_kernels.relu_backward(bits(dy.reshape(-1)), bits(y.reshape(-1)))
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        if name not in activation_kernels.FORWARD or not flat(x, out):
            return super().pointwise(name, x, out, slope)
        flat_x, flat_out = (bits(array.reshape(-1)) for array in (x, out))
        activation_kernels.FORWARD[name](flat_x, flat_out, out is not x, self.policy.compute.type(slope))
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        if name not in activation_kernels.BACKWARD or not flat(dy, kept):
            return super().pointwise_backward(name, dy, kept, slope)
        activation_kernels.BACKWARD[name](bits(dy.reshape(-1)), bits(kept.reshape(-1)), self.policy.compute.type(slope))
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
            self.policy.compute.type(1 / (1 - rate)),
        )
        dropout_kernels.dropout(bits(x.reshape(rows)), bits(out.reshape(rows)), out is not x, samples, *draw)
        return out

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        indices = self.borrow(y.shape, window.index_dtype)
        pool_kernels.max_pool(bits(x), bits(y), indices, *window_numbers(window))
        return y, indices

    def max_pool2d_backward(self, dy: Array, indices: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.max_pool_backward(bits(dy), indices, bits(dx), *window_numbers(window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        window.check(x.shape)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        pool_kernels.avg_pool(bits(x), bits(y), *window_numbers(window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        dx = self.borrow(shape)
        pool_kernels.avg_pool_backward(bits(dy), bits(dx), *window_numbers(window))
        return dx

    def channel_moments(self, x: Array) -> Array:
        moments = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        norm_kernels.channel_moments(bits(x.reshape(_wide_rows(x))), moments)
        return moments

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool,
        around: Array | None = None,
    ) -> Array:  # fmt: skip
        y, rows = self.borrow(x.shape), _wide_rows(x)
        affine = mean, scale / np.sqrt(variance + epsilon), shift.astype(mean.dtype, copy=False)
        mean, factor, shift = _repeated(rows, *affine)
        arrays = bits(x.reshape(rows)), mean, factor, shift, bits(y.reshape(rows)), relu
        if around is None:
            norm_kernels.normalize(*arrays)
        else:
            norm_kernels.normalize_add(*arrays, bits(around.reshape(rows)))
        return y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        sums, rows = self.borrow((2, x.shape[-1]), self.policy.accumulate), _wide_rows(x)
        output = dy if y is None else y
        arrays = bits(dy.reshape(rows)), bits(x.reshape(rows)), bits(output.reshape(rows))
        norm_kernels.normalize_sums(*arrays, _repeated(rows, mean)[0], sums, y is not None)
        sums[1] /= np.sqrt(variance + epsilon)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float,
        epsilon: float, out: Array | None = None,
    ) -> Array:  # fmt: skip
        inverse, rows = 1 / np.sqrt(variance + epsilon), _wide_rows(x)
        factor = scale * inverse
        slope, offset = factor * inverse * sums[1] * (1 / count), factor * sums[0] * (1 / count)
        numbers = _repeated(rows, mean, factor, slope, offset)
        dx = dy if out is None else out
        arrays = bits(dy.reshape(rows)), bits(x.reshape(rows)), bits(dx.reshape(rows))
        norm_kernels.normalize_backward(*arrays, out is not None, *numbers)
        return dx

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        y, moments = self.borrow(x.shape), self.borrow((len(x), 2), self.policy.accumulate)
        affine = bits(scale), bits(shift), moments.dtype.type(epsilon)
        norm_kernels.normalize_rows(bits(x), *affine, bits(y), moments)
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        norm_kernels.normalize_rows_backward(bits(dy), bits(x), moments, bits(scale), scale_grad, shift_grad, need_dx)
        return dy if need_dx else None


def flat(*arrays: Array) -> bool:
    """Return True if kernels can process the arrays as flat vectors: C-contiguous arrays of equal shape."""
    return all(array.shape == arrays[0].shape and array.flags.c_contiguous for array in arrays)


def _wide_rows(x: Array) -> tuple[int, int]:
    """Return the shape in which kernels process x (..., C): equal rows of as many pixels as fit into `ROW`."""
    channels = x.shape[-1]
    pixels = x.size // channels
    pixels_per_row = max(k for k in range(1, max(ROW // channels, 1) + 1) if pixels % k == 0)
    return pixels // pixels_per_row, pixels_per_row * channels


def _repeated(rows: tuple[int, int], *numbers: Array) -> list[Array]:
    # several times as fast as np.tile
    return [vector[None].repeat(rows[1] // len(vector), axis=0).reshape(-1) for vector in numbers]
