"""Measurements other than the loss: each worker's time, traffic, and the drift of replicas."""

import math
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from cupynet import SGD, Loader, ParallelWrapper, Replica
from cupynet.parallel import Average, ParameterAveraging, SerialCommunicator
from cupynet.training.fit import Fit
from tests.support.trainers import trainer_of
from tests.support.training import Recorder, StopAfter, small_dataset, small_model


@pytest.mark.parametrize(("workers", "frequency"), [(2, 1), (3, 4)])
def test_traffic_is_counted_over_all_workers(workers: int, frequency: int) -> None:
    recorder, averaging = Recorder(), ParameterAveraging(frequency, measure_every=0)
    options: dict[str, Any] = {"callbacks": [recorder], "optimizer": SGD(0.05), "log_every": 2}
    with ParallelWrapper(small_model(), workers, synchronizer=averaging, **options) as wrapper:
        wrapper.fit(Loader(small_dataset(workers * 4 * 8), 4), epochs=2)
        spent: Any = wrapper.trainer.statistics.spent
        sent, vector = sum(spent.bytes_sent), wrapper.model.params.master.nbytes
    vectors = 16 // frequency * 2 * (workers - 1) * vector  # SGD sends only weights
    start = workers * (workers - 1) * vector  # at most, to start from equal weights
    assert vectors < sent < vectors + start + 16 * 1000 * workers
    epochs = [record.bytes_sent for record in recorder.epochs]
    assert vectors < recorder.reports[-1].bytes_sent <= epochs[-1] <= sent
    between = epochs[1] - epochs[0] - sum(recorder.epochs[1].spent.bytes_sent)
    assert 0 <= between < 1000  # the numbers that workers exchange between two epochs


def test_traffic_is_counted_over_fits_and_resumed_runs() -> None:
    def sent(wrapper: ParallelWrapper) -> int:
        wrapper.fit(Loader(small_dataset(40), 4), epochs=1)
        spent: Any = wrapper.trainer.statistics.spent
        return int(sum(spent.bytes_sent))

    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        first, state = sent(wrapper), wrapper.trainer.state()
        assert sent(wrapper) > 1.5 * first
    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        wrapper.on_workers(lambda trainer: trainer.restore(state))
        assert sent(wrapper) > 1.5 * first


class FirstDrift(ParameterAveraging):
    """Measures the drift in the first iteration only."""

    def after_update(self, replica: Any, iteration: int) -> Average | None:
        average = super().after_update(replica, iteration)
        assert average is not None
        drift, layers = (math.nan, {}) if iteration else (0.5, {"conv1": 0.25, "dense1": math.nan})
        return Average(average.score, drift, layers)


@pytest.mark.parametrize("log_every", [0, 2])
def test_an_epoch_has_the_last_drift_measured_in_it_even_if_it_was_resumed(log_every: int, tmp_path: Path) -> None:
    loader = Loader(small_dataset(160), 4)
    options: dict[str, Any] = {"synchronizer": FirstDrift(1), "log_every": log_every}
    with ParallelWrapper(small_model(), 2, callbacks=[StopAfter(3)], **options) as wrapper:
        wrapper.fit(loader)
        assert 0 < wrapper.trainer.epoch_iteration < 20
        path = wrapper.checkpoint(tmp_path)
    with ParallelWrapper(small_model(), 2, **options) as wrapper:
        wrapper.restore(path)
        epochs = wrapper.fit(loader, epochs=2).epochs
    assert epochs["drift"] == [0.5, None]
    assert epochs["drift_by_layer"] == [{"conv1": 0.25, "dense1": None}, {}]


def test_the_drift_is_measured_after_full_intervals_only(tmp_path: Path) -> None:
    """Replicas are also averaged at the end of the first fit and before evaluations: after every tenth iteration."""
    data = small_dataset(80)
    with ParallelWrapper(small_model(), 2, 3, log_every=1) as wrapper:
        wrapper.fit(data, epochs=1, batch_size=4)
        path = wrapper.checkpoint(tmp_path)
    with ParallelWrapper(small_model(), 2, 3, log_every=1) as wrapper:
        wrapper.restore(path)
        wrapper.fit(data, epochs=2, batch_size=4, evaluate_on=data)
        drifts = wrapper.history.reports["drift"]
        assert wrapper.history.epochs["drift"] == [drifts[8], drifts[17], drifts[29]]
    measured = [iteration for iteration, drift in enumerate(drifts, 1) if drift is not None]
    assert measured == [3, 6, 9, 15, 18, 24, 27, 30]


class Late(SerialCommunicator):
    """Other workers arrive a second late at an exchange, and ten seconds late at a barrier."""

    now = 0.0

    def gather_numbers(self, *numbers: float) -> NDArray[Any]:
        self.now += 1.0
        return super().gather_numbers(*numbers)

    def barrier(self) -> None:
        self.now += 10.0
        super().barrier()


def test_waiting_for_workers_at_reports_and_ends_of_epochs_counts_as_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for log_every in (0, 1):
        others, replica = Late(), Replica(small_model(), SGD(0.01))
        monkeypatch.setattr("cupynet.training.clock.time.perf_counter", lambda others=others: others.now)
        trainer = trainer_of(others, replica, ParameterAveraging("end"), log_every=log_every)
        trainer.fit(Fit(Loader(small_dataset(12), 4), 1))
        found.append(trainer.statistics.clock.averaging_s)
    assert found[0] > 10 and found[1] == found[0] + 3
