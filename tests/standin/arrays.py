"""Arrays on simulated devices: `cupy.ndarray`, as far as cupynet uses it.

Each array is a view of a block (memory.py), and each operation goes through `Machine.run`. Nothing is converted
silently: NumPy arrays are rejected as operands, even where CuPy would copy them to the device. Results in half stay
half, Python's numbers are weak (NEP 50, CuPy 14), and where NumPy returns a scalar, the result is an array of shape ().
An index out of bounds raises an error; CuPy would wrap it.

Sources, in cupy/_core of CuPy 14.2: _kernel.pyx and _scalar.pyx for weak numbers, _routines_math.pyx for sums of
halves, which accumulate in float, _routines_linalg.pyx for their products, and core.pyx for copies from the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from tests.standin.errors import Foreign, Overrun
from tests.standin.machine import Operation, Span, active
from tests.standin.memory import MemoryPointer
from tests.standin.streams import Device

Scalar = (bool, int, float, np.generic)


class ndarray(NDArrayOperatorsMixin):
    """An array on a device. Its operators call NumPy's ufuncs, and so `__array_ufunc__`.

    Args:
        shape, dtype: of a new array, which is uninitialized.
        memptr: its memory; newly allocated by default.

    Attributes:
        host_view: the elements, for the stand-in's own operations.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any = float, memptr: MemoryPointer | None = None) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(size) for size in shape)
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        pointer = allocate(nbytes, kind) if memptr is None else memptr
        chunk = pointer.mem.chunk
        buffer = np.empty(0, np.uint8) if chunk is None else chunk.memory
        if nbytes > buffer.nbytes - pointer.offset:
            raise Overrun(f"an array of {nbytes} bytes does not fit into {chunk}")
        self.host_view: NDArray[Any] = np.ndarray(shape, kind, buffer, pointer.offset if nbytes else 0)
        self._memory = pointer.mem

    def _of(self, view: NDArray[Any]) -> ndarray:
        made = ndarray.__new__(ndarray)
        made.host_view, made._memory = view, self._memory
        return made

    # attributes -----------------------------------------------------------------------------------------------------

    @property
    def span(self) -> list[Span]:
        """The array's part of its memory; no span if the array is empty."""
        chunk = self._memory.chunk
        return [] if chunk is None or not self.size else [Span(chunk, self.host_view)]

    @property
    def data(self) -> MemoryPointer:
        chunk, address = self._memory.chunk, self.host_view.__array_interface__["data"][0]
        return MemoryPointer(self._memory, 0 if chunk is None else address - chunk.address)

    @property
    def device(self) -> Device:
        chunk = self._memory.chunk
        return Device(None if chunk is None else chunk.pool.device)

    @property
    def T(self) -> ndarray:
        return self._of(self.host_view.T)

    def __len__(self) -> int:
        return len(self.host_view)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "strides", "dtype", "ndim", "size", "itemsize", "nbytes", "flags"):
            return getattr(self.host_view, name)
        raise AttributeError(f"the stand-in of cupy.ndarray has no {name!r}: add it to tests/standin/arrays.py")

    # to and from the host -------------------------------------------------------------------------------------------

    def get(self) -> Any:
        """Return a copy on the host, after waiting for the current stream."""
        machine, name = active(), "a copy to the host"
        machine.must_not_capture(name)
        host, view = np.empty(self.shape, self.dtype), self.host_view
        machine.run(Operation(name, self.span, (), lambda: np.copyto(host, view)))
        seat = machine.seat
        seat.streams[seat.device].synchronize()
        return host

    def __float__(self) -> float:
        return float(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise Foreign("Implicit conversion to a NumPy array is not allowed. Use `.get()` to do it explicitly.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (None,)) -> Any:
        if method != "__call__":
            raise Foreign(f"numpy.{ufunc.__name__}.{method} on a CuPy array")
        return matmul(*inputs, *out) if ufunc is np.matmul else elementwise(ufunc, *inputs, out=out[0])

    # views, copies, indices -----------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> ndarray:
        """Return a view. CuPy would copy if no view is possible."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return self._of(self.host_view.reshape(sizes, copy=False))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return assign(ndarray(self.shape, dtype), self)

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def __getitem__(self, key: Any) -> ndarray:
        keys, arrays = _indices(key)
        if arrays:
            raise Foreign("the stand-in cannot read by arrays of indices: add it to tests/standin/arrays.py")
        return self._of(self.host_view[keys])

    def __setitem__(self, key: Any, value: Any) -> None:
        keys, arrays = _indices(key)
        if not arrays:
            target = self._of(self.host_view[keys])
            if not (isinstance(value, ndarray) and _is_same(target, value)):  # as after +=
                assign(target, value)
            return
        operand(value, "[indices] =")
        plain = tuple(each.host_view if isinstance(each, ndarray) else each for each in keys)
        view, into = (value.host_view if isinstance(value, ndarray) else value), self.host_view

        def work() -> None:
            try:
                into[plain] = view
            except IndexError as error:
                raise Overrun(f"{error}: CuPy would wrap the index") from error

        # the other elements are kept, so they must have been written
        do("[indices] =", work, [self, *arrays, *([value] if isinstance(value, ndarray) else [])], self)

    # reductions -----------------------------------------------------------------------------------------------------

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.add, self, axis, keepdims, dtype)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        total = self.sum(axis, dtype, keepdims)
        return elementwise(np.true_divide, total, self.size // max(total.size, 1))

    def max(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.maximum, self, axis, keepdims)

    def all(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.logical_and, self, axis, keepdims)


def do(name: str, work: Callable[[], Any], reads: Sequence[ndarray], made: ndarray) -> ndarray:
    """Run an operation. `work` refers to views, not arrays, so a captured operation keeps no memory alive."""
    if made.size:
        active().run(Operation(name, [span for each in reads for span in each.span], made.span, work))
    return made


def allocate(nbytes: int, dtype: Any) -> MemoryPointer:
    """Return memory for an array, from the thread's allocator or the default pool."""
    machine = active()
    if machine.seat.allocators:
        return machine.seat.allocators[-1](nbytes)  # type: ignore[no-any-return]
    machine.must_not_capture("an allocation from the default pool")
    return machine.pool.malloc(nbytes, dtype)


def operand(value: Any, name: str) -> Any:
    """Return `value` if it is a CuPy array or a number; otherwise raise Foreign."""
    if isinstance(value, (ndarray, *Scalar)):
        return value
    raise Foreign(f"{name}: Unsupported type {type(value)}: bring it to the device with cupy.asarray")


def elementwise(ufunc: np.ufunc, *inputs: Any, out: ndarray | None = None) -> ndarray:
    name = ufunc.__name__
    arrays = [each for each in inputs if isinstance(operand(each, name), ndarray)]
    kinds = [type(each) if type(each) in (int, float) else np.result_type(_view(each)) for each in inputs]
    *_, dtype = ufunc.resolve_dtypes((*kinds, None))
    shape = np.broadcast_shapes(*(each.shape for each in arrays))
    made = ndarray(shape, dtype) if out is None else operand(out, name)
    if made.shape != shape:
        raise ValueError(f"{name}: operands of shape {shape} do not fit into the output {made.shape}")
    _must_be_apart(name, made, arrays)
    views, into = [_view(each) for each in inputs], made.host_view
    return do(name, lambda: ufunc(*views, out=into, casting="same_kind"), arrays, made)


def assign(target: ndarray, value: Any) -> ndarray:
    name = "[...] ="
    arrays = [value] if isinstance(operand(value, name), ndarray) else []
    view, into = _view(value), target.host_view
    _must_be_apart(name, target, arrays)
    return do(name, lambda: np.copyto(into, view, casting="unsafe"), arrays, target)


def reduce(ufunc: np.ufunc, array: ndarray, axis: Any, keepdims: bool, dtype: Any = None) -> ndarray:
    """Reduce over some axes with `ufunc`, such as a sum. Sums of halves accumulate in float."""
    axes = range(array.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = {each % array.ndim for each in axes}
    shape = [1 if i in gone else size for i, size in enumerate(array.shape) if keepdims or i not in gone]
    kind = ufunc.reduce(np.ones(1, array.dtype), dtype=dtype).dtype
    wide = np.float32 if kind == np.float16 and ufunc is np.add else dtype
    made = ndarray(shape, kind)
    view, into = array.host_view, made.host_view

    def work() -> None:
        into[...] = ufunc.reduce(view, axis=tuple(gone), keepdims=keepdims, dtype=wide)

    return do(f"{ufunc.__name__}.reduce", work, [array], made)


def matmul(a: Any, b: Any, out: ndarray | None = None) -> ndarray:
    """Return the product of two matrices. With more axes, products in half are slow on a GPU."""
    for each in (a, b):
        if not isinstance(each, ndarray) or each.ndim != 2:
            raise Foreign(f"matmul of {type(each)}: the stand-in multiplies only matrices")
    active().uses_cublas("matmul")
    dtype, shape = np.promote_types(a.dtype, b.dtype), (len(a), b.shape[1])
    made = ndarray(shape, dtype) if out is None else out
    if made.shape != shape or made.dtype != dtype or not made.flags.c_contiguous:
        raise ValueError(f"matmul: no output for {shape} {dtype}: CuPy would make a copy")
    _must_be_apart("matmul", made, [a, b], in_place=False)
    left, right, into = a.host_view, b.host_view, made.host_view
    wide = np.float32 if dtype == np.float16 else dtype

    def work() -> None:
        into[...] = left.astype(wide, copy=False) @ right.astype(wide, copy=False)

    return do("matmul", work, [a, b], made)


def upload(target: ndarray, host: NDArray[Any]) -> ndarray:
    """Return a copy made through CuPy's pinned memory, so `host` may be changed right afterwards."""
    machine, name = active(), "a copy from the host"
    machine.must_not_capture(name)
    if machine.pinned.holds(host):
        raise Foreign(f"{name}: CuPy does not wait for its copy of pinned memory: use memcpyAsync")
    machine.pinned.stage(host.nbytes)
    into = target.host_view
    return do(name, lambda: np.copyto(into, host), [], target)


def _view(value: Any) -> Any:
    return value.host_view if isinstance(value, ndarray) else value


def _is_same(one: ndarray, other: ndarray) -> bool:
    a, b = one.host_view, other.host_view
    places = [each.__array_interface__["data"] for each in (a, b)]
    return places[0] == places[1] and (a.shape, a.strides) == (b.shape, b.strides)


def _must_be_apart(name: str, made: ndarray, inputs: Sequence[ndarray], *, in_place: bool = True) -> None:
    """Reject an output that partly overlaps an input: some elements would be overwritten too soon."""
    for each in inputs:
        if in_place and _is_same(made, each):
            continue
        if each._memory is made._memory and np.shares_memory(made.host_view, each.host_view):
            raise Overrun(f"{name}: the output overlaps an input")


def _indices(key: Any) -> tuple[tuple[Any, ...], list[ndarray]]:
    """Return a key with which NumPy makes views, and the arrays in it."""
    keys = key if isinstance(key, tuple) else (key,)
    for each in keys:
        known = each is None or each is Ellipsis or isinstance(each, (slice, int, np.integer, ndarray))
        if not known or isinstance(each, bool):
            raise Foreign(f"an index must be a number, a slice or a CuPy array, not {type(each)}")
    arrays = [each for each in keys if isinstance(each, ndarray)]
    return (keys if any(each is Ellipsis for each in keys) else (*keys, Ellipsis)), arrays
