"""Captures training steps as CUDA graphs with CuPy's stream capture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.controls import Control, Scaling
from cupynet.backend.cuda.launch import first_use
from cupynet.backend.cuda.transfer import Staging

if TYPE_CHECKING:
    from cupynet.backend.cuda.update import CudaUpdate

Scalars: TypeAlias = "tuple[float, float, float, float]"
ROWS = 255  # maximum number of iterations in a table of scalars


def _refuse(nbytes: int) -> Any:
    """Allocator used during capture. Always raises, as a graph must not write to memory that the pool may reuse."""
    raise RuntimeError(f"the step allocates {nbytes} bytes of device memory outside the workspace")


class Recorder:
    """Captures steps of one backend in its worker's thread, and holds their controls (see backend/controls.py)."""

    def __init__(self, backend: CudaUpdate) -> None:
        self._backend = backend
        self._controls = backend.allocate((len(Control),), np.float64)
        self._squared_norm = backend.allocate((), backend.policy.accumulate)
        self._table = backend.allocate((2 + 4 * ROWS,), np.float64)  # see `take_row` in update.cu
        with backend.activated():
            self._controls[...] = 0
            self._table[...] = 0
            self._sending = Staging(backend.xp, self._table.nbytes)
        self._rows: deque[tuple[int, Scalars]] = deque()  # rows that steps will take: iteration and scalars
        self._taken = 0  # rows of the table that steps have taken

    @contextmanager
    def steered(self) -> Iterator[None]:
        """Context manager in which operations read the loss scale and the scalars of a step from the controls."""
        self._backend.controls = self._controls
        try:
            yield
        finally:
            self._backend.controls = None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context manager for code that runs for the first time. No other thread captures during this time."""
        with self._backend.apart, first_use:
            yield

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture `work` without running it, and return a function that launches it. Raise an error if capture fails.

        `work` must have run before, so that its memory and kernels exist.
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
                with suppress(RuntimeError):  # the error may have ended the capture
                    stream.end_capture()
                raise
            graph = stream.end_capture()

        def launch() -> None:
            with activated():
                graph.launch()

        return launch

    def judge(
        self, losses: Array, grad: Array, hits: Array, samples: int, scaling: Scaling, order: Array | None = None
    ) -> Array:
        """Decide on the device whether to apply the step (see update.cu). Return the squared gradient norm, 0-d."""
        backend, kernels, norm = self._backend, self._backend.kernels, self._squared_norm
        losses, squares = backend.partial_sums(losses), backend.partial_sums(grad, squares=True)
        sizes = losses.size, squares.size, samples, scaling.grow_after
        vectors = self._controls, losses, squares, norm, hits, self._table, order
        kernels.launch(
            f"judge_{backend._wide}", (1,), (kernels.threads,), *vectors, *sizes, scaling.least, scaling.most
        )
        return norm

    def undo(self, vector: Array, kept: Array) -> None:
        """If the step is skipped, restore a vector in accumulation precision from its copy `kept`."""
        self._backend._flat(f"undo_{self._backend._wide}", vector.size, vector, kept, self._controls)

    def steer(self, iteration: int, scalars: Scalars, later: Callable[[], Iterator[Scalars]]) -> None:
        """Set the learning-rate factor and other scalars of the next step, which must be launched before the next call.

        later: returns the expected scalars of later iterations, which are sent to the device ahead of time.
        """
        if not self._rows or self._rows[0] != (iteration, scalars):
            # start with short tables, because the scalars may change often
            rows = [scalars, *islice(later(), min(2 * self._taken, ROWS - 1))]
            table = [0.0, len(rows), *chain.from_iterable(rows)]
            with self._backend.activated():
                self._sending.send(self._table[: len(table)], table)
            self._rows, self._taken = deque(enumerate(rows, iteration)), 0
        self._rows.popleft()
        self._taken += 1

    def take_row(self) -> None:
        """Advance the controls to the next scalars, for an update that does not call `judge`."""
        self._backend.kernels.launch("steer_double", (1,), (1,), self._controls, self._table)

    def read(self) -> dict[Control, float]:
        """Wait for all launched work, and return the controls."""
        return dict(zip(Control, self._backend.to_host(self._controls).tolist(), strict=True))

    def begin(self, scale: float, used: float, steady: int) -> None:
        """Begin steps with these values of SCALE, USED and STEADY (see `Control`), and reset earlier results."""
        self._backend.kernels.launch("begin_double", (1,), (1,), self._controls, scale, used, steady)
