from __future__ import annotations

from typing import Any

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, write_back
from cupynet.backend.window import IntPair


@kernel
def seen(at: int, size: int, kernel_size: int, stride: int, padding: int) -> Any:
    """Return the start of window `at` along an axis, and the part [first, end) of it that is in the image."""
    start = at * stride - padding
    return start, max(0, -start), min(kernel_size, size - start)


@kernel
def max_pool(x: Array, y: Array, indices: Array, kernel_size: IntPair, stride: IntPair, padding: IntPair) -> None:
    """Write the maximum of each window and its index ky·K_w + kx, the first among equals. NaN counts as largest."""
    x, y = reals(x), reals(y)
    for n in range(y.shape[0]):
        for row in range(y.shape[1]):
            top, first_ky, end_ky = seen(row, x.shape[1], kernel_size[0], stride[0], padding[0])
            for col in range(y.shape[2]):
                left, first_kx, end_kx = seen(col, x.shape[2], kernel_size[1], stride[1], padding[1])
                best, place = y[n, row, col], indices[n, row, col]
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
    dy: Array, indices: Array, dx: Array, kernel_size: IntPair, stride: IntPair, padding: IntPair
) -> None:  # fmt: skip
    dy, dx = reals(dy), reals(dx)
    dx[...] = 0
    for n in range(dy.shape[0]):
        for row in range(dy.shape[1]):
            top, first_ky, end_ky = seen(row, dx.shape[1], kernel_size[0], stride[0], padding[0])
            for col in range(dy.shape[2]):
                left, first_kx, end_kx = seen(col, dx.shape[2], kernel_size[1], stride[1], padding[1])
                gradient, place = dy[n, row, col], indices[n, row, col]
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        target = dx[n, top + ky, left + kx]
                        for c in range(gradient.size):
                            target[c] += gradient[c] if place[c] == ky * kernel_size[1] + kx else 0


@kernel
def avg_pool(x: Array, y: Array, kernel_size: IntPair, stride: IntPair, padding: IntPair) -> None:
    x, y = reals(x), reals(y)
    real, floats = y.dtype.type, room(y[0, 0, 0])
    for n in range(y.shape[0]):
        for row in range(y.shape[1]):
            top, first_ky, end_ky = seen(row, x.shape[1], kernel_size[0], stride[0], padding[0])
            for col in range(y.shape[2]):
                left, first_kx, end_kx = seen(col, x.shape[2], kernel_size[1], stride[1], padding[1])
                mean, share = scratch(y[n, row, col], floats), real(1 / ((end_ky - first_ky) * (end_kx - first_kx)))
                for c in range(mean.size):
                    mean[c] = 0
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        pixel = x[n, top + ky, left + kx]
                        for c in range(mean.size):
                            mean[c] += pixel[c]
                for c in range(mean.size):
                    mean[c] *= share
                write_back(y[n, row, col], floats)


@kernel
def avg_pool_backward(dy: Array, dx: Array, kernel_size: IntPair, stride: IntPair, padding: IntPair) -> None:
    dy, dx = reals(dy), reals(dx)
    real, floats = dy.dtype.type, room(dx[0])
    for n in range(dy.shape[0]):
        image = scratch(dx[n], floats)
        image[...] = 0
        for row in range(dy.shape[1]):
            top, first_ky, end_ky = seen(row, dx.shape[1], kernel_size[0], stride[0], padding[0])
            for col in range(dy.shape[2]):
                left, first_kx, end_kx = seen(col, dx.shape[2], kernel_size[1], stride[1], padding[1])
                gradient, share = dy[n, row, col], real(1 / ((end_ky - first_ky) * (end_kx - first_kx)))
                for ky in range(first_ky, end_ky):
                    for kx in range(first_kx, end_kx):
                        target = image[top + ky, left + kx]
                        for c in range(gradient.size):
                            target[c] += gradient[c] * share
        write_back(dx[n], floats)
