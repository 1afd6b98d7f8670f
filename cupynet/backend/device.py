"""Where arrays live: the array module, dtype policy, workspace, streams and transfers of one device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from cupynet.backend import shapes
from cupynet.backend.array import Array
from cupynet.backend.environment import memory
from cupynet.backend.failure import Failure
from cupynet.backend.graph_capture import Recorder
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.policy import DtypePolicy
from cupynet.backend.transfer import Shared, Transfer
from cupynet.backend.window import Window
from cupynet.backend.workspace import Loans, ThreadWorkspaces, Workspace
from cupynet.core.checks import amount, one_line


class Device:
    """An array module and a dtype policy on one CPU or GPU.

    Attributes:
        name: `numpy`, `numba` or `cupy`.
        xp: the array module.
        on_gpu: True if arrays are in the memory of a GPU.
        policy: the precision in which values are stored, computed and accumulated.
        device: the number of the GPU; 0 on a CPU.
        loss_scale: the factor on the gradient of the loss; at first the policy's, then what its owner sets.
        options: the arguments of `create_backend`, besides name, dtype and device, that make another one like this.
    """

    name: str
    xp: ModuleType
    on_gpu = False
    options: Mapping[str, Any] = {}

    def __init__(self, policy: DtypePolicy, device: int = 0) -> None:
        self.policy = policy
        self.device = device
        self.loss_scale = policy.loss_scale
        self._workspaces = ThreadWorkspaces(self.allocate, self.address)
        self._constants: dict[tuple[float, ...], Array] = {}

    @property
    def workspace(self) -> Workspace:
        """The calling thread's pool of buffers. A pass borrows and returns its buffers in one thread."""
        return self._workspaces.current

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array of any shape with arbitrary content."""
        return self.xp.empty(shape, dtype)

    def address(self, array: Array) -> int:
        """The address of the first element of an array of any shape."""
        raise NotImplementedError

    def asarray(self, array: Any, dtype: Any = None) -> Array:
        """`array`, of any shape, on this backend's device; not copied where it is already there in that dtype."""
        return self.xp.asarray(array, dtype)

    def to_host(self, array: Array) -> Any:
        """`array`, of any shape, as a NumPy array; on a CPU it is the array itself."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the device has done everything that this backend, or the calling thread, has asked it to."""

    def here(self) -> AbstractContextManager[Any]:
        """This backend's device as the calling thread's for a while: for what others than the worker compute with its
        arrays, or write to them."""
        return nullcontext()

    def activate(self) -> None:
        """Make this backend's device the current one of the calling thread, which is its worker from now on."""

    def deactivate(self) -> None:
        """Let the calling thread have the device and stream that it had before `activate`; harmless without one."""

    def stream(self) -> int:
        """The address of the stream that this backend's work is done on, for libraries that take one; 0 on a CPU."""
        return 0

    def place(self) -> str:
        """Which GPU of which machine this is, alike for all processes; "" on a CPU."""
        return ""

    def failure(self, error: BaseException, device: int) -> Failure | None:
        """Return what an error says about the device: out of memory, or broken; None for any other error."""
        if not isinstance(error, MemoryError):
            return None
        bound = memory()
        limit = "" if bound is None else f", and {bound[1]} {amount(bound[0])}"
        return Failure(f"out of memory: {one_line(error) or 'an allocation failed'}{limit}", of_memory=True)

    def record_event(self) -> Any:
        """The end of what this backend was asked for so far, for others to wait for; None where it is done at once."""

    def wait_event(self, *events: Any) -> None:
        """Let later work on this device wait for events of other backends; the host does not wait."""

    def fetch(self, out: Array, array: Array, source: Device) -> None:
        """Overwrite `out`, of any shape, with an array that lives where `source` does, of the same shape and dtype."""
        out[...] = array

    def recorder(self) -> Recorder | None:
        """What lets a step run ahead of the host, on a device that can do so; None elsewhere."""
        return None

    def borrow(self, shape: tuple[int, ...], dtype: Any = None) -> Array:
        """An array of any shape, with arbitrary content, from the workspace; by default in the storage precision."""
        return self._workspaces.current.borrow(shape, self.policy.storage if dtype is None else dtype)

    def give_back(self, *arrays: Array | None) -> None:
        """Return borrowed arrays, of any shape, to the workspace."""
        self._workspaces.current.give_back(*arrays)

    def loans(self) -> Loans:
        """A context that gives back what was borrowed in it if an exception ends it, see `Loans`."""
        return Loans(self.workspace)

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        """The images of a batch, scaled: (S, H, W, C) uint8, (N,) indices -> (N, H, W, C), by default from 0 to 1.

        Not borrowed: a prefetcher's thread calls this. IndexError: there is no such image.
        """
        batch, wide = self.asarray(images[samples]), self.policy.accumulate
        x = batch * self.asarray(np.array(pixels.scale, wide))
        if any(pixels.shift):
            x += self.asarray(np.array(pixels.shift, wide))
        return x.astype(self.policy.storage)

    def transfer(
        self,
        images: Any,
        labels: Any,
        *,
        batch_size: int,
        ahead: int,
        on_device: bool | str,
        shared: Shared,
        pixels: PixelScale = FRACTIONS,
        edited: bool = False,
    ) -> Transfer:
        """Return what copies rows of a data set to this backend; the worker calls this in its own thread.

        Args:
            images: (S, H, W, C) uint8 on the host, or None for batches without images.
            labels: (S,) int64 on the host.
            batch_size: the largest batch.
            ahead: batches that another thread makes ahead, at most.
            on_device: whether the images stay on the device: true, false, or `auto`: if they fit.
            shared: data that all workers of the process share.
            pixels: how pixels are scaled.
            edited: whether images are augmented on the host before they are scaled, see `Transfer.make`.
        """
        return Transfer(self, images, labels, pixels)

    def convert(self, source: Array, target: Array) -> None:
        """target = source, in the precision of target; both of any shape that is the same."""
        shapes.alike("convert", source, target)
        target[...] = source

    def constants(self, values: tuple[float, ...]) -> Array:
        """These K numbers, (K,), in the accumulation precision, on the device; kept."""
        if values not in self._constants:
            self._constants[values] = self.asarray(np.array(values, self.policy.accumulate))
        return self._constants[values]

    def _stored_copy(self, borrowed: Array) -> Array:
        """A borrowed array in the storage precision: itself where it is."""
        if borrowed.dtype == self.policy.storage:
            return borrowed
        stored = self.borrow(borrowed.shape)
        stored[...] = borrowed
        self.give_back(borrowed)
        return stored

    def _surrounded(self, x: Array, window: Window, value: float) -> Array:
        """The images with `value` around them, borrowed; x itself where the window does not pad."""
        if not window.pads:
            return x
        n, height, width, channels = x.shape
        padded = self.borrow((n, *window.padded(height, width), channels), x.dtype)
        padded[...] = value
        padded[window.inside(height, width)] = x
        return padded

    def _within(self, padded: Array, shape: tuple[int, ...], window: Window) -> Array:
        """Of a borrowed padded array what lies in the images (N, H, W, C), in the storage precision; borrowed."""
        if not window.pads:
            return self._stored_copy(padded)
        x = self.borrow(shape)
        x[...] = padded[window.inside(*shape[1:3])]
        self.give_back(padded)
        return x
