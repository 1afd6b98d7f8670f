"""What a synchronizer can rely on: the same calls on every worker in every round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import Average, Communicator, ParameterAveraging, Synchronizer
from cupynet.training import Callback, Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.trainers import trainer_of
from tests.support.training import fingerprint, on_threads, small_dataset, small_model, train


@pytest.mark.parametrize(("samples", "workers", "clip"), [(61, 3, 0.5), (10, 4, None)])
def test_gradients_averaged_equal_the_concatenated_batch(samples: int, workers: int, clip: float | None) -> None:
    """Also with clipping, which follows the mean. A worker without a batch once skipped the average, and the fit with
    61 samples timed out.
    """

    def optimizer() -> Nesterov:
        return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=clip)

    shared = train(workers, optimizer, samples=samples, epochs=2, synchronizer=GradientMean)
    alone = train(1, optimizer, samples=samples, batch_size=4 * workers, epochs=2)
    assert len({fingerprint(trainer.model) for trainer in shared.trainers}) == 1
    assert np.abs(shared.master - alone.master).max() <= 1e-12 * np.abs(alone.master).max()


def test_every_method_is_called_on_every_worker_in_every_round() -> None:
    """Five batches for three workers."""
    calls: dict[int, list[tuple[str, Any]]] = {}

    class Noting(Synchronizer):
        shares_gradients = False

        def note(self, *call: Any) -> None:
            calls.setdefault(self.communicator.rank, []).append(call)  # type: ignore[arg-type]

        def before_update(self, replica: Any, samples: int) -> None:
            self.note("before", samples > 0)

        def after_update(self, replica: Any, iteration: int) -> None:
            self.note("after", iteration)

        def finish(self, replica: Any, moment: Any) -> None:
            self.note("finish", moment)
            self.communicator.allreduce_mean(self.shared(replica), 1)

    train(3, lambda: SGD(0.05), samples=17, synchronizer=Noting)
    first, end = [("before", True), ("after", 0)], [("after", 1), ("finish", "fit")]
    assert calls[0] == calls[1] == [*first, ("before", True), *end]
    assert calls[2] == [*first, ("before", False), *end]


@pytest.mark.parametrize(
    ("measure_every", "measured"), [(5, [True, False, True, False, False, True]), (0, [False] * 6)]
)
def test_the_divergence_is_measured_once_every_few_iterations(measure_every: int, measured: list[bool]) -> None:
    """At averages after every second one."""
    found: list[bool] = []

    class Noting(ParameterAveraging):
        def after_update(self, replica: Any, iteration: int) -> Average | None:
            average = super().after_update(replica, iteration)
            if average is not None and self.communicator.rank == 0:
                found.append(average.divergence > 0)
            return average

    train(2, lambda: SGD(0.05), samples=96, synchronizer=lambda: Noting(2, measure_every=measure_every))
    assert found == measured


def test_replicas_start_with_the_weights_of_rank_0() -> None:
    """Each worker here has its own seed."""

    class First(Callback):
        every_rank = True

        def on_fit_start(self, trainer: Trainer) -> None:
            self.weights = fingerprint(trainer.model)

    def task(communicator: Communicator) -> str:
        first, replica = First(), Replica(small_model(seed=communicator.rank + 1), SGD(0.05))
        trainer_of(communicator, replica, ParameterAveraging(3), first).fit(Fit(Loader(small_dataset(20), 4), 1))
        return first.weights

    assert on_threads(3, task) == [fingerprint(small_model(seed=1))] * 3
