"""Parameter averaging: its identities with one replica, which samples and replicas take part, and divergence."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.core.errors import ConfigError, DivergedError
from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Nesterov, OneCycle
from cupynet.parallel import Groups, ParameterAveraging, SerialCommunicator, SlowMo, Synchronizer
from cupynet.training import ParallelWrapper, Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.training import (
    alone,
    fingerprint,
    model_of,
    on_backends,
    on_threads,
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


@pytest.mark.parametrize(("name", "workers", "backend"), [("nesterov", 2, "numpy"), ("momentum", 4, "numba")])
def test_frequency_1_is_the_concatenated_batch_in_float(name, workers, backend):
    """Three iterations in float; beyond that rounding grows as it does between any two orders of summation."""
    samples = 4 * 3 * workers
    parallel = train(workers, OPTIMIZERS[name], samples=samples, dtype="float", backend=backend)
    alone = train(1, OPTIMIZERS[name], samples=samples, batch_size=4 * workers, dtype="float", backend=backend)
    assert parallel.trainers[0].iteration == 3
    assert np.abs(parallel.master - alone.master).max() <= 1e-5


def test_slow_momentum_of_every_average_is_momentum_on_the_concatenated_batch():
    """Each outer step goes from the weights that the last one made."""
    slow = train(2, lambda: SGD(0.05), synchronizer=lambda: ParameterAveraging(1, outer=SlowMo(1.0, 0.9)), samples=80)
    alone = train(1, lambda: Momentum(0.05, 0.9), samples=80, batch_size=8)
    assert slow.trainers[0].iteration == alone.trainers[0].iteration == 10
    assert np.abs(slow.master - alone.master).max() <= 1e-12 * np.abs(alone.master).max()


def test_averaging_less_often_gives_other_weights():
    """The identities above would prove nothing if every run gave the same weights."""
    often, seldom = train(2, OPTIMIZERS["nesterov"]), train(2, OPTIMIZERS["nesterov"], frequency=3)
    assert np.abs(often.master - seldom.master).max() > 1e-6


@on_backends("numba", "cupy")
def test_one_worker_equals_a_trainer_without_parallel_code(backend):
    wrapped = train(1, OPTIMIZERS["nesterov"], epochs=2, dtype="float", backend=backend)
    model = model_of(SerialCommunicator(), "float", backend)
    plain = alone(model, OPTIMIZERS["nesterov"](), prefetch_buffer=0, report_every=0)
    plain.fit(Fit(Loader(small_dataset(60), 4, seed=3), 2))
    model.backend.deactivate()
    assert fingerprint(model) == fingerprint(wrapped.trainers[0].model)


@on_backends("numpy", "cupy")
@pytest.mark.parametrize(("workers", "frequency"), [(2, 1), (4, 3)])
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
@pytest.mark.parametrize("workers", [1, 3])
def test_the_same_seeds_give_the_same_bits(workers, backend):
    options = {"samples": 61, "frequency": 3, "dtype": "float", "backend": backend}
    runs = [train(workers, OPTIMIZERS["nesterov"], **options) for _ in range(2)]
    assert runs[0].recorders[0].weights == runs[1].recorders[0].weights
    other = train(workers, OPTIMIZERS["nesterov"], order_seed=4, **options)
    assert other.recorders[0].weights[-1] != runs[0].recorders[0].weights[-1]


COUNTS = [
    # samples, batch size, workers, frequency
    (60, 4, 2, 3),  # 15 batches: the last round has one worker
    (60, 4, 4, 3),  # 4 rounds: not a multiple of the frequency
    (61, 4, 3, 2),  # the last batch has one sample
    (10, 4, 4, 1),  # more workers than batches
    (3, 8, 3, 5),  # one short batch, two workers with none, frequency beyond the epoch
    (60, 60, 2, 1),  # one batch
    (23, 5, 2, "epoch"),
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


def test_batches_are_dealt_by_number_not_by_speed():
    run = train(3, OPTIMIZERS["sgd"], samples=60, batch_size=4)
    order = Loader(small_dataset(60), 4, seed=3).order(0)
    batches = [order[i : i + 4].tolist() for i in range(0, 60, 4)]
    for rank, trainer in enumerate(run.trainers):
        assert trainer.replica.seen[0] == batches[rank::3]


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_identical_replicas_are_evaluated(frequency, evaluated):
    run = train(2, OPTIMIZERS["nesterov"], epochs=3, frequency=frequency)
    assert [r.epoch for r in run.recorders[0].epochs if r.evaluation is not None] == evaluated
    for mine, theirs in zip(run.recorders[0].epochs, run.recorders[1].epochs, strict=True):
        if mine.evaluation is not None:
            assert mine.evaluation.to_dict() == theirs.evaluation.to_dict()


def test_end_means_one_average():
    run = train(2, OPTIMIZERS["nesterov"], epochs=2, frequency="end")
    for iteration in range(run.trainers[0].iteration):
        assert len({recorder.weights[iteration] for recorder in run.recorders}) == 2
    assert len({fingerprint(t.model) for t in run.trainers}) == 1


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


@on_backends("numpy", "cupy")
def test_a_replica_that_is_not_finite_is_never_averaged_into_the_others(backend):
    """Worker 1 poisons its weights; worker 0 must keep its own."""
    kept = {}

    class Poison(Replica):
        def update(self, iteration, squared_norm=None):
            super().update(iteration, squared_norm)
            if self.rank == 1 and iteration == 1:
                self.params.master[5] = np.nan
            kept[self.rank] = self.backend.to_host(self.params.master)

    def task(communicator):
        replica = Poison(model_of(communicator, backend=backend), SGD(0.05))
        replica.rank = communicator.rank
        averaging = ParameterAveraging(2, report_score=False)
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=averaging)
        trainer.fit(Fit(Loader(small_dataset(60), 4, seed=3), 1))

    with pytest.raises(DivergedError) as caught:
        on_threads(3, task)
    assert "replica 1 is not finite after iteration 2 and was not averaged into the others:" in str(caught.value)
    assert np.isfinite(kept[0]).all() and np.isfinite(kept[2]).all()


def test_divergence_ends_training_with_one_worker_too():
    with pytest.raises(DivergedError, match="not finite|is nan"):
        train(1, lambda: SGD(1e35), epochs=3, frequency=5, dtype="float")


def test_divergence_is_detected_without_any_average_or_report():
    trainer = alone(small_model("float"), SGD(1e35), report_every=0)
    with pytest.raises(DivergedError, match="the loss of worker 0 at batch 1 of epoch 1 is not finite, for samples"):
        trainer.fit(Fit(Loader(small_dataset(60), 4), 2))


def test_weights_spoiled_by_the_last_update_of_an_epoch_are_detected():
    class Poison(Replica):
        def update(self, iteration, squared_norm=None):
            super().update(iteration, squared_norm)
            if iteration == 14:
                self.params.master[5] = np.inf

    trainer = Trainer(Poison(small_model("float"), SGD(0.01)), report_every=0)
    with pytest.raises(DivergedError, match="the replica of worker 0 is not finite after iteration 15"):
        trainer.fit(Fit(Loader(small_dataset(60), 4), 2))


def test_a_diverged_replica_has_no_note_of_another_worker():
    with pytest.raises(DivergedError) as caught:
        train(2, lambda: SGD(1e35), epochs=3, dtype="float")
    assert not hasattr(caught.value, "__notes__")


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


def test_schedules_count_rounds_and_know_the_end():
    run = train(3, lambda: Nesterov(OneCycle(0.1)), samples=60, epochs=2)
    assert run.trainers[0].plan.iterations == 10
    assert run.trainers[0].replica.optimizer.learning_rate.stop == 10
    rates = [report.learning_rate for report in run.recorders[0].reports]  # after iterations 2, 4, 6, 8, 10
    assert rates[1] == max(rates) and rates[-1] == pytest.approx(0.1 / 1000)


@pytest.mark.parametrize("frequency", [0, -1, 1.5, True, "never", None])
def test_bad_frequencies_are_refused(frequency):
    with pytest.raises(ConfigError, match="averaging_frequency=.*: must be an integer of at least 1, epoch or end"):
        ParameterAveraging(frequency)


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
