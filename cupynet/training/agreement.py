"""Tasks that all workers carry out together or refuse together, so that they remain usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from cupynet.core.errors import CupynetError
from cupynet.parallel import Communicator, PeerFailed

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer


class Refused(Exception):
    """Raised on all workers by `agreed`. error: this worker's error, or PeerFailed."""

    def __init__(self, error: CupynetError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def agreed(world: Communicator) -> Iterator[None]:
    """Context manager that raises Refused on all workers if one of them raises a CupynetError.

    All workers must call this. The block must not communicate.
    """
    error: CupynetError | None = None
    try:
        yield
    except CupynetError as own:
        error = own
    with world.traffic.uncounted():
        codes = world.gather_numbers(0 if error is None else error.exit_code)[:, 0]
    if codes.any():
        first = int(np.flatnonzero(codes)[0])
        if error is None:
            error = PeerFailed(f"refused, because worker {first} failed")
            error.exit_code = int(codes[first])
        raise Refused(error)


def run_or_refuse(on_workers: Callable[..., Any], task: Callable[[Trainer], None]) -> None:
    """Run a task with `ParallelWrapper.on_workers`. If it is refused, raise the error, but leave the workers usable."""
    errors: list[CupynetError] = []

    def attempt(trainer: Trainer) -> None:
        try:
            task(trainer)
        except Refused as refused:
            errors.append(refused.error)

    on_workers(attempt)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, PeerFailed))
