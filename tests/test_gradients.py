"""The gradient checker rejects wrong derivatives and accepts correct ones."""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from tests.support.gradients import OnAKink, check_derivative

BACKEND = create_backend("numpy", "double")


def test_one_wrong_entry_among_fifty_is_found() -> None:
    def check(gradient: Any) -> None:
        check_derivative(lambda: float((point**3).sum()), BACKEND, point, gradient, "x")
        np.testing.assert_array_equal(point, np.linspace(-2, 2, 50))

    point = np.linspace(-2, 2, 50)
    right = 3 * point**2
    check(right)
    for entry in range(50):
        with pytest.raises(AssertionError):
            check(right + 1e-3 * (np.arange(50) == entry))


def test_a_kink_is_refused() -> None:
    point = np.array([1.0, 1e-7, -1.0])
    with pytest.raises(OnAKink):
        check_derivative(lambda: float(np.maximum(point, 0).sum()), BACKEND, point, (point > 0) * 1.0, "x")
