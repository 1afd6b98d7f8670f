"""Every public operation of a backend, called as layers call it on random arguments, to be compared among backends.

A comparison draws its arguments from a `Call`, uses the operation, and returns what is to be compared. Whoever adds an
operation to `Backend`, or overrides one, adds it here: tests/backend/test_operations.py says when one is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import Backend, Convolution, DtypePolicy, MaxPool, PixelScale, Window

Array: TypeAlias = Any
Results: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """The geometry of one call; operations without images use a part of it."""

    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    window: Window
    flag: bool  # with a bias, with Nesterov, transposed ...
    need_dx: bool

    @property
    def image(self) -> tuple[int, int, int, int]:
        """(N, H, W, C) with room for at least one window."""
        (kh, kw), (rows, cols) = self.window.kernel, self.window.padding
        return (self.batch, max(self.height, kh - sum(rows)), max(self.width, kw - sum(cols)), self.channels)

    @property
    def unpadded(self) -> tuple[Window, tuple[int, int, int, int]]:
        """The window without padding, and images with room for one."""
        window = Window(self.window.kernel, self.window.stride)
        height, width = (max(size, k) for size, k in zip((self.height, self.width), window.kernel, strict=True))
        return window, (self.batch, height, width, self.channels)


class Call:
    """Arguments for one call: the same numbers on every backend, whatever its precision.

    Args:
        seed: of the numbers.
        policy: the precision whose numbers are drawn; a wider backend gets exactly these.
        backend: where they are put.
    """

    def __init__(self, seed: int, policy: DtypePolicy, backend: Backend) -> None:
        self.rng = np.random.default_rng(seed)
        self.drawn, self.policy, self.backend = policy, backend.policy, backend
        self._kept: list[tuple[Array, Array]] = []

    def stored(self, *shape: int, changes: bool = False) -> Array:
        """Normal numbers in the storage precision. `changes`: the operation works in place."""
        return self._put(self.rng.normal(size=shape).astype(self.drawn.storage), self.policy.storage, changes)

    def few(self, *shape: int, changes: bool = False) -> Array:
        """Numbers of which many are equal, and many zero."""
        numbers = self.rng.integers(-1, 2, shape) * self.rng.integers(0, 2, shape[:1] + (1,) * (len(shape) - 1))
        return self._put(numbers.astype(self.drawn.storage), self.policy.storage, changes)

    def wide(self, *shape: int) -> Array:
        """Normal numbers in the accumulation precision, of a vector that the operation changes."""
        return self._put(self.rng.normal(size=shape).astype(self.drawn.accumulate), self.policy.accumulate, True)

    def integers(self, low: int, high: int, *shape: int) -> Array:
        return self._put(self.rng.integers(low, high, shape), np.dtype(np.int64), False)

    def integers_on_host(self, below: int) -> int:
        """A number of the geometry: 0, 1 ... below - 1."""
        return int(self.rng.integers(0, below))

    def spoil(self, array: Array) -> None:
        """Make some of the numbers NaN; not of those that are checked to be unchanged."""
        self._kept = [(kept, before) for kept, before in self._kept if kept is not array]
        array[self.backend.asarray(self.rng.integers(0, 4, array.shape) == 0)] = np.nan

    def _put(self, numbers: Array, dtype: Any, changes: bool) -> Array:
        array = self.backend.allocate(numbers.shape, dtype)
        array[...] = self.backend.asarray(numbers.astype(dtype))
        if not changes:
            self._kept.append((array, array.copy()))
        return array

    def check_arguments(self) -> None:
        """Arguments stay the caller's: only those of operations in place may have changed."""
        for array, before in self._kept:
            assert bool((array == before).all()), "an argument that is not the operation's was changed"


def load_images(backend: Backend, call: Call, shape: Shape) -> Results:
    images, channels = call.rng.integers(0, 256, (7, *shape.image[1:]), np.uint8), shape.image[3]
    samples = call.rng.integers(0, 7, shape.batch)
    each = PixelScale.of(call.rng.uniform(0.1, 0.9, channels), call.rng.uniform(0.2, 0.4, channels))
    return {
        "y": backend.load_images(images, samples),
        "one": backend.load_images(images, samples, PixelScale.of([0.5], [0.25])),
        "each": backend.load_images(images, samples, each),
    }


