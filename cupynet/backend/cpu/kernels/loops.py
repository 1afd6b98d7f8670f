"""Compiled loops for the CPU, and how all kernels are compiled.

Each kernel releases the GIL and runs on the calling thread alone (`parallel=True` aborts the process when several
workers enter it). Compiled code is kept on disk, see `cache`. Arrays are C-contiguous. The fast-math flags allow
contraction and reassociation but keep NaN and infinity meaningful.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.cache import KernelCache
from cupynet.backend.window import IntPair

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

SOURCES = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()[:8]


def kernel(function: Kernel) -> Kernel:
    """Compile on first use, for the dtypes it is called with.

    A kernel that is made for some constants has a cache file named after them and after the state of this folder's
    sources. Files of one name are numbered by numba: of two processes that compile at once, one would find the other's
    code. And numba looks at a kernel's own file only, not at what it is made of (`vectors`).
    """
    if function.__closure__:
        constants = (str(cell.cell_contents) for cell in function.__closure__)
        function.__qualname__ = "-".join((function.__qualname__, *constants, SOURCES))
    compile_ = numba.njit(
        nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract", "reassoc", "nsz", "arcp"}
    )
    compiled = compile_(function)
    compiled._cache = KernelCache(function)  # in place of what cache=True makes, whose errors would be the run's
    return cast(Kernel, compiled)


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of a kernel's loop, compiled into it."""
    found: Callable[..., Any] = numba.extending.register_jitable(function)
    return found


@kernel
def gather_scale(images: Array, samples: Array, scale: float, shift: float, batch: Array) -> None:
    """batch[i] = images[samples[i]] * scale + shift; (S, F) uint8, (N,), (N, F)."""
    for i in range(samples.size):
        source = images[samples[i]]
        target = batch[i]
        for j in range(target.size):
            target[j] = source[j] * scale + shift


@kernel
def gather_scale_each(images: Array, samples: Array, scale: Array, shift: Array, batch: Array) -> None:
    """batch[i] = images[samples[i]] * scale + shift, each by its own; (S, F) uint8, (N,), (F,), (F,), (N, F)."""
    for i in range(samples.size):
        source = images[samples[i]]
        target = batch[i]
        for j in range(target.size):
            target[j] = source[j] * scale[j] + shift[j]


