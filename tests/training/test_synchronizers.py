"""Guarantees of all synchronizers, of each kind in detail, and for synchronizers of users."""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynet import LAMB, SGD, Batch, DivergedError, ElasticAveraging, Loader, Momentum, Nesterov, Optimizer, SlowMo
from cupynet.parallel import FixedThreshold, GradientSharing, ParameterAveraging, Synchronizer, ThresholdEncoding
from cupynet.parallel.synchronizers.averaging import spread
from cupynet.training import EpochRecord, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.device_runs import compared, train_on_device
from tests.support.refusals import refused
from tests.support.trainers import callback_of, fit_on_threads, train
from tests.support.training import KINDS_OF_WAYS, WAYS, On, Seen, fingerprint, on_threads, small_dataset, small_model

every_kind = pytest.mark.parametrize("way", KINDS_OF_WAYS.values(), ids=KINDS_OF_WAYS)


class Case(NamedTuple):
    """Workers that equal one replica.

    samples: by default enough for ten rounds, the last with fewer workers and a short batch.
    whole: the single replica's optimizer, if it differs.
    """

    way: Synchronizer
    workers: int
    optimizer: Optimizer
    samples: int | None = None
    whole: Optimizer | None = None
    backend: str = "numpy"


CLIPPED, PLAIN = Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.3), Nesterov(0.05, 0.9, l2=1e-3)
EVERY_ROUND = ParameterAveraging(1)
CASES = {
    "averaging": Case(EVERY_ROUND, 2, SGD(0.05, l2=1e-3)),
    "averaging, momentum": Case(EVERY_ROUND, 2, Momentum(0.05, 0.9)),
    "averaging, 4, 3 and 0 samples in the last round": Case(EVERY_ROUND, 3, SGD(0.05), 43),
    "averaging, numba": Case(EVERY_ROUND, 4, PLAIN, backend="numba"),
    "slow momentum": Case(
        ParameterAveraging(1, outer_optimizer=SlowMo(1.0, 0.9)), 2, SGD(0.05), 80, Momentum(0.05, 0.9)
    ),
    "sharing": Case(GradientSharing(), 4, CLIPPED),
    "sharing, lamb": Case(GradientSharing(), 2, LAMB(0.01, clip_layer_norm=0.3, epsilon=1e-3)),
    "sum of gradients": Case(GradientSharing(reduce="sum"), 3, SGD(0.02), 60, SGD(0.06)),
    "a user's mean": Case(GradientMean(), 3, CLIPPED, 61),  # timed out when a worker without a batch took no part
    "fewer batches than workers": Case(GradientMean(), 4, PLAIN, 10),
}
ON_A_DEVICE = Case(EVERY_ROUND, 3, PLAIN, 39, backend="cupy")  # four rounds


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        pytest.param(ON_A_DEVICE, id="standin", marks=[pytest.mark.standin, pytest.mark.smoke]),
    ],
)
def test_averaging_or_sharing_in_every_iteration_equals_one_replica_on_the_concatenated_batch(case: Case) -> None:
    samples, size = case.samples or 4 * (9 * case.workers + 1) - 1, 4 * case.workers
    options: dict[str, Any] = {"samples": samples, "backend": case.backend}
    several = train(case.workers, case.optimizer, case.way, **options)
    one = train(1, case.whole or case.optimizer, case.way, batch_size=size, **options)
    assert np.abs(several.master - one.master).max() <= 1e-12 * np.abs(one.master).max()
    scores = [[report.score_after_averaging for report in each.recorders[0].reports] for each in (several, one)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-10, nan_ok=True)
    replicas, rounds = [trainer.replica for trainer in several.trainers], -(-samples // size)
    assert several.trainers[0].iteration == one.trainers[0].iteration == replicas[0].updates == rounds
    assert {each.updates for each in replicas} == {rounds} or not case.way.shares_gradients
    assert len({fingerprint(each.model) for each in replicas}) == 1
    for name, vector in replicas[0].state()["optimizer"].items():
        np.testing.assert_equal([each.state()["optimizer"][name] for each in replicas], [vector] * case.workers)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_replicas_are_equal_after_a_fit_and_whenever_their_synchronizer_says_so(way: Synchronizer) -> None:
    """In the last round, three workers have a single batch of one sample."""
    seen = Seen(lambda trainer: (trainer.synchronizer.identical, fingerprint(trainer.model)))
    loader = Loader(small_dataset(37), 4, seed=3)
    trainers = fit_on_threads(3, lambda c: Replica(small_model(), copy.deepcopy(CLIPPED)), way, loader, seen, epochs=2)
    found = [callback_of(trainer, Seen) for trainer in trainers]
    for claims in zip(*(each.iterations + each.epochs for each in found), strict=True):
        (identical,) = {identical for identical, _ in claims}
        assert not identical or len({weights for _, weights in claims}) == 1
    (weights,) = {fingerprint(trainer.model) for trainer in trainers}
    assert trainers[0].synchronizer.identical and weights != fingerprint(small_model())


@every_kind
def test_one_worker_trains_as_without_parallel_code_and_sends_nothing(way: Synchronizer) -> None:
    model = small_model("float")
    plain = Trainer(Replica(model, copy.deepcopy(CLIPPED)), prefetch_buffer=0, log_every=0)
    plain.fit(Fit(Loader(small_dataset(60), 4, seed=3), 2))
    trained = train(1, CLIPPED, way, epochs=2, dtype="float")
    assert fingerprint(trained.trainers[0].model) == fingerprint(model)
    assert trained.trainers[0].groups.world.traffic.bytes_sent == 0


@every_kind
@pytest.mark.parametrize("where", ["weights", "gradient"])
def test_a_replica_that_is_not_finite_is_never_averaged_into_the_others(where: str, way: Synchronizer) -> None:
    class Poisoned(Replica):
        def backpropagate(self, batch: Batch | None) -> int:
            samples = super().backpropagate(batch)
            if where == "gradient" and self.updates == 1:
                self.params.grad[5] = np.nan
            return samples

        def update(self, iteration: int, step: Any = None) -> None:
            super().update(iteration, step)
            if where == "weights" and iteration == 1:
                self.params.master[5] = np.inf

    replicas = [kind(small_model(), SGD(0.05)) for kind in (Replica, Poisoned, Replica)]
    loader = Loader(small_dataset(60), 4, seed=3)
    with pytest.raises(DivergedError, match="(replica|worker) 1 "):
        fit_on_threads(3, lambda c: replicas[c.rank], way, loader, log_every=0)
    assert all(np.isfinite(replica.params.master).all() for replica in replicas[::2])


@every_kind
def test_weights_may_be_replaced_between_fits_with_every_kind_of_synchronizer(way: Synchronizer) -> None:
    data, other = small_dataset(33), small_model(seed=9)
    with ParallelWrapper(small_model(), 3, synchronizer=way, optimizer=CLIPPED) as wrapper:
        wrapper.fit(data, epochs=1, batch_size=4)
        wrapper.fit(data, epochs=1, batch_size=4, evaluate_on=data)
        wrapper.model.load_weights(other.weights())
        before = wrapper.evaluate(data, batch_size=4).loss
        with ParallelWrapper(other, 1) as single:
            assert before == pytest.approx(single.evaluate(data, batch_size=4).loss, rel=1e-12)
        wrapper.fit(data, epochs=1, batch_size=4)
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_averaged_replicas_are_evaluated(frequency: int | str, evaluated: list[int]) -> None:
    run = train(2, PLAIN, ParameterAveraging(frequency), epochs=3)
    mine, theirs = ([each.evaluation for each in recorder.epochs] for recorder in run.recorders)
    assert [epoch for epoch, evaluation in enumerate(mine, 1) if evaluation is not None] == evaluated
    assert [each and each.to_dict() for each in mine] == [each and each.to_dict() for each in theirs]


@pytest.mark.parametrize("samples", [[6, 4], [4, 4, 2, 0]], ids=["two workers", "four workers"])
@pytest.mark.parametrize("average_updaters", [True, False])
def test_weights_are_averaged_by_samples_and_so_is_optimizer_state_if_average_updaters(
    average_updaters: bool, samples: list[int]
) -> None:
    """The batches have 4, 4 and 2 samples. Of two workers, the first has two batches; of four, the last has none."""
    run = train(len(samples), PLAIN, ParameterAveraging("end", average_updaters=average_updaters), samples=10)
    found = [trainer.replica.optimizer.state["velocity"] for trainer in run.trainers]
    weights = [trainer.params.master for trainer in run.trainers]
    replicas = [Replica(small_model(), copy.deepcopy(PLAIN)) for _ in samples]
    for rank, replica in enumerate(replicas):  # without averaging
        for batch in Loader(small_dataset(10), 4, seed=3).epoch(0, replica.backend, rank, len(samples)):
            replica.gradient(batch)
            replica.update(0)
    own = [replica.optimizer.state["velocity"] for replica in replicas]
    mean = np.average([replica.params.master for replica in replicas], axis=0, weights=samples)
    np.testing.assert_allclose(weights, [mean] * len(samples), rtol=1e-13, atol=1e-15)
    expected = [np.average(own, axis=0, weights=samples)] * len(samples) if average_updaters else own
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)
    assert (found[0].tobytes() == found[1].tobytes()) == average_updaters


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_thousand_averages_of_equal_replicas_change_nothing(backend: str) -> None:
    """The replicas are equal, but three times the single-precision third is more than one."""
    mean = small_model("float", backend).backend.mean_in_place
    start = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    parts = [start.copy() for _ in range(3)]
    for _ in range(1000):
        mean(parts, [1 / 3] * 3)
    np.testing.assert_array_equal(parts[0], start)


