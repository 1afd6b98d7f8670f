"""Losses: PyTorch's values and derivatives, and logits that would overflow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import Backend, create_backend
from cupynet.core.errors import ConfigError
from tests.support.backends import every_backend, every_dtype
from tests.support.refusals import refused

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "loss.npz")
WEIGHTS = [0.5, 1.0, 2.0, 0.0, 1.5]
LOSSES: dict[str, nn.Loss] = {
    "softmax": nn.SoftmaxNLL(),
    "soft": nn.SoftmaxNLL(),
    "smoothed": nn.SoftmaxNLL(0.1),
    "weighted": nn.SoftmaxNLL(class_weights=WEIGHTS),
    "both": nn.SoftmaxNLL(0.2, WEIGHTS),
    "soft, both": nn.SoftmaxNLL(0.2, WEIGHTS),
    "squared": nn.MeanSquaredError(),
    "logistic": nn.BinaryCrossEntropy(),
    "hinge": nn.Hinge(),
    "huber": nn.Huber(),
    "huber, narrow": nn.Huber(0.25),
}


def computed(loss: nn.Loss, backend: Backend, outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return losses and gradient on the host, without the loss scale."""
    there = backend.asarray(np.asarray(outputs).astype(backend.policy.storage))
    losses, gradient = loss(backend, there, backend.asarray(np.asarray(labels)))
    on_host = np.array(backend.to_host(gradient), np.float64) / backend.policy.loss_scale
    return np.array(backend.to_host(losses), np.float64), on_host


@every_backend
@every_dtype
@pytest.mark.parametrize("kind", [name.removesuffix("/losses") for name in GOLDEN if name.endswith("/losses")])
def test_losses_and_their_derivatives_match_pytorch(name: str, dtype: str, kind: str) -> None:
    """Labels are classes or, in the kinds named `targets`, numbers with a weight for each example."""
    backend, tolerance = create_backend(name, dtype), {"double": 1e-12, "float": 1e-5, "half": 4e-3}[dtype]
    targets = GOLDEN["targets"].astype(np.float32)
    labels = targets if kind.startswith("targets, ") else GOLDEN["labels"]
    losses, gradient = computed(LOSSES[kind.removeprefix("targets, ")], backend, GOLDEN["outputs"], labels)
    np.testing.assert_allclose(losses, GOLDEN[f"{kind}/losses"], rtol=tolerance, atol=tolerance)
    expected = GOLDEN[f"{kind}/gradient"]
    np.testing.assert_allclose(gradient, expected, rtol=tolerance, atol=tolerance * abs(expected).max())
    assert backend.workspace.on_loan == 0


@every_backend
@pytest.mark.parametrize("loss", [nn.SoftmaxNLL(), nn.MeanSquaredError()], ids=["softmax", "squared"])
def test_targets_of_another_width_are_refused(name: str, loss: nn.Loss) -> None:
    with refused(""):
        computed(loss, create_backend(name, "float"), np.zeros((2, 5)), np.zeros((2, 3), np.float32))


@every_backend
@every_dtype
def test_losses_and_gradients_of_extreme_logits_neither_overflow_nor_vanish(name: str, dtype: str) -> None:
    logits = [[1000, -1000, 0], [-1000, 1000, 1000], [1000, 1000, 1000]]
    losses, gradient = computed(nn.SoftmaxNLL(), create_backend(name, dtype), logits, [1, 2, 0])
    np.testing.assert_allclose(losses, [2000, np.log(2), np.log(3)], rtol=1e-6)
    expected = np.array([[1, -1, 0], [0, 0.5, -0.5], [-2 / 3, 1 / 3, 1 / 3]]) / 3
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-9)
    _, gradient = computed(nn.SoftmaxNLL(), create_backend(name, dtype), [[9.0, -9.0]], [0])
    assert gradient[0, 1] == pytest.approx(1.523e-8, rel=0.01)  # less than half precision can hold


@pytest.mark.parametrize(("smoothing", "trains"), [(0.0, False), (0.1, True)])
def test_with_smoothing_an_example_of_a_class_of_weight_0_trains_the_others(smoothing: float, trains: bool) -> None:
    """As in PyTorch, the weight is a factor of the class's term in the loss."""
    loss, backend = nn.SoftmaxNLL(smoothing, [0, 1, 1]), create_backend("numpy", "double")
    _, gradient = computed(loss, backend, [[1.0, 2.0, 3.0]], [0])
    assert gradient.any() == trains


@every_backend
def test_scores_of_binary_cross_entropy_are_probabilities_and_others_are_outputs(name: str) -> None:
    backend = create_backend(name, "float")
    raw = np.array([[0, np.log(3)], [-1000, 1000]], np.float32)
    for loss in (nn.MeanSquaredError(), nn.Hinge(), nn.Huber()):
        np.testing.assert_array_equal(backend.to_host(loss.scores(backend, backend.asarray(raw.copy()))), raw)
    scores = nn.BinaryCrossEntropy().scores(backend, backend.asarray(raw.copy()))
    np.testing.assert_allclose(backend.to_host(scores), [[0.5, 0.75], [0.0, 1.0]], rtol=1e-6)


def test_a_loss_must_fit_its_network() -> None:
    network, weighted = nn.Dense(3, activation="sigmoid"), nn.SoftmaxNLL(0, [1, 2])
    nn.Model(network, nn.Flat(4), create_backend("numpy"), loss=nn.MeanSquaredError())
    with pytest.raises(ConfigError):  # it applies the sigmoid itself
        nn.Model(network, nn.Flat(4), create_backend("numpy"), loss=nn.BinaryCrossEntropy())
    with refused("class_weights"):
        nn.Model(nn.Dense(3), nn.Flat(4), create_backend("numpy"), loss=weighted)
