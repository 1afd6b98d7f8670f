"""An epoch's training loss and accuracy: means over all replicas' samples, even if the epoch was interrupted."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Dataset, Evaluation, HistoryWriter, Loader, ParallelWrapper, Pipeline, StepDecay
from tests.support.training import Recorder, StopAfter, small_dataset, small_model

DATA = small_dataset(57)  # 15 batches, the last of one sample


def recorded(workers: int, *data: Dataset, callbacks: Any = (), **options: Any) -> Recorder:
    """Fit an epoch of each data set without changing weights."""
    recorder, model = Recorder(), small_model()
    model.set_learning_rate_factors({"*": 5e-324})  # times the learning rate, this is 0
    with ParallelWrapper(model, workers, 1, callbacks=[recorder, *callbacks], **options) as wrapper:
        for each in data:
            wrapper.fit(Loader(each, 4, seed=3), epochs=1)
    return recorder


def evaluated(data: Dataset) -> Evaluation:
    with ParallelWrapper(small_model(), 1) as wrapper:
        return wrapper.evaluate(data)


@pytest.mark.parametrize(
    ("workers", "log_every", "options"),
    [(2, 0, {}), (3, 1, {}), (3, 7, {}), (1, 9, {"accumulation_steps": 3}), (1, 9, {"pipeline": Pipeline(2)})],
)
def test_training_loss_and_accuracy_are_means_over_the_samples_of_all_replicas(
    workers: int, log_every: int, options: dict[str, Any]
) -> None:
    found, expected = recorded(workers, DATA, DATA, log_every=log_every, **options), evaluated(DATA)
    for record in found.epochs:
        assert record.loss == pytest.approx(expected.loss, rel=1e-12)
        assert record.accuracy == expected.accuracy
        assert np.nansum(np.multiply(record.losses, record.spent.samples)) / 57 == pytest.approx(record.loss, rel=1e-12)
    if log_every:
        assert 0 < np.mean([report.accuracy for report in found.reports]) < 1


def test_a_worker_without_a_batch_has_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    (record,) = recorded(3, small_dataset(8), callbacks=(HistoryWriter(path),)).epochs
    assert np.isnan(record.losses).tolist() == [False, False, True]
    assert record.loss == pytest.approx(np.nanmean(record.losses))
    assert json.loads(path.read_text())["losses"] == [*record.losses[:2], None]  # JSON has no NaN


@pytest.mark.parametrize(("stages", "workers"), [(3, 1), (2, 2)])
def test_only_last_stages_of_a_pipeline_have_a_loss(stages: int, workers: int) -> None:
    (uncut,) = recorded(workers, DATA).epochs
    (cut,) = recorded(workers, DATA, pipeline=Pipeline(stages, micro_batches=2)).epochs
    assert cut.loss == pytest.approx(uncut.loss, rel=1e-12)
    np.testing.assert_allclose(cut.losses[stages - 1 :: stages], uncut.losses, rtol=1e-12)
    assert np.isnan(cut.losses).sum() == (stages - 1) * workers
    assert cut.accuracy == uncut.accuracy > 0


def test_an_interrupted_epoch_that_is_resumed_is_one_record() -> None:
    """The second epoch is interrupted too, and another one starts in its place."""
    other = small_dataset(20, seed=5)
    found = recorded(1, DATA, DATA, DATA, other, callbacks=(StopAfter(3), StopAfter(18)))
    assert [record.loss for record in found.epochs] == pytest.approx([evaluated(each).loss for each in (DATA, other)])


def test_the_history_has_the_speed_and_the_last_learning_rate_of_each_epoch() -> None:
    recorder, optimizer = Recorder(), SGD(StepDecay(0.1, factor=0.5, every=1, by="epoch"))
    with ParallelWrapper(small_model(), 1, optimizer=optimizer, callbacks=[recorder], log_every=0) as wrapper:
        rows = wrapper.fit(Loader(small_dataset(20), 4), epochs=3).epochs
    assert rows["learning_rate"] == [0.1, 0.05, 0.025]
    for name in ("loss", "losses", "learning_rate", "images_per_s"):
        assert rows[name] == [getattr(record, name) for record in recorder.epochs]
    assert rows["images_per_s"] == [record.samples / record.train_s for record in recorder.epochs]
