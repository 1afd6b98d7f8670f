"""Arguments for calls of a backend's operations: odd shapes, and random numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import Backend, DtypePolicy, Layers, Window
from tests.support.pairwise import cover

Array: TypeAlias = Any


@dataclass(frozen=True)
class Shape:
    """The geometry of one call. Operations without images use only part of it."""

    batch: int
    height: int
    width: int
    channels: int
    outputs: int
    window: Window
    flag: bool  # has a bias, uses Nesterov, is transposed ...
    need_dx: bool
    groups: bool = False  # convolutions are also compared with several groups of channels

    @property
    def image(self) -> tuple[int, int, int, int]:
        """The shape (N, H, W, C), with room for at least one window."""
        (kh, kw), (rows, cols) = self.window.extent, self.window.padding
        return (self.batch, max(self.height, kh - sum(rows)), max(self.width, kw - sum(cols)), self.channels)

    @property
    def pooled(self) -> tuple[Window, tuple[int, int, int, int]]:
        """A pool's window, without dilation and with less padding than its size; a shape with room for one window."""
        (kh, kw), (rows, cols) = self.window.kernel, self.window.padding
        (above, below), (left, right) = ([min(zeros, k - 1) for zeros in side] for side, k in ((rows, kh), (cols, kw)))
        window = Window((kh, kw), self.window.stride, ((above, below), (left, right)))
        height, width = max(self.height, kh - above - below), max(self.width, kw - left - right)
        return window, (self.batch, height, width, self.channels)


# Every pair of values of different parameters occurs in at least one shape.
GEOMETRIES: dict[str, Sequence[Any]] = {
    "batch": (1, 4),
    "size": ((7, 6), (1, 1), (5, 9)),
    "channels": (1, 3, 6),  # few different widths, because a kernel is compiled for each
    "outputs": (1, 3, 6),
    "kernel": ((1, 1), (3, 3), (2, 5), (4, 1)),
    "stride": ((1, 1), (2, 1), (3, 4)),
    "padding": (((0, 0), (0, 0)), ((1, 1), (1, 1)), ((0, 1), (1, 2)), ((2, 2), (0, 0))),
    "dilation": ((1, 1), (2, 2), (1, 3)),
    "flag": (True, False),
    "need_dx": (True, False),
}


SHAPES: list[Shape] = []
for case in cover([len(values) for values in GEOMETRIES.values()]):
    chosen = [values[i] for values, i in zip(GEOMETRIES.values(), case, strict=True)]
    batch, (height, width), channels, outputs, *window, flag, need_dx = chosen
    SHAPES.append(Shape(batch, height, width, channels, outputs, Window(*window), flag, need_dx, groups=True))
# A subset for tests in which all shapes would take too long: batches of four, with and without each flag, and enough
# values that a small grid loops over them. All have the same widths, because a kernel is compiled for each.
CHOSEN = [replace(shape, channels=6, outputs=6) for shape in SHAPES[3::4]]
HALVING = Window((2, 2), (2, 2))  # a pool that numba fuses with its convolution: windows are small and disjoint


class Call:
    """Arguments for one call. All backends, even wider ones, get the same numbers, drawn in the precision `policy`."""

    def __init__(self, seed: int, policy: DtypePolicy, backend: Backend) -> None:
        self.rng = np.random.default_rng(seed)
        self.drawn, self.policy, self.backend = policy, backend.policy, backend
        self._kept: list[tuple[Array, Array]] = []

    def stored(self, *shape: int, changes: bool = False) -> Array:
        """Draw normal numbers in storage precision. `changes`: the operation works in place."""
        return self._put(self.rng.normal(size=shape).astype(self.drawn.storage), self.policy.storage, changes)

    def few(self, *shape: int) -> Array:
        """Draw numbers, many of them equal and many zero."""
        numbers = self.rng.integers(-1, 2, shape) * self.rng.integers(0, 2, shape[:1] + (1,) * (len(shape) - 1))
        return self._put(numbers.astype(self.drawn.storage), self.policy.storage, False)

    def wide(self, *shape: int) -> Array:
        """Draw normal numbers in accumulation precision, for a vector that the operation changes."""
        return self._put(self.rng.normal(size=shape).astype(self.drawn.accumulate), self.policy.accumulate, True)

    def integers(self, low: int, high: int, *shape: int) -> Array:
        return self._put(self.rng.integers(low, high, shape), np.dtype(np.int64), False)

    def integers_on_host(self, below: int) -> int:
        """Draw a geometry parameter from 0, 1 ... below - 1."""
        return int(self.rng.integers(0, below))

    def spoil(self, array: Array) -> None:
        """Make some of an array's numbers NaN, and no longer check that the array stays unchanged."""
        self._kept = [(kept, before) for kept, before in self._kept if kept is not array]
        array[self.backend.asarray(self.rng.integers(0, 4, array.shape) == 0)] = np.nan

    def _put(self, numbers: Array, dtype: Any, changes: bool) -> Array:
        array = self.backend.allocate(numbers.shape, dtype)
        array[...] = self.backend.asarray(numbers.astype(dtype))
        if not changes:
            self._kept.append((array, array.copy()))
        return array

    def check_arguments(self) -> None:
        """Check that only in-place operations have changed their arguments."""
        for array, before in self._kept:
            assert bool((array == before).all()), "an argument that is not the operation's was changed"


