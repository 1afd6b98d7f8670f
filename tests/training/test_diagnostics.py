"""Measurements besides the loss: time spent by each worker, traffic, divergence of replicas."""

from __future__ import annotations

import json
import math

import pytest

from cupynet.data import Loader
from cupynet.optim import SGD
from cupynet.parallel import Average, ParameterAveraging, Pipeline
from cupynet.runs.run import Run
from cupynet.training import History, ParallelWrapper
from tests.support.training import Recorder, small_dataset, small_model, train


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_epoch_records_the_time_of_each_worker(workers):
    run = train(workers, lambda: SGD(0.05), samples=61, batch_size=4, epochs=2, frequency=2)
    for number, record in enumerate(run.recorders[0].epochs):
        batches = [range(16)[rank::workers] for rank in range(workers)]
        assert len(record.spent.samples) == workers and sum(record.spent.samples) == 61 == record.samples
        short = [(4 * len(own), 4 * len(own) - 3) for own in batches]  # one has the short batch of one sample
        assert all(found in pair for found, pair in zip(record.spent.samples, short, strict=True))
        for rank in range(workers):
            assert run.recorders[rank].epochs[number].spent == record.spent  # the same on every worker
            spent = record.spent
            parts = spent.compute_s[rank] + spent.data_s[rank] + spent.averaging_s[rank]
            assert 0 < spent.compute_s[rank] < parts <= spent.rounds_s[rank]
        assert record.spent.rounds_s[0] == pytest.approx(record.train_s)
    whole = [trainer.statistics.spent for trainer in run.trainers]
    assert all(each == whole[0] for each in whole) and sum(whole[0].samples) == 122
    for rank, trainer in enumerate(run.trainers):
        assert whole[0].compute_s[rank] == trainer.statistics.clock.compute_s


@pytest.mark.parametrize(("workers", "frequency"), [(2, 1), (3, 4)])
def test_traffic_is_counted_over_all_workers(workers, frequency):
    recorder = Recorder()
    averaging = ParameterAveraging(frequency, measure_every=0)
    with ParallelWrapper(
        small_model(), workers, synchronizer=averaging, callbacks=[recorder], optimizer=SGD(0.05), report_every=2
    ) as wrapper:
        wrapper.fit(Loader(small_dataset(workers * 4 * 8), 4), 2)
        spent, vector = wrapper.trainer.statistics.spent, wrapper.model.params.master.nbytes
    vectors = 16 // frequency * 2 * (workers - 1) * vector  # SGD: the weights alone
    start = workers * (workers - 1) * vector  # at most, to begin alike
    assert vectors < sum(spent.bytes_sent) < vectors + start + 16 * 1000 * workers
    reports = [report.bytes_sent for report in recorder.reports]
    epochs = [record.bytes_sent for record in recorder.epochs]
    assert reports == sorted(reports) and vectors < reports[-1] <= epochs[-1] <= sum(spent.bytes_sent)
    between = epochs[1] - epochs[0] - sum(recorder.epochs[1].spent.bytes_sent)
    assert 0 <= between < 1000  # the numbers that workers exchange between two epochs


def test_traffic_is_counted_over_fits_and_resumed_runs():
    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        wrapper.fit(Loader(small_dataset(40), 4), 1)
        first, state = sum(wrapper.trainer.statistics.spent.bytes_sent), wrapper.trainer.state()
        wrapper.fit(Loader(small_dataset(40), 4), 1)
        second = sum(wrapper.trainer.statistics.spent.bytes_sent)
    assert second > 1.5 * first
    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        wrapper.on_workers(lambda trainer: trainer.restore(state))
        wrapper.fit(Loader(small_dataset(40), 4), 1)
        assert sum(wrapper.trainer.statistics.spent.bytes_sent) > 1.5 * first


class Layers(ParameterAveraging):
    """Measures layer by layer, in every fourth iteration."""

    def after_update(self, replica, iteration):
        average = super().after_update(replica, iteration)
        if average is None or iteration % 4:
            return average and Average(average.score, math.nan)
        return Average(average.score, 0.5 + iteration, {"conv1": 0.25, "dense1": math.nan})


def test_the_divergence_by_layer_is_reported_when_measured(tmp_path):
    recorder, run = Recorder(), Run(tmp_path)
    callbacks = [recorder, History()]
    with ParallelWrapper(
        small_model(), 2, synchronizer=Layers(1), callbacks=callbacks, run=run, report_every=2
    ) as wrapper:
        wrapper.fit(Loader(small_dataset(64), 4), 1)
        assert wrapper.trainer.statistics.measured.divergence == 4.5
        assert wrapper.trainer.statistics.measured.by_layer["conv1"] == 0.25
    found = [(report.divergence, report.divergence_by_layer.get("conv1")) for report in recorder.reports]
    assert found[0] == (0.5, 0.25) and found[2] == (4.5, 0.25)
    assert math.isnan(found[1][0]) and found[1][1] is None
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert rows[0]["divergence_by_layer"] == {"conv1": 0.25, "dense1": None}  # JSON knows no NaN
    assert rows[1]["divergence_by_layer"] == {}
    assert rows[-1]["kind"] == "epoch" and len(rows[-1]["averaging_s"]) == 2 and rows[-1]["bytes_sent"] > 0


def test_the_divergence_of_stages_is_that_of_the_whole_network(tmp_path):
    """Measured after rounds 4 and 24."""
    reports, measured = [], []
    for pipeline in (None, Pipeline(3)):
        recorder, averaging = Recorder(), ParameterAveraging(4, measure_every=20)
        run, options = Run.of(tmp_path / str(pipeline is None)), {"report_every": 5, "pipeline": pipeline}
        with ParallelWrapper(
            small_model(), 2, synchronizer=averaging, callbacks=[recorder, History()], run=run, **options
        ) as wrapper:
            wrapper.fit(Loader(small_dataset(200), 4), 1)
            measured.append(wrapper.trainer.statistics.measured)
            everybody = wrapper.on_workers(
                lambda trainer: trainer.groups.world.gather_numbers(trainer.statistics.measured.divergence)
            )
            assert (everybody == wrapper.trainer.statistics.measured.divergence).all()
        reports.append([(each.divergence, each.divergence_by_layer) for each in recorder.reports])
    (first, *_), (known, *rest) = reports
    assert not any(layers for _, layers in rest[:3])
    for (whole, layers), (bound, found) in ((first, known), *[[(each.divergence, each.by_layer) for each in measured]]):
        assert list(found) == ["conv1", "dense1", "output"] and found == pytest.approx(layers, rel=1e-9)
        assert whole <= bound * (1 + 1e-12) and bound <= max(layers.values()) * (1 + 1e-12)
    by_layer = [row["divergence_by_layer"] for row in map(json.loads, run.history_path.read_text().splitlines()[:5])]
    assert by_layer == [known[1], {}, {}, {}, rest[3][1]]
