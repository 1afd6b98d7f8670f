"""Generates LLVM vector code. Functions that take an LLVM builder `b` emit instructions and return their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target

I32, I64 = ir.IntType(32), ir.IntType(64)


@functools.cache  # a call takes 0.2 ms
def registers() -> tuple[int, int]:
    """Return the size of a vector register in bytes, and the number of registers to use for sums."""
    features = llvmlite.binding.get_host_cpu_features()
    if features.get("avx512f"):
        return 64, 20
    if features.get("avx2"):
        return 32, 12
    return 16, 20 if features.get("neon") else 12


def lanes(itemsize: int) -> int:
    """Return the number of values in a vector."""
    return registers()[0] // itemsize


def target_features() -> set[str]:
    """Return the CPU features that kernels are compiled for, such as `+avx2`. NUMBA_CPU_NAME may exclude some."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return set(features.split(","))


def widths(length: int, widest: int) -> list[int]:
    """Split `length` into vector widths, powers of two of at most `widest`."""
    result = []
    while length:
        width = min(widest, 1 << (length.bit_length() - 1))
        result.append(width)
        length -= width
    return result


def constants(*kinds: Any) -> list[int] | None:
    """Return the values of compile-time constant arguments, or None if one is not constant."""
    if not all(isinstance(kind, types.IntegerLiteral) for kind in kinds):
        return None
    return [int(kind.literal_value) for kind in kinds]


def pointers(context: Any, b: Any, signature: Any, arguments: Any) -> Callable[..., Any]:
    """Return pointer(i, j), the address of element arguments[j] of array arguments[i]; pointer(i) is its start."""

    def pointer(array: int, at: int | None = None) -> Any:
        data = context.make_array(signature.args[array])(context, b, arguments[array]).data
        return data if at is None else b.gep(data, [arguments[at]])

    return pointer


def size_of(real: Any) -> int:
    return 4 if isinstance(real, ir.FloatType) else 8


def split(length: int, real: Any) -> list[tuple[int, Any]]:
    """Split `length` values into vectors. Return the start and type of each; a single value is a scalar."""
    vectors, at = [], 0
    for width in widths(length, registers()[0] // size_of(real)):
        vectors.append((at, ir.VectorType(real, width) if width > 1 else real))
        at += width
    return vectors


def bytes_like(kind: Any, value: int) -> Any:
    """Return the constant `value` as a vector of bytes with as many elements as `kind`."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(ir.VectorType(ir.IntType(8), kind.count), [value] * kind.count)
    return ir.Constant(ir.IntType(8), value)


def load(b: Any, base: Any, at: int, kind: Any) -> Any:
    """Load a value of type `kind` at offset `at` from `base`, with any alignment."""
    return b.load(_place(b, base, at, kind), align=_alignment(base))


def store(b: Any, value: Any, base: Any, at: int) -> None:
    b.store(value, _place(b, base, at, value.type), align=_alignment(base))


def element(b: Any, base: Any, index: Any) -> Any:
    return b.sext(b.load(b.gep(base, [index])), I64)


def multiply_add(b: Any, x: Any, factor: Any, total: Any) -> Any:
    """Emit x · factor + total, fused if the CPU supports it. `factor` may be a single value for all elements of x.

    Unlike `llvm.fma`, this never calls the C library.
    """
    kind = x.type
    if isinstance(kind, ir.VectorType):
        if factor.type != kind:
            undefined, first = ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(I32, kind.count), None)
            factor = b.shuffle_vector(b.insert_element(undefined, factor, ir.Constant(I32, 0)), undefined, first)
        name = f"v{kind.count}f{8 * size_of(kind.element)}"
    else:
        name = f"f{8 * size_of(kind)}"
    fma = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind] * 3), f"llvm.fmuladd.{name}")
    return b.call(fma, [x, factor, total])


def sums_of_products(
    b: Any, x: Any, places: Any, rows: int, table: Any, w: Any, pitch: Any, count: Any, width: int, by_column: int = 0
) -> Any:
    """Emit rows x width sums of x[places[i] + table[t]] · w[t · pitch + j] over t < count, in registers. count >= 1.

    With `by_column`, column j has its own values x[places[i] + table[t] + j]. Returns the vectors of sums by row, and
    their starts and types (see `split`).
    """

    def values(place: Any) -> list[Any]:
        return [load(b, place, *part) for part in parts] if by_column else [b.load(place)] * len(parts)

    parts = split(width, x.type.pointee)
    patches = [b.gep(x, [element(b, places, ir.Constant(I64, i))]) for i in range(rows)]
    entry, loop, done = b.block, b.append_basic_block("sums"), b.append_basic_block("sums.done")
    b.branch(loop)

    b.position_at_end(loop)
    t = b.phi(I64)
    sums = [[b.phi(kind) for _, kind in parts] for _ in range(rows)]
    offset, row = element(b, table, t), b.gep(w, [b.mul(t, pitch)])
    factors = [load(b, row, *part) for part in parts]
    updated = [
        list(map(functools.partial(multiply_add, b), factors, values(b.gep(patch, [offset])), row_sums))
        for patch, row_sums in zip(patches, sums, strict=True)
    ]
    next_t = b.add(t, ir.Constant(I64, 1))
    t.add_incoming(ir.Constant(I64, 0), entry)
    t.add_incoming(next_t, loop)
    for row_sums, later in zip(sums, updated, strict=True):
        for phi, total in zip(row_sums, later, strict=True):
            phi.add_incoming(ir.Constant(phi.type, None), entry)
            phi.add_incoming(total, loop)
    rolled(b, b.cbranch(b.icmp_signed("<", next_t, count), loop, done))
    b.position_at_end(done)
    return updated, parts


def rolled(b: Any, branch: Any) -> None:
    """Keep LLVM from unrolling the loop that `branch` repeats.

    An unrolled loop may need more registers than there are. Values then spill to the stack, which is not aligned to
    vectors. The cost depends on the stack's address, which differs between processes: kernels were up to 2.5 times
    slower.
    """
    disable = b.module.add_metadata(["llvm.loop.unroll.disable"])
    loop = b.module.add_metadata([ir.Constant(I64, len(b.module.metadata)), disable])  # the number makes it unique
    loop.operands = (loop, disable)  # LLVM requires the node itself as its first operand
    branch.set_metadata("llvm.loop", loop)


def _place(b: Any, base: Any, at: int, kind: Any) -> Any:
    return b.bitcast(b.gep(base, [ir.Constant(I64, at)]), kind.as_pointer())


def _alignment(base: Any) -> int:
    """Return the alignment of a single value, because a vector may start at any element."""
    return 1 if isinstance(base.type.pointee, ir.IntType) else size_of(base.type.pointee)
