"""Synchronizers of users: they see every gradient, also on a GPU, and say whether they change it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD
from cupynet.parallel import ParameterAveraging, Synchronizer
from cupynet.training import ParallelWrapper, Replica, parallel_wrapper
from tests.support.device_runs import assert_same, train_on_device
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


class Signs(ParameterAveraging):
    """Each replica follows the signs of its gradient; the weights are averaged."""

    def before_update(self, replica: Any, samples: int) -> None:
        replica.params.grad[...] = np.sign(replica.params.grad)


class Scheduled(Synchronizer):
    """The mean gradient in every round, of a class that has a schedule besides."""

    shares_gradients = True

    def __init__(self) -> None:
        self.schedule = ParameterAveraging(3).schedule

    def before_update(self, replica: Any, samples: int) -> None:
        self.communicator.allreduce_mean([replica.params.grad], samples)


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("synchronizer", [Signs(3), Scheduled()], ids=["signs", "scheduled"])
def test_a_gpu_does_not_run_ahead_of_what_a_synchronizer_does_in_each_round(
    synchronizer: Synchronizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = train_on_device(workers=2, synchronizer=synchronizer)
    monkeypatch.setattr(parallel_wrapper, "replica_of", Replica)
    assert_same(captured, train_on_device(workers=2, synchronizer=synchronizer))
    assert not captured["ahead"]


def test_a_class_with_a_step_before_updates_says_whether_it_shares_gradients() -> None:
    class Silent(Synchronizer):
        def before_update(self, replica: Any, samples: int) -> None:
            pass

    with refused("synchronizer"):
        ParallelWrapper(small_model(), 2, synchronizer=Silent())


def test_a_step_before_updates_returns_nothing() -> None:
    class Answers(Synchronizer):
        shares_gradients = False

        def before_update(self, replica: Any, samples: int) -> Any:
            return False

    with ParallelWrapper(small_model(), 2, synchronizer=Answers()) as wrapper, refused(""):
        wrapper.fit(Loader(small_dataset(20), 4), 1)


def test_replicas_without_samples_move_only_if_gradients_are_shared() -> None:
    """Three batches for two workers: in the second round one has none."""

    class Own(Synchronizer):
        shares_gradients = False

        def before_update(self, replica: Any, samples: int) -> None:
            pass

    for synchronizer, updates in ((Own(), [2, 1]), (Scheduled(), [2, 2])):
        with ParallelWrapper(small_model(), 2, optimizer=SGD(0.01), synchronizer=synchronizer) as wrapper:
            wrapper.fit(Loader(small_dataset(12), 4), 1)
            seen: list[tuple[int, int]] = []
            wrapper.on_workers(lambda trainer, seen=seen: seen.append((trainer.rank, trainer.replica.updates)))  # type: ignore[misc]
            assert [each for _, each in sorted(seen)] == updates
