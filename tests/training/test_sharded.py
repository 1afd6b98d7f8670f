"""Training on shards: one per worker, averages weighted by samples, and the same data on all workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import DataError
from cupynet.data import Dataset, Loader, Shards
from cupynet.optim import SGD
from cupynet.parallel import Communicator, ParameterAveraging
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.shards import write_shards
from tests.support.trainers import trainer_of
from tests.support.training import RecordingReplica, alone, on_threads, small_dataset, small_model

EVERY_ROUND = ParameterAveraging(1)


def train(loader: Loader, workers: int, epochs: int = 1) -> list[Trainer]:
    def task(communicator: Communicator) -> Trainer:
        replica: Any = RecordingReplica(small_model(), SGD(0.05))  # type: ignore[no-untyped-call, unused-ignore]
        trainer = trainer_of(communicator, replica, EVERY_ROUND, prefetch_buffer=2)
        trainer.fit(Fit(loader, epochs))
        return trainer

    found: list[Trainer] = on_threads(workers, task)
    return found


class Concatenated(Loader):
    """The batches of three workers in a round as one batch."""

    def __init__(self, sharded: Loader, dataset: Dataset) -> None:
        super().__init__(dataset, sharded.batch_size)
        self.sharded = sharded

    def iterations(self, size: int) -> int:
        return self.sharded.iterations(3)

    def assigned(self, epoch: int, rank: int, size: int, start: int = 0) -> Any:
        dealt = [self.sharded.assigned(epoch, rank, 3) for rank in range(3)]
        iterations = [
            [samples for mine in dealt for _, _, samples in mine[n : n + 1]] for n in range(self.iterations(1))
        ]
        return [(n, np.concatenate(samples), np.concatenate(samples)) for n, samples in enumerate(iterations)]


def test_frequency_1_is_one_replica_on_the_concatenated_rounds(tmp_path: Path) -> None:
    """Averages weight by samples: short batches, and a worker that has run out, included."""
    loader = Loader(write_shards(small_dataset(61), tmp_path, 3), 4, seed=3)
    trainers = train(loader, 3, epochs=2)
    one = alone(small_model(), SGD(0.05), prefetch_buffer=0)
    one.fit(Fit(Concatenated(loader, small_dataset(61)), 2))
    np.testing.assert_allclose(trainers[0].params.master, one.params.master, rtol=0, atol=1e-12)
    for epoch in range(2):
        replicas: list[Any] = [trainer.replica for trainer in trainers]
        seen = [sample for replica in replicas for batch in replica.seen[epoch] for sample in batch]
        assert sorted(seen) == list(range(61))


def joined(shards: Shards) -> Dataset:
    parts = [shards.open(rank) for rank in range(2)]
    images, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", "labels"))
    return Dataset("joined", images, labels, 3)


def test_an_evaluation_of_shards_is_that_of_the_whole_data_set(tmp_path: Path) -> None:
    shards = write_shards(small_dataset(60), tmp_path, 2)
    with ParallelWrapper(small_model("float", "numba"), 2, 1) as wrapper:
        wrapper.fit(shards, epochs=6, batch_size=4, evaluate_on=small_dataset(9))
        found = wrapper.evaluate(shards).to_dict()
        expected = wrapper.evaluate(Loader(joined(shards), 30, shuffle=False)).to_dict()
    for mistake in (*found["mistakes"], *expected["mistakes"]):
        del mistake["sample"]  # shards have kept the numbers of the whole set
    assert found == expected


def test_the_wrapper_refuses_another_number_before_anything_is_trained(tmp_path: Path) -> None:
    shards = write_shards(small_dataset(60), tmp_path, 3)
    with ParallelWrapper(small_model(), workers=2) as wrapper:
        with refused("workers"):
            wrapper.fit(shards)
        wrapper.fit(small_dataset(20))  # nothing has broken


@pytest.mark.parametrize("what", ["train", "evaluate_on"])
def test_workers_that_found_other_data_are_refused(what: str) -> None:
    """As if one machine had other files than the rest."""

    def task(communicator: Communicator) -> int:
        other = small_dataset(60, seed=int(communicator.rank == 1))
        loaders = {"train": Loader(small_dataset(60), 4), "evaluate_on": Loader(small_dataset(60), 7)}
        loaders[what] = Loader(other, 4)
        trainer = trainer_of(communicator, Replica(small_model(), SGD(0.05)), EVERY_ROUND)
        with pytest.raises(DataError):
            trainer.fit(Fit(loaders["train"], 1, evaluate_on=loaders["evaluate_on"]))
        return trainer.iteration

    assert on_threads(3, task) == [0, 0, 0]
