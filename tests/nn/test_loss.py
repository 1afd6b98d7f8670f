"""The loss: its gradient by differences, and logits that would overflow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.errors import ConfigError
from cupynet.nn import SoftmaxNLL
from tests.backends import every_backend, every_dtype
from tests.gradients import check_derivative


def loss(backend: Backend, logits: Any, labels: Any) -> tuple[Any, Any]:
    """Losses and gradient on the host, the loss scale taken out."""
    losses, gradient = SoftmaxNLL()(backend, backend.asarray(logits), backend.asarray(np.array(labels)))
    on_host = np.array(backend.to_host(gradient), np.float64) / backend.policy.loss_scale
    backend.give_back(losses, gradient)
    return np.array(backend.to_host(losses), np.float64), on_host


@every_backend
@pytest.mark.parametrize("shape", [(1, 2), (4, 10), (3, 1), (7, 3)])
def test_the_gradient_is_that_of_the_mean_loss(name: str, shape: tuple[int, int]) -> None:
    backend, rng = create_backend(name, "double"), np.random.default_rng(0)
    logits = backend.asarray(rng.normal(0, 2, shape))
    labels = backend.asarray(rng.integers(0, shape[1], shape[0]))

    def value() -> float:
        losses, gradient = SoftmaxNLL()(backend, logits, labels)
        backend.give_back(gradient)
        return float(losses.mean())

    _, gradient = SoftmaxNLL()(backend, logits, labels)
    check_derivative(value, backend, logits, gradient.copy(), "logits")
    backend.give_back(gradient)
    assert backend.workspace.on_loan == 0


@every_backend
@every_dtype
def test_extreme_logits_neither_overflow_nor_vanish(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    logits = np.array([[1000, -1000, 0], [-1000, 1000, 1000], [1000, 1000, 1000]], backend.policy.storage)
    losses, gradient = loss(backend, logits, [1, 2, 0])
    np.testing.assert_allclose(losses, [2000, np.log(2), np.log(3)], rtol=1e-6)
    expected = np.array([[1, -1, 0], [0, 0.5, -0.5], [-2 / 3, 1 / 3, 1 / 3]]) / 3
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-9)


@every_backend
@every_dtype
def test_the_logits_are_left_alone_and_the_gradient_has_their_dtype(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    logits = backend.asarray(np.linspace(-3, 3, 12).reshape(4, 3).astype(backend.policy.storage))
    before = logits.copy()
    losses, gradient = SoftmaxNLL()(backend, logits, backend.asarray(np.array([0, 1, 2, 0])))
    assert bool((logits == before).all())
    assert (losses.dtype, gradient.dtype) == (backend.policy.accumulate, backend.policy.storage)
    assert losses.shape == (4,) and gradient.shape == (4, 3)


@every_backend
def test_a_gradient_sums_to_zero_over_the_classes(name: str) -> None:
    _, gradient = loss(create_backend(name, "double"), np.random.default_rng(1).normal(size=(6, 5)), [0, 1, 2, 3, 4, 0])
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-15)


@every_backend
def test_scores_are_probabilities(name: str) -> None:
    backend = create_backend(name, "float")
    logits = backend.asarray(np.array([[0, np.log(3)], [1000, 1000]], np.float32))
    scores = backend.to_host(SoftmaxNLL().scores(backend, logits))
    np.testing.assert_allclose(scores, [[0.25, 0.75], [0.5, 0.5]], rtol=1e-6)


def test_what_is_no_row_of_logits_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SoftmaxNLL needs logits \(N, O\), got \(2, 3, 3, 1\): end in a Dense"):
        SoftmaxNLL()(create_backend("numpy"), np.zeros((2, 3, 3, 1), np.float32), np.zeros(2, np.int64))
