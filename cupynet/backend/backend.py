"""The reference of every hot operation, written once against an array module (`numpy` or `cupy`).

A faster backend overrides what it does better and falls back to `super()`. Layers call these operations and nothing
else that is heavy. Axis letters: N batch, H W image, C channels in, O channels out, K kernel, F features, P parameters.

Ownership, for every operation: what is returned was borrowed from `workspace`; arguments stay the caller's, except for
the one of an in-place operation, which says so. Arrays are C-contiguous, activations in `policy.storage`. Gradients of
weights are *added*, in `policy.accumulate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend import philox, shapes
from cupynet.backend.array import Array
from cupynet.backend.environment import memory
from cupynet.backend.failure import Failure
from cupynet.backend.fusion import Operation, Pair
from cupynet.backend.graph_capture import Recorder
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.reference import activation as pointwise
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.backend.transfer import Shared, Transfer
from cupynet.backend.update_rules import Layers, Move, Rule
from cupynet.backend.window import Window
from cupynet.backend.workspace import Loans, ThreadWorkspaces, Workspace
from cupynet.checks import amount, one_line


class Backend:
    """An array module, a dtype policy and about a dozen hot operations.

    Attributes:
        name: `numpy`, `numba` or `cupy`.
        xp: the array module.
        on_gpu: whether arrays live in the memory of a GPU.
        policy: which precision is stored, computed in and accumulated in.
        device: number of the GPU; 0 on a CPU.
        loss_scale: the factor on the gradient of the loss; at first the policy's, then what its owner sets.
        options: what `create_backend` is given beside name, dtype and device to make another one like this.
    """

    name: str
    xp: ModuleType
    on_gpu = False
    options: Mapping[str, Any] = {}

    def __init__(self, policy: DtypePolicy, device: int = 0) -> None:
        self.policy = policy
        self.device = device
        self.loss_scale = policy.loss_scale
        self._workspaces = ThreadWorkspaces(self.allocate, self.address)
        self._constants: dict[tuple[float, ...], Array] = {}

    @property
    def workspace(self) -> Workspace:
        """The calling thread's pool of buffers. A pass borrows and returns its buffers in one thread."""
        return self._workspaces.current

    # arrays ---------------------------------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of any shape with arbitrary content."""
        return self.xp.empty(shape, dtype)

    def address(self, array: Array) -> int:
        """The address of the first element of an array of any shape."""
        raise NotImplementedError

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        """`array`, of any shape, on this backend's device; not copied where it is already there in that dtype."""
        return self.xp.asarray(array, dtype)

    def to_host(self, array: Array) -> Any:
        """`array`, of any shape, as a NumPy array; on a CPU it is the array itself."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has done everything that this backend, or the calling thread, has asked it to."""

    def here(self) -> AbstractContextManager[Any]:
        """This backend's device as the calling thread's for a while: for what others than the worker compute with its
        arrays, or write to them."""
        return nullcontext()

    def activate(self) -> None:
        """Make this backend's device the current one of the calling thread, which is its worker from now on."""

    def deactivate(self) -> None:
        """Let the calling thread have the device and stream that it had before `activate`; harmless without one."""

    def stream(self) -> int:
        """The address of the stream that this backend's work is done on, for libraries that take one; 0 on a CPU."""
        return 0

    def place(self) -> str:
        """Which GPU of which machine this is, alike for all processes; "" on a CPU."""
        return ""

    def failure(self, error: BaseException, device: int) -> Failure | None:
        """Return what an error says about the device: out of memory, or broken; None for any other error."""
        if not isinstance(error, MemoryError):
            return None
        bound = memory()
        limit = "" if bound is None else f", and {bound[1]} {amount(bound[0])}"
        return Failure(f"out of memory: {one_line(error) or 'an allocation failed'}{limit}", of_memory=True)

    def mark(self) -> Any:
        """The end of what this backend was asked for so far, for others to wait for; None where it is done at once."""

    def after(self, *marks: Any) -> None:
        """Let what is asked for from now on happen after these marks of other backends; nobody waits on the host."""

    def fetch(self, out: Array, array: Array, source: Backend) -> None:
        """Overwrite `out`, of any shape, with an array that lives where `source` does, of the same shape and dtype."""
        out[...] = array

    def recorder(self) -> Recorder | None:
        """What lets a step run ahead of the host, on a device that can do so; None elsewhere."""
        return None

    def borrow(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """An array of any shape, with arbitrary content, from the workspace; by default in the storage precision."""
        return self._workspaces.current.borrow(shape, self.policy.storage if dtype is None else dtype)

    def give_back(self, *arrays: Array | None) -> None:
        """Return borrowed arrays, of any shape, to the workspace."""
        self._workspaces.current.give_back(*arrays)

    def loans(self) -> Loans:
        """A context that gives back what was borrowed in it if an exception ends it, see `Loans`."""
        return Loans(self.workspace)

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """The images of a batch, scaled: (S, H, W, C) uint8, (N,) indices -> (N, H, W, C), by default from 0 to 1.

        Not borrowed: a prefetcher's thread calls this. IndexError: there is no such image.
        """
        batch, wide = self.asarray(images[samples]), self.policy.accumulate
        x = batch * self.asarray(np.array(pixels.scale, wide))
        if any(pixels.shift):
            x += self.asarray(np.array(pixels.shift, wide))
        return x.astype(self.policy.storage)

    def transfer(
        self,
        images: Any,
        labels: Any,
        *,
        batch_size: int,
        ahead: int,
        on_device: bool | str,
        shared: Shared,
        pixels: PixelScale = FRACTIONS,
        edited: bool = False,
    ) -> Transfer:
        """Return what copies rows of a data set to this backend; the worker calls this in its own thread.

        Args:
            images: (S, H, W, C) uint8 on the host, or None for batches without images.
            labels: (S,) int64 on the host.
            batch_size: the largest batch.
            ahead: batches that another thread makes ahead, at most.
            on_device: whether the images stay on the device: true, false, or `auto`: if they fit.
            shared: data that all workers of the process share.
            pixels: how pixels are scaled.
            edited: whether images are augmented on the host before they are scaled, see `Transfer.make`.
        """
        return Transfer(self, images, labels, pixels)

    def convert(self, source: Array, target: Array) -> None:
        """target = source, in the precision of target; both of any shape that is the same."""
        shapes.alike("convert", source, target)
        target[...] = source

    # products -------------------------------------------------------------------------------------------------------

    def _operand(self, a: Array) -> tuple[Array, bool]:
        """`a` in the compute precision, and whether that is a borrowed copy."""
        if a.dtype == self.policy.compute:
            return a, False
        copy = self.borrow(a.shape, self.policy.compute)
        copy[...] = a
        return copy, True

    def matmul(self, a: Array, b: Array, *, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        """The product a @ b of (I, J) and (J, K), or of what is to be transposed: (I, K), in the storage precision."""
        return self._stored_copy(self._product(a, b, transpose_a, transpose_b))

    def _product(self, a: Array, b: Array, transpose_a: bool = False, transpose_b: bool = False) -> Array:
        """The 2-D product in the compute precision."""
        a, a_copied = self._operand(a)
        b, b_copied = self._operand(b)
        left, right = (a.T if transpose_a else a), (b.T if transpose_b else b)
        out = self.borrow((left.shape[0], right.shape[1]), self.policy.compute)
        self._gemm(left, right, out)
        self.give_back(a if a_copied else None, b if b_copied else None)
        return out

    def _gemm(self, left: Array, right: Array, out: Array) -> None:
        """out = left right; every product passes here, 2-D and in one precision (3-D ones are a trap on the GPU)."""
        self.xp.matmul(left, right, out=out)

    def _add_product(self, grad: Array, a: Array, dy: Array) -> None:
        """grad += aᵀ dy."""
        product = self._product(a, dy, transpose_a=True)
        grad += product
        self.give_back(product)

    def _add_bias(self, y: Array, bias: Array) -> None:
        """y += bias in each row, in place; (R, O), (O,)."""
        y += bias

    def _add_column_sums(self, grad: Array, dy: Array) -> None:
        """grad += the sum of dy over its rows; (O,) += (R, O)."""
        grad += dy.sum(axis=0, dtype=self.policy.accumulate)

    # dense ----------------------------------------------------------------------------------------------------------

    def dense(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """x W + b: (N, F), (F, O), (O,) -> (N, O)."""
        y = self.matmul(x, weight)
        if bias is not None:
            self._add_bias(y, bias)
        return y

    def dense_backward(
        self, dy: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None, *, need_dx: bool
    ) -> Array | None:
        """Adds the gradients of weight and bias, returns dx (N, F) or None."""
        self._add_product(weight_grad, x, dy)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy)
        return self.matmul(dy, weight, transpose_b=True) if need_dx else None

    # convolution ----------------------------------------------------------------------------------------------------

    def _surrounded(self, x: Array, window: Window, value: float) -> Array:
        """The images with `value` around them, borrowed; x itself where the window does not pad."""
        if not window.pads:
            return x
        n, height, width, channels = x.shape
        padded = self.borrow((n, *window.padded(height, width), channels), x.dtype)
        padded[...] = value
        padded[window.inside(height, width)] = x
        return padded

    def im2col(self, x: Array, window: Window) -> Array:
        """The windows of x as rows, in the compute precision: (N, H, W, C) -> (N·H'·W', K_h·K_w·C).

        Chellapilla et al. 2006.
        """
        shapes.windows("im2col", x.shape, window)
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), self._surrounded(x, window, 0)
        columns = self.borrow((n * output[0] * output[1], window.places * channels), self.policy.compute)
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            windows[:, :, :, ky, kx] = padded[window.seen(ky, kx, output)]
        if padded is not x:
            self.give_back(padded)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """The transpose of im2col, windows added back to their places: (N·H'·W', K_h·K_w·C) -> (N, H, W, C)."""
        shapes.windows("col2im", shape, window)
        n, height, width, channels = shape
        output = window.output(height, width)
        shapes.shape_of("col2im", "columns", columns, (n * output[0] * output[1], window.places * channels))
        padded = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        padded[...] = 0
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            padded[window.seen(ky, kx, output)] += windows[:, :, :, ky, kx]
        return self._within(padded, shape, window)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, window: Window, *, groups: int = 1
    ) -> tuple[Array, Array]:
        """Cross-correlation: (N, H, W, C), (K_h, K_w, C, O), (O,) -> (N, H', W', O), and what the backward pass needs.

        With `groups` the channels, and the filters, fall into as many equal parts, and each filter sees the channels of
        its part alone: the weight is (K_h, K_w, C / groups, O).

        Raises:
            ConfigError: the images have no room for a window, or other channels than the weight.
        """
        shapes.convolution("conv2d", x.shape, weight, window, groups)
        outputs = weight.shape[3]
        if groups > 1:
            y, kept = self._grouped(x, weight, window, groups)
            if bias is not None:
                self._add_bias(y.reshape(-1, outputs), bias)
            return y, kept
        columns = self.im2col(x, window)
        y = self.matmul(columns, weight.reshape(-1, outputs))  # (N·H'·W', O)
        if bias is not None:
            self._add_bias(y, bias)
        return y.reshape(x.shape[0], *window.output(*x.shape[1:3]), outputs), columns

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool, groups: int = 1,
    ) -> Array | None:  # fmt: skip
        """Adds the gradients of weight and bias, returns dx (N, H, W, C) or None.

        `columns` is what `conv2d` returned beside y.
        """
        shapes.convolution("conv2d_backward", x.shape, weight, window, groups)
        outputs = weight.shape[3]
        shapes.shape_of("conv2d_backward", "dy", dy, (x.shape[0], *window.output(*x.shape[1:3]), outputs))
        if groups > 1:
            shapes.alike("conv2d_backward", weight, weight_grad)
            if bias_grad is not None:
                self._add_column_sums(bias_grad, dy.reshape(-1, outputs))
            return self._grouped_backward(dy, columns, x, weight, weight_grad, window, groups, need_dx=need_dx)
        dy = dy.reshape(-1, outputs)  # (N·H'·W', O)
        self._add_product(weight_grad.reshape(-1, outputs), columns, dy)
        if bias_grad is not None:
            self._add_column_sums(bias_grad, dy)
        if not need_dx:
            return None
        dcolumns = self._product(dy, weight.reshape(-1, outputs), transpose_b=True)
        dx = self.col2im(dcolumns, x.shape, window)
        self.give_back(dcolumns)
        return dx

    # One product for each group, of rows that lie together: the groups' channels are moved before the images, so that
    # im2col takes them for images of their own.

    def _grouped(self, x: Array, weight: Array, window: Window, groups: int) -> tuple[Array, Array]:
        """`conv2d` in groups, without a bias."""
        columns = self._columns_apart(x, window, groups)
        rows, each = len(columns) // groups, weight.shape[3] // groups
        parts = self.borrow((groups, rows, each))
        for g in range(groups):
            product = self.matmul(columns[g * rows : (g + 1) * rows], self._group(weight, g, each))
            parts[g] = product
            self.give_back(product)
        y = self.borrow((x.shape[0], *window.output(*x.shape[1:3]), weight.shape[3]))
        y.reshape(rows, groups, each)[...] = parts.transpose(1, 0, 2)
        self.give_back(parts)
        return y, columns

    def _grouped_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, window: Window, groups: int, *,
        need_dx: bool,
    ) -> Array | None:  # fmt: skip
        """`conv2d_backward` in groups, without a bias; columns: None where the forward pass made none."""
        made = None if columns is not None else self._columns_apart(x, window, groups)
        columns = columns if made is None else made
        rows, each = len(columns) // groups, weight.shape[3] // groups
        parts = self._apart(dy, groups)  # (G·N, H', W', O / G)
        of_group = parts.reshape(groups, rows, each)
        grad = self.borrow((columns.shape[1], each), self.policy.accumulate)  # that of a group has gaps
        dcolumns = self.borrow(columns.shape, self.policy.compute) if need_dx else None
        for g in range(groups):
            own = slice(g * rows, (g + 1) * rows)
            grad[...] = 0
            self._add_product(grad, columns[own], of_group[g])
            self._group(weight_grad, g, each)[...] += grad
            if dcolumns is not None:
                product = self._product(of_group[g], self._group(weight, g, each), transpose_b=True)
                dcolumns[own] = product
                self.give_back(product)
        self.give_back(grad, parts, made)
        if dcolumns is None:
            return None
        n, height, width, channels = x.shape
        apart = self.col2im(dcolumns, (groups * n, height, width, channels // groups), window)
        dx = self.borrow(x.shape)
        places = n * height * width
        dx.reshape(places, groups, -1)[...] = apart.reshape(groups, places, -1).transpose(1, 0, 2)
        self.give_back(dcolumns, apart)
        return dx

    def _columns_apart(self, x: Array, window: Window, groups: int) -> Array:
        """The im2col rows of each group, one group after the other: (G·N·H'·W', K_h·K_w·C / G)."""
        apart = self._apart(x, groups)
        columns = self.im2col(apart, window)
        self.give_back(apart)
        return columns

    def _apart(self, x: Array, groups: int) -> Array:
        """The channels of each group as images of their own, borrowed: (N, H, W, C) -> (G·N, H, W, C / G)."""
        n, height, width, channels = x.shape
        apart, places = self.borrow((groups * n, height, width, channels // groups)), n * height * width
        apart.reshape(groups, places, -1)[...] = x.reshape(places, groups, -1).transpose(1, 0, 2)
        return apart

    @staticmethod
    def _group(weight: Array, group: int, filters: int) -> Array:
        """A group's part of a weight (K_h, K_w, C / G, O) as a matrix, a view with gaps: (K_h·K_w·C / G, O / G)."""
        return weight.reshape(-1, weight.shape[3])[:, group * filters : (group + 1) * filters]

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """The largest value of each window, and which it was: (N, H, W, C) -> 2 x (N, H', W', C).

        A winner is its place in the window, ky·K_w + kx; among equals the first in that order wins, so ties have one
        gradient path. A window that holds NaN has NaN as its largest, the first of them. What is around the image is
        never the largest.
        """
        shapes.windows("max_pool2d", x.shape, window, pool=True)
        output = window.output(*x.shape[1:3])
        y = self.borrow((x.shape[0], *output, x.shape[3]), x.dtype)
        winners = self.borrow(y.shape, self.winner_dtype(window))
        padded = self._surrounded(x, window, -math.inf)
        y[...] = padded[window.seen(0, 0, output)]
        winners[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            if place > 0:
                candidate = padded[window.seen(ky, kx, output)]
                with np.errstate(invalid="ignore"):  # ml_dtypes warns of NaN
                    better = ~(candidate <= y)  # larger, or one of the two is NaN
                better &= y == y  # the first NaN stays
                self.xp.copyto(winners, winners.dtype.type(place), where=better)
                self.xp.copyto(y, candidate, where=better)
        self.give_back(padded if padded is not x else None)
        return y, winners

    def winner_dtype(self, window: Window) -> Any:
        """The smallest integer that numbers the places of a window."""
        return self.xp.dtype(self.xp.uint8 if window.places <= 256 else self.xp.int32)

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        """The gradient goes to each window's winner: (N, H', W', C) -> (N, H, W, C); windows that overlap add up."""
        shapes.windows("max_pool2d_backward", shape, window, pool=True)
        n, height, width, channels = shape
        output = window.output(height, width)
        shapes.shape_of("max_pool2d_backward", "dy", dy, (n, *output, channels))
        shapes.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow((n, *window.padded(height, width), channels), dy.dtype)
        dx[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            target = dx[window.seen(ky, kx, output)]
            target += self.xp.where(winners == place, dy, dy.dtype.type(0))  # no product: 0 times NaN is NaN
        return self._within(dx, shape, window)

    def avg_pool2d(self, x: Array, window: Window) -> Array:
        """The mean of the pixels of the image that each window sees: (N, H, W, C) -> (N, H', W', C).

        What is around the image does not count. Added up in the accumulation precision.
        """
        shapes.windows("avg_pool2d", x.shape, window, pool=True)
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), self._surrounded(x, window, 0)
        total = self.borrow((n, *output, channels), self.policy.accumulate)
        total[...] = 0
        for ky, kx in np.ndindex(*window.kernel):
            total += padded[window.seen(ky, kx, output)]
        total *= self._shares(window, height, width)
        self.give_back(padded if padded is not x else None)
        return self._stored_copy(total)

    def avg_pool2d_backward(self, dy: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Each pixel's share of the gradient of the windows that see it: (N, H', W', C) -> (N, H, W, C)."""
        shapes.windows("avg_pool2d_backward", shape, window, pool=True)
        n, height, width, channels = shape
        output = window.output(height, width)
        shapes.shape_of("avg_pool2d_backward", "dy", dy, (n, *output, channels))
        dx = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        dx[...] = 0
        shared = dy * self._shares(window, height, width)
        for ky, kx in np.ndindex(*window.kernel):
            dx[window.seen(ky, kx, output)] += shared
        return self._within(dx, shape, window)

    def _shares(self, window: Window, height: int, width: int) -> Array:
        """What each pixel counts in the mean of each window, (H', W', 1)."""
        rows, cols = (np.array(counts, np.float64) for counts in window.pixels(height, width))
        return self.asarray((1 / np.outer(rows, cols))[..., None].astype(self.policy.accumulate))

    def _within(self, padded: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Of a borrowed padded array what lies in the images (N, H, W, C), in the storage precision; borrowed."""
        if not window.pads:
            return self._stored_copy(padded)
        x = self.borrow(shape)
        x[...] = padded[window.inside(*shape[1:3])]
        self.give_back(padded)
        return x

    def _stored_copy(self, borrowed: Array) -> Array:
        """A borrowed array in the storage precision: itself where it is."""
        if borrowed.dtype == self.policy.storage:
            return borrowed
        stored = self.borrow(borrowed.shape)
        stored[...] = borrowed
        self.give_back(borrowed)
        return stored

    # two operations as one ------------------------------------------------------------------------------------------

    def fused_pair(self, first: Operation, second: Operation) -> Pair | None:
        """Both operations as one that is faster here than the two in turn; None where there is none.

        Asked for when a network is built.
        """
        return None

    # activations ----------------------------------------------------------------------------------------------------

    def relu(self, x: Array) -> Array:
        """max(x, 0), in place."""
        return self.xp.maximum(x, 0, out=x)

    def relu_backward(self, dy: Array, y: Array) -> Array:
        """dy where the output y is positive, else 0; in place, of any shape."""
        shapes.alike("relu_backward", dy, y)
        self.xp.copyto(dy, dy.dtype.type(0), where=~(y > 0))  # no product: 0 times NaN is NaN
        return dy

    def softmax(self, x: Array) -> Array:
        """exp(x) / sum exp(x) over the last axis of x (..., O), in place, shifted by the largest: nothing overflows."""
        wide = x.astype(self.policy.accumulate)
        wide -= wide.max(axis=-1, keepdims=True)
        self.xp.exp(wide, out=wide)
        wide /= wide.sum(axis=-1, keepdims=True)
        x[...] = wide
        return x

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        """y · (dy - sum(dy · y)) over the last axis of (..., O), in place in dy."""
        wide = dy.astype(self.policy.accumulate)
        wide -= (wide * y).sum(axis=-1, keepdims=True)
        wide *= y
        dy[...] = wide
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        """out = the activation of this name of each value of x, of any shape; `out` may be x, and is returned.

        leaky_relu (below zero, `slope` times x), elu, tanh, sigmoid, softplus, gelu, silu: see `nn.activation`.
        """
        shapes.alike("pointwise", x, out)
        out[...] = pointwise.forward(self.xp, name, x.astype(self.policy.accumulate), slope)
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        """dy, of any shape, times the derivative of the activation, in place.

        kept: the output y; for gelu and silu the input x.
        """
        shapes.alike("pointwise_backward", dy, kept)
        factor = pointwise.derivative(self.xp, name, kept.astype(self.policy.accumulate), slope)
        dy[...] = dy * factor
        return dy

    # normalisation --------------------------------------------------------------------------------------------------

    def channel_moments(self, x: Array) -> Array:
        """Mean and biased variance of each channel: (..., C) -> (2, C), in the accumulation precision."""
        shapes.channels("channel_moments", x)
        rows = x.reshape(-1, x.shape[-1]).astype("float64")
        moments = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        mean = rows.mean(axis=0)
        rows -= mean
        rows *= rows
        moments[0], moments[1] = mean, rows.mean(axis=0)
        return moments

    def track_moments(self, mean: Array, variance: Array, moments: Array, momentum: float, unbiased: float) -> None:
        """running = momentum · running + (1 - momentum) · moment, in place, for both; (C,), (C,), (2, C).

        unbiased: the factor on the moments' variance, n / (n - 1).
        """
        shapes.shape_of("track_moments", "moments", moments, (2, *mean.shape))
        shapes.alike("track_moments", mean, variance)
        for running, moment, factor in ((mean, moments[0], 1.0), (variance, moments[1], unbiased)):
            running *= momentum
            running += (1 - momentum) * factor * moment

    def normalize(
        self, x: Array, mean: Array, variance: Array, scale: Array, shift: Array, epsilon: float, *, relu: bool
    ) -> Array:
        """(x - mean) / sqrt(variance + epsilon) · scale + shift in each channel, and max(., 0) with `relu`.

        (..., C); mean and variance (C,) in the accumulation precision, scale and shift (C,) in that of x.
        """
        shapes.channels("normalize", x, mean, variance, scale, shift)
        wide = x.astype(self.policy.accumulate)
        wide -= mean
        wide *= scale.astype(self.policy.accumulate) / self.xp.sqrt(variance + epsilon)
        wide += shift.astype(self.policy.accumulate)
        y = self.borrow(x.shape)
        y[...] = self.xp.maximum(wide, 0) if relu else wide
        return y

    def normalize_sums(
        self, dy: Array, x: Array, y: Array | None, mean: Array, variance: Array, epsilon: float
    ) -> Array:
        """The sums of dy and of dy · x̂ in each channel, for what was normalised to x̂: (2, C), accumulated.

        y: the output behind ReLU: where it is not positive dy becomes 0, in place; None without ReLU.
        """
        shapes.channels("normalize_sums", x, mean, variance)
        shapes.alike("normalize_sums", dy, x, *([] if y is None else [y]))
        if y is not None:
            dy = self.relu_backward(dy, y)
        wide = x.astype("float64")
        wide -= mean
        wide /= self.xp.sqrt(variance + epsilon)
        wide *= dy
        sums = self.borrow((2, x.shape[-1]), self.policy.accumulate)
        sums[0] = dy.reshape(-1, x.shape[-1]).sum(axis=0, dtype="float64")
        sums[1] = wide.reshape(-1, x.shape[-1]).sum(axis=0)
        return sums

    def normalize_backward(
        self, dy: Array, x: Array, mean: Array, variance: Array, scale: Array, sums: Array, count: float, epsilon: float
    ) -> Array:
        """scale / σ · (dy - sums[0] / count - x̂ · sums[1] / count), in place in dy (..., C); see `normalize_sums`.

        count: how many values of each channel the moments, and the sums, are of.
        """
        shapes.channels("normalize_backward", x, mean, variance, scale)
        shapes.alike("normalize_backward", dy, x)
        shapes.shape_of("normalize_backward", "sums", sums, (2, x.shape[-1]))
        accumulate = self.policy.accumulate
        inverse = 1 / self.xp.sqrt(variance + epsilon)
        wide = x.astype(accumulate)
        wide -= mean
        wide *= inverse * sums[1] * (-1 / count)
        wide += dy.astype(accumulate)
        wide -= sums[0] * (1 / count)
        wide *= scale.astype(accumulate) * inverse
        dy[...] = wide
        return dy

    def normalize_rows(self, x: Array, scale: Array, shift: Array, epsilon: float) -> tuple[Array, Array]:
        """(x - mean) / sqrt(variance + epsilon) · scale + shift in each row, and each row's mean and 1 / sqrt(...).

        (R, D), (D,), (D,) -> (R, D), (R, 2) in the accumulation precision.
        """
        shapes.channels("normalize_rows", x, scale, shift)
        accumulate = self.policy.accumulate
        wide = x.astype(accumulate)
        moments = self.borrow((len(x), 2), accumulate)
        moments[:, 0] = wide.mean(axis=1)
        wide -= moments[:, :1]
        moments[:, 1] = 1 / self.xp.sqrt((wide * wide).mean(axis=1) + epsilon)
        wide *= moments[:, 1:]
        wide *= scale.astype(accumulate)
        wide += shift.astype(accumulate)
        y = self.borrow(x.shape)
        y[...] = wide
        return y, moments

    def normalize_rows_backward(
        self, dy: Array, x: Array, moments: Array, scale: Array, scale_grad: Array, shift_grad: Array, *, need_dx: bool
    ) -> Array | None:
        """Adds the gradients of scale and shift (F,); returns dx (N, F), in place in dy, or None.

        moments: (N, 2), of the forward pass.
        """
        shapes.channels("normalize_rows_backward", x, scale, scale_grad, shift_grad)
        shapes.alike("normalize_rows_backward", dy, x)
        shapes.shape_of("normalize_rows_backward", "moments", moments, (len(x), 2))
        accumulate = self.policy.accumulate
        wide, normal = dy.astype(accumulate), x.astype(accumulate)
        normal -= moments[:, :1]
        normal *= moments[:, 1:]
        scale_grad += (wide * normal).sum(axis=0)
        shift_grad += wide.sum(axis=0)
        if not need_dx:
            return None
        wide *= scale.astype(accumulate)
        normal *= (wide * normal).mean(axis=1, keepdims=True)
        normal += wide.mean(axis=1, keepdims=True)
        wide -= normal
        wide *= moments[:, 1:]
        dy[...] = wide
        return dy

    # random ---------------------------------------------------------------------------------------------------------

    def dropout(self, x: Array, samples: Array, epoch: Any, key: int, rate: float, out: Array | None = None) -> Array:
        """Each value of x is 0 with probability `rate`, else x / (1 - rate): (N, ...), (N,) int64.

        Which are 0 follows from (key, epoch, sample, place in the example), see philox.py: alike on all backends.

        Args:
            epoch: a number, or an array of one element on the device.
            key: 64 bits.
            out: what is overwritten, x itself perhaps; by default borrowed.
        """
        out = self.borrow(x.shape) if out is None else out
        shapes.alike("dropout", x, out)
        shapes.shape_of("dropout", "samples", samples, x.shape[:1])
        rows = x.reshape(len(x), -1)
        drawn = philox.of_examples(self.xp, samples, epoch, key, rows.shape[1])
        kept = rows.astype(self.policy.accumulate) * self.policy.accumulate.type(1 / (1 - rate))
        zero = self.policy.accumulate.type(0)  # no product: 0 times NaN is NaN
        out.reshape(len(x), -1)[...] = self.xp.where(drawn >= philox.dropped_below(rate), kept, zero)
        return out

    # loss -----------------------------------------------------------------------------------------------------------

    def softmax_cross_entropy(
        self, logits: Array, labels: Array, smoothing: float = 0.0, weights: tuple[float, ...] | None = None
    ) -> tuple[Array, Array]:
        """-sum_c t_c · log softmax(logits)_c of each example (N,); the gradient of their mean (N, O).

        The gradient is times the loss scale. The target t is (1 - smoothing) · weight at the label, and smoothing / O ·
        weight of the class at every class. The losses are read before the next call, which may overwrite them.

        Args:
            weights: of the classes; 1 without.
        """
        xp, (n, classes), accumulate = self.xp, logits.shape, self.policy.accumulate
        shifted = logits.astype(accumulate)
        shifted -= shifted.max(axis=1, keepdims=True)  # (N, O)
        exponentials = xp.exp(shifted)
        sums = exponentials.sum(axis=1, keepdims=True)  # (N, 1)
        rows = xp.arange(n)
        losses = xp.log(sums[:, 0]) - shifted[rows, labels]
        exponentials /= sums
        if weights is None and not smoothing:
            exponentials[rows, labels] -= 1
        else:
            own = xp.ones(classes, accumulate) if weights is None else self.constants(weights)  # (O,)
            at_label, even = (1 - smoothing) * own[labels], smoothing / classes * own  # (N,), (O,)
            losses *= at_label
            if smoothing:
                losses += ((xp.log(sums) - shifted) * even).sum(axis=1)
            exponentials *= (at_label + even.sum())[:, None]
            exponentials -= even
            exponentials[rows, labels] -= at_label
        gradient = self.borrow(logits.shape)
        gradient[...] = exponentials * accumulate.type(self.loss_scale / n)
        return losses, gradient

    def target_loss(self, kind: str, prediction: Array, labels: Array, parameter: float = 0.0) -> tuple[Array, Array]:
        """The mean over the outputs of a loss that compares each with 1 at the label and 0 elsewhere, of each example.

        (N, O), (N,) -> (N,), and the gradient of the mean of these (N, O), times the loss scale. The losses are read
        before the next call, which may overwrite them.

        Args:
            kind: `squared`, `logistic`, `hinge` or `huber`, see `targets`.
            parameter: of the kind.
        """
        n, outputs = prediction.shape
        wide = prediction.astype(self.policy.accumulate)
        target = self.xp.zeros_like(wide)
        target[self.xp.arange(n), labels] = 1
        values, slopes = TARGET_LOSSES[kind](self.xp, wide, target, parameter)
        gradient = self.borrow(prediction.shape)
        gradient[...] = slopes * self.policy.accumulate.type(self.loss_scale / (n * outputs))
        return values.mean(axis=1), gradient

    def constants(self, values: tuple[float, ...]) -> Array:
        """These K numbers, (K,), in the accumulation precision, on the device; kept."""
        if values not in self._constants:
            self._constants[values] = self.asarray(np.array(values, self.policy.accumulate))
        return self._constants[values]

    # updates of flat vectors ----------------------------------------------------------------------------------------

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        """Overwrite all of `parts` with sum_r shares[r] · parts[r], added in this order; parts of share 0 are not read.

        Flat vectors (P,) on the host, whatever the backend: averages are computed there.
        """
        shapes.alike("mean_in_place", *parts)
        contributors = [(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        # in double: shares in single precision do not add up to one
        total = contributors[0][0].astype("float64") * contributors[0][1]
        for part, share in contributors[1:]:
            total += part.astype("float64") * share
        for part in parts:
            part[...] = total

    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """Overwrite `out` with sum_r shares[r] · parts[r], added in this order; parts of share 0 are not read.

        Flat vectors (P,) of this device and of one dtype; `out` may be one of them. Added up in double precision.
        """
        shapes.alike("weighted_sum", out, *parts)
        total = self.xp.zeros(out.shape, "float64")
        for part, share in zip(parts, shares, strict=True):
            if share:
                total += part.astype("float64") * share
        out[...] = total

    def squared_norm(self, grad: Array) -> Array:
        """The sum of squares of a (P,) vector, on the device: a number, or a 0-d array that the next call changes."""
        return (grad * grad).sum()

    def total(self, vector: Array) -> Array:
        """The sum of a vector, on the device: a number, or a 0-d array that the next call overwrites."""
        return vector.sum()

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        """Shorten the gradient to the length `largest` if it is longer, in place (Pascanu et al. 2013).

        Args:
            grad: (P,), all of the gradient or a part of it.
            squared_norm: of the whole gradient; parts add theirs up.
            largest: the length it may have.
        """
        length = self.xp.sqrt(self.xp.asarray(squared_norm, grad.dtype))
        grad *= largest / self.xp.maximum(length, largest)

    def move_weights(
        self, rule: Rule, weight: Array, grad: Array, states: Sequence[Array], move: Move, stored: Array | None = None
    ) -> None:
        """One update by a rule that looks at each weight by itself, in place; (P,) vectors.

            g = clip(scale · grad) + l2 · w + l1 · sign(w);    w -= step(g) + rate · decay · w;    grad = 0

        Where the rule does not move weights at once, grad = step(g) + decay · w instead, for `trust_weights`.

        Args:
            states: the rule's own vectors, which it changes.
            stored: the copy of the weights that layers read, written too; None where they read the weights themselves.
        """
        shapes.alike(rule.name, weight, grad, *states)
        xp = self.xp
        if move.scale != 1.0:
            grad *= move.scale
        if move.clip < math.inf:
            xp.clip(grad, -move.clip, move.clip, out=grad)
        if move.l2:
            grad += move.l2 * weight
        if move.l1:
            grad += move.l1 * xp.sign(weight)
        step = rule.step(xp, move, grad, *states)
        if not rule.moves:
            grad[...] = step + move.decay * weight if move.decay else step
            return
        if move.decay:
            step = step + move.rate * move.decay * weight
        weight -= step
        grad[...] = 0
        if stored is not None:
            self.convert(weight, stored)

    # layer by layer -------------------------------------------------------------------------------------------------

    def layers(self, bounds: Sequence[tuple[int, int]], group: Sequence[int]) -> Layers:
        """Stretches of a flat vector by the layer that they are of, see `Layers`; made once."""
        table = np.array([(*each, layer) for each, layer in zip(bounds, group, strict=True)], np.int64).reshape(-1, 3)
        return Layers(tuple(bounds), tuple(group), max(group, default=-1) + 1, self.asarray(table))

    def squared_norms(self, vector: Array, layers: Layers) -> Array:
        """The sum of squares of each layer's part of a (P,) vector: (L,), borrowed, in the vector's precision."""
        found = self.borrow((layers.count,), vector.dtype)
        found[...] = 0
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            found[layer] += self.squared_norm(vector[start:stop])
        return found

    def clip_norms(self, grad: Array, squared_norms: Array, layers: Layers, largest: float) -> None:
        """Shorten each layer's part of the gradient (P,) to the length `largest` if it is longer, in place."""
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            self.clip_norm(grad[start:stop], squared_norms[layer], largest)

    def trust_weights(
        self, weight: Array, grad: Array, norms: tuple[Array, Array], layers: Layers, rate: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        """w -= rate · |w| / |g| · g, layer by layer and in place; g is set to zero (You et al. 2020, LAMB).

        Args:
            norms: |w|² and |g|² of each layer (L,). Where one of them is zero, the ratio counts as one.
            stored: as in `move_weights`.
        """
        shapes.alike("trust_weights", weight, grad)
        xp, (squares, steps) = self.xp, norms
        both = (squares > 0) & (steps > 0)
        ratios = xp.sqrt(xp.where(both, squares, 1) / xp.where(both, steps, 1))
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            weight[start:stop] -= rate * ratios[layer] * grad[start:stop]
            grad[start:stop] = 0
            if stored is not None:
                self.convert(weight[start:stop], stored[start:stop])