def test_the_drift_is_the_largest_distance_of_a_replica_with_samples_from_the_mean() -> None:
    """Only one layer differs, most of all in worker 2, which had no batch. One replica alone has no divergence."""

    def task(communicator: Any) -> Any:
        replica, rank = Replica(small_model(), SGD(0.05)), communicator.rank
        own, mean = replica.params.master.copy(), replica.params.master
        for name, view in replica.params.views(own):
            if name.startswith("dense1."):
                view *= (1.25, 1.125, 9.0)[rank]
        return [spread(communicator, replica, own, mean, samples[rank]) for samples in ((4, 0, 0), (4, 2, 0))]

    for of_one, (whole, layers) in on_threads(3, task):
        assert math.isnan(of_one[0]) and of_one[1] == {}
        assert layers == {"conv1": 0.0, "dense1": pytest.approx(0.25, rel=1e-12), "output": 0.0}
        assert 0 < whole < 0.25


@pytest.mark.parametrize(
    ("measure_every", "measured"), [(5, [True, False, True, False, False, True]), (0, [False] * 6)]
)
def test_measure_every_limits_how_often_the_drift_is_measured(measure_every: int, measured: list[bool]) -> None:
    """Replicas are averaged after every second iteration."""
    averaging = ParameterAveraging(2, measure_every=measure_every)
    reports = train(2, SGD(0.05), averaging, samples=96).recorders[0].reports
    assert [report.drift > 0 for report in reports] == measured