def matmul(backend: Backend, call: Call, shape: Shape) -> Results:
    rows, inner, cols = shape.batch * shape.height, shape.width * shape.channels, shape.outputs
    a = call.stored(*((inner, rows) if shape.flag else (rows, inner)))
    b = call.stored(*((cols, inner) if shape.need_dx else (inner, cols)))
    return {"y": backend.matmul(a, b, transpose_a=shape.flag, transpose_b=shape.need_dx)}


def dense(backend: Backend, call: Call, shape: Shape) -> Results:
    features = shape.height * shape.channels
    x, weight = call.stored(shape.batch, features), call.stored(features, shape.outputs)
    bias = call.stored(shape.outputs) if shape.flag else None
    return {"y": backend.dense(x, weight, bias)}


def dense_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    features = shape.height * shape.channels
    x, weight, dy = (
        call.stored(shape.batch, features),
        call.stored(features, shape.outputs),
        call.stored(shape.batch, shape.outputs),
    )
    weight_grad, bias_grad = call.wide(features, shape.outputs), call.wide(shape.outputs) if shape.flag else None
    dx = backend.dense_backward(dy, x, weight, weight_grad, bias_grad, need_dx=shape.need_dx)
    return {"dx": dx, "weight_grad": weight_grad, "bias_grad": bias_grad}


def im2col(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"columns": backend.im2col(call.stored(*shape.image), shape.window)}


def col2im(backend: Backend, call: Call, shape: Shape) -> Results:
    probe = backend.im2col(call.stored(*shape.image), shape.window)
    size = probe.shape
    backend.give_back(probe)
    columns = backend.asarray(call.rng.normal(size=size).astype(call.drawn.storage).astype(backend.policy.compute))
    return {"dx": backend.col2im(columns, shape.image, shape.window)}


def conv2d(backend: Backend, call: Call, shape: Shape) -> Results:
    x, weight = call.stored(*shape.image), call.stored(*shape.window.kernel, shape.channels, shape.outputs)
    bias = call.stored(shape.outputs) if shape.flag else None
    y, kept = backend.conv2d(x, weight, bias, shape.window)
    backend.give_back(kept)
    return {"y": y}


def conv2d_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    x, weight = call.stored(*shape.image), call.stored(*shape.window.kernel, shape.channels, shape.outputs)
    y, kept = backend.conv2d(x, weight, None, shape.window)
    dy, size = call.stored(*y.shape), y.shape
    backend.give_back(y)
    assert size[0] == shape.batch
    weight_grad, bias_grad = call.wide(*weight.shape), call.wide(shape.outputs) if shape.flag else None
    dx = backend.conv2d_backward(dy, kept, x, weight, weight_grad, bias_grad, shape.window, need_dx=shape.need_dx)
    backend.give_back(kept)
    return {"dx": dx, "weight_grad": weight_grad, "bias_grad": bias_grad}


