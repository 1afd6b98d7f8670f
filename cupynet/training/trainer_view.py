"""A trainer as callbacks, and the other files of the training loop, see it."""

from __future__ import annotations

from typing import Any, Protocol

from cupynet.backend import Backend
from cupynet.data import Batches
from cupynet.nn import Model, Params
from cupynet.optim import Schedule
from cupynet.parallel import Communicator, Groups, Synchronizer
from cupynet.training.clock import Statistics
from cupynet.training.consensus import StopConsensus
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Piece, Stop, StopReason
from cupynet.training.replica import Replica


class TrainerView(Protocol):
    """A worker's `Trainer`, which describes the attributes.

    A callback may change weights only in `Callback.before_finish`, each replica its own; and in `after_finish` and
    `on_diverged`, if it runs on every rank and does the same on each. `params.publish` lets the layers see them.
    """

    rank: int
    workers: int
    groups: Groups
    world: Communicator
    replicas: Communicator
    replica: Replica
    model: Model
    whole: Model
    params: Params
    backend: Backend
    synchronizer: Synchronizer
    schedule: Schedule
    callbacks: list[Any]
    statistics: Statistics
    consensus: StopConsensus
    iteration: int
    epoch: int
    round: int
    total_iterations: int
    total_epochs: int
    fit_start: int | None
    averaged: bool
    deal: tuple[int, ...]
    evaluation: Evaluation | None
    stopped: Stop | None

    def stop(self, text: str = ..., reason: StopReason = ...) -> None:
        """Let all workers end after the same round. Callable from any thread."""

    def pieces(self) -> list[Piece]:
        """Return the calls of this worker that a round and an evaluation consist of, but for the layers."""

    def launch_singly(self, wanted: bool) -> None:
        """Let a GPU launch each operation by itself from the next round on, or captured graphs again."""

    def state(self) -> dict[str, Any]:
        """Return the state of this worker, from which training continues bit for bit."""

    def emit(self, event: str, *arguments: Any) -> None:
        """Call a method of all callbacks."""

    def evaluate(self, loader: Batches) -> Evaluation:
        """Evaluate a data set in parallel."""
