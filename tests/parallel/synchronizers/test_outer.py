"""The outer step, against its formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import ConfigError
from cupynet.optim import SGD
from cupynet.parallel import DiLoCo, Outer, SlowMo
from cupynet.parallel.synchronizers.outer import Mean, outer_step
from cupynet.training import Replica
from tests.support.training import small_model


def weights_after(outer: Outer, means: list[float]) -> list[float]:
    """Return the common weights after averages at these distances, the same for all weights."""
    replica = Replica(small_model(), SGD(0.1))
    outer.start(replica)
    common, found = np.zeros_like(replica.params.master), []
    for far in means:
        mean = common + far
        outer.step(common, mean)
        common[...] = mean
        assert np.ptp(common) == 0
        found.append(float(common[0]))
    return found


def test_the_mean_is_the_mean() -> None:
    assert weights_after(Mean(), [1.0, 2.0]) == [1.0, 3.0]


@pytest.mark.parametrize("kind", [SlowMo, DiLoCo])
def test_rate_1_without_momentum_is_the_mean(kind: Any) -> None:
    assert weights_after(kind(1.0, 0.0), [1.0, 2.0, -1.0]) == [1.0, 3.0, 2.0]


def test_slow_momentum() -> None:
    """u = 1, 2.5, 0.25; x += 0.8 u (1910.00643, algorithm 1)."""
    found = weights_after(SlowMo(0.8, 0.5), [1.0, 2.0, -1.0])
    np.testing.assert_allclose(found, np.cumsum([0.8 * 1, 0.8 * 2.5, 0.8 * 0.25]), rtol=1e-12)


def test_nesterovs_momentum() -> None:
    """u = 1, 2.9, 1.61; x += 0.7 (delta + 0.9 u) (2311.08105, with torch's Nesterov)."""
    found = weights_after(DiLoCo(), [1.0, 2.0, -1.0])
    steps = [0.7 * (1 + 0.9 * 1), 0.7 * (2 + 0.9 * 2.9), 0.7 * (-1 + 0.9 * 1.61)]
    np.testing.assert_allclose(found, np.cumsum(steps), rtol=1e-12)


def test_momentum_is_kept_by_name() -> None:
    one, two = DiLoCo(), DiLoCo()
    weights_after(one, [1.0, 2.0])
    two.start(Replica(small_model(), SGD(0.1)))
    saved = one.state()
    assert set(saved["velocity"]) == {name for name, _ in small_model().params.named()}
    two.restore(saved)
    np.testing.assert_array_equal(two.state()["velocity"]["conv1.weight"], saved["velocity"]["conv1.weight"])


def test_outer_optimizers_have_names() -> None:
    assert [type(outer_step(name)) for name in ("mean", "slowmo", "diloco")] == [Mean, SlowMo, DiLoCo]
    assert (str(outer_step("diloco")), str(SlowMo()), str(Mean())) == ("DiLoCo(0.7, 0.9)", "SlowMo(1, 0.5)", "mean")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: outer_step("diloko"), "outer=.*diloko.*must be one of mean, slowmo, diloco.*did you mean 'diloco'"),
        (lambda: outer_step(DiLoCo), "outer=<the class DiLoCo>: must be an Outer"),  # type: ignore[arg-type]
        (lambda: SlowMo(0.0), "SlowMo learning_rate=0.0: must be a number above 0"),
        (lambda: DiLoCo(0.7, 1.0), "DiLoCo momentum=1.0: must be a number of at least 0 and below 1"),
    ],
)
def test_invalid_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
