"""The training loss of an epoch: the mean over the samples of all replicas, even if the epoch was interrupted."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cupynet.data import Dataset, Loader
from cupynet.optim import SGD, Step
from cupynet.parallel import Groups, ParameterAveraging, Pipeline
from cupynet.training import Callback, EpochRecord, History, NonFinite, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.training import (
    Poisoned,
    Recorder,
    StopAfter,
    alone,
    network_with,
    on_threads,
    small_dataset,
    small_model,
)

STILL = 1e-300  # a learning rate at which no weight moves


class Summed(Callback):
    """Adds up the losses of each epoch on every worker."""

    every_rank = True

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}
        self._seen = 0

    def on_iteration_end(self, trainer):
        trainer.statistics.count()
        samples, self._seen = trainer.statistics.clock.samples - self._seen, trainer.statistics.clock.samples
        found = self.sums.setdefault(trainer.epoch, [0, 0.0])
        found[0] += samples
        found[1] += float(trainer.replica.losses) if samples else 0.0


def records(
    callbacks: list[Callback],
    data: Dataset,
    rate: float = STILL,
    *,
    report_every: int = 2,
    epochs: int = 1,
    states=None,
) -> list[list[EpochRecord]]:
    """Train with one worker per callback and return the epoch records of each."""

    def task(communicator):
        recorder = Recorder()
        trainer = Trainer(
            Replica(small_model(), SGD(rate)),
            groups=Groups.of(communicator),
            synchronizer=ParameterAveraging(1),
            callbacks=[callbacks[communicator.rank], recorder],
            report_every=report_every,
        )
        if states is not None:
            trainer.restore(states[communicator.rank])
        trainer.fit(Fit(Loader(data, 4, seed=3), epochs))
        return recorder.epochs

    return on_threads(len(callbacks), task)


@pytest.mark.parametrize(("workers", "report_every"), [(1, 2), (2, 0), (3, 1), (3, 7)])
def test_the_loss_is_the_mean_over_the_samples_of_all_replicas(workers, report_every):
    sums = [Summed() for _ in range(workers)]
    found = records(sums, small_dataset(57), 0.2, report_every=report_every, epochs=3)
    for epoch, record in enumerate(found[0]):
        counts, totals = np.array([each.sums[epoch] for each in sums]).T
        assert counts.sum() == 57 == record.samples
        assert record.loss == pytest.approx(totals.sum() / 57, rel=1e-12)
        np.testing.assert_allclose(record.losses, totals / counts, rtol=1e-12)
    assert found[0][0].loss > found[0][1].loss > found[0][2].loss
    for other in found[1:]:  # all workers know the same
        assert [(each.loss, each.losses) for each in other] == [(each.loss, each.losses) for each in found[0]]


def test_a_worker_without_a_batch_has_no_loss():
    (record,) = records([Callback() for _ in range(3)], small_dataset(8))[0]
    assert math.isnan(record.losses[2]) and record.loss == pytest.approx(np.mean(record.losses[:2]))


@pytest.mark.parametrize(("stages", "workers"), [(3, 1), (2, 2)])
def test_only_last_stages_of_a_pipeline_have_a_loss(stages, workers):
    def epochs_with(pipeline):
        recorder = Recorder()
        with ParallelWrapper(
            small_model(), workers, 1, optimizer=SGD(0.2), pipeline=pipeline, callbacks=[recorder], report_every=2
        ) as wrapper:
            wrapper.fit(Loader(small_dataset(61), 6, seed=3), 2)
        return recorder.epochs

    for whole, split in zip(epochs_with(None), epochs_with(Pipeline(stages, micro_batches=2)), strict=True):
        assert split.loss == pytest.approx(whole.loss, rel=1e-12)
        assert len(split.losses) == stages * workers
        np.testing.assert_allclose(split.losses[stages - 1 :: stages], whole.losses, rtol=1e-12)
        assert np.isnan(split.losses).sum() == (stages - 1) * workers


def test_skipped_batches_do_not_count():
    recorder, summed = Recorder(), Summed()
    data = small_dataset(97)
    guard = NonFinite("skip")
    trainer = alone(network_with(Poisoned(17)), SGD(STILL), callbacks=[recorder, summed, guard], report_every=3)
    trainer.fit(Fit(Loader(data, 4, seed=3), 2))
    assert guard.left_out == 2
    fine = alone(network_with(None), SGD(STILL), callbacks=[clean := Recorder()])
    fine.fit(Fit(Loader(data, 4, seed=3), 2))
    for epoch, (record, whole) in enumerate(zip(recorder.epochs, clean.epochs, strict=True)):
        left = next(b for b in Loader(data, 4, seed=3).epoch(epoch, trainer.backend) if 17 in b.samples)
        replica = Replica(small_model(), SGD(STILL))
        replica.gradient(left)
        expected = (whole.loss * 97 - float(replica.losses)) / (97 - len(left))
        assert record.loss == pytest.approx(expected, rel=1e-12)


def test_an_interrupted_epoch_is_one_record():
    data, recorder = small_dataset(40), Recorder()
    trainer = alone(small_model(), SGD(STILL), callbacks=[recorder, StopAfter(3)], report_every=2)
    trainer.fit(Fit(Loader(data, 4, seed=3), 1))
    assert trainer.stopped is not None and not recorder.epochs
    trainer.fit(Fit(Loader(data, 4, seed=3), 1))
    assert recorder.epochs[0].loss == pytest.approx(records([Callback()], data)[0][0].loss, rel=1e-12)
    other = small_dataset(20, seed=5)
    trainer.callbacks.append(StopAfter(13))
    trainer.fit(Fit(Loader(data, 4, seed=3), 1))  # broken off once more, and then another begins
    trainer.fit(Fit(Loader(other, 4, seed=3), 1))
    assert recorder.epochs[1].loss == pytest.approx(records([Callback()], other)[0][0].loss, rel=1e-12)


def test_the_learning_rate_is_that_of_the_last_iteration(tmp_path):
    recorder = Recorder()
    trainer = alone(
        small_model(),
        SGD(Step(0.1, factor=0.5, every=1, by="epoch")),
        callbacks=[recorder, History(tmp_path / "history.jsonl")],
        report_every=0,
    )
    trainer.fit(Fit(Loader(small_dataset(20), 4), 3))
    trainer.callbacks.close()
    assert [record.learning_rate for record in recorder.epochs] == [0.1, 0.05, 0.025]
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    for row, record in zip(rows, recorder.epochs, strict=True):
        assert (row["loss"], row["losses"]) == (record.loss, record.losses) and row["losses"] == [row["loss"]]
        assert row["learning_rate"] == record.learning_rate
        assert row["images_per_s"] == record.images_per_s == record.samples / record.train_s > 0


def test_a_missing_loss_is_null_in_the_history(tmp_path):
    path, model = tmp_path / "history.jsonl", network_with(Poisoned(*range(4)))  # one of the two batches, of worker 0
    data = Loader(small_dataset(8), 4, shuffle=False)
    with ParallelWrapper(model, 2, 1, callbacks=[History(path), NonFinite("skip")]) as wrapper:
        wrapper.fit(data, 1)
    (row,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert row["losses"][0] is None and row["losses"][1] == row["loss"] > 0
