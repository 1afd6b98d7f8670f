"""The reference of every hot operation, written once against an array module (`numpy` or `cupy`).

A faster backend overrides what it does better and falls back to `super()`. Layers call these operations and nothing
else that is heavy. Axis letters: N batch, H W image, C channels in, O channels out, K kernel, F features, P parameters.

The file is long (over 300 lines) because the operations are read, overridden and compared as one list.

Ownership, for every operation: what is returned was borrowed from `workspace`; arguments stay the caller's, except for
the one of an in-place operation, which says so. Arrays are C-contiguous, activations in `policy.storage`. Gradients of
weights are *added*, in `policy.accumulate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend import checks
from cupynet.backend.array import Array
from cupynet.backend.failure import Failure
from cupynet.backend.feed import Feed, Shared
from cupynet.backend.pairs import Convolution, Operation, Pair
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.recording import Recorder
from cupynet.backend.window import Window
from cupynet.backend.workspace import Loans, Workspace


class Backend:
    """An array module, a dtype policy and about a dozen hot operations.

    Attributes:
        name: `numpy`, `numba` or `cupy`.
        xp: the array module.
        on_gpu: whether arrays live in the memory of a GPU.
        policy: which precision is stored, computed in and accumulated in.
        device: number of the GPU; 0 on a CPU.
        workspace: lends the buffers of activations and their gradients.
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
        self.workspace = Workspace(self.allocate, self.address)

    # arrays ---------------------------------------------------------------------------------------------------------

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array with arbitrary content."""
        return self.xp.empty(shape, dtype)

    def address(self, array: Array) -> int:
        """The address of an array's first element."""
        raise NotImplementedError

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        """`array` on this backend's device; not copied where it is already there in that dtype."""
        return self.xp.asarray(array, dtype)

    def to_host(self, array: Array) -> Any:
        """`array` as a NumPy array; on a CPU it is the array itself."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has done everything that this backend, or the calling thread, has asked it to."""

    def here(self) -> AbstractContextManager[Any]:
        """This backend's device as the calling thread's for a while: for what is written to its arrays by others than
        the worker."""
        return nullcontext()

    def activate(self) -> None:
        """Make this backend's device the current one of the calling thread; once, at the start of a worker."""

    def stream(self) -> int:
        """The address of the stream that this backend's work is done on, for libraries that take one; 0 on a CPU."""
        return 0

    def place(self) -> str:
        """Which GPU of which machine this is, alike for all processes; "" on a CPU."""
        return ""

    def failure(self, error: BaseException, device: int) -> Failure | None:
        """What an error says of a device of this kind: that it has no memory left, or has failed; else None."""
        return None

    def mark(self) -> Any:
        """The end of what this backend was asked for so far, for others to wait for; None where it is done at once."""

    def after(self, *marks: Any) -> None:
        """Let what is asked for from now on happen after these marks of other backends; nobody waits on the host."""

    def fetch(self, out: Array, array: Array, source: Backend) -> None:
        """Overwrite `out` with an array that lives where `source` does, of the same shape and dtype."""
        out[...] = array

    def recorder(self) -> Recorder | None:
        """What lets a step run ahead of the host, on a device that can do so; None elsewhere."""
        return None

    def borrow(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """An array with arbitrary content from the workspace, by default in the storage precision."""
        return self.workspace.borrow(shape, self.policy.storage if dtype is None else dtype)

    def give_back(self, *arrays: Array | None) -> None:
        """Return borrowed arrays to the workspace."""
        self.workspace.give_back(*arrays)

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

    def feed(
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
    ) -> Feed:
        """What turns rows of a data set into batches for this backend's worker, who asks in its own thread.

        Args:
            images: (S, H, W, C) uint8 of the host, or None where batches come without.
            labels: (S,) int64 of the host.
            batch_size: of no batch more. ahead: how many of them another thread makes ahead, at most.
            on_device: whether the images stay on the device: true, false, or `auto`, where they fit.
            shared: of all workers of the process.
            pixels: what becomes of them.
            edited: whether images are changed on the host before they are scaled, see `Feed.make`.
        """
        return Feed(self, images, labels, pixels)

    def convert(self, source: Array, target: Array) -> None:
        """target = source, in the precision of target; of one shape."""
        checks.alike("convert", source, target)
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
        """The 2-D product, in the storage precision."""
        product = self._product(a, b, transpose_a, transpose_b)
        if product.dtype == self.policy.storage:
            return product
        stored = self.borrow(product.shape)
        stored[...] = product
        self.give_back(product)
        return stored

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

    def im2col(self, x: Array, window: Window) -> Array:
        """The windows of x as rows, in the compute precision: (N, H, W, C) -> (N·H'·W', K_h·K_w·C).

        Chellapilla et al. 2006.
        """
        checks.windows("im2col", x.shape, window)
        n, height, width, channels = x.shape
        output, padded = window.output(height, width), x
        if window.pads:
            padded = self.borrow((n, *window.padded(height, width), channels))
            padded[...] = 0
            padded[window.inside(height, width)] = x
        columns = self.borrow((n * output[0] * output[1], window.places * channels), self.policy.compute)
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            windows[:, :, :, ky, kx] = padded[window.seen(ky, kx, output)]
        if padded is not x:
            self.give_back(padded)
        return columns

    def col2im(self, columns: Array, shape: tuple[int, ...], window: Window) -> Array:
        """The transpose of im2col, windows added back to their places: (N·H'·W', K_h·K_w·C) -> (N, H, W, C)."""
        checks.windows("col2im", shape, window)
        n, height, width, channels = shape
        output = window.output(height, width)
        checks.shape_of("col2im", "columns", columns, (n * output[0] * output[1], window.places * channels))
        padded = self.borrow((n, *window.padded(height, width), channels), self.policy.accumulate)
        padded[...] = 0
        windows = columns.reshape(n, *output, *window.kernel, channels)
        for ky, kx in np.ndindex(*window.kernel):
            padded[window.seen(ky, kx, output)] += windows[:, :, :, ky, kx]
        if not window.pads and padded.dtype == self.policy.storage:
            return padded
        x = self.borrow(shape)
        x[...] = padded[window.inside(height, width)]
        self.give_back(padded)
        return x

    def conv2d(self, x: Array, weight: Array, bias: Array | None, window: Window) -> tuple[Array, Array]:
        """Cross-correlation: (N, H, W, C), (K_h, K_w, C, O), (O,) -> (N, H', W', O), and what the backward pass needs.

        Raises:
            ConfigError: the images have no room for a window, or other channels than the weight.
        """
        checks.convolution("conv2d", x.shape, weight, window)
        outputs = weight.shape[3]
        columns = self.im2col(x, window)
        y = self.matmul(columns, weight.reshape(-1, outputs))  # (N·H'·W', O)
        if bias is not None:
            self._add_bias(y, bias)
        return y.reshape(x.shape[0], *window.output(*x.shape[1:3]), outputs), columns

    def conv2d_backward(
        self, dy: Array, columns: Array, x: Array, weight: Array, weight_grad: Array, bias_grad: Array | None,
        window: Window, *, need_dx: bool,
    ) -> Array | None:  # fmt: skip
        """Adds the gradients of weight and bias, returns dx (N, H, W, C) or None.

        `columns` is what `conv2d` returned beside y.
        """
        checks.convolution("conv2d_backward", x.shape, weight, window)
        outputs = weight.shape[3]
        checks.shape_of("conv2d_backward", "dy", dy, (x.shape[0], *window.output(*x.shape[1:3]), outputs))
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

    def conv2d_buffers(self, convolution: Convolution, *, need_dx: bool) -> int:
        """Bytes that `conv2d` and its derivative borrow for an image, about, beside y, dy and dx."""
        height, width, channels = convolution.image
        window, compute, storage = convolution.window, self.policy.compute, self.policy.storage
        places = math.prod(window.output(height, width))
        values = places * window.places * channels * (2 if need_dx else 1)  # im2col rows, and their derivatives
        values += 2 * places * convolution.filters if compute != storage else 0
        around = math.prod(window.padded(height, width)) * channels if window.pads else 0
        return values * compute.itemsize + around * (storage.itemsize + need_dx * self.policy.accumulate.itemsize)

    # pooling --------------------------------------------------------------------------------------------------------

    def max_pool2d(self, x: Array, window: Window) -> tuple[Array, Array]:
        """The largest value of each window, and which it was: (N, H, W, C) -> 2 x (N, H', W', C).

        A winner is its place in the window, ky·K_w + kx; among equals the first in that order wins, so ties have one
        gradient path. A window that holds NaN has NaN as its largest, the first of them.
        """
        checks.windows("max_pool2d", x.shape, window, pads=False)
        output = window.output(*x.shape[1:3])
        y = self.borrow((x.shape[0], *output, x.shape[3]), x.dtype)
        winners = self.borrow(y.shape, self.winner_dtype(window))
        y[...] = x[window.seen(0, 0, output)]
        winners[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            if place > 0:
                candidate = x[window.seen(ky, kx, output)]
                with np.errstate(invalid="ignore"):  # ml_dtypes warns of NaN
                    better = ~(candidate <= y)  # larger, or one of the two is NaN
                better &= y == y  # the first NaN stays
                self.xp.copyto(winners, winners.dtype.type(place), where=better)
                self.xp.copyto(y, candidate, where=better)
        return y, winners

    def winner_dtype(self, window: Window) -> Any:
        """The smallest integer that numbers the places of a window."""
        return self.xp.dtype(self.xp.uint8 if window.places <= 256 else self.xp.int32)

    def max_pool2d_backward(self, dy: Array, winners: Array, shape: tuple[int, ...], window: Window) -> Array:
        """The gradient goes to each window's winner: (N, H', W', C) -> (N, H, W, C); windows that overlap add up."""
        checks.windows("max_pool2d_backward", shape, window, pads=False)
        output = window.output(*shape[1:3])
        checks.shape_of("max_pool2d_backward", "dy", dy, (shape[0], *output, shape[3]))
        checks.alike("max_pool2d_backward", dy, winners)
        dx = self.borrow(shape, dy.dtype)
        dx[...] = 0
        for place, (ky, kx) in enumerate(np.ndindex(*window.kernel)):
            target = dx[window.seen(ky, kx, output)]
            target += self.xp.where(winners == place, dy, dy.dtype.type(0))  # no product: 0 times NaN is NaN
        return dx

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
        """dy where the output y is positive, else 0; in place."""
        checks.alike("relu_backward", dy, y)
        self.xp.copyto(dy, dy.dtype.type(0), where=~(y > 0))  # no product: 0 times NaN is NaN
        return dy

    def softmax(self, x: Array) -> Array:
        """exp(x) / sum exp(x) over the last axis, in place, shifted by the largest so that nothing overflows."""
        wide = x.astype(self.policy.accumulate)
        wide -= wide.max(axis=-1, keepdims=True)
        self.xp.exp(wide, out=wide)
        wide /= wide.sum(axis=-1, keepdims=True)
        x[...] = wide
        return x

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        """y · (dy - sum(dy · y)) over the last axis, in place in dy."""
        wide = dy.astype(self.policy.accumulate)
        wide -= (wide * y).sum(axis=-1, keepdims=True)
        wide *= y
        dy[...] = wide
        return dy

    # loss -----------------------------------------------------------------------------------------------------------

    def softmax_cross_entropy(self, logits: Array, labels: Array) -> tuple[Array, Array]:
        """-log softmax(logits)[label] of each example (N,); the gradient of their mean (N, O), times the loss scale.

        The losses are read before the next call, which may overwrite them.
        """
        xp, n = self.xp, logits.shape[0]
        shifted = logits.astype(self.policy.accumulate)
        shifted -= shifted.max(axis=1, keepdims=True)  # (N, O)
        exponentials = xp.exp(shifted)
        sums = exponentials.sum(axis=1, keepdims=True)  # (N, 1)
        rows = xp.arange(n)
        losses = xp.log(sums[:, 0]) - shifted[rows, labels]
        exponentials /= sums
        exponentials[rows, labels] -= 1
        gradient = self.borrow(logits.shape)
        gradient[...] = exponentials * self.policy.accumulate.type(self.loss_scale / n)
        return losses, gradient

    # updates of flat vectors ----------------------------------------------------------------------------------------

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        """Overwrite all of `parts` with sum_r shares[r] · parts[r], added in this order; parts of share 0 are not read.

        Flat vectors on the host, whatever the backend: averages are computed there.
        """
        checks.alike("mean_in_place", *parts)
        contributors = [(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        # in double: shares in single precision do not add up to one
        total = contributors[0][0].astype("float64") * contributors[0][1]
        for part, share in contributors[1:]:
            total += part.astype("float64") * share
        for part in parts:
            part[...] = total

    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """Overwrite `out` with sum_r shares[r] · parts[r], added in this order; parts of share 0 are not read.

        Flat vectors of this backend's device, of one dtype; `out` may be one of them. Added up in double precision.
        """
        checks.alike("weighted_sum", out, *parts)
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

    def sgd_update(
        self, weight: Array, grad: Array, learning_rate: float, l2: float, grad_scale: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        """w -= lr · (scale · g + l2 · w), in place; g is set to zero for the next step. (P,) vectors.

        stored: the copy of the weights that layers read, written too; None where they read the weights themselves.
        """
        checks.alike("sgd_update", weight, grad)
        if grad_scale != 1.0:
            grad *= grad_scale
        if l2:
            grad += l2 * weight
        grad *= learning_rate
        weight -= grad
        grad[...] = 0
        if stored is not None:
            self.convert(weight, stored)

    def momentum_update(
        self, weight: Array, velocity: Array, grad: Array, learning_rate: float, momentum: float, l2: float,
        grad_scale: float, nesterov: bool, stored: Array | None = None,
    ) -> None:  # fmt: skip
        """v = mu · v - lr · (scale · g + l2 · w); w += v, or with Nesterov w += mu · v - lr · (...); g is set to zero.

        Sutskever et al. 2013, "On the importance of initialization and momentum", with the learning rate inside the
        velocity. `stored`: as in `sgd_update`.
        """
        checks.alike("momentum_update", weight, velocity, grad)
        if grad_scale != 1.0:
            grad *= grad_scale
        if l2:
            grad += l2 * weight
        grad *= learning_rate
        velocity *= momentum
        velocity -= grad
        if nesterov:
            weight -= grad
            weight += momentum * velocity
        else:
            weight += velocity
        grad[...] = 0
        if stored is not None:
            self.convert(weight, stored)
