"""The training loss of an epoch: the mean over the samples of all replicas, even if the epoch was interrupted."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.data import Dataset, Loader
from cupynet.optim import SGD, Step
from cupynet.parallel import Communicator, ParameterAveraging, Pipeline
from cupynet.training import Callback, EpochRecord, History, NonFinite, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.trainers import trainer_of
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
    """Adds up the samples and losses of each epoch on every worker."""

    every_rank = True

    def __init__(self) -> None:
        self.sums: dict[int, list[float]] = {}
        self._seen = 0

    def on_iteration_end(self, trainer: Trainer) -> None:
        trainer.statistics.count()
        samples, self._seen = trainer.statistics.clock.samples - self._seen, trainer.statistics.clock.samples
        found = self.sums.setdefault(trainer.epoch, [0, 0.0])
        found[0] += samples
        found[1] += float(trainer.replica.losses or 0.0) if samples else 0.0


def records(
    callbacks: Sequence[Callback], data: Dataset, rate: float = STILL, *, report_every: int = 2, epochs: int = 1
) -> list[list[EpochRecord]]:
    """Train with one worker per callback and return the epoch records of each."""

    def task(communicator: Communicator) -> list[EpochRecord]:
        recorder, replica = Recorder(), Replica(small_model(), SGD(rate))
        own = callbacks[communicator.rank]
        trainer = trainer_of(communicator, replica, ParameterAveraging(1), own, recorder, report_every=report_every)
        trainer.fit(Fit(Loader(data, 4, seed=3), epochs))
        return recorder.epochs

    found: list[list[EpochRecord]] = on_threads(len(callbacks), task)
    return found


@pytest.mark.parametrize(("workers", "report_every"), [(2, 0), (3, 1), (3, 7)])
def test_the_loss_is_the_mean_over_the_samples_of_all_replicas(workers: int, report_every: int) -> None:
    sums = [Summed() for _ in range(workers)]
    found = records(sums, small_dataset(57), 0.2, report_every=report_every, epochs=2)
    for epoch, record in enumerate(found[0]):
        counts, totals = np.array([each.sums[epoch] for each in sums]).T
        assert counts.sum() == 57 == record.samples
        assert record.loss == pytest.approx(totals.sum() / 57, rel=1e-12)
        np.testing.assert_allclose(record.losses, totals / counts, rtol=1e-12)
    for other in found[1:]:  # all workers know the same
        assert [each.losses for each in other] == [each.losses for each in found[0]]


def test_a_worker_without_a_batch_has_no_loss() -> None:
    (record,) = records([Callback()] * 3, small_dataset(8))[0]
    assert math.isnan(record.losses[2]) and record.loss == pytest.approx(np.mean(record.losses[:2]))


@pytest.mark.parametrize(("stages", "workers"), [(3, 1), (2, 2)])
def test_only_last_stages_of_a_pipeline_have_a_loss(stages: int, workers: int) -> None:
    def trained(pipeline: Pipeline | None) -> EpochRecord:
        recorder = Recorder()
        options: dict[str, Any] = {"optimizer": SGD(0.2), "callbacks": [recorder], "report_every": 2}
        with ParallelWrapper(small_model(), workers, 1, pipeline=pipeline, **options) as wrapper:
            wrapper.fit(Loader(small_dataset(61), 6, seed=3), 1)
        record: EpochRecord = recorder.epochs[0]
        return record

    whole, split = trained(None), trained(Pipeline(stages, micro_batches=2))
    assert split.loss == pytest.approx(whole.loss, rel=1e-12)
    np.testing.assert_allclose(split.losses[stages - 1 :: stages], whole.losses, rtol=1e-12)
    assert np.isnan(split.losses).sum() == (stages - 1) * workers


def test_skipped_batches_do_not_count() -> None:
    """The loss is that of a worker that trains the batches of an epoch in which sample 17 is not."""

    def loss(poisoned: Poisoned | None, *callbacks: Callback) -> float:
        recorder = Recorder()
        trainer = alone(network_with(poisoned), SGD(STILL), callbacks=[recorder, *callbacks], report_every=3)
        trainer.fit(Fit(loader, 1))
        return float(recorder.epochs[0].loss)

    loader = Loader(small_dataset(97), 4, seed=3)
    replica: Any = Replica(small_model(), SGD(STILL))
    (skipped,) = [batch for batch in loader.epoch(0, replica.backend) if 17 in batch.samples]
    replica.gradient(skipped)
    expected = (loss(None) * 97 - float(replica.losses)) / (97 - len(skipped))
    assert loss(Poisoned(17), NonFinite("skip")) == pytest.approx(expected, rel=1e-12)


def test_an_interrupted_epoch_is_one_record() -> None:
    data, other, recorder = small_dataset(40), small_dataset(20, seed=5), Recorder()
    callbacks = [recorder, StopAfter(3), StopAfter(13)]
    trainer = alone(small_model(), SGD(STILL), callbacks=callbacks, report_every=2)
    for each in (data, data, data, other):  # the third is interrupted again, and then another begins
        trainer.fit(Fit(Loader(each, 4, seed=3), 1))
    expected = [records([Callback()], each)[0][0].loss for each in (data, other)]
    assert [record.loss for record in recorder.epochs] == pytest.approx(expected, rel=1e-12)


def test_the_learning_rate_is_that_of_the_last_iteration(tmp_path: Path) -> None:
    recorder = Recorder()
    optimizer = SGD(Step(0.1, factor=0.5, every=1, by="epoch"))
    callbacks = [recorder, History(tmp_path / "history.jsonl")]
    trainer = alone(small_model(), optimizer, callbacks=callbacks, report_every=0)
    trainer.fit(Fit(Loader(small_dataset(20), 4), 3))
    trainer.callbacks.close()
    assert [record.learning_rate for record in recorder.epochs] == [0.1, 0.05, 0.025]
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    for row, record in zip(rows, recorder.epochs, strict=True):
        assert (row["loss"], row["losses"]) == (record.loss, record.losses)
        assert row["learning_rate"] == record.learning_rate
        assert row["images_per_s"] == record.images_per_s == record.samples / record.train_s > 0


def test_a_missing_loss_is_null_in_the_history(tmp_path: Path) -> None:
    path, model = tmp_path / "history.jsonl", network_with(Poisoned(*range(4)))  # one of the two batches, of worker 0
    with ParallelWrapper(model, 2, 1, callbacks=[History(path), NonFinite("skip")]) as wrapper:
        wrapper.fit(Loader(small_dataset(8), 4, shuffle=False), 1)
    row = json.loads(path.read_text())
    assert row["losses"][0] is None and row["losses"][1] == row["loss"] > 0
