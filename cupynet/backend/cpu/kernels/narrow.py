"""16-bit types in kernels: half and bfloat16 values are converted in registers to float for computations.

Numba does not support these types. Kernels receive the bits from `bits`, as uint16 (half) or int16 (bfloat16), and
`reals` views them as an array of type `Narrow`. Stores round to nearest, ties to even. NaN stays NaN.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed, lower_cast
from numba.core.typeconv import Conversion
from numba.extending import intrinsic, models, register_model

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.vectors import target_features

F16, F32, I16, I32 = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)


class Narrow(types.Type):
    """Numba type of a number that is stored in 16 bits and converted to float for computations."""

    def can_convert_to(self, context: Any, other: Any) -> Any:
        return {types.float32: Conversion.promote, types.float64: Conversion.safe}.get(other)

    def can_convert_from(self, context: Any, other: Any) -> Any:
        return Conversion.unsafe if isinstance(other, types.Number) else None

    def unify(self, context: Any, other: Any) -> Any:
        return context.unify_pairs(types.float32, other)


HALF, BFLOAT16 = Narrow("half"), Narrow("bfloat16")
KINDS = {types.uint16: HALF, types.int16: BFLOAT16}
BITS = {"e": np.uint16, "E": np.int16}  # by dtype.char of NumPy's half and ml_dtypes' bfloat16


@register_model(Narrow)
class NarrowModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, F32)

    def get_data_type(self) -> Any:
        return I16

    def from_data(self, b: Any, stored: Any) -> Any:
        if self._fe_type == BFLOAT16:
            return b.bitcast(b.shl(b.zext(stored, I32), _whole(16)), F32)
        return b.fpext(b.bitcast(stored, F16), F32) if converts_half() else half_to_float(b, stored)

    def as_data(self, b: Any, value: Any) -> Any:
        if self._fe_type == HALF:
            return b.bitcast(b.fptrunc(value, F16), I16) if converts_half() else float_to_half(b, value)
        whole = b.bitcast(value, I32)
        rounded = b.lshr(_plus(b, whole, b.and_(b.lshr(whole, _whole(16)), _whole(1)), 0x7FFF), _whole(16))
        quiet = b.lshr(b.or_(whole, _whole(0x400000)), _whole(16))
        return b.trunc(b.select(b.fcmp_unordered("uno", value, value), quiet, rounded), I16)


def converts_half() -> bool:
    """Return True if the processor can convert between half and float. Otherwise LLVM would call a missing function."""
    return "+f16c" in target_features() or platform.machine() in ("aarch64", "arm64")


def half_to_float(b: Any, stored: Any) -> Any:
    """Convert the bits of a half to float with integer operations, and an exact product that adjusts the exponent."""
    whole = b.zext(stored, I32)
    size = b.shl(b.and_(whole, _whole(0x7FFF)), _whole(13))
    scaled = b.bitcast(b.fmul(b.bitcast(size, F32), ir.Constant(F32, 2.0**112)), I32)
    finite = b.icmp_unsigned("<", size, _whole(0x7C00 << 13))
    sign = b.shl(b.and_(whole, _whole(0x8000)), _whole(16))
    return b.bitcast(b.or_(b.select(finite, scaled, b.or_(size, _whole(0x7F800000))), sign), F32)


def float_to_half(b: Any, value: Any) -> Any:
    """Convert a float to the bits of a half with integer operations. Adding 0.5 rounds subnormal numbers."""
    whole = b.bitcast(value, I32)
    size = b.and_(whole, _whole(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, _whole(13)), _whole(1))
    rounded = b.lshr(_plus(b, size, odd, 0xFFF - (112 << 23)), _whole(13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(size, F32), ir.Constant(F32, 0.5)), I32), _whole(0x3F000000))
    result = b.select(b.icmp_unsigned("<", size, _whole(113 << 23)), small, rounded)
    result = b.select(b.icmp_unsigned("<", size, _whole(0x477FF000)), result, _whole(0x7C00))  # rounds to at most 65504
    result = b.select(b.icmp_unsigned(">", size, _whole(0x7F800000)), _whole(0x7E00), result)
    return b.trunc(b.or_(result, b.and_(b.lshr(whole, _whole(16)), _whole(0x8000))), I16)


def _whole(value: int) -> Any:
    return ir.Constant(I32, value)


def _plus(b: Any, whole: Any, last: Any, value: int) -> Any:
    return b.add(b.add(whole, last), _whole(value))


@lower_cast(Narrow, types.Float)  # type: ignore[untyped-decorator]
def _widened(context: Any, b: Any, narrow: Any, to: Any, value: Any) -> Any:
    return context.cast(b, value, types.float32, to)


@lower_cast(types.Number, Narrow)  # type: ignore[untyped-decorator]
def _narrowed(context: Any, b: Any, kind: Any, narrow: Any, value: Any) -> Any:
    return context.cast(b, value, kind, types.float32)


@intrinsic  # type: ignore[untyped-decorator]
def reals(typing: Any, array: Any) -> Any:
    """Return the same array, viewed as `Narrow` if it contains the bits of half or bfloat16."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return impl_ret_borrowed(context, builder, signature.return_type, arguments[0])

    return array.copy(dtype=KINDS.get(array.dtype, array.dtype))(array), generate


