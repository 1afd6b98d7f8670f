"""Parameter averaging: its identities with one replica, which samples and replicas take part, and divergence."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Nesterov
from cupynet.parallel import ParameterAveraging, SlowMo, Synchronizer
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.training import (
    alone,
    fingerprint,
    on_backends,
    small_dataset,
    small_model,
    train,
)

OPTIMIZERS = {
    "sgd": lambda: SGD(0.05, l2=1e-3),
    "momentum": lambda: Momentum(0.05, 0.9, l2=1e-3),
    "nesterov": lambda: Nesterov(0.05, 0.9, l2=1e-3),
}


def velocity(trainer):
    return trainer.replica.optimizer.state["velocity"]


@pytest.mark.parametrize(
    ("name", "workers", "backend"),
    [
        ("sgd", 2, "numpy"),
        ("momentum", 3, "numba"),
        ("nesterov", 4, "numpy"),
        pytest.param("nesterov", 3, "cupy", id="standin", marks=[pytest.mark.standin, pytest.mark.smoke]),
    ],
)
def test_frequency_1_is_one_replica_on_the_concatenated_batch(name, workers, backend):
    """Ten iterations in double; the last round has fewer workers and a short batch."""
    batches = 10 * workers - (workers - 1)
    samples = 4 * batches - 1
    parallel = train(workers, OPTIMIZERS[name], samples=samples, backend=backend)
    alone = train(1, OPTIMIZERS[name], samples=samples, batch_size=4 * workers, backend=backend)
    assert parallel.trainers[0].iteration == alone.trainers[0].iteration == 10
    scale = np.abs(alone.master).max()
    assert np.abs(parallel.master - alone.master).max() <= 1e-12 * scale


def test_slow_momentum_of_every_average_is_momentum_on_the_concatenated_batch():
    """Each outer step goes from the weights that the last one made."""
    slow = train(2, lambda: SGD(0.05), synchronizer=lambda: ParameterAveraging(1, outer=SlowMo(1.0, 0.9)), samples=80)
    alone = train(1, lambda: Momentum(0.05, 0.9), samples=80, batch_size=8)
    assert slow.trainers[0].iteration == alone.trainers[0].iteration == 10
    assert np.abs(slow.master - alone.master).max() <= 1e-12 * np.abs(alone.master).max()


@on_backends("numpy", "cupy")
@pytest.mark.parametrize(("workers", "frequency"), [(4, 3)])
def test_replicas_are_identical_after_every_average_and_differ_in_between(workers, frequency, backend):
    run = train(workers, OPTIMIZERS["nesterov"], samples=97, epochs=2, frequency=frequency, backend=backend)
    rounds = run.trainers[0].iteration
    for iteration in range(rounds):
        hashes = {recorder.weights[iteration] for recorder in run.recorders}
        averaged = (iteration + 1) % frequency == 0
        assert (len(hashes) == 1) == averaged, f"after iteration {iteration + 1}"
    assert len({fingerprint(t.model) for t in run.trainers}) == 1
    assert len({each.tobytes() for each in run.host(velocity)}) == 1


@on_backends("numba", "cupy")
def test_the_same_seeds_give_the_same_bits(backend):
    options = {"samples": 61, "frequency": 3, "dtype": "float", "backend": backend}
    runs = [train(3, OPTIMIZERS["nesterov"], **options) for _ in range(2)]
    assert runs[0].recorders[0].weights == runs[1].recorders[0].weights
    other = train(3, OPTIMIZERS["nesterov"], order_seed=4, **options)
    assert other.recorders[0].weights[-1] != runs[0].recorders[0].weights[-1]


COUNTS = [
    # samples, batch size, workers, frequency
    (61, 4, 3, 2),  # the last batch has one sample
    (10, 4, 4, 1),  # more workers than batches
    (3, 8, 3, 5),  # one short batch, two workers with none, frequency beyond the epoch
    (23, 5, 2, "end"),
]


@pytest.mark.parametrize(("samples", "batch_size", "workers", "frequency"), COUNTS)
def test_no_sample_is_lost_or_seen_twice(samples, batch_size, workers, frequency):
    options = {"samples": samples, "batch_size": batch_size, "frequency": frequency}
    run = train(workers, OPTIMIZERS["sgd"], epochs=2, **options)
    for epoch in range(2):
        seen = [s for trainer in run.trainers for batch in trainer.replica.seen.get(epoch, []) for s in batch]
        assert sorted(seen) == list(range(samples))
    assert len({fingerprint(t.model) for t in run.trainers}) == 1
    assert sum(record.samples for record in run.recorders[0].epochs) == 2 * samples


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_identical_replicas_are_evaluated(frequency, evaluated):
    run = train(2, OPTIMIZERS["nesterov"], epochs=3, frequency=frequency)
    assert [r.epoch for r in run.recorders[0].epochs if r.evaluation is not None] == evaluated
    for mine, theirs in zip(run.recorders[0].epochs, run.recorders[1].epochs, strict=True):
        if mine.evaluation is not None:
            assert mine.evaluation.to_dict() == theirs.evaluation.to_dict()


def test_the_end_average_weights_by_samples():
    """Worker 0 sees a batch of 4 and one of 2, worker 1 one of 4: the average must be 6 : 4."""
    run = train(2, OPTIMIZERS["sgd"], samples=10, frequency="end")
    # replay both replicas alone, from the same start, on the batches they were dealt
    replicas = []
    for rank in range(2):
        model = small_model()
        replica = Replica(model, OPTIMIZERS["sgd"]())
        for batch in Loader(small_dataset(10), 4, seed=3).epoch(0, model.backend, rank, 2):
            replica.gradient(batch)
            replica.update(0)
        replicas.append(model.params.master)
    order = Loader(small_dataset(10), 4, seed=3)
    counts = [sum(len(b) for b in order.epoch(0, small_model().backend, rank, 2)) for rank in range(2)]
    assert counts == [6, 4]
    expected = (replicas[0] * counts[0] + replicas[1] * counts[1]) / 10
    np.testing.assert_allclose(run.master, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("average_updaters", [True, False])
def test_optimizer_state_is_averaged_if_enabled(average_updaters):
    run = train(2, OPTIMIZERS["nesterov"], average_updaters=average_updaters, frequency=3)
    assert (len({each.tobytes() for each in run.host(velocity)}) == 1) == average_updaters


def test_divergence_is_detected_without_any_average_or_report():
    trainer = alone(small_model("float"), SGD(1e35), report_every=0)
    with pytest.raises(DivergedError, match="worker 0 at batch 1 of epoch 1"):
        trainer.fit(Fit(Loader(small_dataset(60), 4), 2))


def test_weights_spoiled_by_the_last_update_of_an_epoch_are_detected():
    class Poison(Replica):
        def update(self, iteration, squared_norm=None):
            super().update(iteration, squared_norm)
            if iteration == 14:
                self.params.master[5] = np.inf

    trainer = Trainer(Poison(small_model("float"), SGD(0.01)), report_every=0)
    with pytest.raises(DivergedError, match="worker 0 .*iteration 15"):
        trainer.fit(Fit(Loader(small_dataset(60), 4), 2))


@on_backends("numpy", "cupy")
def test_scores_are_weighted_by_samples(backend):
    """One average over batches of 4, 4 and 2: the score is the mean loss of the ten samples, each in its replica."""
    run = train(2, OPTIMIZERS["sgd"], samples=10, batch_size=4, frequency=2, backend=backend)
    total = 0.0
    for rank in range(2):
        replica = Replica(small_model(), OPTIMIZERS["sgd"]())
        for batch in Loader(small_dataset(10), 4, seed=3).epoch(0, replica.backend, rank, 2):
            replica.gradient(batch)
            replica.update(0)
            total += replica.losses
    report = run.recorders[0].reports[-1]
    assert report.iteration == 2 and report.divergence > 0
    assert report.score_after_averaging == pytest.approx(total / 10, rel=1e-12)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_thousand_averages_do_not_drift(backend):
    """Three equal replicas: a third in single precision, three times, is more than one."""
    mean = small_model("float", backend).backend.mean_in_place
    start = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    parts = [start.copy() for _ in range(3)]
    for _ in range(1000):
        mean(parts, [1 / 3] * 3)
    np.testing.assert_array_equal(parts[0], start)


def test_gradients_that_a_synchronizer_changes_are_clipped_afterwards():
    """Also with a single worker."""

    class Louder(Synchronizer):
        shares_gradients = True

        def before_update(self, replica, samples):
            replica.params.grad[...] *= 1000

    model = small_model("double")
    before = model.weights()
    with ParallelWrapper(model, 1, optimizer=SGD(1.0, max_grad_norm=0.01), synchronizer=Louder()) as wrapper:
        wrapper.fit(Loader(small_dataset(4), 4), 1)
    moved = sum(float(((weight - before[name]) ** 2).sum()) for name, weight in model.weights().items())
    assert moved**0.5 == pytest.approx(0.01)
