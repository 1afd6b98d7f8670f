"""Guarantees for user-defined synchronizers: they receive the same calls in every round and see every gradient."""

from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD
from cupynet.parallel import ParameterAveraging, Synchronizer
from tests.support.device_runs import compared, train_on_device
from tests.support.refusals import refused
from tests.support.trainers import fitted, train
from tests.support.training import On, small_dataset, small_model


def test_every_method_is_called_on_every_worker_in_every_round() -> None:
    """Of five batches, worker 2 has none in the second round."""
    calls: dict[int, list[tuple[str, Any]]] = {}

    class Noting(Synchronizer):
        shares_gradients = False

        def note(self, *call: Any) -> None:
            calls.setdefault(self.communicator.rank, []).append(call)

        def before_update(self, replica: Any, samples: int) -> None:
            self.note("before", samples > 0)

        def after_update(self, replica: Any, iteration: int) -> None:
            self.note("after", iteration)

        def finish(self, replica: Any, moment: Any) -> None:
            self.note("finish", moment)
            self.communicator.allreduce_mean(self.shared(replica), 1)

    train(3, lambda: SGD(0.05), samples=17, synchronizer=Noting())
    first, end = [("before", True), ("after", 0)], [("after", 1), ("finish", "fit")]
    assert calls[0] == calls[1] == [*first, ("before", True), *end]
    assert calls[2] == [*first, ("before", False), *end]


@pytest.mark.parametrize(
    ("measure_every", "measured"), [(5, [True, False, True, False, False, True]), (0, [False] * 6)]
)
def test_the_divergence_is_measured_once_every_few_iterations(measure_every: int, measured: list[bool]) -> None:
    """Replicas are averaged after every second iteration."""
    averaging = ParameterAveraging(2, measure_every=measure_every)
    reports = train(2, lambda: SGD(0.05), samples=96, synchronizer=averaging).recorders[0].reports
    assert [report.drift > 0 for report in reports] == measured


class Signs(ParameterAveraging):
    def before_update(self, replica: Any, samples: int) -> None:
        replica.params.grad[...] = np.sign(replica.params.grad)


class Scheduled(Synchronizer):
    """Averages gradients in every round, although it also has the attribute `schedule`."""

    shares_gradients = True

    def __init__(self) -> None:
        self.schedule = ParameterAveraging(3).schedule

    def before_update(self, replica: Any, samples: int) -> None:
        self.communicator.allreduce_mean([replica.params.grad], samples)


class Own(Synchronizer):
    """Does not synchronize."""

    shares_gradients = False

    def before_update(self, replica: Any, samples: int) -> None:
        pass


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("synchronizer", [Signs(3), Scheduled()], ids=["signs", "scheduled"])
def test_a_gpu_does_not_run_ahead_of_what_a_synchronizer_does_in_each_round(synchronizer: Synchronizer) -> None:
    assert not compared(lambda: train_on_device(workers=2, synchronizer=synchronizer))["ahead"]


def test_a_step_before_updates_returns_nothing() -> None:
    class Answers(Own):
        def before_update(self, replica: Any, samples: int) -> Any:
            return False

    with refused(""):
        fitted(small_model(), Loader(small_dataset(20), 4), 2, synchronizer=Answers())


@pytest.mark.parametrize(("synchronizer", "updates"), [(Own(), {0: 2, 1: 1}), (Scheduled(), {0: 2, 1: 2})], ids=str)
def test_replicas_without_samples_move_only_if_gradients_are_shared(
    synchronizer: Synchronizer, updates: dict[int, int]
) -> None:
    """Two workers share three batches: worker 1 has none in the second round."""
    found: dict[int, int] = {}
    note = On("on_fit_end", lambda trainer: found.update({trainer.rank: trainer.replica.updates}), every_rank=True)
    fitted(small_model(), Loader(small_dataset(12), 4), 2, synchronizer=synchronizer, callbacks=[note])
    assert found == updates
