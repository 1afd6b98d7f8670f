"""The outer step, compared with its formulas."""

import numpy as np
import pytest

from cupynet.optim import SGD
from cupynet.parallel import DiLoCo, OuterOptimizer, SlowMo
from cupynet.parallel.synchronizers.outer_optimizer import outer_optimizer_of
from cupynet.training import Replica
from tests.support.refusals import refused
from tests.support.training import small_model


@pytest.mark.parametrize(
    ("outer_optimizer", "steps"),
    [
        (SlowMo(0.8, 0.5), [0.8 * 1, 0.8 * 2.5, 0.8 * 0.25]),
        (DiLoCo(), [0.7 * (1 + 0.9 * 1), 0.7 * (2 + 0.9 * 2.9), 0.7 * (-1 + 0.9 * 1.61)]),
    ],
    ids=["slow momentum", "Nesterov's momentum"],
)
def test_slowmo_and_diloco_follow_the_formulas_of_their_papers(
    outer_optimizer: OuterOptimizer, steps: list[float]
) -> None:
    """With SlowMo (1910.00643, algorithm 1), the momentum u is 1, 2.5, 0.25, and x += 0.8 u.

    With DiLoCo (2311.08105, with torch's Nesterov), it is 1, 2.9, 1.61, and x += 0.7 (delta + 0.9 u).
    """
    replica = Replica(small_model(), SGD(0.1))
    outer_optimizer.start(replica)
    common, found = np.zeros_like(replica.params.master), []
    for difference in (1.0, 2.0, -1.0):
        mean = common + difference
        outer_optimizer.step(common, mean)
        common[...] = mean
        assert np.ptp(common) == 0
        found.append(common[0])
    np.testing.assert_allclose(found, np.cumsum(steps), rtol=1e-12)


def test_invalid_arguments_of_an_outer_optimizer_are_refused() -> None:
    with refused("outer_optimizer"):
        outer_optimizer_of("diloko")
    with refused("learning_rate"):
        SlowMo(0.0)
    with refused("momentum"):
        DiLoCo(0.7, 1.0)
