"""Losses: PyTorch's values and derivatives, and logits that would overflow."""

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
TARGET_LOSSES: dict[str, Loss] = {
    f"targets, {name}": loss
    for name, loss in {
        **{"soft": SoftmaxNLL(), "soft, both": LOSSES["both"]},
        **{name: LOSSES[name] for name in ("squared", "logistic", "hinge", "huber")},
    }.items()
}
every_loss = pytest.mark.parametrize("kind", LOSSES)
every_target_loss = pytest.mark.parametrize("kind", TARGET_LOSSES)


def computed(loss: Loss, backend: Backend, outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return losses and gradient on the host, without the loss scale."""
    there = backend.asarray(np.asarray(outputs).astype(backend.policy.storage))
    losses, gradient = loss(backend, there, backend.asarray(np.asarray(labels)))
    on_host = np.array(backend.to_host(gradient), np.float64) / backend.policy.loss_scale
    return np.array(backend.to_host(losses), np.float64), on_host


@every_backend
@every_dtype
@every_loss
def test_losses_and_their_derivatives_are_those_of_pytorch(name: str, dtype: str, kind: str) -> None:
    backend, tolerance = create_backend(name, dtype), {"double": 1e-12, "float": 1e-5, "half": 4e-3}[dtype]
    losses, gradient = computed(LOSSES[kind], backend, GOLDEN["outputs"], GOLDEN["labels"])
    np.testing.assert_allclose(losses, GOLDEN[f"{kind}/losses"], rtol=tolerance, atol=tolerance)
    expected = GOLDEN[f"{kind}/gradient"]
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
    assert backend.workspace.on_loan == 0


@every_backend
@every_dtype
@every_target_loss
def test_losses_of_weighted_targets_and_their_derivatives_are_those_of_pytorch(
    name: str, dtype: str, kind: str
) -> None:
    backend, tolerance = create_backend(name, dtype), {"double": 1e-12, "float": 1e-5, "half": 4e-3}[dtype]
    targets = GOLDEN["targets"].astype(np.float32)
    losses, gradient = computed(TARGET_LOSSES[kind], backend, GOLDEN["outputs"], targets)
    np.testing.assert_allclose(losses, GOLDEN[f"{kind}/losses"], rtol=tolerance, atol=tolerance)
    expected = GOLDEN[f"{kind}/gradient"]
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
    assert backend.workspace.on_loan == 0


@pytest.mark.parametrize("batch", [1, 2, 9])
@pytest.mark.parametrize("kind", [*LOSSES, *TARGET_LOSSES])
def test_the_derivative_of_every_loss_agrees_with_differences_for_every_batch_size(kind: str, batch: int) -> None:
    loss, backend = (LOSSES | TARGET_LOSSES)[kind], create_backend("numpy", "double")
    outputs = np.random.default_rng(3).normal(0, 2, (batch, 5))
    targets = GOLDEN["targets"].astype(np.float32)[:batch] if kind in TARGET_LOSSES else GOLDEN["labels"][:batch]
    _, gradient = computed(loss, backend, outputs, targets)
    check_derivative(lambda: computed(loss, backend, outputs, targets)[0].mean(), backend, outputs, gradient, kind)


def test_every_golden_loss_is_compared() -> None:
    assert {each.partition("/")[0] for each in GOLDEN if "/" in each} == LOSSES.keys() | TARGET_LOSSES.keys()


@every_backend
def test_targets_of_another_width_are_refused(name: str) -> None:
    for loss in (SoftmaxNLL(), MeanSquaredError()):
        with refused(""):
            computed(loss, create_backend(name, "float"), np.zeros((2, 5)), np.zeros((2, 3), np.float32))


@every_backend
@every_dtype
def test_extreme_logits_neither_overflow_nor_vanish(name: str, dtype: str) -> None:
    logits = [[1000, -1000, 0], [-1000, 1000, 1000], [1000, 1000, 1000]]
    losses, gradient = computed(SoftmaxNLL(), create_backend(name, dtype), logits, [1, 2, 0])
    np.testing.assert_allclose(losses, [2000, np.log(2), np.log(3)], rtol=1e-6)
    expected = np.array([[1, -1, 0], [0, 0.5, -0.5], [-2 / 3, 1 / 3, 1 / 3]]) / 3
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(("smoothing", "trains"), [(0.0, False), (0.1, True)])
def test_with_smoothing_an_example_of_a_class_of_weight_0_trains_the_others(smoothing: float, trains: bool) -> None:
    """As in PyTorch, the weight is a factor of the class's term in the loss."""
    loss, backend = SoftmaxNLL(smoothing, [0, 1, 1]), create_backend("numpy", "double")
    _, gradient = computed(loss, backend, [[1.0, 2.0, 3.0]], [0])
    assert gradient.any() == trains


@every_backend
def test_scores_of_binary_cross_entropy_are_probabilities_and_others_are_outputs(name: str) -> None:
    backend = create_backend(name, "float")
    raw = np.array([[0, np.log(3)], [-1000, 1000]], np.float32)
    for loss in (MeanSquaredError(), Hinge(), Huber()):
        np.testing.assert_array_equal(backend.to_host(loss.scores(backend, backend.asarray(raw.copy()))), raw)
    scores = BinaryCrossEntropy().scores(backend, backend.asarray(raw.copy()))
    np.testing.assert_allclose(backend.to_host(scores), [[0.5, 0.75], [0.0, 1.0]], rtol=1e-6)


def test_a_loss_refuses_the_activation_that_it_applies_itself() -> None:
    network = Sequential({"output": Dense(3, activation="sigmoid")})
    Model(network, Flat(4), create_backend("numpy"), loss=MeanSquaredError())
    with pytest.raises(ConfigError):
        Model(network, Flat(4), create_backend("numpy"), loss=BinaryCrossEntropy())


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("label_smoothing", lambda: SoftmaxNLL(1.0)),
        ("class_weights", lambda: SoftmaxNLL(class_weights=[])),
        ("class_weights", lambda: SoftmaxNLL(class_weights=np.ones((2, 2)))),
        ("class_weights", lambda: SoftmaxNLL(class_weights=[1, -1])),
        ("class_weights", lambda: Model(Dense(3), Flat(4), create_backend("numpy"), loss=SoftmaxNLL(0, [1, 2]))),
        ("delta", lambda: Huber(0)),
        ("loss", lambda: Model(Dense(3), Flat(4), loss="categorical_crossentropy")),
    ],
)
def test_arguments_are_checked(setting: str, make: Callable[[], object]) -> None:
    with refused(setting):
        make()
