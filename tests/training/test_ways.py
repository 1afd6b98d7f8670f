"""Guarantees of all synchronizers, then averaging and elastic averaging in detail."""

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupynet.core.errors import DivergedError
from cupynet.data import Batch, Loader
from cupynet.optim import LAMB, SGD, Momentum, Nesterov, Optimizer
from cupynet.parallel import Communicator, ElasticAveraging, GradientSharing, ParameterAveraging, SlowMo, Synchronizer
from cupynet.parallel.synchronizers.averaging import spread
from cupynet.training import Callback, EpochRecord, ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.refusals import refused
from tests.support.trainers import Trained, callback_of, fit_on_threads, train
from tests.support.training import (
    KINDS_OF_WAYS,
    WAYS,
    RecordingReplica,
    Seen,
    alone,
    fingerprint,
    on_threads,
    small_dataset,
    small_model,
)

every_kind = pytest.mark.parametrize("way", KINDS_OF_WAYS.values(), ids=KINDS_OF_WAYS)


def nesterov() -> Nesterov:
    return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.5)


def run(
    way: Synchronizer,
    workers: int,
    samples: int = 60,
    epochs: int = 2,
    optimizer: Callable[[], Optimizer] = nesterov,
    **options: Any,
) -> Trained:
    return train(workers, optimizer, way, samples=samples, epochs=epochs, **options)


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
SLOW = ParameterAveraging(1, outer_optimizer=SlowMo(1.0, 0.9))
CASES = {
    "averaging": Case(EVERY_ROUND, 2, SGD(0.05, l2=1e-3)),
    "averaging, momentum": Case(EVERY_ROUND, 2, Momentum(0.05, 0.9)),
    "averaging, numba": Case(EVERY_ROUND, 4, PLAIN, backend="numba"),
    "slow momentum": Case(SLOW, 2, SGD(0.05), 80, Momentum(0.05, 0.9)),
    "sharing": Case(GradientSharing(), 4, CLIPPED),
    "sharing, lamb": Case(GradientSharing(), 2, LAMB(0.01, clip_layer_norm=0.3, epsilon=1e-3)),
    "sum of gradients": Case(GradientSharing(reduce="sum"), 3, SGD(0.02), 60, SGD(0.06)),
    "a user's mean": Case(GradientMean(), 3, CLIPPED, 61),  # timed out when a worker without a batch took no part
    "fewer batches than workers": Case(GradientMean(), 4, PLAIN, 10),
}
ON_A_DEVICE = Case(EVERY_ROUND, 3, PLAIN, backend="cupy")


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        pytest.param(ON_A_DEVICE, id="standin", marks=[pytest.mark.standin, pytest.mark.smoke]),
    ],
)
def test_workers_equal_one_replica_on_the_concatenated_batch(case: Case) -> None:
    samples, size, backend = case.samples or 4 * (9 * case.workers + 1) - 1, 4 * case.workers, case.backend
    several = run(case.way, case.workers, samples, 1, lambda: copy.deepcopy(case.optimizer), backend=backend)
    one = run(
        case.way, 1, samples, 1, lambda: copy.deepcopy(case.whole or case.optimizer), batch_size=size, backend=backend
    )
    assert np.abs(several.master - one.master).max() <= 1e-12 * np.abs(one.master).max()
    replicas, rounds = [trainer.replica for trainer in several.trainers], -(-samples // size)
    assert several.trainers[0].iteration == one.trainers[0].iteration == replicas[0].updates == rounds
    assert {each.updates for each in replicas} == {rounds} or not case.way.shares_gradients
    assert len({fingerprint(each.model) for each in replicas}) == 1
    for name, vector in replicas[0].state()["optimizer"].items():
        np.testing.assert_equal([each.state()["optimizer"][name] for each in replicas], [vector] * case.workers)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_no_sample_is_lost_and_replicas_are_equal_after_averages(way: Synchronizer) -> None:
    """In the last round, three workers have a single batch of one sample."""
    trained = run(way, 3, 37)
    for epoch in range(2):
        seen: list[int] = []
        for trainer in trained.trainers:
            assert isinstance(trainer.replica, RecordingReplica)
            seen += [sample for batch in trainer.replica.seen.get(epoch, []) for sample in batch]
        assert sorted(seen) == list(range(37))
    assert len({fingerprint(trainer.model) for trainer in trained.trainers}) == 1
    assert np.isfinite(trained.master).all()
    assert fingerprint(trained.trainers[0].model) != fingerprint(small_model())


@every_kind
def test_workers_agree_when_replicas_are_identical(way: Synchronizer) -> None:
    seen = Seen(lambda trainer: (trainer.synchronizer.identical, fingerprint(trainer.model)))
    loader = Loader(small_dataset(37), 4, seed=3)
    trainers = fit_on_threads(3, lambda c: Replica(small_model(), nesterov()), way, loader, seen, epochs=2)
    found = [callback_of(trainer, Seen) for trainer in trainers]
    identical = 0
    for claims in zip(*(each.iterations + each.epochs for each in found), strict=True):
        (claim,) = {claim for claim, _ in claims}
        identical += claim
        assert not claim or len({weights for _, weights in claims}) == 1
    assert identical


@every_kind
def test_one_worker_alone_runs_no_parallel_code(way: Synchronizer) -> None:
    model = small_model("float")
    plain = alone(model, nesterov(), prefetch_buffer=0, log_every=0)
    plain.fit(Fit(Loader(small_dataset(60), 4, seed=3), 2))
    trained = run(way, 1, dtype="float")
    assert fingerprint(trained.trainers[0].model) == fingerprint(model)
    assert trained.trainers[0].groups.world.traffic.bytes_sent == 0


@every_kind
@pytest.mark.parametrize("where", ["weights", "gradient"])
def test_a_replica_that_is_not_finite_spoils_no_other(where: str, way: Synchronizer) -> None:
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
def test_fits_follow_one_another_and_weights_may_be_changed_in_between(way: Synchronizer) -> None:
    data, other = small_dataset(33), small_model(seed=9)
    with ParallelWrapper(small_model(), 3, synchronizer=way, optimizer=nesterov()) as wrapper:
        wrapper.fit(data, epochs=1, batch_size=4)
        wrapper.fit(data, epochs=1, batch_size=4, evaluate_on=data)
        wrapper.model.load_weights(other.weights())
        before = wrapper.evaluate(data, batch_size=4).loss
        with ParallelWrapper(other, 1) as single:
            assert before == pytest.approx(single.evaluate(data, batch_size=4).loss, rel=1e-12)
        wrapper.fit(data, epochs=1, batch_size=4)
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1


# averaging ------------------------------------------------------------------------------------------------------------


def test_the_divergence_of_each_layer() -> None:
    """Only one layer of worker 1 is changed."""

    def task(communicator: Communicator) -> Any:
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


def test_a_replica_without_samples_adds_no_divergence() -> None:
    """Worker 2 had no batch, so its weight is 0. If only one replica had samples, there is no drift."""

    def task(communicator: Communicator) -> Any:
        replica, rank = Replica(small_model(), SGD(0.05)), communicator.rank
        mean = replica.params.master
        own = mean * (1.25, 1.125, 9.0)[rank]
        return [spread(communicator, replica, own, mean, samples[rank]) for samples in ((4, 0, 0), (4, 2, 0))]

    for of_one, (whole, layers) in on_threads(3, task):
        assert [whole, *layers.values()] == [pytest.approx(0.25, rel=1e-12)] * 4
        assert math.isnan(of_one[0]) and of_one[1] == {}


class Squares(SGD):
    """A running mean of squares that decays fast, and to zero at one index."""

    def init(self, params: Any, backend: Any) -> None:
        super().init(params, backend)
        self.state["squares"] = np.linspace(0, 1e-3, len(params.master), dtype=params.master.dtype)

    def step(self, params: Any, iteration: int, squared_norm: Any = None) -> None:
        squares = self.state["squares"]
        squares *= 0.02
        squares += 1e-12 * params.grad**2
        super().step(params, iteration, squared_norm)


def test_half_leaves_squares_positive() -> None:
    """A mean that has nearly decayed since the last average is too small to be resolved in its 16-bit change."""
    ends: list[Any] = []

    class Noting(ParameterAveraging):
        def finish(self, replica: Any, moment: Any) -> Any:
            average = super().finish(replica, moment)
            ends.append(replica.optimizer_state["squares"].copy())
            return average

    run(Noting(4, transfer_dtype="half"), 3, 97, optimizer=lambda: Squares(0.05), dtype="float", backend="numba")
    assert len(ends) == 6 and all((squares[1:] > 0).all() and squares[0] >= 0 for squares in ends)


# elastic averaging ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transfer_dtype", "bound"), [("full", 1e-12), ("half", 1e-4)])
def test_elastic_replicas_and_their_center_against_the_formula(transfer_dtype: str, bound: float) -> None:
    """Replay two replicas by hand: x -= a (x - c), c += 2 a (mean - c) after each of five rounds."""
    trained = run(ElasticAveraging(1, 0.2, transfer_dtype=transfer_dtype), 2, 40, optimizer=lambda: SGD(0.05), epochs=1)
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
            master += 0.2 * (center - master)
        center += 2 * 0.2 * (mean - center)
    assert np.abs(trained.master - center).max() <= bound


def test_elastic_replicas_meet_only_when_they_are_evaluated() -> None:
    different: dict[int, set[Any]] = {}

    class Compare(Callback):
        every_rank = True

        def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
            different.setdefault(record.epoch, set()).add(fingerprint(trainer.model))

    way = ElasticAveraging("epoch")
    with ParallelWrapper(small_model(), 2, synchronizer=way, callbacks=[Compare()]) as wrapper:
        wrapper.fit(small_dataset(60), epochs=5, batch_size=4, evaluate_on=small_dataset(9), evaluate_every=2)
    assert [len(each) for _, each in sorted(different.items())] == [2, 1, 2, 1, 1]


def test_a_pull_beyond_the_mean_is_refused() -> None:
    with refused("synchronizer.pull", "0.5"):
        ParallelWrapper(small_model(), 3, synchronizer=ElasticAveraging(1, 0.5))
    ParallelWrapper(small_model(), 2, synchronizer=ElasticAveraging(1, 0.5)).close()
    ParallelWrapper(small_model(), 1, synchronizer=ElasticAveraging(1, 5.0)).close()  # it has no center
