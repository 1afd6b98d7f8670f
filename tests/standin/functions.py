"""The functions of `cupy` that cupynet uses. See the head of arrays.py."""

from functools import partial
from typing import Any

import numpy as np

from tests.standin.arrays import assign, do, elementwise, matmul, ndarray, operand, upload
from tests.standin.errors import Foreign


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return assign(empty(shape, dtype), 0)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return assign(empty(shape, dtype), 1)


def arange(*limits: int, dtype: Any = None) -> ndarray:
    host = np.arange(*limits, dtype=dtype)
    made = empty(host.shape, host.dtype)
    into = made.host_view
    return do("arange", lambda: np.copyto(into, host), [], made)


def asarray(value: Any, dtype: Any = None) -> ndarray:
    """Return a device copy of a host array, or a device array itself, converted if its dtype differs."""
    if isinstance(value, ndarray):
        return value if dtype is None else value.astype(dtype, copy=False)
    host = np.asarray(value, dtype)
    if host.dtype == object:
        raise Foreign(f"asarray: {value!r:.80} is not an array of numbers")
    made = empty(host.shape, host.dtype)
    return assign(made, host[()]) if host.ndim == 0 else upload(made, host)


def asnumpy(value: Any) -> Any:
    return value.get() if isinstance(value, ndarray) else np.asarray(value)


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    operands = [operand(each, "where") for each in (condition, x, y)]
    arrays = [each for each in operands if isinstance(each, ndarray)]
    dtype = np.result_type(*(each.dtype if isinstance(each, ndarray) else each for each in (x, y)))
    made = empty(np.broadcast_shapes(*(each.shape for each in arrays)), dtype)
    views = [each.host_view if isinstance(each, ndarray) else each for each in operands]
    into = made.host_view
    return do("where", lambda: np.copyto(into, np.where(*views), casting="same_kind"), arrays, made)


OF_ELEMENTS = "abs add divide exp expm1 isfinite isnan log log1p maximum minimum multiply sign sqrt subtract tanh"
FUNCTIONS: dict[str, Any] = {name: partial(elementwise, getattr(np, name)) for name in OF_ELEMENTS.split()}
FUNCTIONS |= {f.__name__: f for f in (empty, zeros, ones, arange, asarray, asnumpy, where, matmul)}
