"""Gradient sharing: gradients or encoded updates are exchanged in every iteration."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import LAMB, SGD, Momentum, Nesterov
from cupynet.parallel import FixedThreshold, GradientSharing, Groups, ThresholdEncoding
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import fingerprint, on_threads, small_dataset, small_model, train

OPTIMIZERS = {
    "nesterov": lambda: Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.3),
    "lamb": lambda: LAMB(0.01, clip_layer_norm=0.3, epsilon=1e-3),
}


class SignedRoot(SGD):
    """w -= lr · sign(g) √|g|: far from linear in the gradient."""

    def update(self, params, segment, move):
        grad = params.grad[segment.part]
        params.master[segment.part] -= move.rate * np.sign(grad) * np.sqrt(np.abs(grad))
        grad[...] = 0


@pytest.mark.parametrize(
    ("name", "workers"),
    [("nesterov", 4), ("lamb", 2), ("signed root", 3)],
)
def test_gradients_equal_one_worker_on_the_concatenated_batch(name, workers):
    """Ten iterations in double, clipped; the last round has fewer workers and a short batch."""
    optimizer = OPTIMIZERS.get(name, lambda: SignedRoot(1e-3))
    samples = 4 * (10 * workers - (workers - 1)) - 1
    shared = train(workers, optimizer, samples=samples, synchronizer=GradientSharing)
    alone = train(1, optimizer, samples=samples, batch_size=4 * workers)
    assert shared.trainers[0].iteration == 10
    far = 1e-12 if name in OPTIMIZERS else 1e-7  # a root is steep where gradients vanish
    assert np.abs(shared.master - alone.master).max() <= far * np.abs(alone.master).max()
    assert [trainer.replica.updates for trainer in shared.trainers] == [10] * workers
    states = [b"".join(vector.tobytes() for vector in t.replica.optimizer.state.values()) for t in shared.trainers]
    assert len(set(states)) == 1


def test_summed_gradients_equal_a_learning_rate_multiplied_by_the_workers():
    added = train(3, lambda: SGD(0.02), samples=60, synchronizer=lambda: GradientSharing(reduce="sum"))
    alone = train(1, lambda: SGD(0.06), samples=60, batch_size=12)
    assert np.abs(added.master - alone.master).max() <= 1e-12


def test_scores_come_every_so_often_and_weight_samples():
    """Batches of 4, 4 and 2: two rounds, whose score is the mean loss of the ten samples."""
    run = train(2, lambda: SGD(0.05), samples=10, synchronizer=lambda: GradientSharing(score_every=2))
    replica, total, loader = Replica(small_model(), SGD(0.05)), 0.0, Loader(small_dataset(10), 8, seed=3)
    for batch in loader.epoch(0, replica.backend, 0, 1):
        replica.gradient(batch)
        replica.update(0)
        total += replica.losses
    assert run.recorders[0].reports[-1].score_after_averaging == pytest.approx(total / 10, rel=1e-12)


class Noting(Replica):
    """Adds up its optimizer's updates."""

    def __init__(self, *args):
        super().__init__(*args)
        self.total = np.zeros_like(self.params.master)

    def update(self, iteration, squared_norm=None):
        before = self.params.master.copy()
        super().update(iteration, squared_norm)
        self.total += self.params.master - before


@pytest.mark.parametrize("threshold", [0.004, 10.0])
def test_encoded_updates_plus_residuals_are_the_sum_of_the_updates(threshold):
    """Added up, without cuts: moved = sum of updates - sum of residuals. Dense, sparse, and nothing at all."""

    def task(communicator):
        replica = Noting(small_model(), Momentum(0.05, 0.9))
        start = replica.params.master.copy()
        way = GradientSharing(ThresholdEncoding(FixedThreshold(threshold), 0), reduce="sum")
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=way)
        trainer.fit(Fit(Loader(small_dataset(61), 4, seed=3), 2))
        return replica.total, way.encoding.residual, replica.params.master - start

    found = on_threads(3, task)
    expected = sum(total - residual for total, residual, _ in found)
    for _, _, moved in found:
        np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-12)
    assert (np.abs(found[0][2]).max() > 0) == (threshold < 1)


def test_encoded_updates_are_averaged_by_samples():
    """One round of 4 and 2 samples; every weight of a threshold this small makes one step."""

    def task(communicator):
        replica = Noting(small_model(), SGD(0.05))
        start = replica.params.master.copy()
        way = GradientSharing(ThresholdEncoding(FixedThreshold(1e-12), 0))
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=way)
        trainer.fit(Fit(Loader(small_dataset(6), 4, seed=3), 1))
        return np.sign(replica.total) * (np.abs(replica.total) >= 1e-12), replica.params.master - start

    (first, moved), (second, _) = on_threads(2, task)
    expected = np.float32(1e-12) * (4 * first + 2 * second) / 6
    np.testing.assert_allclose(moved, expected, rtol=0, atol=1e-16)  # weights of order one: rounding


def test_residuals_survive_fits():
    def residual(wrapper):
        return wrapper.trainer.synchronizer.encoding.residual.copy()

    data, way = small_dataset(40), GradientSharing(ThresholdEncoding(FixedThreshold(0.01), 0))
    with ParallelWrapper(small_model(), 2, synchronizer=way, optimizer=SGD(0.05)) as wrapper:
        wrapper.fit(data, 1, batch_size=4)
        first = residual(wrapper)
        assert np.abs(first).max() > 0
        model = fingerprint(wrapper.model)
        wrapper.evaluate(data)
        assert fingerprint(wrapper.model) == model and np.array_equal(residual(wrapper), first)
        wrapper.fit(data, 1, batch_size=4)
        assert not np.array_equal(residual(wrapper), first)


def test_encoding_saves_traffic():
    """One batch for each of two workers: 1 % of exact gradients' bytes, headers and scores aside."""

    def sent(way):
        with ParallelWrapper(small_model("float"), 2, synchronizer=way) as wrapper:
            wrapper.fit(small_dataset(400), 1, batch_size=4)
            return wrapper.trainer.groups.world.traffic.bytes_sent

    none, exact = sent(GradientSharing(ThresholdEncoding(FixedThreshold(1e3)))), sent(GradientSharing())
    half = sent(GradientSharing(wire="half"))
    parameters = 4 * len(small_model("float").params.master)
    assert exact - none > 0.9 * 50 * parameters  # an all-reduce of two: as many bytes as the vector has
    assert half < 0.75 * exact


@pytest.mark.parametrize(
    "arguments", [{"encoding": "treshold"}, {"reduce": "max"}, {"wire": "half", "encoding": "threshold"}]
)
def test_invalid_arguments_are_refused(arguments):
    with refused(next(iter(arguments))):
        GradientSharing(**arguments)
