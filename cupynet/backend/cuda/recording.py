"""CUDA graphs: all launches of a step as one (CuPy's capture of a stream)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.recording import Control, Scaling

if TYPE_CHECKING:
    from cupynet.backend.cuda.backend import CupyBackend

_one_at_a_time = threading.Lock()  # CuPy holds its own tests of graphs to be unsafe in several threads


class Recorder:
    """See `cupynet.backend.recording.Recorder`."""

    def __init__(self, backend: CupyBackend) -> None:
        self._backend = backend
        self._controls = backend.allocate((len(Control),), np.float64)
        self._rate = np.nan  # what the controls have

    @contextmanager
    def steered(self) -> Iterator[None]:
        """See there."""
        self._backend.controls = self._controls
        try:
            yield
        finally:
            self._backend.controls = None

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """See there."""
        here = self._backend.here
        with _one_at_a_time, here():
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
        self._backend.kernels.flat(name, vector.size, vector, kept, self._controls, vector.size)

    def steer(self, rate: float) -> None:
        """See there. The number travels with a launch, of which there is none where it stays what it was."""
        if rate != self._rate:
            self._backend.kernels.launch("steer_double", (1,), (1,), self._controls, rate)
            self._rate = rate

    def read(self) -> dict[Control, float]:
        """See there."""
        return dict(zip(Control, self._backend.to_host(self._controls).tolist(), strict=True))

    def write(self, values: dict[Control, float]) -> None:
        """See there."""
        host = np.array([{Control.RATE: self._rate, **values}.get(place, 0.0) for place in Control])
        with self._backend.here():
            self._controls.set(host)
        self._rate = float(host[Control.RATE])