def grouped(shape: Shape) -> list[tuple[str, int, tuple[int, int, int, int], tuple[int, ...]]]:
    """Return ways to group channels: name, number of groups, shape of the images, shape of the weight."""
    n, height, width, channels = shape.image
    window = shape.window.kernel
    one = ("one", 1, shape.image, (*window, channels, shape.outputs))
    if not shape.groups or channels == 1:
        return [one]
    copies = 2 if channels == 3 else 1  # filters per channel; 3 and 6 channels then share kernels
    return [
        one,
        ("three", 3, (n, height, width, 3 * channels), (*window, channels, 3 * shape.outputs)),
        ("depthwise", channels, shape.image, (*window, 1, channels * copies)),
    ]


def pools_of(call: Call, shape: Shape) -> list[Window]:
    """Return a random pool, which few backends fuse, and the usual one if it fits."""
    convolved = shape.window.output(*shape.image[1:3])
    kernel = [min(1 + call.integers_on_host(3), side) for side in convolved]
    drawn = Window((kernel[0], kernel[1]), (1 + call.integers_on_host(3), 1 + call.integers_on_host(3)))
    if shape.outputs % 2 and min(kernel) > 1:
        drawn = Window(drawn.kernel, drawn.stride, ((1, 0), (0, 1)))
    return [drawn, HALVING] if min(convolved) > 1 and drawn != HALVING else [drawn]


def targets(backend: Backend, call: Call, shape: Shape) -> Array:
    """Return targets from 0 to 1 (N, O), or with a column of weights (N, O + 1)."""
    columns = shape.outputs + shape.flag
    found = call.integers(0, 65, shape.batch * columns).astype(np.float32) / 64
    return backend.asarray(found.reshape(shape.batch, columns))


def channels_of(call: Call, shape: Shape) -> tuple[Array, Array, Array, Array, Array]:
    """Return values to normalize, and the mean, variance, scale and shift of their channels."""
    x = call.stored(*(shape.image if shape.flag else (shape.batch * 67, shape.channels)))
    mean, scale, shift = call.wide(shape.channels), call.stored(shape.channels), call.stored(shape.channels)
    variance = call.wide(shape.channels)
    variance *= variance
    return x, mean, variance, scale, shift


def terms_of(call: Call, shape: Shape) -> tuple[list[Array], list[float]]:
    """Return vectors and their shares. A vector without a share is NaN."""
    parts = [call.wide(shape.height * 500) for _ in range(shape.batch + 1)]
    shares = [0.1 * r + 0.2 for r in range(len(parts))]
    if shape.flag:
        parts[0][...], shares[0] = math.nan, 0.0
    return parts, shares


def layers_of(backend: Backend, shape: Shape) -> Layers:
    """Return segments with gaps between them; some belong to the same layer, and one is empty."""
    edges = np.linspace(0, shape.height * 500, shape.outputs + 2).astype(int).tolist()
    bounds = [(start, stop - (i % 2)) for i, (start, stop) in enumerate(pairwise(edges))]
    return Layers(backend, [*bounds, (3, 3)], [*(i % 3 if i > 2 else i for i in range(len(bounds))), 0])
