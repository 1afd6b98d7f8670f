"""Arrays of the made-up devices: `cupy.ndarray`, as far as cupynet uses it.

Each array is a view of a block (memory.py) and each operation goes through `Machine.run`. Nothing is converted
silently: NumPy arrays are refused wherever they meet one, also where CuPy would copy them to the device (as indices) or
where its text says something else. Results in half stay half, numbers of Python are weak (NEP 50, CuPy 14), and what
NumPy returns as a number is an array () here. An index that is out of bounds raises, where CuPy goes round.

Read in CuPy 14.2, below cupy/_core: weak numbers in _kernel.pyx and _scalar.pyx; sums of halves, made in float, in
_routines_math.pyx, and their products in _routines_linalg.pyx; indices in _routines_indexing.pyx; copies from the host,
which go through pinned memory unless they come from there, in core.pyx.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.standin.errors import Foreign, Overrun
from tests.standin.machine import Operation, Span, active
from tests.standin.memory import Memory, MemoryPointer, MemoryPool
from tests.standin.order import label
from tests.standin.streams import Device, Stream

Scalar = (bool, int, float, np.generic)
Key = Any


class ndarray:
    """An array on a device.

    Args:
        shape, dtype: of a new one, with nothing written. memptr: the memory it is to use.
    """

    __array_priority__ = 100

    def __init__(self, shape: int | Sequence[int], dtype: Any = float, memptr: MemoryPointer | None = None) -> None:
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(size) for size in shape)
        kind = np.dtype(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        pointer = allocate(nbytes, kind) if memptr is None else memptr
        chunk = pointer.mem.chunk
        buffer = np.empty(0, np.uint8) if chunk is None else chunk.memory
        if nbytes > buffer.nbytes - pointer.offset:
            raise Overrun(f"an array of {nbytes} bytes does not fit into {chunk}")
        self._take(np.ndarray(shape, kind, buffer, pointer.offset if nbytes else 0), pointer.mem)

    def _take(self, view: NDArray[Any], memory: Memory) -> None:
        self._view, self._memory = view, memory

    @classmethod
    def _of(cls, view: NDArray[Any], memory: Memory) -> ndarray:
        made = cls.__new__(cls)
        made._take(view, memory)
        return made

    # what it is -----------------------------------------------------------------------------------------------------

    @property
    def span(self) -> list[Span]:
        """What of memory it is: nothing where it is empty."""
        chunk = self._memory.chunk
        return [] if chunk is None or not self._view.size else [Span(chunk, self._view)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self._view.strides

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._view.dtype

    @property
    def ndim(self) -> int:
        return self._view.ndim

    @property
    def size(self) -> int:
        return self._view.size

    @property
    def itemsize(self) -> int:
        return self._view.itemsize

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def flags(self) -> SimpleNamespace:
        flags = self._view.flags
        return SimpleNamespace(c_contiguous=flags.c_contiguous, f_contiguous=flags.f_contiguous)

    @property
    def data(self) -> MemoryPointer:
        """Where its first element is."""
        chunk = self._memory.chunk
        return MemoryPointer(
            self._memory, 0 if chunk is None else self._view.__array_interface__["data"][0] - chunk.address
        )

    @property
    def device(self) -> Device:
        chunk = self._memory.chunk
        return Device(None if chunk is None else chunk.pool.device)

    @property
    def T(self) -> ndarray:
        return self._of(self._view.T, self._memory)

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in of cupy.ndarray has no {name!r}: add it to tests/standin/arrays.py")

    def __repr__(self) -> str:
        return f"<array {self.shape} {self.dtype} of device {self.device.id}>"

    # to the host ----------------------------------------------------------------------------------------------------

    def get(self, stream: Stream | None = None, out: NDArray[Any] | None = None, blocking: bool = True) -> Any:
        """A copy on the host; waits for the stream, unless `blocking` is false."""
        active().synchronous("a copy to the host")
        if out is not None and (out.dtype, out.shape) != (self.dtype, self.shape):
            raise Foreign(f"{self} cannot be copied into {out.dtype} {out.shape}")
        host = np.empty(self.shape, self.dtype) if out is None else out
        seat = active().seat
        stream = seat.streams[seat.device] if stream is None else stream

        machine, view, line = active(), self._view, stream.line_on(seat.device)

        def work() -> None:
            if blocking or not machine.pinned.holds(host):
                host[...] = view
            else:
                machine.pinned.flies(line, label("a copy to the host"), host, view.copy(), arrives=True)

        machine.run(Operation("a copy to the host", self.span, (), work), line)
        if blocking:
            stream.synchronize()
        return host

    def item(self) -> Any:
        """The one element, on the host."""
        return self.get().item()

    def tolist(self) -> Any:
        """All elements, on the host."""
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise Foreign("Implicit conversion to a NumPy array is not allowed. Use `.get()` to do it explicitly.")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        for each in inputs:
            operand(each, ufunc.__name__)
        if method != "__call__" or named:
            raise Foreign(f"numpy.{ufunc.__name__} on an array of CuPy: use cupy.{ufunc.__name__}")
        return elementwise(ufunc, *inputs)

    def __array_function__(self, function: Any, types: Any, arguments: Any, named: Any) -> Any:
        raise Foreign(f"numpy.{function.__name__} on an array of CuPy: use cupy.{function.__name__}")

    # shapes ---------------------------------------------------------------------------------------------------------

    def reshape(self, *shape: Any) -> ndarray:
        """A view where one can be had, else a copy."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        try:
            return self._of(self._view.reshape(sizes, copy=False), self._memory)
        except ValueError:
            self._view.reshape(sizes)  # that size it cannot have: NumPy says so
        made = self.copy()
        return self._of(made._view.reshape(sizes), made._memory)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def view(self) -> ndarray:
        return self._of(self._view, self._memory)

    def transpose(self, *axes: Any) -> ndarray:
        return self._of(self._view.transpose(*axes), self._memory)

    # copies ---------------------------------------------------------------------------------------------------------

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        """In another precision; itself if it has that precision and `copy` is False."""
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return assign(ndarray(self.shape, dtype), self)

    def copy(self) -> ndarray:
        return self.astype(self.dtype)

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        with self.device:
            return self.copy()

    def fill(self, value: Any) -> None:
        assign(self, scalar(value, "fill"))

    def set(self, host: NDArray[Any]) -> None:
        """Overwrite it with an array of the host, of the same shape and dtype."""
        if not isinstance(host, np.ndarray) or (host.shape, host.dtype) != (self.shape, self.dtype):
            raise Foreign(f"{self} cannot be set to {host!r:.60}")
        upload(self, host)

    # indices --------------------------------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> ndarray:
        key, arrays = _indices(key)
        if not arrays:
            return self._of(self._view[key], self._memory)
        plain = tuple(each._view if isinstance(each, ndarray) else each for each in key)
        if any(each.dtype == bool for each in arrays):  # how many there are is not known before they are counted
            for each in arrays:
                each.get()
            shape = self._view[plain].shape
        else:
            shape = self._view[
                tuple(np.zeros_like(each) if isinstance(each, np.ndarray) else each for each in plain)
            ].shape
        made = ndarray(shape, self.dtype)
        view, into = self._view, made._view

        def work() -> None:
            into[...] = _within(view, plain)

        return _run("indexing", work, [self, *arrays], made)

    def __setitem__(self, key: Key, value: Any) -> None:
        key, arrays = _indices(key)
        if not arrays:
            if isinstance(value, ndarray) and value._view.size and self._view.size:
                target = self._view[key]
                same = (target.__array_interface__["data"], target.shape, target.strides) == (
                    value._view.__array_interface__["data"], value.shape, value.strides,
                )  # fmt: skip
                if same:
                    return
            assign(self._of(self._view[key], self._memory), value)
            return
        operand(value, "[...] =")
        plain = tuple(each._view if isinstance(each, ndarray) else each for each in key)
        view, into = (value._view if isinstance(value, ndarray) else value), self._view

        def work() -> None:
            _within(into, plain)
            into[plain] = view

        reads = [*arrays, *([value] if isinstance(value, ndarray) else [])]
        span = self.span
        if span and span[0].chunk.written is not None:
            reads.append(self)  # some of it stays as it is
        _run("[indices] =", work, reads, self)

    # reductions -----------------------------------------------------------------------------------------------------

    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.add, self, axis, keepdims, dtype)

    def mean(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> ndarray:
        total = self.sum(axis, dtype, keepdims)
        return elementwise(np.true_divide, total, self.size // max(total.size, 1))

    def max(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.maximum, self, axis, keepdims)

    def min(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.minimum, self, axis, keepdims)

    def all(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.logical_and, self, axis, keepdims)

    def any(self, axis: Any = None, keepdims: bool = False) -> ndarray:
        return reduce(np.logical_or, self, axis, keepdims)

    # operators ------------------------------------------------------------------------------------------------------

    def __matmul__(self, other: Any) -> ndarray:
        return matmul(self, other)

    def __neg__(self) -> ndarray:
        return elementwise(np.negative, self)

    def __abs__(self) -> ndarray:
        return elementwise(np.absolute, self)

    def __invert__(self) -> ndarray:
        return elementwise(np.invert, self)

    __hash__ = None  # type: ignore[assignment]


def _operators() -> None:
    """`+`, `+=`, `<=` and the like, each as NumPy's function of elements."""
    both = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power,
        "floordiv": np.floor_divide, "mod": np.remainder, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    for name, ufunc in both.items():
        setattr(ndarray, f"__{name}__", lambda self, other, f=ufunc: elementwise(f, self, other))
        setattr(ndarray, f"__r{name}__", lambda self, other, f=ufunc: elementwise(f, other, self))
        setattr(ndarray, f"__i{name}__", lambda self, other, f=ufunc: elementwise(f, self, other, out=self))
    compared = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
        "ne": np.not_equal,
    }  # fmt: skip
    for name, ufunc in compared.items():
        setattr(ndarray, f"__{name}__", lambda self, other, f=ufunc: elementwise(f, self, other))


_operators()


# what they go through -------------------------------------------------------------------------------------------------


def allocate(nbytes: int, dtype: Any) -> MemoryPointer:
    """Memory for an array, from the thread's allocator, else from the default pool."""
    machine = active()
    if machine.seat.allocators:
        return machine.seat.allocators[-1](nbytes)  # type: ignore[no-any-return]
    machine.synchronous("an allocation from the default pool")
    pool: MemoryPool = machine.pools[0]
    return pool.malloc(nbytes, dtype)


def operand(value: Any, name: str) -> Any:
    """`value`, if it is an array of CuPy's or a number; else Foreign."""
    if isinstance(value, (ndarray, *Scalar)):
        return value
    raise Foreign(f"{name}: Unsupported type {type(value)}: bring it to the device with cupy.asarray")


def scalar(value: Any, name: str) -> Any:
    """`value`, if it is a number."""
    if isinstance(value, Scalar):
        return value
    raise Foreign(f"{name}: {type(value)} is no number")


def elementwise(ufunc: np.ufunc, *inputs: Any, out: ndarray | None = None) -> ndarray:
    """One of NumPy's functions of elements."""
    name = ufunc.__name__
    for each in (*inputs, *(() if out is None else (out,))):
        operand(each, name)
    arrays = [each for each in inputs if isinstance(each, ndarray)]
    if not arrays:
        raise Foreign(f"{name}: no array of CuPy among {inputs}")
    kinds = [type(each) if type(each) in (bool, int, float) else each.dtype for each in inputs]
    kinds = [np.dtype(bool) if kind is bool else kind for kind in kinds]
    *_, dtype = ufunc.resolve_dtypes((*kinds, None))
    shape = np.broadcast_shapes(*(each.shape for each in arrays))
    made = ndarray(shape, dtype) if out is None else out
    if made.shape != shape:
        raise ValueError(f"{name}: operands of shape {shape} do not fit into the output {made.shape}")
    if not np.can_cast(dtype, made.dtype, "same_kind"):
        raise TypeError(f"{name}: cannot cast output from {dtype} to {made.dtype} with casting rule 'same_kind'")
    _apart(name, made, arrays)
    views, into = [each._view if isinstance(each, ndarray) else each for each in inputs], made._view
    return _run(name, lambda: ufunc(*views, out=into, casting="same_kind"), arrays, made)


def assign(target: ndarray, value: Any, where: ndarray | None = None) -> ndarray:
    """Overwrite `target`, everywhere or where the mask is True."""
    operand(value, "[...] =")
    if isinstance(value, ndarray):
        shape, leading = value.shape, max(value.ndim - target.ndim, 0)
        fits = zip(shape[::-1], target.shape[::-1], strict=False)
        if any(size not in (1, room) for size, room in fits) or math.prod(shape[:leading]) != 1:
            raise ValueError(f"could not broadcast input array from shape {shape} into shape {target.shape}")
        _apart("[...] =", target, [value])
    arrays = [each for each in (value, where) if isinstance(each, ndarray)]
    view, into = (value._view if isinstance(value, ndarray) else value), target._view
    if where is None:
        return _run("[...] =", lambda: np.copyto(into, view, casting="unsafe"), arrays, target)
    if not isinstance(where, ndarray) or where.dtype != bool:
        raise Foreign(f"copyto: where must be an array of CuPy's, of bool, is {where!r:.60}")
    mask = where._view
    span = target.span
    if span and span[0].chunk.written is not None:
        arrays.append(target)  # some of it stays as it is
    return _run("copyto", lambda: np.copyto(into, view, casting="unsafe", where=mask), arrays, target)


def reduce(ufunc: np.ufunc, array: ndarray, axis: Any, keepdims: bool, dtype: Any = None) -> ndarray:
    """A sum or the like over some axes; sums of halves are made in float."""
    axes = range(array.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    gone = {each % array.ndim if array.ndim else each for each in axes}
    kept = [(1 if i in gone else size) for i, size in enumerate(array.shape) if keepdims or i not in gone]
    kind = ufunc.reduce(np.ones(1, array.dtype), dtype=dtype).dtype
    made = ndarray(kept, kind)
    if ufunc in (np.maximum, np.minimum) and not array.size and made.size:
        raise ValueError(f"zero-size array to reduction operation {ufunc.__name__} which has no identity")
    wide = np.float32 if kind == np.float16 and ufunc is np.add else dtype

    view, into = array._view, made._view

    def work() -> None:
        into[...] = ufunc.reduce(view, axis=tuple(gone), keepdims=keepdims, dtype=wide)

    return _run(f"{ufunc.__name__}.reduce", work, [array], made)


def matmul(a: Any, b: Any, out: ndarray | None = None) -> ndarray:
    """The product of two matrices or vectors. More axes are refused: on a GPU they are slow in half."""
    for each in (a, b, *(() if out is None else (out,))):
        if not isinstance(each, ndarray):
            raise Foreign(f"matmul: Unsupported type {type(each)}")
    if not 1 <= min(a.ndim, b.ndim) <= max(a.ndim, b.ndim) <= 2:
        raise ValueError(f"matmul of {a.shape} and {b.shape}: vectors and matrices only")
    active().library("matmul")
    dtype = np.promote_types(a.dtype, b.dtype)
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"shapes {a.shape} and {b.shape} not aligned")
    shape = (*a.shape[:-1], *b.shape[1:])
    made = ndarray(shape, dtype) if out is None else out
    if made.shape != shape or made.dtype != dtype or not made.flags.c_contiguous:
        raise ValueError(f"matmul: {made} is no output for {shape} {dtype}: CuPy would make a copy")
    _apart("matmul", made, [a, b], in_place=False)
    wide = np.float32 if dtype == np.float16 else dtype

    left, right, into = a._view, b._view, made._view

    def work() -> None:
        into[...] = left.astype(wide, copy=False) @ right.astype(wide, copy=False)

    return _run("matmul", work, [a, b], made)


def upload(target: ndarray, host: NDArray[Any]) -> ndarray:
    """A copy from the host.

    The array may be changed right afterwards, as it goes through pinned memory of CuPy's; one that is in pinned memory
    may not, before the copy has been waited for.
    """
    machine, name = active(), "a copy from the host"
    machine.synchronous(name)
    into, pinned = target._view, machine.pinned.holds(host)
    if not pinned:
        machine.pinned.staged(host.nbytes)

    def work() -> None:
        np.copyto(into, host)
        if pinned:
            machine.pinned.flies(machine.line, label(name), host, host.copy(), arrives=False)

    return _run(name, work, [], target)


def _run(name: str, work: Callable[[], Any], reads: Sequence[ndarray], made: ndarray) -> ndarray:
    """One operation. `work` holds views and no arrays: one that is recorded keeps no memory in use."""
    if made.size:
        active().run(Operation(name, [span for each in reads for span in each.span], made.span, work))
    return made


def _apart(name: str, made: ndarray, inputs: Sequence[ndarray], *, in_place: bool = True) -> None:
    """Refuse an output that overlaps an input and is not the same: some elements would be overwritten too soon."""
    for each in inputs:
        if each._memory is not made._memory or not each.size:
            continue
        one, other = made._view, each._view
        same = (one.__array_interface__["data"], one.shape, one.strides) == (
            other.__array_interface__["data"], other.shape, other.strides,
        )  # fmt: skip
        if not (in_place and same) and np.shares_memory(one, other):
            raise Overrun(f"{name}: the output overlaps an input")


def _indices(key: Key) -> tuple[tuple[Any, ...], list[ndarray]]:
    """A key as a tuple that NumPy takes for views, and the arrays in it."""
    keys = key if isinstance(key, tuple) else (key,)
    arrays = [each for each in keys if isinstance(each, ndarray)]
    for each in keys:
        known = each is None or each is Ellipsis or isinstance(each, (slice, int, np.integer, ndarray))
        if not known or isinstance(each, bool):
            raise Foreign(f"an index must be a number, a slice or an array of CuPy's, is {type(each)}")
    return ((*keys, Ellipsis) if Ellipsis not in [each for each in keys if each is Ellipsis] else keys), arrays


def _within(view: NDArray[Any], key: Any) -> Any:
    """What is there; Overrun where an index is out of bounds, for which CuPy goes round."""
    try:
        return view[key]
    except IndexError as error:
        raise Overrun(f"{error}: CuPy would go round, and take another element") from error
