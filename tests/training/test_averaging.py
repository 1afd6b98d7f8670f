"""Parameter averaging: equality with one replica, weighting by samples, which replicas take part, and drift."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov, Optimizer
from cupynet.training import Replica
from tests.support.trainers import train
from tests.support.training import on_backends, small_dataset, small_model

sgd = partial(SGD, 0.05, l2=1e-3)
nesterov = partial(Nesterov, 0.05, 0.9, l2=1e-3)


def trained_apart(
    samples: int, workers: int = 2, optimizer: Callable[[], Optimizer] = sgd, averaged: Sequence[int] = ()
) -> tuple[list[Any], float]:
    """Train on batches of 4. Return the replicas and the sum of losses.

    averaged: iterations after which the replicas are averaged without weights.
    """
    replicas: list[Any] = [Replica(small_model(), optimizer()) for _ in range(workers)]
    loader, losses = Loader(small_dataset(samples), 4, seed=3), 0.0
    dealt = [loader.epoch(0, replica.backend, rank, workers) for rank, replica in enumerate(replicas)]
    for iteration, batches in enumerate(zip_longest(*dealt), 1):
        for replica, batch in zip(replicas, batches, strict=True):
            if batch is not None:
                replica.gradient(batch)
                replica.update(0)
                losses += float(replica.losses)
        mean = np.mean([replica.params.master for replica in replicas], axis=0)
        for replica in replicas if iteration in averaged else ():
            replica.params.master[...] = mean
    return replicas, losses


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_identical_replicas_are_evaluated(frequency: int | str, evaluated: list[int]) -> None:
    run = train(2, nesterov, epochs=3, frequency=frequency)
    mine, theirs = ([each.evaluation for each in recorder.epochs] for recorder in run.recorders)
    assert [epoch for epoch, evaluation in enumerate(mine, 1) if evaluation is not None] == evaluated
    assert [each and each.to_dict() for each in mine] == [each and each.to_dict() for each in theirs]


@pytest.mark.parametrize(
    ("frequency", "averaged", "samples"), [("end", [], [20, 18, 16]), (3, [3], [8, 6, 4]), (2, [2, 4], [4, 2, 0])]
)
def test_a_later_average_weights_each_replica_by_its_samples_since_the_last_average(
    frequency: int | str, averaged: list[int], samples: list[int]
) -> None:
    """Three workers have five iterations. In the last, their batches have 4, 2 and 0 samples."""
    run = train(3, sgd, samples=54, frequency=frequency)
    masters = [replica.params.master for replica in trained_apart(54, 3, averaged=averaged)[0]]
    expected = np.average(masters, axis=0, weights=samples)
    np.testing.assert_allclose(run.master, expected, rtol=1e-13, atol=1e-15)


@on_backends("numpy", "cupy")
def test_scores_are_weighted_by_samples(backend: str) -> None:
    """After batches of 4, 4 and 2, the score is the mean of ten losses, each from the replica that trained on it."""
    run = train(2, sgd, samples=10, batch_size=4, frequency=2, backend=backend)
    _, losses = trained_apart(10)
    report = run.recorders[0].reports[-1]
    assert report.iteration == 2 and report.drift > 0
    assert report.score_after_averaging == pytest.approx(losses / 10, rel=1e-12)


@pytest.mark.parametrize("average_updaters", [True, False])
def test_optimizer_state_is_averaged_with_the_weights_unless_average_updaters_is_false(average_updaters: bool) -> None:
    """Worker 0 has batches of 4 and 2, worker 1 has one of 4."""
    run = train(2, nesterov, samples=10, average_updaters=average_updaters, frequency="end")
    found = [trainer.replica.optimizer.state["velocity"] for trainer in run.trainers]
    own = [replica.optimizer.state["velocity"] for replica in trained_apart(10, optimizer=nesterov)[0]]
    expected = [(6 * own[0] + 4 * own[1]) / 10] * 2 if average_updaters else own
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-15)
    assert (found[0].tobytes() == found[1].tobytes()) == average_updaters


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_thousand_averages_do_not_drift(backend: str) -> None:
    """The replicas are equal, but three times the single-precision third is more than one."""
    mean = small_model("float", backend).backend.mean_in_place
    start = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    parts = [start.copy() for _ in range(3)]
    for _ in range(1000):
        mean(parts, [1 / 3] * 3)
    np.testing.assert_array_equal(parts[0], start)
