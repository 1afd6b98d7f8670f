"""Promises that hold for every way to keep replicas together, then averaging and elastic averaging in detail."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import (
    Adaptive,
    ElasticAveraging,
    Groups,
    ParameterAveraging,
    Pipeline,
    PostLocal,
)
from cupynet.parallel.synchronizers.averaging import spread
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import (
    KINDS_OF_WAYS,
    WAYS,
    Recorder,
    alone,
    fingerprint,
    on_threads,
    small_dataset,
    small_model,
    train,
)

every_kind = pytest.mark.parametrize("way", KINDS_OF_WAYS.values(), ids=KINDS_OF_WAYS)


def nesterov():
    return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.5)


def run(way, workers, samples=60, batch_size=4, epochs=2, optimizer=nesterov, **options):
    made = dict(samples=samples, batch_size=batch_size, epochs=epochs, **options)
    return train(workers, optimizer, synchronizer=lambda: copy.deepcopy(way), **made)


def check_samples_and_ends(trained, samples):
    for epoch in range(2):
        seen = [s for trainer in trained.trainers for batch in trainer.replica.seen.get(epoch, []) for s in batch]
        assert sorted(seen) == list(range(samples))
    assert len({fingerprint(t.model) for t in trained.trainers}) == 1
    assert np.isfinite(trained.master).all()
    assert fingerprint(trained.trainers[0].model) != fingerprint(small_model())


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_sample_is_lost_and_replicas_are_equal_after_averages(way, monkeypatch):
    """The last round has one batch, of one sample, for three workers."""
    identical = []

    def on_iteration_end(recorder, trainer):
        recorder.weights.append(fingerprint(trainer.model))
        identical.append((trainer.iteration, trainer.rank, trainer.synchronizer.identical))

    monkeypatch.setattr(Recorder, "on_iteration_end", on_iteration_end)
    trained = run(way, 3, 37)
    check_samples_and_ends(trained, 37)
    claims = {iteration: {claim for at, _, claim in identical if at == iteration} for iteration, *_ in identical}
    for iteration, claim in claims.items():
        assert len(claim) == 1, f"workers disagree after iteration {iteration}"
        if claim == {True}:
            weights = {recorder.weights[iteration - 1] for recorder in trained.recorders}
            assert len(weights) == 1, f"replicas differ after iteration {iteration}"
    scores = [report.score_after_averaging for report in trained.recorders[0].reports]
    assert np.isfinite(scores).any() or way is WAYS["end"]


@every_kind
def test_one_worker_alone_runs_no_parallel_code(way):
    model = small_model("float")
    plain = alone(model, nesterov(), prefetch_buffer=0, report_every=0)
    plain.fit(Fit(Loader(small_dataset(60), 4, seed=3), 2))
    trained = run(way, 1, dtype="float")
    assert fingerprint(trained.trainers[0].model) == fingerprint(model)
    assert trained.trainers[0].groups.world.traffic.bytes_sent == 0


@every_kind
def test_a_replica_that_is_not_finite_spoils_no_other(way):
    """The weights of worker 1 are poisoned, or its gradient: the other replicas stay finite."""
    for where in ("params", "gradient"):
        kept = {}

        class Poison(Replica):
            def backpropagate(self, batch):
                samples = super().backpropagate(batch)
                if where == "gradient" and self.rank == 1 and self.updates == 1:  # noqa: B023
                    self.params.grad[5] = np.nan
                return samples

            def update(self, iteration, squared_norm=None):
                super().update(iteration, squared_norm)
                if where == "params" and self.rank == 1 and iteration == 1:  # noqa: B023
                    self.params.master[5] = np.inf

        def task(communicator):
            replica = Poison(small_model(), SGD(0.05))
            replica.rank = communicator.rank
            kept[replica.rank] = replica.params.master  # noqa: B023
            trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=copy.deepcopy(way), report_every=0)
            trainer.fit(Fit(Loader(small_dataset(60), 4, seed=3), 1))

        with pytest.raises(DivergedError, match="(replica|worker) 1 "):
            on_threads(3, task)
        assert np.isfinite(kept[0]).all() and np.isfinite(kept[2]).all()


@every_kind
def test_fits_follow_one_another_and_weights_may_be_changed_in_between(way):
    data, other = small_dataset(33), small_model(seed=9)
    with ParallelWrapper(small_model(), 3, synchronizer=way, optimizer=nesterov()) as wrapper:
        wrapper.fit(data, 1, batch_size=4).fit(data, 1, batch_size=4, evaluate_on=data)
        wrapper.model.load_weights(other.weights())
        before = wrapper.evaluate(data, batch_size=4).loss
        with ParallelWrapper(other, 1) as single:
            assert before == pytest.approx(single.evaluate(data, batch_size=4).loss, rel=1e-12)
        wrapper.fit(data, 1, batch_size=4)
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1


@pytest.mark.parametrize("way", ["diloco, half", "elastic", "threshold"])
def test_a_stage_may_have_no_weights(way):
    model, before = small_model(), fingerprint(small_model())
    stages = Pipeline([["conv1"], ["pool1"], ["dense1", "output"]])
    with ParallelWrapper(model, 2, synchronizer=WAYS[way], optimizer=nesterov(), pipeline=stages) as wrapper:
        wrapper.fit(small_dataset(30), 1, batch_size=4)
    assert np.isfinite(model.params.master).all() and fingerprint(model) != before


# Averaging: one mechanism of several parts ---------------------------------------------------------------------------

SAME = {
    "post-local from the start": (ParameterAveraging(PostLocal(0, 3)), ParameterAveraging(3)),
    "post-local to the end": (ParameterAveraging(PostLocal(9, 3)), ParameterAveraging(1)),
    "adaptive that may not": (ParameterAveraging(Adaptive(0.1, 1, 1)), ParameterAveraging(1)),
}


@pytest.mark.parametrize(("one", "other"), SAME.values(), ids=SAME)
def test_equivalent_schedules_give_equal_weights(one, other):
    assert run(one, 3).recorders[0].weights == run(other, 3).recorders[0].weights


def test_adaptive_periods_follow_what_is_measured():
    def averaged(target):
        trained = run(ParameterAveraging(Adaptive(target, 2, 50)), 3, 240, epochs=1)  # 20 rounds
        return [i + 1 for i in range(20) if len({r.weights[i] for r in trained.recorders}) == 1]

    assert averaged(1e6) == [2, 6, 14]
    assert averaged(1e-9) == [2, *range(3, 21)]


@pytest.mark.parametrize("wire", ["exact", "half"])
def test_elastic_replicas_and_their_centre_against_the_formula(wire):
    """Two replicas replayed by hand: x -= a (x - c), c += 2 a (mean - c) after each of five rounds."""
    trained = run(ElasticAveraging(1, 0.2, wire=wire), 2, 40, optimizer=lambda: SGD(0.05), epochs=1)
    replicas = [Replica(small_model(), SGD(0.05)) for _ in range(2)]
    centre = replicas[0].params.master.copy()
    dealt = [Loader(small_dataset(40), 4, seed=3).epoch(0, r.backend, i, 2) for i, r in enumerate(replicas)]
    for batches in zip(*dealt, strict=True):
        for replica, batch in zip(replicas, batches, strict=True):
            replica.gradient(batch)
            replica.update(0)
        masters = [replica.params.master for replica in replicas]
        mean = (masters[0] + masters[1]) / 2
        for master in masters:
            master += 0.2 * (centre - master)
        centre += 2 * 0.2 * (mean - centre)
    assert np.abs(trained.master - centre).max() <= (1e-12 if wire == "exact" else 1e-4)


def test_a_pull_beyond_the_mean_is_refused():
    with refused("synchronizer.pull", "0.5"):
        ParallelWrapper(small_model(), 3, synchronizer=ElasticAveraging(1, 0.5))
    ParallelWrapper(small_model(), 2, synchronizer=ElasticAveraging(1, 0.5)).close()
    ParallelWrapper(small_model(), 1, synchronizer=ElasticAveraging(1, 5.0)).close()  # no centre, and no pull


def test_the_divergence_of_each_layer():
    """Worker 1 is moved in one layer alone."""

    def task(communicator):
        replica = Replica(small_model(), SGD(0.05))
        own, mean = replica.params.master.copy(), replica.params.master
        if communicator.rank == 1:
            for name, view in replica.params.views(own):
                if name.startswith("dense1."):
                    view *= 1.5
        return spread(communicator, replica, own, mean, 1)

    for whole, layers in on_threads(2, task):
        assert layers == {"conv1": 0.0, "dense1": pytest.approx(0.5, rel=1e-12), "output": 0.0}
        assert 0 < whole < 0.5


def test_a_replica_without_samples_adds_no_divergence():
    """Worker 2 had no batch and so has no weight. With samples on one replica only, there is no divergence."""

    def task(communicator):
        replica = Replica(small_model(), SGD(0.05))
        mean = replica.params.master
        own = mean * (1.25, 1.125, 9.0)[communicator.rank]
        of_one = spread(communicator, replica, own, mean, (4, 0, 0)[communicator.rank])
        return of_one, spread(communicator, replica, own, mean, (4, 2, 0)[communicator.rank])

    for of_one, (whole, layers) in on_threads(3, task):
        assert [whole, *layers.values()] == [pytest.approx(0.25, rel=1e-12)] * 4
        assert math.isnan(of_one[0]) and of_one[1] == {}

    class Noting(ParameterAveraging):
        def after_update(self, replica, iteration):
            average = super().after_update(replica, iteration)
            averages.append((iteration, self.communicator.rank, average.divergence))
            return average

    averages = []
    run(Noting(1, measure_every=1), 2, 12, epochs=1)  # three batches: after round 2 the mean is worker 0 itself
    last = [found for iteration, _, found in averages if iteration == 1]
    assert len(last) == 2 and all(math.isnan(found) for found in last)
    assert all(found > 0 for iteration, _, found in averages if iteration == 0)


@pytest.mark.parametrize(
    ("kind", "frequency"), [(ParameterAveraging, "epoch"), (ParameterAveraging, "end"), (ElasticAveraging, 4)]
)
def test_the_divergence_is_measured_at_the_end_of_epochs_and_fits(kind, frequency):
    measured = []

    class Noting(kind):
        def finish(self, replica, moment):
            average = super().finish(replica, moment)
            if average is not None and self.communicator.rank == 0:
                measured.append((moment, average.divergence > 0, set(average.by_layer)))
            return average

    run(Noting(frequency, measure_every=50), 2, 40, epochs=2)  # 5 rounds an epoch
    layers = {"conv1", "dense1", "output"}
    ends = [("fit", True, layers)]
    assert measured == (ends if frequency == "end" else [("evaluation", True, layers), *ends])
    measured.clear()
    run(Noting(frequency, measure_every=0), 2, 40, epochs=2)
    assert measured and not any(found or by_layer for _, found, by_layer in measured)


class Squares(SGD):
    """A running mean of squares that decays fast, and in one place to nothing."""

    def init(self, params, backend):
        super().init(params, backend)
        self.state["squares"] = np.linspace(0, 1e-3, len(params.master), dtype=params.master.dtype)

    def step(self, params, iteration, squared_norm=None):
        squares = self.state["squares"]
        squares *= 0.02
        squares += 1e-12 * params.grad**2
        super().step(params, iteration, squared_norm)


def test_half_leaves_squares_positive():
    """What is nearly gone since the last average is less than the 16 bits of its way tell apart."""
    ends = []

    class Noting(ParameterAveraging):
        def finish(self, replica, moment):
            average = super().finish(replica, moment)
            ends.append(replica.optimizer_state["squares"].copy())
            return average

    run(Noting(4, wire="half"), 3, 97, optimizer=lambda: Squares(0.05), dtype="float", backend="numba")
    assert len(ends) == 6 and all((squares[1:] > 0).all() and squares[0] >= 0 for squares in ends)
