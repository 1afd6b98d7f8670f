"""The functions of `cupy` that cupynet uses. See the head of arrays.py."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.standin.arrays import _run, assign, elementwise, matmul, ndarray, operand, upload
from tests.standin.errors import Foreign


def empty(shape: Any, dtype: Any = float) -> ndarray:
    """A new array with nothing written."""
    return ndarray(shape, dtype)


def full(shape: Any, value: Any, dtype: Any) -> ndarray:
    """A new array of one number."""
    return assign(empty(shape, dtype), operand(value, "full"))


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    """A new array of zeros."""
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    """A new array of ones."""
    return full(shape, 1, dtype)


def empty_like(array: ndarray, dtype: Any = None) -> ndarray:
    """A new array of that shape, with nothing written."""
    return empty(_own(array, "empty_like").shape, array.dtype if dtype is None else dtype)


def zeros_like(array: ndarray, dtype: Any = None) -> ndarray:
    """A new array of that shape, of zeros."""
    return assign(empty_like(array, dtype), 0)


def arange(*limits: int, dtype: Any = None) -> ndarray:
    """Numbers one after the other, made on the device."""
    host = np.arange(*limits, dtype=dtype)
    made = empty(host.shape, host.dtype)
    into = made._view
    return _run("arange", lambda: np.copyto(into, host), [], made)


def asarray(value: Any, dtype: Any = None) -> ndarray:
    """An array of the host copied to the device; one of the device itself, or in another precision."""
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)
    host = np.asarray(value, dtype)
    if host.dtype == object:
        raise Foreign(f"asarray: {value!r:.80} is no array of numbers")
    made = empty(host.shape, host.dtype)
    return assign(made, host[()]) if host.ndim == 0 else upload(made, host)


def asnumpy(value: Any) -> Any:
    """On the host; waits for the stream that is current."""
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


def copyto(dst: ndarray, src: Any, casting: str = "same_kind", where: ndarray | None = None) -> None:
    """Overwrite `dst`; only where the mask is True if there is one."""
    kind = operand(src, "copyto")
    source = src.dtype if isinstance(src, (ndarray, np.generic)) else np.min_scalar_type(kind)
    if not np.can_cast(source, _own(dst, "copyto").dtype, casting):  # type: ignore[arg-type]
        raise TypeError(f"Cannot cast {source} to {dst.dtype} in {casting} casting mode")
    assign(dst, src, where)


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    """x where the condition is true, else y."""
    arrays = [each for each in (condition, x, y) if isinstance(operand(each, "where"), ndarray)]
    dtype = np.result_type(*(each.dtype if isinstance(each, ndarray) else each for each in (x, y)))
    made = empty(np.broadcast_shapes(*(each.shape for each in arrays)), dtype)
    views = [each._view if isinstance(each, ndarray) else each for each in (condition, x, y)]
    into = made._view
    return _run("where", lambda: np.copyto(into, np.where(*views), casting="same_kind"), arrays, made)


def _own(value: Any, name: str) -> ndarray:
    if not isinstance(value, ndarray):
        raise Foreign(f"{name}: Unsupported type {type(value)}")
    return value


def _of_elements(ufunc: np.ufunc) -> Any:
    def function(*inputs: Any, out: ndarray | None = None) -> ndarray:
        return elementwise(ufunc, *inputs, out=out)

    function.__name__ = ufunc.__name__
    return function


FUNCTIONS = {
    function.__name__: function
    for function in (
        empty, zeros, ones, empty_like, zeros_like, arange, asarray, asnumpy, copyto, where, matmul,
    )
}  # fmt: skip
FUNCTIONS |= {
    name: _of_elements(getattr(np, name))
    for name in (
        "abs", "add", "divide", "equal", "exp", "expm1", "greater", "isfinite", "isnan", "less", "log", "log1p",
        "logical_and", "logical_not", "maximum", "minimum", "multiply", "negative", "power", "sign", "sqrt", "square",
        "subtract", "tanh",
    )
}  # fmt: skip
