"""The CPU backends: `numpy`, the reference itself, and `numba`, which compiles what takes NumPy many passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupynet.backend import philox, shapes
from cupynet.backend.array import Array
from cupynet.backend.backend import Backend
from cupynet.backend.cpu import conv_pool
from cupynet.backend.cpu.direct_conv import DirectConvolution, passes
from cupynet.backend.fusion import Convolution, MaxPool, Operation, Pair
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.update_rules import Move, Rule
from cupynet.backend.window import Window
from cupynet.errors import ConfigError


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
        from cupynet.backend.cpu.kernels import (
            curves,
            depthwise,
            loops,
            norms,
            random,
            updates,
        )  # numba only where it is used

        self.kernels, self.curves, self.depthwise = loops, curves, depthwise
        self.norms, self.random, self.updates = norms, random, updates

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
        if window.pads or window.dilates or not self._stores(x):
            return super().im2col(x, window)
        shapes.windows("im2col", x.shape, window)
        n, height, width, channels = x.shape
        rows, cols = window.output(height, width)
        columns = self.borrow((n * rows * cols, window.places * channels))
        windows = columns.reshape(n * rows, cols, window.kernel[0], window.kernel[1] * channels)
        self.kernels.im2col(x.reshape(n, height, width * channels), windows, rows, window.stride, channels)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        if window.pads or window.dilates or not self._stores(columns):
            return super().col2im(columns, shape, window)
        shapes.windows("col2im", shape, window)
        n, height, width, channels = shape
        rows, cols = window.output(height, width)
        shapes.shape_of("col2im", "columns", columns, (n * rows * cols, window.places * channels))
        x = self.borrow(shape)
        windows = columns.reshape(n * rows, cols, window.kernel[0], window.kernel[1] * channels)
        self.kernels.col2im(windows, x.reshape(n, height, width * channels), rows, window.stride, channels)
        return x

    def _direct(self, x: Array, weight: Array, window: Window) -> DirectConvolution | None:
        """The convolution without im2col rows; None where NumPy takes it."""
        if x.ndim != 4 or weight.ndim != 4 or not self._stores(x, weight):
            return None
        known = passes((x.shape[1], x.shape[2], x.shape[3]), weight.shape[3], window, x.itemsize)
        return None if known is None else DirectConvolution(self, known)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1
    ) -> tuple[Array, Array]:
        shapes.convolution("conv2d", x.shape, weight, window, groups)
        convolution = self._direct(x, weight, window) if groups == 1 else None
        if convolution is None:
            return super().conv2d(x, weight, bias, window, groups=groups)
        if bias is not None:
            shapes.shape_of("conv2d", "the bias", bias, weight.shape[3:])
        y = self.borrow((len(x), *window.output(*x.shape[1:3]), weight.shape[3]))
        convolution.forward(x, weight, bias, y)
        return y, None

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1,
    ) -> Array | None:  # fmt: skip
        shapes.convolution("conv2d_backward", x.shape, weight, window, groups)
        convolution = self._direct(x, weight, window) if groups == 1 and columns is None else None
        if convolution is None:
            given = dy, columns, x, weight, weight_grad, bias_grad, window
            return super().conv2d_backward(*given, need_dx=need_dx, groups=groups)
        filters = weight.shape[3]
        shapes.shape_of("conv2d_backward", "dy", dy, (len(x), *window.output(*x.shape[1:3]), filters))
        shapes.alike("conv2d_backward", weight, weight_grad)
        if not self._compiles(weight, weight_grad):
            raise ConfigError(f"conv2d_backward: the weight's gradient must be contiguous, in {weight.dtype}")
        dy = np.ascontiguousarray(dy, x.dtype)
        convolution.add_weight_gradient(x, dy, weight_grad)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy.reshape(-1, filters))
        if not need_dx:
            return None
        dx = self.borrow(x.shape)
        convolution.input_gradient(dy, weight, dx)
        return dx

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> tuple[Array, Array]:
        if weight.shape[2] > 1 or not self._stores(x, weight):
            return super()._grouped(x, weight, window, groups)
        filters = weight.reshape(*window.kernel, -1)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), filters.shape[2]))
        self.depthwise.forward(x, filters, y, *self._moves(window)[1:], window.dilation, filters.shape[2] // groups)
        return y, None

    def _grouped_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *,
        need_dx: bool,
    ) -> Array | None:  # fmt: skip
        given = dy, columns, x, weight, weight_grad, window, groups
        if columns is not None or not self._stores(dy, x, weight) or not self._compiles(dy, weight_grad):
            return super()._grouped_backward(*given, need_dx=need_dx)
        filters, grad = (a.reshape(*window.kernel, -1) for a in (weight, weight_grad))
        moves = (*self._moves(window)[1:], window.dilation, filters.shape[2] // groups)
        self.depthwise.weight_gradient(x, dy, grad, *moves)
        if not need_dx:
            return None
        dx = self.borrow(x.shape)
        self.depthwise.input_gradient(dy, filters, dx, *moves)
        return dx

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        if not self._stores(x):
            return super().max_pool2d(x, window)
        shapes.windows("max_pool2d", x.shape, window, pool=True)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        winners = self.borrow(y.shape, self.winner_dtype(window))
        self.kernels.max_pool(x, y, winners, *self._moves(window))
        return y, winners

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        if not self._stores(dy) or not winners.flags.c_contiguous:
            return super().max_pool2d_backward(dy, winners, shape, window)
        shapes.windows("max_pool2d_backward", shape, window, pool=True)
        shapes.shape_of("max_pool2d_backward", "dy", dy, (shape[0], *window.output(*shape[1:3]), shape[3]))
        shapes.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape)
        self.kernels.max_pool_backward(dy, winners, dx, *self._moves(window))
        return dx

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        if not self._stores(x):
            return super().avg_pool2d(x, window)
        shapes.windows("avg_pool2d", x.shape, window, pool=True)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), x.shape[3]))
        self.kernels.avg_pool(x, y, *self._moves(window))
        return y

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        if not self._stores(dy):
            return super().avg_pool2d_backward(dy, shape, window)
        shapes.windows("avg_pool2d_backward", shape, window, pool=True)
        shapes.shape_of("avg_pool2d_backward", "dy", dy, (shape[0], *window.output(*shape[1:3]), shape[3]))
        dx = self.borrow(shape)
        self.kernels.avg_pool_backward(dy, dx, *self._moves(window))
        return dx

    @staticmethod
    def _moves(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Kernel, stride, and the zeros (above, left of) images, as kernels are told them."""
        (above, _), (left, _) = window.padding
        return window.kernel, window.stride, (above, left)

    def fused_pair(self, first: Operation, second: Operation) -> Pair | None:
        fuse = FUSED.get((type(first), type(second)))
        return None if fuse is None else fuse(self, first, second)

    def relu_backward(self, dy: Array, y: Array) -> Array:
        if not self._stores(dy, y) or dy.shape != y.shape:
            return super().relu_backward(dy, y)
        self.kernels.relu_backward(dy.reshape(-1), y.reshape(-1))
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        if not self._stores(x, out) or x.shape != out.shape or name not in self.curves.FORWARD:
            return super().pointwise(name, x, out, slope)
        self.curves.FORWARD[name](x.reshape(-1), out.reshape(-1), x.dtype.type(slope))
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        if not self._stores(dy, kept) or dy.shape != kept.shape or name not in self.curves.BACKWARD:
            return super().pointwise_backward(name, dy, kept, slope)
        self.curves.BACKWARD[name](dy.reshape(-1), kept.reshape(-1), dy.dtype.type(slope))
        return dy

    def _normalises(self, x: Array, *vectors: Array) -> bool:
        """Whether compiled code takes these activations and vectors of their channels; that they fit is checked."""
        shapes.channels("normalisation", x, *vectors)
        return self._stores(x, *vectors)

    def channel_moments(self, x: Array) -> Array:
        if not self._normalises(x):
            return super().channel_moments(x)
        moments = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        self.norms.channel_moments(x.reshape(-1, x.shape[-1]), moments)
        return moments

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool
    ) -> Array:
        if not self._normalises(x, mean, variance, scale, shift):
            return super().normalize(x, mean, variance, scale, shift, epsilon, relu=relu)
        y, factor = self.borrow(x.shape), scale / np.sqrt(variance + epsilon)
        rows = x.shape[-1]
        self.norms.normalize(x.reshape(-1, rows), mean, factor, shift, y.reshape(-1, rows), relu)
        return y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        others = [dy] if y is None else [dy, y]
        shapes.alike("normalize_sums", x, *others)
        if not self._normalises(x, mean, variance) or not self._stores(*others):
            return super().normalize_sums(dy, x, y, mean, variance, epsilon)
        sums, flat = self.borrow((2, x.shape[-1]), self.policy.accumulate), (-1, x.shape[-1])
        if y is None:
            self.norms.normalize_sums(dy.reshape(flat), x.reshape(flat), mean, sums)
        else:
            self.norms.normalize_relu_sums(dy.reshape(flat), x.reshape(flat), y.reshape(flat), mean, sums)
        sums[1] /= np.sqrt(variance + epsilon)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float, epsilon: float
    ) -> Array:
        shapes.alike("normalize_backward", dy, x)
        shapes.shape_of("normalize_backward", "sums", sums, (2, x.shape[-1]))
        if not self._normalises(x, mean, variance, scale) or not self._stores(dy, sums):
            return super().normalize_backward(dy, x, mean, variance, scale, sums, count, epsilon)
        inverse, flat = 1 / np.sqrt(variance + epsilon), (-1, x.shape[-1])
        factor = scale * inverse
        slope, offset = factor * inverse * sums[1] * (1 / count), factor * sums[0] * (1 / count)
        self.norms.normalize_backward(dy.reshape(flat), x.reshape(flat), mean, factor, slope, offset)
        return dy

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        if not self._normalises(x, scale, shift):
            return super().normalize_rows(x, scale, shift, epsilon)
        y, moments = self.borrow(x.shape), self.borrow((len(x), 2), self.policy.accumulate)
        self.norms.normalize_rows(x, scale, shift, x.dtype.type(epsilon), y, moments)
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        shapes.alike("normalize_rows_backward", dy, x)
        shapes.shape_of("normalize_rows_backward", "moments", moments, (len(x), 2))
        if not self._normalises(x, scale, scale_grad, shift_grad) or not self._stores(dy, moments):
            return super().normalize_rows_backward(dy, x, moments, scale, scale_grad, shift_grad, need_dx=need_dx)
        self.norms.normalize_rows_backward(dy, x, moments, scale, scale_grad, shift_grad, need_dx)
        return dy if need_dx else None

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        if not self._stores(x) or not x.size or (out is not None and not self._stores(out)):
            return super().dropout(x, samples, epoch, key, rate, out)
        out = self.borrow(x.shape) if out is None else out
        shapes.alike("dropout", x, out)
        shapes.shape_of("dropout", "samples", samples, x.shape[:1])
        flat, samples = (len(x), -1), np.ascontiguousarray(samples, np.int64)
        draw = (
            int(np.reshape(epoch, -1)[0]),
            key & philox.MASK,
            key >> 32,
            philox.dropped_below(rate),
            x.dtype.type(1 / (1 - rate)),
        )
        self.random.dropout(x.reshape(flat), out.reshape(flat), samples, *draw)
        return out

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        shapes.alike("mean_in_place", *parts)
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

    def move_weights(
        self, rule: Rule, weight: Array, grad: Array, states: Sequence[Array], move: Move, stored: Array | None = None
    ) -> None:
        shapes.alike(rule.name, weight, grad, *states)
        if not self._compiles(weight, grad, *states):
            return super().move_weights(rule, weight, grad, states, move, stored)
        numbers = tuple(map(weight.dtype.type, move.in_order()))
        self.updates.UPDATES[rule.name](weight, grad, *states, numbers)
        if stored is not None and rule.moves:
            self.convert(weight, stored)


# What is faster as one operation here, by what the first and the second are.
FUSED: dict[tuple[type, type], Callable[[Backend, Any, Any], Pair | None]] = {
    (Convolution, MaxPool): conv_pool.fuse,
}
