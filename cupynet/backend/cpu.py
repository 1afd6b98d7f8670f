"""The CPU backends: `numpy`, the reference as it stands, and `numba`, which compiles what takes NumPy many passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cupynet.backend import checks, convpool
from cupynet.backend.array import Array
from cupynet.backend.base import Backend
from cupynet.backend.pairs import Convolution, MaxPool, Operation, Pair
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.window import Window


class NumpyBackend(Backend):
    """The reference operations on NumPy arrays."""

    name = "numpy"
    xp = np

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        super().__init__(DtypePolicy.of(dtype), device)

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array that starts on a cache line, as 64-byte vector loads like it."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        raw = np.empty(nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + nbytes].view(dtype).reshape(shape)

    def address(self, array: Array) -> int:
        return int(array.__array_interface__["data"][0])

    def to_host(self, array: Array) -> Any:
        return array


class NumbaBackend(NumpyBackend):
    """Compiled loops (`kernels/`) where NumPy needs several passes over memory; products stay with BLAS.

    The kernels read and write float and double, trust the shapes they are given and take contiguous arrays alone: each
    operation checks the shapes, and leaves arrays of another kind to NumPy. Under `half` a fused convolution works on
    copies in float; the other operations that touch stored activations are NumPy's.
    """

    name = "numba"

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        super().__init__(dtype, device)
        from cupynet.backend.kernels import loops  # numba is imported only where it is used

        self.kernels = loops

    def _compiles(self, *arrays: Array) -> bool:
        """Whether compiled code takes these: contiguous, and all in one precision. NumPy takes the others."""
        return all(array.flags.c_contiguous and array.dtype == arrays[0].dtype for array in arrays)

    def _stores(self, *arrays: Array) -> bool:
        """Whether compiled code takes these activations: contiguous, and stored in the compute precision."""
        return self.policy.compute == self.policy.storage == arrays[0].dtype and self._compiles(*arrays)

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        if not self._compiles(grad, dy) or grad.shape != dy.shape[1:]:
            return super()._add_column_sums(grad, dy)
        self.kernels.add_column_sums(dy, grad)

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # compiled code reads anywhere
            raise IndexError(f"samples {samples.min()} to {samples.max()}: there are {len(images)} images")
        whole = samples.ndim == 1 and samples.dtype.kind in "iu" and samples.size and images.size
        halved = self.policy.compute != self.policy.storage
        whole = whole and len(pixels.scale) in (1, images.shape[-1])  # NumPy says what is wrong with another number
        if halved or not whole or images.dtype != np.uint8 or not images.flags.c_contiguous:
            return super().load_images(images, samples, pixels)
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows, wide = images.reshape(len(images), -1), self.policy.storage.type
        rows.flags.writeable = False  # of this view: files are mapped read-only, and both kinds run the same code
        target = batch.reshape(len(samples), -1)
        if len(pixels.scale) == 1:
            self.kernels.gather_scale(rows, samples, wide(pixels.scale[0]), wide(pixels.shift[0]), target)
        else:
            repeats = rows.shape[1] // len(pixels.scale)  # tables of a whole image: the loop has no inner one
            scale, shift = (np.tile(np.array(each, wide), repeats) for each in (pixels.scale, pixels.shift))
            self.kernels.gather_scale_each(rows, samples, scale, shift, target)
        return batch

    def im2col(self, x: Array, window: Window) -> Array:
        if window.pads or not self._stores(x):
            return super().im2col(x, window)
        checks.windows("im2col", x.shape, window)
        n, height, width, channels = x.shape
        rows, cols = window.output(height, width)
        columns = self.borrow((n * rows * cols, window.places * channels))
        windows = columns.reshape(n * rows, cols, window.kernel[0], window.kernel[1] * channels)
        self.kernels.im2col(x.reshape(n, height, width * channels), windows, rows, window.stride, channels)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        if window.pads or not self._stores(columns):
            return super().col2im(columns, shape, window)
        checks.windows("col2im", shape, window)
        n, height, width, channels = shape
        rows, cols = window.output(height, width)
        checks.shape_of("col2im", "columns", columns, (n * rows * cols, window.places * channels))
        x = self.borrow(shape)
        windows = columns.reshape(n * rows, cols, window.kernel[0], window.kernel[1] * channels)
        self.kernels.col2im(windows, x.reshape(n, height, width * channels), rows, window.stride, channels)
        return x

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        if not self._stores(x):
            return super().max_pool2d(x, window)
        checks.windows("max_pool2d", x.shape, window, pads=False)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        winners = self.borrow(y.shape, self.winner_dtype(window))
        self.kernels.max_pool(x, y, winners, window.kernel, window.stride)
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        if not self._stores(dy) or not winners.flags.c_contiguous:
            return super().max_pool2d_backward(dy, winners, shape, window)
        checks.windows("max_pool2d_backward", shape, window, pads=False)
        checks.shape_of("max_pool2d_backward", "dy", dy, (shape[0], *window.output(*shape[1:3]), shape[3]))
        checks.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape)
        self.kernels.max_pool_backward(dy, winners, dx, window.kernel, window.stride)
        return dx

    def fused_pair(self, first: Operation, second: Operation) -> Pair | None:
        fuse = FUSED.get((type(first), type(second)))
        return None if fuse is None else fuse(self, first, second)

    def relu_backward(self, dy: Array, y: Array) -> Array:
        if not self._stores(dy, y) or dy.shape != y.shape:
            return super().relu_backward(dy, y)
        self.kernels.relu_backward(dy.reshape(-1), y.reshape(-1))
        return dy

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        checks.alike("mean_in_place", *parts)
        small = parts[0].dtype == np.float16  # no compiled code for these: NumPy's takes them
        if small or not self._compiles(*parts) or len(parts) != len(shares):
            return super().mean_in_place(parts, shares)
        self.kernels.mean_in_place(tuple(part.reshape(-1) for part in parts), np.array(shares, np.float64))

    def squared_norm(self, grad: Array) -> Array:
        if not self._compiles(grad):
            return super().squared_norm(grad)
        return grad.dtype.type(self.kernels.squared_norm(grad.reshape(-1)))

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        if not self._compiles(grad):
            return super().clip_norm(grad, squared_norm, largest)
        real = grad.dtype.type
        self.kernels.clip_norm(grad.reshape(-1), real(squared_norm), real(largest))

    def sgd_update(
        self, weight: Array, grad: Array, learning_rate: float, l2: float, grad_scale: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        checks.alike("sgd_update", weight, grad)
        if not self._compiles(weight, grad):
            return super().sgd_update(weight, grad, learning_rate, l2, grad_scale, stored)
        real = weight.dtype.type
        self.kernels.sgd_update(weight, grad, real(learning_rate), real(l2), real(grad_scale))
        if stored is not None:
            self.convert(weight, stored)

    def momentum_update(
        self, weight: Array, velocity: Array, grad: Array, learning_rate: float, momentum: float, l2: float,
        grad_scale: float, nesterov: bool, stored: Array | None = None,
    ) -> None:  # fmt: skip
        checks.alike("momentum_update", weight, velocity, grad)
        if not self._compiles(weight, velocity, grad):
            factors = (learning_rate, momentum, l2, grad_scale)
            return super().momentum_update(weight, velocity, grad, *factors, nesterov, stored)
        real = weight.dtype.type
        factors = (real(learning_rate), real(momentum), real(l2), real(grad_scale))
        self.kernels.momentum_update(weight, velocity, grad, *factors, nesterov)
        if stored is not None:
            self.convert(weight, stored)


# What is faster as one operation here, by what the first and the second are.
FUSED: dict[tuple[type, type], Callable[[Backend, Any, Any], Pair | None]] = {
    (Convolution, MaxPool): convpool.fuse,
}
