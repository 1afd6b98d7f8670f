"""Checks of the shapes of arguments, once per call: compiled code would read any memory, and NumPy would broadcast."""

from __future__ import annotations

from collections.abc import Iterable

from cupynet.backend.array import Array
from cupynet.backend.window import Window
from cupynet.core.errors import ConfigError


def windows(operation: str, shape: tuple[int, ...], window: Window, *, pool: bool = False) -> None:
    """Refuse a `shape` other than (N, H, W, C) with room for a window; for pools, also windows of padding alone."""
    if len(shape) != 4 or not window.fits(*shape[1:3]):
        raise ConfigError(
            f"{operation}: images of shape {tuple(shape)} have no room for a window of {window.kernel} with padding "
            f"{window.padding}: they must be (N, H, W, C)"
        )
    if pool and any(max(window.padding[i]) >= window.kernel[i] for i in (0, 1)):
        raise ConfigError(
            f"{operation}: a window of {window.kernel} with padding {window.padding}: padding must be smaller than the "
            "window, which would see no pixel"
        )
    if pool and window.dilates:
        raise ConfigError(f"{operation}: dilation {window.dilation}: only convolutions can be dilated")


def convolution(operation: str, shape: tuple[int, ...], weight: Array, window: Window, groups: int = 1) -> None:
    """Refuse images of `shape` that do not fit the weight (K_h, K_w, C / groups, O)."""
    windows(operation, shape, window)
    if shape[3] % groups or weight.shape[-1] % groups:
        raise ConfigError(
            f"{operation}: {groups} groups: {shape[3]} channels and {weight.shape[-1]} filters must be multiples of it"
        )
    expected = (*window.kernel, shape[3] // groups)
    if weight.ndim != 4 or weight.shape[:3] != expected:
        raise ConfigError(
            f"{operation}: the weight {weight.shape} is not for windows of {window.kernel} on images of {shape[3]} "
            f"channels{f' in {groups} groups' if groups > 1 else ''}: it must be ({', '.join(map(str, expected))}, O)"
        )


def shape_of(operation: str, name: str, array: Array, expected: Iterable[int]) -> None:
    """Refuse an array of another shape."""
    if tuple(array.shape) != tuple(expected):
        raise ConfigError(f"{operation}: {name} has shape {tuple(array.shape)}, it must be {tuple(expected)}")


def channels(operation: str, x: Array, *vectors: Array) -> None:
    """Refuse an x that is empty or not (..., C), and vectors that are not (C,)."""
    if x.ndim < 2 or not x.size:
        raise ConfigError(f"{operation}: an array of shape {tuple(x.shape)}: it must be (..., C) and not empty")
    for vector in vectors:
        shape_of(operation, "a vector of the channels", vector, x.shape[-1:])


def alike(operation: str, *arrays: Array) -> None:
    """Refuse arrays of different shapes."""
    for array in arrays:
        if array.shape != arrays[0].shape:
            shapes = ", ".join(str(tuple(each.shape)) for each in arrays)
            raise ConfigError(f"{operation}: arrays of shapes {shapes}: they must be equal")
