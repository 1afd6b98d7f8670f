"""Parameter averaging: its identities with one replica, which samples and replicas take part, and drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov
from cupynet.training import Replica
from tests.support.training import on_backends, small_dataset, small_model, train

on_numpy_and_a_device: pytest.MarkDecorator = on_backends("numpy", "cupy")
on_numba_and_a_device: pytest.MarkDecorator = on_backends("numba", "cupy")


def sgd() -> SGD:
    return SGD(0.05, l2=1e-3)


def nesterov() -> Nesterov:
    return Nesterov(0.05, 0.9, l2=1e-3)


def trained_apart(samples: int) -> tuple[list[Any], float]:
    """Weights of two replicas that train on the batches of two workers without any average, and the sum of losses."""
    weights, losses = [], 0.0
    for rank in range(2):
        replica: Any = Replica(small_model(), sgd())
        for batch in Loader(small_dataset(samples), 4, seed=3).epoch(0, replica.backend, rank, 2):
            replica.gradient(batch)
            replica.update(0)
            losses += float(replica.losses)
        weights.append(replica.params.master)
    return weights, losses


@on_numba_and_a_device
def test_the_same_seeds_give_the_same_bits(backend: str) -> None:
    options: dict[str, Any] = {"samples": 61, "frequency": 3, "dtype": "float", "backend": backend}
    one, again = (train(3, nesterov, **options).recorders[0].weights for _ in range(2))
    assert one == again
    assert one[-1] != train(3, nesterov, order_seed=4, **options).recorders[0].weights[-1]


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_identical_replicas_are_evaluated(frequency: int | str, evaluated: list[int]) -> None:
    run = train(2, nesterov, epochs=3, frequency=frequency)
    mine, theirs = ([each.evaluation for each in recorder.epochs] for recorder in run.recorders)
    assert [epoch for epoch, evaluation in enumerate(mine, 1) if evaluation is not None] == evaluated
    assert [each and each.to_dict() for each in mine] == [each and each.to_dict() for each in theirs]


def test_averages_come_after_iterations_k_2k_3k_of_the_whole_training() -> None:
    """An epoch has 5 iterations; replicas are averaged every 3."""
    run = train(2, sgd, samples=40, epochs=2, frequency=3)
    weights = zip(*(recorder.weights for recorder in run.recorders), strict=True)
    assert [iteration for iteration, (mine, theirs) in enumerate(weights, 1) if mine == theirs] == [3, 6, 9]


def test_the_end_average_weights_by_samples() -> None:
    """Worker 0 sees a batch of 4 and one of 2, worker 1 one of 4: the average must be 6 : 4."""
    run = train(2, sgd, samples=10, frequency="end")
    (first, second), _ = trained_apart(10)
    np.testing.assert_allclose(run.master, (6 * first + 4 * second) / 10, rtol=1e-13, atol=1e-15)


@on_numpy_and_a_device
def test_scores_are_weighted_by_samples(backend: str) -> None:
    """One average over batches of 4, 4 and 2: the score is the mean loss of the ten samples, each in its replica."""
    run = train(2, sgd, samples=10, batch_size=4, frequency=2, backend=backend)
    _, losses = trained_apart(10)
    report = run.recorders[0].reports[-1]
    assert report.iteration == 2 and report.drift > 0
    assert report.score_after_averaging == pytest.approx(losses / 10, rel=1e-12)


@pytest.mark.parametrize("average_updaters", [True, False])
def test_optimizer_state_is_averaged_if_enabled(average_updaters: bool) -> None:
    run = train(2, nesterov, average_updaters=average_updaters, frequency=3)
    velocities = {trainer.replica.optimizer.state["velocity"].tobytes() for trainer in run.trainers}
    assert (len(velocities) == 1) == average_updaters


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_thousand_averages_do_not_drift(backend: str) -> None:
    """Three equal replicas: a third in single precision, three times, is more than one."""
    mean = small_model("float", backend).backend.mean_in_place
    start = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    parts = [start.copy() for _ in range(3)]
    for _ in range(1000):
        mean(parts, [1 / 3] * 3)
    np.testing.assert_array_equal(parts[0], start)
