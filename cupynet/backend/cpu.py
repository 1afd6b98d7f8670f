"""The CPU backends: `numpy`, which is the reference as it stands, and `numba`, which compiles what NumPy does in many
passes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.base import Backend, Pad, out_size
from cupynet.backend.convpool import ConvPool
from cupynet.backend.policy import DtypePolicy


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

    The kernels read and write float and double. Under `half` a fused convolution works on copies in float; the other
    operations that touch stored activations are NumPy's.
    """

    name = "numba"

    def __init__(self, dtype: str = "float", device: int = 0) -> None:
        super().__init__(dtype, device)
        from cupynet.backend.kernels import loops  # numba is imported only where it is used

        self.kernels = loops
        self._pairs: dict[Any, ConvPool] = {}
        self.stored_is_computed = self.policy.storage == self.policy.compute

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        if dy.dtype == grad.dtype:
            self.kernels.add_column_sums(dy, grad)
        else:
            super()._add_column_sums(grad, dy)

    def load_images(self, images: Any, samples: Any) -> Array:
        if not self.stored_is_computed:
            return super().load_images(images, samples)
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # compiled code reads anywhere
            raise IndexError(f"samples {samples.min()} to {samples.max()}: there are {len(images)} images")
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        self.kernels.gather_scale(images.reshape(len(images), -1), samples, batch.reshape(len(samples), -1))
        return batch

    def im2col(self, x: Array, kernel: int, stride: int, pad: Pad) -> Array:
        if any(pad) or not self.stored_is_computed:
            return super().im2col(x, kernel, stride, pad)
        n, height, width, channels = x.shape
        rows, cols = out_size(height, kernel, stride, 0, 0), out_size(width, kernel, stride, 0, 0)
        columns = self.borrow((n * rows * cols, kernel * kernel * channels))
        windows = columns.reshape(n * rows, cols, kernel, kernel * channels)
        self.kernels.im2col(x.reshape(n, height, width * channels), windows, rows, stride, channels)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], kernel: int, stride: int, pad: Pad) -> Array:
        if any(pad) or not self.stored_is_computed:
            return super().col2im(columns, shape, kernel, stride, pad)
        n, height, width, channels = shape
        rows, cols = out_size(height, kernel, stride, 0, 0), out_size(width, kernel, stride, 0, 0)
        x = self.borrow(shape)
        windows = columns.reshape(n * rows, cols, kernel, kernel * channels)
        self.kernels.col2im(windows, x.reshape(n, height, width * channels), rows, stride, channels)
        return x

    def max_pool2d(self, x: Array, kernel: int, stride: int) -> tuple[Array, Array]:
        if not self.stored_is_computed:
            return super().max_pool2d(x, kernel, stride)
        n, height, width, channels = x.shape
        rows, cols = out_size(height, kernel, stride, 0, 0), out_size(width, kernel, stride, 0, 0)
        y = self.borrow((n, rows, cols, channels))
        winners = self.borrow((n, rows, cols, channels), self.winner_dtype(kernel))
        self.kernels.max_pool(x, y, winners, kernel, stride)
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], kernel: int, stride: int) -> Array:
        if not self.stored_is_computed:
            return super().max_pool2d_backward(dy, winners, shape, kernel, stride)
        dx = self.borrow(shape)
        self.kernels.max_pool_backward(dy, winners, dx, kernel, stride)
        return dx

    def fuses_conv2d_max_pool2d(self, pool: int, pool_stride: int) -> bool:
        # a window's pixels are computed once each, in registers: windows must not overlap, nor be large
        return 1 < pool <= min(pool_stride, 3)

    def _pair(self, shape: tuple[int, ...], weight_shape: tuple[int, ...], *geometry: Any) -> ConvPool:
        key = (shape[1:3], weight_shape, geometry)
        if key not in self._pairs:
            self._pairs[key] = ConvPool(self, (shape[1], shape[2]), weight_shape, *geometry)
        return self._pairs[key]

    def conv2d_max_pool2d(
        self, x: Array, weight: Array, bias: Array | None, stride: int, pad: Pad, pool: int, pool_stride: int
    ) -> tuple[Array, tuple[Array, ...]]:
        if not self.fuses_conv2d_max_pool2d(pool, pool_stride):
            return super().conv2d_max_pool2d(x, weight, bias, stride, pad, pool, pool_stride)
        pair = self._pair(x.shape, weight.shape, stride, pad, pool, pool_stride)
        wide = self._operand(x)[0]
        images = pair.padded(wide)
        if images is not wide and wide is not x:
            self.give_back(wide)
        filters, offset = self._operand(weight)[0], None if bias is None else self._operand(bias)[0]
        y, winners = pair.forward(images, filters, offset)
        self._drop(filters, weight)
        self._drop(offset, bias)
        return self._stored(y), (winners, images) if images is not x else (winners,)

    def _stored(self, a: Array) -> Array:
        """The borrowed `a` in the storage precision, borrowed."""
        if self.stored_is_computed:
            return a
        stored = self.borrow(a.shape)
        stored[...] = a
        self.give_back(a)
        return stored

    def _drop(self, operand: Array | None, original: Array | None) -> None:
        """Give an operand back that was copied into the compute precision."""
        if operand is not original:
            self.give_back(operand)

    def conv2d_max_pool2d_backward(
        self,
        dy: Array,
        saved: tuple[Array, ...],
        x: Array,
        weight: Array,
        weight_grad: Array,
        bias_grad: Array | None,
        stride: int,
        pad: Pad,
        pool: int,
        pool_stride: int,
        *,
        need_dx: bool,
    ) -> Array | None:
        if not self.fuses_conv2d_max_pool2d(pool, pool_stride):
            return super().conv2d_max_pool2d_backward(
                dy, saved, x, weight, weight_grad, bias_grad, stride, pad, pool, pool_stride, need_dx=need_dx
            )
        pair = self._pair(x.shape, weight.shape, stride, pad, pool, pool_stride)
        by_window = (len(x), -1, weight.shape[3])  # (N, P, O)
        wide, winners = self._operand(dy)[0], saved[0].reshape(by_window)
        gradients = wide.reshape(by_window)
        pair.weight_gradient(gradients, winners, saved[1] if len(saved) > 1 else x, weight_grad)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, gradients.reshape(-1, weight.shape[3]))
        dx = None
        if need_dx:
            filters = self._operand(weight)[0]
            dx = self._stored(pair.input_gradient(gradients, winners, filters, x.shape))
            self._drop(filters, weight)
        self._drop(wide, dy)
        return dx

    def relu_backward(self, dy: Array, y: Array) -> Array:
        if not self.stored_is_computed:
            return super().relu_backward(dy, y)
        self.kernels.relu_backward(dy.reshape(-1), y.reshape(-1))
        return dy

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        self.kernels.mean_in_place(tuple(parts), np.array(shares, np.float64))

    def clip_norm(self, grad: Array, largest: float) -> None:
        self.kernels.clip_norm(grad, grad.dtype.type(largest))

    def sgd_update(self, weight: Array, grad: Array, learning_rate: float, l2: float, grad_scale: float) -> None:
        real = weight.dtype.type
        self.kernels.sgd_update(weight, grad, real(learning_rate), real(l2), real(grad_scale))

    def momentum_update(
        self,
        weight: Array,
        velocity: Array,
        grad: Array,
        learning_rate: float,
        momentum: float,
        l2: float,
        grad_scale: float,
        nesterov: bool,
    ) -> None:
        real = weight.dtype.type
        factors = (real(learning_rate), real(momentum), real(l2), real(grad_scale))
        self.kernels.momentum_update(weight, velocity, grad, *factors, nesterov)