def test_averaging_frequency_counts_iterations_over_all_fits() -> None:
    averaged: list[int] = []

    def note(trainer: Trainer) -> None:
        if trainer.synchronizer.identical:
            averaged.append(trainer.iteration)

    with ParallelWrapper(small_model(), 2, 3, callbacks=[On("on_iteration_end", note)]) as wrapper:
        for _ in range(2):
            wrapper.fit(small_dataset(32), batch_size=4)  # four iterations
    assert averaged == [3, 6]


@pytest.mark.parametrize(
    ("pull", "alpha", "transfer_dtype", "bound"),
    [(0.2, 0.2, "full", 1e-12), (0.2, 0.2, "half", 1e-4), (None, 0.9 / 2, "full", 1e-12)],
)
def test_elastic_averaging_follows_its_formula_with_a_pull_of_0_9_over_workers_by_default(
    pull: float | None, alpha: float, transfer_dtype: str, bound: float
) -> None:
    """Replay two replicas by hand: x -= a (x - c), c += 2 a (mean - c) after each of five rounds."""
    trained = train(2, SGD(0.05), ElasticAveraging(1, pull, transfer_dtype=transfer_dtype), samples=40)
    replicas = [Replica(small_model(), SGD(0.05)) for _ in range(2)]
    center = replicas[0].params.master.copy()
    dealt = [Loader(small_dataset(40), 4, seed=3).epoch(0, r.backend, i, 2) for i, r in enumerate(replicas)]
    for batches in zip(*dealt, strict=True):
        for replica, batch in zip(replicas, batches, strict=True):
            replica.gradient(batch)
            replica.update(0)
        masters = [replica.params.master for replica in replicas]
        mean = (masters[0] + masters[1]) / 2
        for master in masters:
            master += alpha * (center - master)
        center += 2 * alpha * (mean - center)
    assert np.abs(trained.master - center).max() <= bound


