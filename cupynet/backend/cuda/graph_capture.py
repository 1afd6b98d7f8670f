"""Training steps as CUDA graphs, with CuPy's stream capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.controls import GIVEN, Control, Scaling
from cupynet.backend.cuda.launch import first_use

if TYPE_CHECKING:
    from cupynet.backend.cuda.update import CudaUpdate


def _refuse(nbytes: int) -> Any:
    """Allocator during capture, which always raises. A graph must not write to memory that the pool may reuse."""
    raise RuntimeError(f"it allocates {nbytes} bytes of device memory outside the workspace")


class Recorder:
    """Captures steps of one backend in its worker's thread, and holds their controls (backend/controls.py)."""

    def __init__(self, backend: CudaUpdate) -> None:
        self._backend = backend
        self._controls = backend.allocate((len(Control),), np.float64)
        self._squared_norm = backend.allocate((), backend.policy.accumulate)
        with backend.activated():
            self._controls[...] = 0
        self._given: tuple[float, ...] = (np.nan,) * len(GIVEN)  # current values in the controls

    @contextmanager
    def steered(self) -> Iterator[None]:
        """Context in which operations read the loss scale and the scalars of the iteration from the controls."""
        self._backend.controls = self._controls
        try:
            yield
        finally:
            self._backend.controls = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context for the first run of some work. No other thread captures during this time."""
        with self._backend.apart, first_use:
            yield

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture work without running it, and return a function that launches it.

        The work must have run before, so that memory and kernels exist. Any exception means that it cannot be captured.
        Only one thread captures at a time, as CuPy requires.
        """
        activated = self._backend.activated
        with (
            self.first(),
            activated(),
            self._backend.workspace.capturing(),
            self._backend.xp.cuda.using_allocator(_refuse),
        ):
            stream = self._backend.xp.cuda.get_current_stream()
            stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(RuntimeError):  # the failure may have ended the capture
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def launch() -> None:
            with activated():
                graph.launch()

        return launch

    def judge(self, losses: Array, grad: Array, hits: Array, samples: int, scaling: Scaling) -> Array:
        """Decide on the device if the step is applied, see update.cu. Return the squared norm of the gradient, 0-d."""
        backend, kernels, norm = self._backend, self._backend.kernels, self._squared_norm
        losses, squares = backend.partial_sums(losses), backend.partial_sums(grad, squares=True)
        sizes = losses.size, squares.size, samples, scaling.grow_after
        arguments = self._controls, losses, squares, norm, hits, *sizes, scaling.least, scaling.most
        kernels.launch(f"judge_{backend._wide}", (1,), (kernels.threads,), *arguments)
        return norm

    def undo(self, vector: Array, kept: Array) -> None:
        """Restore a vector in accumulation precision from its copy `kept` if the step is skipped."""
        self._backend._flat(f"undo_{self._backend._wide}", vector.size, vector, kept, self._controls)

    def steer(self, numbers: tuple[float, float, float, float]) -> None:
        """Set the learning-rate factor and the other scalars of the next step, see `GIVEN`."""
        if numbers != self._given:
            self._backend.kernels.launch("steer_double", (1,), (1,), self._controls, *numbers)
            self._given = numbers

    def read(self) -> dict[Control, float]:
        """Wait for all launched work, and return the controls."""
        return dict(zip(Control, self._backend.to_host(self._controls).tolist(), strict=True))

    def begin(self, scale: float, used: float, steady: int) -> None:
        """Start a series of steps. steady: number of steps since the loss scale changed."""
        self._backend.kernels.launch("begin_double", (1,), (1,), self._controls, scale, used, steady)
