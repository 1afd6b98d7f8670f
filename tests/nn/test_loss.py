"""Losses: gradients by differences, PyTorch's numbers, and logits that would overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    BinaryCrossEntropy,
    Dense,
    Flat,
    Hinge,
    Huber,
    Loss,
    MeanSquaredError,
    Model,
    Sequential,
    SoftmaxNLL,
)
from tests.support.backends import every_backend, every_dtype
from tests.support.gradients import check_derivative
from tests.support.refusals import refused


def loss(backend: Backend, logits: Any, labels: Any) -> tuple[Any, Any]:
    """Losses and gradient on the host, the loss scale taken out."""
    losses, gradient = SoftmaxNLL()(backend, backend.asarray(logits), backend.asarray(np.array(labels)))
    on_host = np.array(backend.to_host(gradient), np.float64) / backend.policy.loss_scale
    return np.array(backend.to_host(losses), np.float64), on_host


@pytest.mark.parametrize(("smoothing", "trains"), [(0.0, False), (0.1, True)])
def test_with_smoothing_an_example_of_a_class_of_weight_0_trains_the_others(smoothing: float, trains: bool) -> None:
    """As in PyTorch: the weight is a factor of the class's term of the loss."""
    backend = create_backend("numpy", "double")
    logits, labels = backend.asarray(np.array([[1.0, 2.0, 3.0]])), backend.asarray(np.array([0]))
    _, gradient = SoftmaxNLL(smoothing, [0, 1, 1])(backend, logits, labels)
    assert gradient.any() == trains


@every_backend
@every_dtype
def test_extreme_logits_neither_overflow_nor_vanish(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    logits = np.array([[1000, -1000, 0], [-1000, 1000, 1000], [1000, 1000, 1000]], backend.policy.storage)
    losses, gradient = loss(backend, logits, [1, 2, 0])
    np.testing.assert_allclose(losses, [2000, np.log(2), np.log(3)], rtol=1e-6)
    expected = np.array([[1, -1, 0], [0, 0.5, -0.5], [-2 / 3, 1 / 3, 1 / 3]]) / 3
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-9)


# all losses ----------------------------------------------------------------------------------------------------------

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "loss.npz")
WEIGHTS = [0.5, 1.0, 2.0, 0.0, 1.5]
LOSSES: dict[str, Loss] = {
    "softmax": SoftmaxNLL(),
    "smoothed": SoftmaxNLL(0.1),
    "weighted": SoftmaxNLL(class_weights=WEIGHTS),
    "both": SoftmaxNLL(0.2, WEIGHTS),
    "squared": MeanSquaredError(),
    "logistic": BinaryCrossEntropy(),
    "hinge": Hinge(),
    "huber": Huber(),
    "huber, narrow": Huber(0.25),
}


@every_backend
@every_dtype
def test_losses_are_those_of_pytorch(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    outputs = backend.asarray(GOLDEN["outputs"].astype(backend.policy.storage))
    tolerance = {"double": 1e-12, "float": 1e-5, "half": 4e-3}[dtype]
    for kind, loss in LOSSES.items():
        losses, gradient = loss(backend, outputs, backend.asarray(GOLDEN["labels"]))
        found = np.array(backend.to_host(losses), np.float64)
        np.testing.assert_allclose(found, GOLDEN[f"{kind}/losses"], rtol=tolerance, atol=tolerance, err_msg=kind)
        slopes = np.array(backend.to_host(gradient), np.float64) / backend.loss_scale
        expected = GOLDEN[f"{kind}/gradient"]
        bound = tolerance * abs(expected).max()
        np.testing.assert_allclose(slopes, expected, rtol=tolerance, atol=bound, err_msg=kind)
        assert (losses.dtype, gradient.dtype) == (backend.policy.accumulate, backend.policy.storage)
        del gradient
        assert backend.workspace.on_loan == 0, kind


def test_every_golden_loss_is_compared() -> None:
    assert {each.partition("/")[0] for each in GOLDEN if "/" in each} == LOSSES.keys()


@pytest.mark.parametrize("kind", LOSSES)
def test_every_gradient_is_that_of_the_mean_loss(kind: str) -> None:
    backend, rng = create_backend("numpy", "double"), np.random.default_rng(3)
    outputs, labels = backend.asarray(rng.normal(0, 2, (6, 5))), backend.asarray(rng.integers(0, 5, 6))

    def value() -> float:
        losses, _ = LOSSES[kind](backend, outputs, labels)
        return float(losses.mean())

    _, gradient = LOSSES[kind](backend, outputs, labels)
    check_derivative(value, backend, outputs, gradient.copy(), "outputs")


@every_backend
def test_scores_grow_with_what_is_predicted(name: str) -> None:
    backend = create_backend(name, "float")
    raw = np.array([[0, np.log(3)], [-1000, 1000]], np.float32)
    for loss in (MeanSquaredError(), Hinge(), Huber()):
        np.testing.assert_array_equal(backend.to_host(loss.scores(backend, backend.asarray(raw.copy()))), raw)
    scores = backend.to_host(BinaryCrossEntropy().scores(backend, backend.asarray(raw.copy())))
    np.testing.assert_allclose(scores, [[0.5, 0.75], [0.0, 1.0]], rtol=1e-6)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_refuses_the_activation_that_it_applies_itself(loss: Loss) -> None:
    network = Sequential({"output": Dense(3, activation="softmax")})
    if loss.applies is None:
        Model(network, Flat(4), create_backend("numpy"), loss=loss)
        return
    with pytest.raises(ConfigError):
        Model(network, Flat(4), create_backend("numpy"), loss=loss)


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("label_smoothing", lambda: SoftmaxNLL(1.0)),
        ("class_weights", lambda: SoftmaxNLL(class_weights=[])),
        ("class_weights", lambda: SoftmaxNLL(class_weights=2.0)),
        ("class_weights", lambda: SoftmaxNLL(class_weights=np.ones((2, 2)))),
        ("class_weights", lambda: SoftmaxNLL(class_weights={})),
        ("class_weights", lambda: SoftmaxNLL(class_weights=[1, -1])),
        ("delta", lambda: Huber(0)),
    ],
)
def test_arguments_are_checked(setting: str, make: Callable[[], Loss]) -> None:
    with refused(setting):
        make()


@every_backend
def test_classes_and_weights_are_as_many(name: str) -> None:
    backend = create_backend(name)
    same: list[Any] = [np.array([1, 0.5]), np.array([1, 0.5], np.float32), [1, 0.5]]
    assert {SoftmaxNLL(class_weights=each).class_weights for each in same} == {(1.0, 0.5)}
    with refused("class_weights"):
        Model(Dense(3), Flat(4), backend, loss=SoftmaxNLL(class_weights=[1, 2]))