def _is_narrow(array: Any) -> bool:
    return isinstance(array.dtype, Narrow)


def _copy(context: Any, b: Any, kinds: Any, arrays: Any, of: int) -> None:
    """Copy the first of two contiguous arrays to the second. of: index of the array that has the size to copy."""
    source, target = (context.make_array(kind)(context, b, array) for kind, array in zip(kinds, arrays, strict=True))
    with cgutils.for_range(b, (source, target)[of].nitems) as loop:
        value = context.unpack_value(b, kinds[0].dtype, b.gep(source.data, [loop.index]))
        converted = context.cast(b, value, kinds[0].dtype, kinds[1].dtype)
        context.pack_value(b, kinds[1].dtype, converted, b.gep(target.data, [loop.index]))


def bits(array: Array) -> Array:
    """Return the array as kernels expect it: half and bfloat16 are viewed as 16-bit integers."""
    kind = BITS.get(array.dtype.char)
    return array if kind is None else array.view(kind)


def is_bfloat16(array: Array) -> bool:
    return bool(array.dtype.char == "E")


# The following functions are for kernels that need floats in memory, for a row, an image or a block at a time, which
# stays in the L1 cache. They are intrinsics, because ordinary functions would take a second longer to compile.


@intrinsic  # type: ignore[untyped-decorator]
def room(typing: Any, part: Any) -> Any:
    """Return new floats with the shape of `part` for the functions below, or `part` itself if it is not `Narrow`."""
    floats = types.Array(types.float32, part.ndim, "C") if _is_narrow(part) else part

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if not _is_narrow(part):
            return impl_ret_borrowed(context, b, part, arguments[0])
        return context.compile_internal(b, lambda part: np.empty(part.shape, np.float32), signature, arguments)

    return floats(part), generate


@intrinsic  # type: ignore[untyped-decorator]
def widened(typing: Any, part: Any, floats: Any) -> Any:
    """Copy `part` to the beginning of `floats` and return `floats`, or return `part` itself if it is not `Narrow`."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if _is_narrow(part):
            _copy(context, b, (part, floats), arguments, of=0)
        return impl_ret_borrowed(context, b, signature.return_type, arguments[_is_narrow(part)])

    return (floats if _is_narrow(part) else part)(part, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def scratch(typing: Any, part: Any, floats: Any) -> Any:
    """Return the array for results before `write_back`: `floats`, or `part` itself if it is not `Narrow`."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        return impl_ret_borrowed(context, b, signature.return_type, arguments[_is_narrow(part)])

    return (floats if _is_narrow(part) else part)(part, floats), generate


@intrinsic  # type: ignore[untyped-decorator]
def write_back(typing: Any, part: Any, floats: Any) -> Any:
    """Copy the beginning of `floats` to `part` if `part` is `Narrow`."""

    def generate(context: Any, b: Any, signature: Any, arguments: Any) -> Any:
        if _is_narrow(part):
            _copy(context, b, (floats, part), arguments[::-1], of=1)
        return context.get_dummy_value()

    return types.void(part, floats), generate
