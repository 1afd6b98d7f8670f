"""Training on shards: one per worker, averages weighted by samples, and the same data on all workers."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.core.errors import DataError
from cupynet.data import Dataset, Loader
from cupynet.optim import SGD
from cupynet.parallel import Groups, ParameterAveraging
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.shards import write_shards
from tests.support.training import (
    RecordingReplica,
    StopAfter,
    alone,
    fingerprint,
    on_threads,
    small_dataset,
    small_model,
)


def cut(samples, shards, folder):
    return write_shards(small_dataset(samples), folder, shards)


def train(loader, workers, epochs=1, frequency=1, optimizer=lambda: SGD(0.05), backend="numpy", dtype="double"):
    def task(communicator):
        trainer = Trainer(
            RecordingReplica(small_model(dtype, backend), optimizer()),
            groups=Groups.of(communicator),
            synchronizer=ParameterAveraging(frequency),
            prefetch_buffer=2,
        )
        trainer.fit(Fit(loader, epochs))
        return trainer

    return on_threads(workers, task)


class Concatenated(Loader):
    """The batches of all workers in a round as one batch."""

    def __init__(self, sharded, workers, dataset):
        super().__init__(dataset, sharded.batch_size)
        self.sharded, self.workers = sharded, workers

    def rounds(self, size):
        return self.sharded.rounds(self.workers)

    def assigned(self, epoch, rank, size, start=0):
        dealt = [self.sharded.assigned(epoch, rank, self.workers) for rank in range(self.workers)]
        rounds = [[samples for mine in dealt for _, _, samples in mine[n : n + 1]] for n in range(self.rounds(1))]
        return [(n, np.concatenate(samples), np.concatenate(samples)) for n, samples in enumerate(rounds)]


@pytest.mark.parametrize(("samples", "batch_size"), [(61, 4), (13, 4)])
def test_frequency_1_is_one_replica_on_the_concatenated_rounds(samples, batch_size, tmp_path):
    """Averages weight by samples: short batches, and a worker that has run out, included."""
    loader = Loader(cut(samples, 3, tmp_path), batch_size, seed=3)
    trainers = train(loader, 3, epochs=2)
    one = alone(small_model(), SGD(0.05), prefetch_buffer=0)
    one.fit(Fit(Concatenated(loader, 3, small_dataset(samples)), 2))
    assert trainers[0].iteration == one.iteration == 2 * loader.rounds(3)
    scale = np.abs(one.model.params.master).max()
    assert np.abs(trainers[0].model.params.master - one.model.params.master).max() <= 1e-12 * scale
    for epoch in range(2):
        seen = [sample for trainer in trainers for batch in trainer.replica.seen[epoch] for sample in batch]
        assert sorted(seen) == list(range(samples))
    assert trainers[0].statistics.clock.images == 2 * samples


def test_one_shard_trains_as_the_whole_data_set(tmp_path):
    sharded = train(Loader(cut(60, 1, tmp_path), 4, seed=3), 1, 2)[0]
    whole = train(Loader(small_dataset(60), 4, seed=3), 1, 2)[0]
    assert fingerprint(sharded.model) == fingerprint(whole.model)


def test_an_interrupted_epoch_is_continued(tmp_path):
    loader = Loader(cut(60, 2, tmp_path), 4, seed=3)

    def task(communicator, callbacks):
        trainer = Trainer(
            Replica(small_model(), SGD(0.05)),
            groups=Groups.of(communicator),
            synchronizer=ParameterAveraging(1),
            callbacks=callbacks,
        )
        while trainer.epoch < 2:
            trainer.fit(Fit(loader, 2 - trainer.epoch))
        return trainer

    broken = on_threads(2, lambda communicator: task(communicator, [StopAfter(3)]))
    whole = on_threads(2, lambda communicator: task(communicator, []))
    assert broken[0].iteration == whole[0].iteration == 16
    assert fingerprint(broken[0].model) == fingerprint(whole[0].model)


def test_the_wrapper_takes_shards_and_evaluates_on_them(tmp_path):
    shards = cut(60, 2, tmp_path)
    test = small_dataset(9)
    with ParallelWrapper(small_model("float", "numba"), workers=2, averaging_frequency=1) as wrapper:
        wrapper.fit(shards, 6, batch_size=4, evaluate_on=test)
        assert wrapper.evaluate(shards).samples == 60
        parts = [shards.open(rank) for rank in range(2)]  # as one data set, each worker has the same batch
        images, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", "labels"))
        whole = Loader(Dataset("whole", images, labels, 3), len(parts[0]), shuffle=False)
        found, expected = (wrapper.evaluate(each).to_dict() for each in (shards, whole))
        for mistake in (*found["mistakes"], *expected["mistakes"]):
            del mistake["sample"]  # shards have kept the numbers of the whole set
        assert found == expected
        assert wrapper.evaluate(shards).confusion.tolist() == wrapper.evaluate(small_dataset(60)).confusion.tolist()
        assert wrapper.evaluate(test).samples == 9


def test_the_wrapper_refuses_another_number_before_anything_is_trained(tmp_path):
    shards = cut(60, 3, tmp_path)
    with ParallelWrapper(small_model(), workers=2) as wrapper:
        with refused("workers"):
            wrapper.fit(shards)
        wrapper.fit(small_dataset(20))  # nothing has broken


def test_a_damaged_shard_stops_all_with_its_own_error(tmp_path):
    shards = cut(60, 3, tmp_path)
    (tmp_path / "1" / "images.npy").write_bytes(b"")
    with (
        ParallelWrapper(small_model(), workers=3) as wrapper,
        pytest.raises(DataError, match="1/images.npy"),
    ):
        wrapper.fit(shards)


@pytest.mark.parametrize("what", ["train", "evaluate_on"])
def test_workers_that_found_other_data_are_refused(what, tmp_path):
    """As if one machine had other files than the rest."""

    def task(communicator):
        other = small_dataset(60, seed=int(communicator.rank == 1))
        loaders = {"train": Loader(small_dataset(60), 4), "evaluate_on": Loader(small_dataset(60), 7)}
        loaders[what] = Loader(other, 4)
        trainer = Trainer(
            Replica(small_model(), SGD(0.05)), groups=Groups.of(communicator), synchronizer=ParameterAveraging(1)
        )
        with pytest.raises(DataError, match="1.*rank 0"):
            trainer.fit(Fit(loaders["train"], 1, evaluate_on=loaders["evaluate_on"]))
        return trainer.iteration

    assert on_threads(3, task) == [0, 0, 0]