def max_pool2d(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.unpadded
    x = call.few(*size) if shape.flag else call.stored(*size)
    if shape.need_dx:
        call.spoil(x)
    y, winners = backend.max_pool2d(x, window)
    return {"y": y, "winners": winners}


def max_pool2d_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    window, size = shape.unpadded
    x = call.few(*size) if shape.flag else call.stored(*size)
    y, winners = backend.max_pool2d(x, window)
    dy = call.stored(*y.shape)
    if shape.need_dx:
        call.spoil(dy)
    dx = backend.max_pool2d_backward(dy, winners, size, window)
    backend.give_back(y, winners)
    return {"dx": dx}


def fused_pair(backend: Backend, call: Call, shape: Shape) -> Results:
    """All pairs there are, each as one operation where the backend has it, else as two: forwards, then backwards."""
    found: Results = {}
    for activation in ("identity", "relu"):
        pair = convolution_and_max_pool(backend, call, shape, activation)
        found |= {f"{activation} {name}": array for name, array in pair.items()}
    return found


def convolution_and_max_pool(backend: Backend, call: Call, shape: Shape, activation: str) -> Results:
    """Small whole numbers: every precision computes them exactly, so that all agree on the winners, ties included."""
    x, weight = call.few(*shape.image), call.few(*shape.window.kernel, shape.channels, shape.outputs)
    bias = call.few(shape.outputs) if shape.flag else None
    convolved = shape.window.output(*shape.image[1:3])
    kernel = [min(1 + call.integers_on_host(3), side) for side in convolved]
    pool = Window((kernel[0], kernel[1]), (1 + call.integers_on_host(3), 1 + call.integers_on_host(3)))
    convolution = Convolution(x.shape[1:], shape.outputs, shape.window, activation)
    pair, relu = backend.fused_pair(convolution, MaxPool(pool)), activation == "relu"
    if pair is None:
        middle, columns = backend.conv2d(x, weight, bias, shape.window)
        y, winners = backend.max_pool2d(middle, pool)
        kept: tuple[Array, ...] = (middle, columns, winners)
    else:
        y, kept = pair.forward(x, (weight, bias))
    apart = relu and not (pair is not None and pair.activates)
    if apart:
        y = backend.relu(y)
    given = call.stored(*y.shape)
    dy = backend.borrow(y.shape)
    dy[...] = given
    if apart:
        dy = backend.relu_backward(dy, y)
    weight_grad, bias_grad = call.wide(*weight.shape), call.wide(shape.outputs) if shape.flag else None
    if pair is None:
        through = backend.max_pool2d_backward(dy, winners, middle.shape, pool)
        grads = weight_grad, bias_grad
        dx = backend.conv2d_backward(through, columns, x, weight, *grads, shape.window, need_dx=shape.need_dx)
        backend.give_back(through)
    else:
        dx = pair.backward(dy, kept, x, (weight, bias), (weight_grad, bias_grad), need_dx=shape.need_dx)
    backend.give_back(dy, *kept)
    return {"y": y, "dx": dx, "weight_grad": weight_grad, "bias_grad": bias_grad}


def winner_dtype(backend: Backend, call: Call, shape: Shape) -> Results:
    height, width = shape.window.kernel
    return {"dtype": backend.borrow((1,), backend.winner_dtype(Window((height + 13, width + 13))))[:0]}


def relu(backend: Backend, call: Call, shape: Shape) -> Results:
    x = call.stored(*shape.image, changes=True)
    y = backend.relu(x)
    assert backend.address(y) == backend.address(x), "not in place"
    return {"y": y}


def relu_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    dy, y = call.stored(*shape.image, changes=True), call.few(*shape.image)
    if shape.need_dx:
        call.spoil(dy)
    dx = backend.relu_backward(dy, y)
    assert backend.address(dx) == backend.address(dy), "not in place"
    return {"dx": dx}


def softmax(backend: Backend, call: Call, shape: Shape) -> Results:
    x = call.stored(*(shape.image if shape.flag else (shape.batch, shape.outputs)), changes=True)
    y = backend.softmax(x)
    assert backend.address(y) == backend.address(x), "not in place"
    return {"y": y}


def softmax_backward(backend: Backend, call: Call, shape: Shape) -> Results:
    size = shape.image if shape.flag else (shape.batch, shape.outputs)
    dy, y = call.stored(*size, changes=True), call.stored(*size)
    dx = backend.softmax_backward(dy, y)
    assert backend.address(dx) == backend.address(dy), "not in place"
    return {"dx": dx}


def softmax_cross_entropy(backend: Backend, call: Call, shape: Shape) -> Results:
    logits, labels = call.stored(shape.batch, shape.outputs), call.integers(0, shape.outputs, shape.batch)
    losses, gradient = backend.softmax_cross_entropy(logits, labels)
    return {"losses": losses, "scaled gradient": gradient}


def convert(backend: Backend, call: Call, shape: Shape) -> Results:
    """Both ways, and in one precision."""
    stored, wide = call.stored(*shape.image), call.wide(shape.height * 16)
    widened, narrowed = backend.borrow(stored.shape, wide.dtype), backend.borrow(wide.shape)
    backend.convert(stored, widened)
    backend.convert(wide, narrowed)
    copy = backend.borrow(wide.shape, wide.dtype)
    backend.convert(wide, copy)
    return {"widened": widened, "narrowed": narrowed, "copy": copy}


def stored_copy(backend: Backend, shape: Shape) -> Array | None:
    """Where an update writes the weights once more, for layers to read; or nothing."""
    return None if shape.outputs % 3 == 0 else backend.borrow((shape.height * 16,))


def sgd_update(backend: Backend, call: Call, shape: Shape) -> Results:
    weight, grad, stored = call.wide(shape.height * 16), call.wide(shape.height * 16), stored_copy(backend, shape)
    backend.sgd_update(weight, grad, 0.1, 0.01 if shape.flag else 0.0, 0.25 if shape.need_dx else 1.0, stored)
    return {"weight": weight, "grad": grad, "stored": stored}


def mean_in_place(backend: Backend, call: Call, shape: Shape) -> Results:
    parts = [np.array(backend.to_host(call.wide(shape.height * 500))) for _ in range(shape.batch + 1)]
    shares = [(0.0 if shape.flag and r == 0 else 0.1 * r + 0.2) for r in range(len(parts))]
    if shares[0] == 0.0:
        parts[0][:] = np.nan
    backend.mean_in_place(parts, shares)
    return {f"part {r}": part for r, part in enumerate(parts)}


def weighted_sum(backend: Backend, call: Call, shape: Shape) -> Results:
    parts = [call.wide(shape.height * 500) for _ in range(shape.batch + 1)]
    shares = [(0.0 if shape.flag and r == 0 else 0.1 * r + 0.2) for r in range(len(parts))]
    if shares[0] == 0.0:
        parts[0][...] = math.nan
    out = call.wide(shape.height * 500)
    backend.weighted_sum(out, parts, shares)
    return {"sum": out}


def squared_norm(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"total": backend.asarray(backend.squared_norm(call.wide(shape.height * 16))).reshape(1)}


def total(backend: Backend, call: Call, shape: Shape) -> Results:
    return {"total": backend.asarray(backend.total(call.wide(shape.height * 16))).reshape(1)}


def clip_norm(backend: Backend, call: Call, shape: Shape) -> Results:
    grad = call.wide(shape.height * 16)
    others = 4.0 if shape.need_dx else 0.0  # of other vectors that are clipped together with this one
    backend.clip_norm(grad, backend.squared_norm(grad) + others, 0.5 if shape.flag else 1000.0)
    return {"grad": grad}


def momentum_update(backend: Backend, call: Call, shape: Shape) -> Results:
    weight, velocity, grad = (call.wide(shape.height * 16) for _ in range(3))
    l2, scale = 0.01 if shape.window.stride[0] > 1 else 0.0, 0.25 if shape.need_dx else 1.0
    stored = stored_copy(backend, shape)
    backend.momentum_update(weight, velocity, grad, 0.1, 0.9, l2, scale, shape.flag, stored)
    return {"weight": weight, "velocity": velocity, "grad": grad, "stored": stored}


COMPARISONS: dict[str, Callable[[Backend, Call, Shape], Results]] = {
    function.__name__: function
    for function in (
        load_images,
        convert,
        matmul,
        dense,
        dense_backward,
        im2col,
        col2im,
        conv2d,
        conv2d_backward,
        max_pool2d,
        max_pool2d_backward,
        fused_pair,
        winner_dtype,
        relu,
        relu_backward,
        softmax,
        softmax_backward,
        softmax_cross_entropy,
        mean_in_place,
        weighted_sum,
        squared_norm,
        total,
        clip_norm,
        sgd_update,
        momentum_update,
    )
}

# Moving numbers about: exactly the reference's, in every precision.
EXACT = {"im2col", "max_pool2d", "winner_dtype", "relu", "relu_backward"}

# Not operations on numbers: tested on their own in tests/backend/test_backends.py and test_workspace.py, and
# in tests/data/test_feeding.py.
ELSEWHERE = {
    "feed",
    "mark",
    "recorder",
    "here",
    "failure",
    "after",
    "fetch",
    "stream",
    "place",
    "conv2d_buffers",
    "allocate",
    "address",
    "asarray",
    "to_host",
    "synchronize",
    "activate",
    "borrow",
    "give_back",
    "loans",
}
