"""Parameter averaging: equality with one replica, weighting by samples, which replicas take part, and drift."""

import copy

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.parallel import ParameterAveraging
from cupynet.training import Replica
from tests.support.trainers import train
from tests.support.training import small_dataset, small_model

NESTEROV = Nesterov(0.05, 0.9, l2=1e-3)


@pytest.mark.parametrize(("frequency", "evaluated"), [(3, [1, 2, 3]), ("epoch", [1, 2, 3]), ("end", [3])])
def test_only_averaged_replicas_are_evaluated(frequency: int | str, evaluated: list[int]) -> None:
    run = train(2, NESTEROV, ParameterAveraging(frequency), epochs=3)
    mine, theirs = ([each.evaluation for each in recorder.epochs] for recorder in run.recorders)
    assert [epoch for epoch, evaluation in enumerate(mine, 1) if evaluation is not None] == evaluated
    assert [each and each.to_dict() for each in mine] == [each and each.to_dict() for each in theirs]


@pytest.mark.parametrize("average_updaters", [True, False])
def test_optimizer_state_is_averaged_with_the_weights_unless_average_updaters_is_false(average_updaters: bool) -> None:
    """Worker 0 has batches of 4 and 2, worker 1 has one of 4."""
    run = train(2, NESTEROV, ParameterAveraging("end", average_updaters=average_updaters), samples=10)
    found = [trainer.replica.optimizer.state["velocity"] for trainer in run.trainers]
    replicas = [Replica(small_model(), copy.deepcopy(NESTEROV)) for _ in range(2)]
    for rank, replica in enumerate(replicas):  # without averaging
        for batch in Loader(small_dataset(10), 4, seed=3).epoch(0, replica.backend, rank, 2):
            replica.gradient(batch)
            replica.update(0)
    own = [replica.optimizer.state["velocity"] for replica in replicas]
    expected = [(6 * own[0] + 4 * own[1]) / 10] * 2 if average_updaters else own
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
