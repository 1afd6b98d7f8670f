"""Forward pass of a convolution followed by max pooling. Sums stay in registers; only maxima and indices are stored."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, widened, write_back
from cupynet.backend.cpu.kernels.patches import Patches
from cupynet.backend.cpu.kernels.vectors import (
    bytes_like,
    constants,
    load,
    pointers,
    registers,
    store,
    sums_of_products,
)

FAR_FROM_OVERFLOW = 1e37  # in single and double precision


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def window_maximum(
    typing: Any, pixels: Any, filters: Any, nan: Any, x: Any, x_at: Any, places: Any, table: Any, weight: Any,
    bias: Any, first: Any, pitch: Any, count: Any, y: Any, indices: Any, y_at: Any,
) -> Any:  # fmt: skip
    """Compute the maximum over the pixels of a window, and its index, for a block of filters.

    y[y_at + j] = bias[first + j] + the maximum over p < pixels of
    sum over k < count of x[x_at + places[p] + table[k]] · weight[k · pitch + first + j], for j < filters;
    indices[y_at + j] = the first p with the maximum. With `nan`, the first NaN is the maximum.

    `pixels`, `filters` and `nan` (0 or 1) are constants. Arrays are flat; places and table are int32. Arguments are not
    checked.
    """
    literals = constants(pixels, filters, nan)
    if literals is None:
        return None
    signature = types.void(
        pixels, filters, nan, x, x_at, places, table, weight, bias, first, pitch, count, y, indices, y_at
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = pointers(context, builder, signature, arguments)
        inputs = pointer(3, 4), pointer(5), pointer(6), pointer(7, 9), arguments[10], arguments[11]
        _emit(builder, literals, inputs, (pointer(8, 9), pointer(12, 14), pointer(13, 14)))
        return context.get_dummy_value()

    return signature, generate


def _emit(b: Any, literals: list[int], inputs: Any, outputs: Any) -> None:
    pixels, filters, nan = literals
    x, places, table, weight, pitch, count = inputs
    sums, parts = sums_of_products(b, x, places, pixels, table, weight, pitch, count, filters)
    _emit_largest(b, parts, sums, bool(nan), *outputs)


def _emit_largest(b: Any, parts: Any, sums: Any, nan: bool, bias: Any, y: Any, indices: Any) -> None:
    """Emit the maximum for each filter, the first among equals; with `nan`, the first NaN if there is one."""
    for v, (at, kind) in enumerate(parts):
        best, won = sums[0][v], bytes_like(kind, 0)
        for p in range(1, len(sums)):
            if nan:
                larger_or_nan = b.fcmp_unordered(">", sums[p][v], best)  # also true if `best` is NaN
                better = b.and_(larger_or_nan, b.fcmp_ordered("ord", best, best))
            else:
                better = b.fcmp_ordered(">", sums[p][v], best)
            best, won = b.select(better, sums[p][v], best), b.select(better, bytes_like(kind, p), won)
        store(b, b.fadd(best, load(b, bias, at, kind)), y, at)
        store(b, won, indices, at)


def blocks(pixels: int, filters: int, itemsize: int) -> tuple[int, int, int]:
    """Split filters by the number of registers: (number of full blocks, block size, remaining filters)."""
    width, sums = registers()
    max_filters = max(sums // pixels, 1) * (width // itemsize)
    return (0, 0, filters) if filters <= max_filters else (filters // max_filters, max_filters, filters % max_filters)


@functools.cache
def conv_pool(pixels: int, full: int, block: int, rest: int, nan: int = 0) -> Callable[..., bool]:
    """Return the kernel for pooling windows of `pixels` pixels, and filters split by `blocks`.

    If `nan` is 1, every sum is checked for NaN. Otherwise, the kernel only checks that inputs are too small for a sum
    to overflow, because checking sums would need registers and reduce the speed by a fifth.
    """

    @kernel
    def forward(x: Array, patches: Patches, table: Array, weight: Array, bias: Array, y: Array, indices: Array) -> bool:
        """Write pooled outputs and the indices of maxima. Return False, with invalid results, if NaN is possible.

        x: (N, F). table: see `ConvPool.table`. weight: (K_h·K_w·C, O). bias: (O,). y, indices: (N, P·O).
        """
        corners, places = patches.corners, patches.places
        size, windows, filters, count = x.shape[1], corners.size, weight.shape[1], table.size
        x, y, factors = reals(x), reals(y), weight.reshape(-1)
        floats, sums, weights = room(x[0]), room(y[0]), weight.dtype.type(0)
        for i in range(factors.size):  # np.sum would take Numba longer to compile
            weights += abs(factors[i])
        for n in range(x.shape[0]):
            image, out, won = widened(x[n], floats), scratch(y[n], sums), indices[n]
            if nan == 0:
                total = weight.dtype.type(0)
                for i in range(size):
                    total += abs(image[i])
                if not total * weights < FAR_FROM_OVERFLOW:  # bounds all sums of products; False for NaN
                    return False
            for part in range(full):
                at = part * block
                for k in range(windows):
                    window_maximum(
                        pixels, block, nan, image, corners[k], places, table, factors, bias, at, filters, count, out,
                        won, k * filters + at,
                    )  # fmt: skip
            at = full * block
            for k in range(windows if rest else 0):
                window_maximum(
                    pixels, rest, nan, image, corners[k], places, table, factors, bias, at, filters, count, out, won,
                    k * filters + at,
                )  # fmt: skip
            write_back(y[n], sums)
        return True

    return forward