def test_elastic_replicas_are_equal_only_at_evaluations_and_at_the_end_of_fit() -> None:
    different: dict[int, set[str]] = {}

    def note(trainer: Trainer, record: EpochRecord) -> None:
        different.setdefault(record.epoch, set()).add(fingerprint(trainer.model))

    options: dict[str, Any] = {"callbacks": [On("on_epoch_end", note, every_rank=True)]}
    with ParallelWrapper(small_model(), 2, synchronizer=ElasticAveraging("epoch"), **options) as wrapper:
        wrapper.fit(small_dataset(60), epochs=5, batch_size=4, evaluate_on=small_dataset(9), evaluate_every=2)
    assert [len(each) for _, each in sorted(different.items())] == [2, 1, 2, 1, 1]


def test_an_elastic_pull_beyond_the_mean_is_refused() -> None:
    with refused("synchronizer.pull", "0.5"):
        ParallelWrapper(small_model(), 3, synchronizer=ElasticAveraging(1, 0.5))
    ParallelWrapper(small_model(), 2, synchronizer=ElasticAveraging(1, 0.5)).close()
    ParallelWrapper(small_model(), 1, synchronizer=ElasticAveraging(1, 5.0)).close()  # it has no center


class Noting(Replica):
    """Adds up its optimizer's updates."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.total = np.zeros_like(self.params.master)

    def update(self, iteration: int, squared_norm: Any = None) -> None:
        before = self.params.master.copy()
        super().update(iteration, squared_norm)
        self.total += self.params.master - before


@pytest.mark.parametrize(
    ("reduce", "workers", "samples", "shares"), [("sum", 3, 61, [1, 1, 1]), ("mean", 2, 6, [4 / 6, 2 / 6])]
)
def test_threshold_encoding_applies_what_was_sent(reduce: str, workers: int, samples: int, shares: list[float]) -> None:
    """A worker sends its updates except for the residual. The mean is of a single round with batches of 4 and 2."""
    way = GradientSharing(ThresholdEncoding(FixedThreshold(0.001), 0), reduce=reduce)
    loader, start = Loader(small_dataset(samples), 4, seed=3), small_model().params.master
    trainers: list[Any] = fit_on_threads(workers, lambda c: Noting(small_model(), Momentum(0.05, 0.9)), way, loader)
    sent = [each.replica.total - each.synchronizer.encoding.residual for each in trainers]
    expected = sum(share * each for share, each in zip(shares, sent, strict=True))
    for each in trainers:
        moved = each.params.master - start
        np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-12)
        assert moved.any()


def test_scores_of_gradient_sharing_are_computed_every_score_every_iterations() -> None:
    """Reports follow the second and the fourth round."""
    way = GradientSharing(score_every=4)
    first, second = train(2, SGD(0.05), way, samples=32).recorders[0].reports
    assert math.isnan(first.score_after_averaging) and second.score_after_averaging > 0


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


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("synchronizer", [Signs(3), Scheduled()], ids=["signs", "scheduled"])
def test_a_gpu_does_not_run_ahead_of_a_users_synchronizer(synchronizer: Synchronizer) -> None:
    assert not compared(lambda: train_on_device(workers=2, synchronizer=synchronizer))["ahead"]
