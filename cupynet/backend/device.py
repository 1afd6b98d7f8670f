from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.environment import memory
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.window import Window
from cupynet.backend.workspace import Allocate, Buffer, Loan, ThreadWorkspaces, Workspace
from cupynet.core.wording import amount, one_line


@dataclass(frozen=True)
class Failure:
    """Diagnosis of a device error, for the user. of_memory: True if the device is out of memory."""

    text: str
    of_memory: bool


class Device:
    """Creates and moves arrays on one CPU or GPU.

    Attributes:
        device: GPU index; 0 on a CPU.
        loss_scale: the factor by which the loss gradient is multiplied, initially `policy.loss_scale`.
        options: further arguments of `create_backend`.
    """

    name: str
    xp: ModuleType
    options: Mapping[str, Any] = {}

    def __init__(self, policy: DtypePolicy, device: int = 0) -> None:
        self.policy = policy
        self.device = device
        self.loss_scale = policy.loss_scale
        self._workspaces = ThreadWorkspaces(self.allocator, self.lend)
        self._vectors: dict[tuple[float, ...], Array] = {}

    @property
    def workspace(self) -> Workspace:
        """The calling thread's pool of buffers."""
        return self._workspaces.current

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new uninitialized array."""
        return self.xp.empty(shape, dtype)

    def allocator(self) -> Allocate:
        """Return the function that allocates the buffers of a thread's workspace."""
        return self.allocate

    def data_ptr(self, array: Array) -> int:
        raise NotImplementedError

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        """Return `array` on this device. It is copied only if it is elsewhere or has a different dtype."""
        return self.xp.asarray(array, dtype)

    def compact(self, array: Any) -> Array:
        """Return `array`, or a copy, as a writable, contiguous array in storage precision on this device."""
        matches = isinstance(array, self.xp.ndarray) and array.dtype == self.policy.storage
        result = array if matches else self.asarray(array, self.policy.storage)
        contiguous = result.flags.c_contiguous and getattr(result.flags, "writeable", True)
        return result if contiguous else result.copy()

    def to_host(self, array: Array) -> Any:
        """Return `array` as a NumPy array. On a CPU, this is the array itself."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for all device work enqueued by this backend and by the calling thread."""

    def activated(self) -> AbstractContextManager[Any]:
        """Context manager that makes this device and its stream current, for threads other than the worker."""
        return nullcontext()

    def subnormals_as_zero(self) -> AbstractContextManager[Any]:
        """Context manager that treats subnormal numbers as zero in this thread, if this is faster."""
        return nullcontext()

    def activate(self) -> None:
        """Make this device current in the calling thread, which becomes the backend's worker."""

    def deactivate(self) -> None:
        """Restore the device and stream that the calling thread had before `activate`."""

    def failure(self, error: BaseException, device: int) -> Failure | None:
        """Return the diagnosis of a device error, or None for other errors."""
        if not isinstance(error, MemoryError):
            return None
        bound = memory()
        limit = "" if bound is None else f", and {bound[1]} {amount(bound[0])}"
        return Failure(f"out of memory: {one_line(error) or 'an allocation failed'}{limit}", of_memory=True)

    def prepare(self) -> None:
        """Compile the kernels of a training step in advance. Does nothing by default."""

    def borrow(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """Return an uninitialized array from the workspace, by default in storage precision.

        Its memory returns to the workspace when the last reference to the array and its views is dropped.
        """
        return self._workspaces.current.borrow(shape, self.policy.storage if dtype is None else dtype)

    def lend(self, buffer: Buffer, shape: tuple[int, ...], loan: Loan) -> Array:
        """Return an array backed by a buffer. The array and all its views reference the loan."""
        array, dtype = np.asarray(loan), buffer.key[1]
        if array.dtype != dtype:  # NumPy's array interface cannot describe bfloat16
            array = array.view(dtype)
        return array if len(array) == shape[0] else array[: shape[0]]

    def convert(self, source: Array, target: Array) -> None:
        """Copy source to target, converting it to the dtype of target. Shapes must be equal."""
        target[...] = source

    def _constants(self, values: tuple[float, ...]) -> Array:
        """Return a cached device array (K,) of these K numbers, in accumulation precision."""
        if values not in self._vectors:
            self._vectors[values] = self.asarray(np.array(values, self.policy.accumulate))
        return self._vectors[values]

    def _stored_copy(self, borrowed: Array) -> Array:
        """Return a borrowed array in storage precision: the array itself, or a borrowed copy."""
        if borrowed.dtype == self.policy.storage:
            return borrowed
        stored = self.borrow(borrowed.shape)
        self.convert(borrowed, stored)
        return stored

    def _surrounded(self, x: Array, window: Window, value: float) -> Array:
        """Return borrowed images padded with `value`, or x itself if there is no padding."""
        if not window.pads:
            return x
        n, height, width, channels = x.shape
        padded = self.borrow((n, *window.padded(height, width), channels), x.dtype)
        padded[...] = value
        padded[window.inside(height, width)] = x
        return padded

    def _within(self, padded: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Return borrowed images (N, H, W, C) without their padding, in storage precision."""
        if not window.pads:
            return self._stored_copy(padded)
        x = self.borrow(shape)
        x[...] = padded[window.inside(*shape[1:3])]
        return x
