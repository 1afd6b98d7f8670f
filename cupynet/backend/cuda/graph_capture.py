"""CUDA graphs: all launches of a step as one (CuPy's capture of a stream)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cuda.launch import Kernels, first_use
from cupynet.backend.graph_capture import GIVEN, Control, Scaling


class Gpu(Protocol):
    """What a recorder needs of the worker's backend."""

    xp: ModuleType
    kernels: Kernels
    controls: Array | None  # what operations take their numbers from

    @property
    def apart(self) -> AbstractContextManager[Any]:
        """While it lasts no other thread asks the worker's stream for anything."""

    def here(self) -> AbstractContextManager[Any]:
        """The device and the worker's stream, as those of the calling thread."""

    def allocate(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array."""

    def to_host(self, array: Array) -> Any:
        """A copy on the host."""


def _refuse(nbytes: int) -> Any:
    """In place of the pool: CuPy would record what is allocated, give it to others, and let each launch write there."""
    raise RuntimeError(f"it allocates {nbytes} bytes of the device, beside the workspace")


class Recorder:
    """See `cupynet.backend.graph_capture.Recorder`."""

    def __init__(self, backend: Gpu) -> None:
        self._backend = backend
        self._controls = backend.allocate((len(Control),), np.float64)
        with backend.here():
            self._controls[...] = 0
        self._given: tuple[float, ...] = (np.nan,) * len(GIVEN)  # what the controls have

    @contextmanager
    def steered(self) -> Iterator[None]:
        """See there."""
        self._backend.controls = self._controls
        try:
            yield
        finally:
            self._backend.controls = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """See there."""
        with self._backend.apart, first_use:
            yield

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See there. CuPy holds its own tests of graphs to be unsafe in several threads: one at a time."""
        here = self._backend.here
        with self.first(), here(), self._backend.xp.cuda.using_allocator(_refuse):
            stream = self._backend.xp.cuda.get_current_stream()
            stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # what failed has ended the capture
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def launch() -> None:
            with here():
                graph.launch()

        return launch

    def judge(self, loss: Array, squared_norm: Array, samples: int, scaling: Scaling) -> None:
        """See there."""
        name = f"judge_{'double' if loss.dtype == np.float64 else 'float'}"
        how = scaling.grow_after, scaling.least, scaling.most
        self._backend.kernels.launch(name, (1,), (1,), self._controls, loss, squared_norm, samples, *how)

    def undo(self, vector: Array, kept: Array) -> None:
        """See there."""
        name = f"undo_{'double' if vector.dtype == np.float64 else 'float'}"
        at_once = 16 // vector.dtype.itemsize
        self._backend.kernels.flat(name, vector.size, vector, kept, self._controls, vector.size, at_once=at_once)

    def steer(self, numbers: tuple[float, float, float, float]) -> None:
        """See there. The numbers travel with a launch, of which there is none where they stay what they were."""
        if numbers != self._given:
            self._backend.kernels.launch("steer_double", (1,), (1,), self._controls, *numbers)
            self._given = numbers

    def read(self) -> dict[Control, float]:
        """See there."""
        return dict(zip(Control, self._backend.to_host(self._controls).tolist(), strict=True))

    def begin(self, scale: float, used: float, steady: int) -> None:
        """See there."""
        self._backend.kernels.launch("begin_double", (1,), (1,), self._controls, scale, used, steady)