@kernel
def im2col(x: Array, windows: Array, rows: int, stride: IntPair, channels: int) -> None:
    """Copy each window as K_h contiguous segments of K_w·C: (N, H, W·C) -> (N·H', W', K_h, K_w·C)."""
    kernel_height, segment = windows.shape[2], windows.shape[3]
    for line in range(windows.shape[0]):
        image = x[line // rows]
        top = line % rows * stride[0]
        for col in range(windows.shape[1]):
            left = col * stride[1] * channels
            for ky in range(kernel_height):
                source = image[top + ky, left : left + segment]
                target = windows[line, col, ky]
                for j in range(segment):
                    target[j] = source[j]


@kernel
def col2im(windows: Array, x: Array, rows: int, stride: IntPair, channels: int) -> None:
    """The transpose of im2col: x = 0, then every segment is added where it came from."""
    kernel_height, segment = windows.shape[2], windows.shape[3]
    for n in range(x.shape[0]):
        image = x[n]
        image[...] = 0
        for row in range(rows):
            line = n * rows + row
            for col in range(windows.shape[1]):
                left = col * stride[1] * channels
                for ky in range(kernel_height):
                    target = image[row * stride[0] + ky, left : left + segment]
                    source = windows[line, col, ky]
                    for j in range(segment):
                        target[j] += source[j]


@kernel
def seen(at: int, size: int, kernel_size: int, stride: int, zeros: int) -> Any:
    """Of the `at`th window along an axis: where it begins in the image, and the first and the end of its own places
    that lie there; `zeros` are before the image."""
    start = at * stride - zeros
    return start, max(0, -start), min(kernel_size, size - start)


@kernel
def max_pool(x: Array, y: Array, winners: Array, kernel_size: IntPair, stride: IntPair, zeros: IntPair) -> None:
    """The largest of each window and its place ky·K_w + kx, the first among equals, and the first NaN of any."""
    for n in range(y.shape[0]):
        for row in range(y.shape[1]):
            top, first_ky, end_ky = seen(row, x.shape[1], kernel_size[0], stride[0], zeros[0])
            for col in range(y.shape[2]):
                left, first_kx, end_kx = seen(col, x.shape[2], kernel_size[1], stride[1], zeros[1])
                best, place = y[n, row, col], winners[n, row, col]
                first = x[n, top + first_ky, left + first_kx]
                for c in range(best.size):
                    best[c] = first[c]
                    place[c] = first_ky * kernel_size[1] + first_kx
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        candidate = x[n, top + ky, left + kx]
                        for c in range(best.size):
                            better = (not candidate[c] <= best[c]) & (best[c] == best[c])
                            best[c] = candidate[c] if better else best[c]
                            place[c] = ky * kernel_size[1] + kx if better else place[c]


@kernel
def max_pool_backward(
    dy: Array, winners: Array, dx: Array, kernel_size: IntPair, stride: IntPair, zeros: IntPair
) -> None:  # fmt: skip
    """dx = 0, then each gradient is added at its window's winner."""
    dx[...] = 0
    for n in range(dy.shape[0]):
        for row in range(dy.shape[1]):
            top, first_ky, end_ky = seen(row, dx.shape[1], kernel_size[0], stride[0], zeros[0])
            for col in range(dy.shape[2]):
                left, first_kx, end_kx = seen(col, dx.shape[2], kernel_size[1], stride[1], zeros[1])
                gradient, place = dy[n, row, col], winners[n, row, col]
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        target = dx[n, top + ky, left + kx]
                        for c in range(gradient.size):
                            target[c] += gradient[c] if place[c] == ky * kernel_size[1] + kx else 0


@kernel
def avg_pool(x: Array, y: Array, kernel_size: IntPair, stride: IntPair, zeros: IntPair) -> None:
    """The mean of the pixels of the image in each window."""
    real = y.dtype.type
    for n in range(y.shape[0]):
        for row in range(y.shape[1]):
            top, first_ky, end_ky = seen(row, x.shape[1], kernel_size[0], stride[0], zeros[0])
            for col in range(y.shape[2]):
                left, first_kx, end_kx = seen(col, x.shape[2], kernel_size[1], stride[1], zeros[1])
                mean, share = y[n, row, col], real(1 / ((end_ky - first_ky) * (end_kx - first_kx)))
                for c in range(mean.size):
                    mean[c] = 0
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        pixel = x[n, top + ky, left + kx]
                        for c in range(mean.size):
                            mean[c] += pixel[c]
                for c in range(mean.size):
                    mean[c] *= share


@kernel
def avg_pool_backward(dy: Array, dx: Array, kernel_size: IntPair, stride: IntPair, zeros: IntPair) -> None:
    """dx = 0, then each pixel's share of each window's gradient is added."""
    real = dy.dtype.type
    dx[...] = 0
    for n in range(dy.shape[0]):
        for row in range(dy.shape[1]):
            top, first_ky, end_ky = seen(row, dx.shape[1], kernel_size[0], stride[0], zeros[0])
            for col in range(dy.shape[2]):
                left, first_kx, end_kx = seen(col, dx.shape[2], kernel_size[1], stride[1], zeros[1])
                gradient, share = dy[n, row, col], real(1 / ((end_ky - first_ky) * (end_kx - first_kx)))
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        target = dx[n, top + ky, left + kx]
                        for c in range(gradient.size):
                            target[c] += gradient[c] * share


@kernel
def add_column_sums(dy: Array, grad: Array) -> None:
    """grad += the sum of the rows of dy, 64 at a time, so that long sums keep their digits; (R, O), (O,)."""
    part = np.empty_like(grad)
    for start in range(0, dy.shape[0], 64):
        part[:] = 0
        for r in range(start, min(start + 64, dy.shape[0])):
            row = dy[r]
            for j in range(part.size):
                part[j] += row[j]
        for j in range(part.size):
            grad[j] += part[j]


@kernel
def relu_backward(dy: Array, y: Array) -> None:
    """dy = dy where y > 0, else 0."""
    for i in range(dy.size):
        dy[i] = dy[i] if y[i] > 0 else 0


@kernel
def mean_in_place(parts: Any, shares: Array) -> None:
    """Overwrite all of `parts`, a tuple of vectors, with sum_r shares[r] · parts[r]; parts of share 0 are not read."""
    tile = np.empty(2048, np.float64)  # shares in single precision do not add up to one: averages would drift
    for start in range(0, parts[0].size, tile.size):
        stop = min(start + tile.size, parts[0].size)
        tile[:] = 0
        for r in range(len(parts)):
            if shares[r] > 0:
                part, share = parts[r][start:stop], shares[r]
                for i in range(part.size):
                    tile[i] += share * part[i]
        for r in range(len(parts)):
            part = parts[r][start:stop]
            for i in range(part.size):
                part[i] = tile[i]


@kernel
def squared_norm(grad: Array) -> Any:
    """The sum of squares of a vector."""
    total = grad.dtype.type(0)
    for i in range(grad.size):
        total += grad[i] * grad[i]
    return total


@kernel
def clip_norm(grad: Array, squared_norm: Any, largest: Any) -> None:
    """Shorten a vector of this squared norm to the length `largest` if it is longer; NaN stays NaN."""
    length = np.sqrt(squared_norm)
    if not length <= largest:
        for i in range(grad.size):
            grad[i] *= largest / length


def compiled() -> bool:
    """Whether any kernel has been compiled or loaded in this process; importing the package must not do it."""
    kernels = [value for value in globals().values() if isinstance(value, numba.core.dispatcher.Dispatcher)]
    return any(len(k.signatures) > 0 for k in kernels)
