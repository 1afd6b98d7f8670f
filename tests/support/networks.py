"""Networks shared by tests."""

from typing import Any

import numpy as np

from cupynet import nn
from cupynet.backend import Backend

SMALL = nn.Image(9, 8, 2)


class Around(nn.Layer):
    """A user-defined x + branch(x)."""

    def __init__(self, branch: nn.Layer) -> None:
        self.branch = branch

    def build(self, input: nn.InputType, params: nn.Scope, backend: Backend) -> nn.InputType:
        return self.branch.build(input, params.scope("branch"), backend)

    def forward(self, x: Any, context: nn.Context) -> tuple[Any, nn.Backward]:
        out, branch_backward = self.branch.forward(x, context)

        def backward(dy: Any) -> Any:
            dx = branch_backward(dy.copy())  # it may overwrite its argument
            return None if dx is None else dx + dy

        return x + out, backward if context.train else nn.no_backward


def lenet() -> nn.Sequential:
    """Deeplearning4j's LeNet: convolutions without activation, disjoint pooling windows, one hidden layer with ReLU."""
    return nn.Sequential(
        {
            "conv1": nn.Conv2D(20, 5),
            "pool1": nn.MaxPool2D(2, 2),
            "conv2": nn.Conv2D(50, 5),
            "pool2": nn.MaxPool2D(2, 2),
            "dense1": nn.Dense(500, "relu"),
            "output": nn.Dense(10),
        }
    )


def small_networks() -> dict[str, nn.Sequential]:
    """Small networks with every kind of layer in different positions: SMALL images, three logits."""
    mixed: dict[str, Any] = {
        "narrow": nn.Conv2D(2, 1, activation="softplus"),
        "wide": [nn.Conv2D(3, 3, padding=1, activation="tanh"), nn.MaxPool2D(3, 1, 1)],
        "mean": nn.AvgPool2D(3, 1, "same"),
    }
    networks: dict[str, dict[str, nn.Layer]] = {
        "lenet": {
            "conv1": nn.Conv2D(3, 3, padding="same"),
            "pool1": nn.MaxPool2D(2),
            "conv2": nn.Conv2D(6, 2, activation="relu"),
            "pool2": nn.MaxPool2D(2, 1),
            "dense1": nn.Dense(6, "relu"),
            "output": nn.Dense(3),
        },
        "nested": {
            "block": nn.Sequential({"conv": nn.Conv2D(3, 2, stride=2), "relu": nn.Activation("relu")}),
            "head": nn.Sequential(
                {"inner": nn.Sequential({"flat": nn.Flatten(), "a": nn.Dense(5), "b": nn.Dense(5, "softmax")})}
            ),
            "output": nn.Dense(3),
        },
        "dense only": {"a": nn.Dense(4, "relu", bias=False), "output": nn.Dense(3)},
        "begins with flatten": {"flat": nn.Flatten(), "output": nn.Dense(3)},
        "residual": {
            "pool": nn.MaxPool2D(2),
            "block": Around(nn.Sequential({"conv": nn.Conv2D(2, 3, padding="same"), "relu": nn.Activation("relu")})),
            "again": Around(nn.Sequential([nn.Conv2D(2, (1, 3), padding=(0, 1), activation="relu")])),
            "output": nn.Dense(3),
        },
        "blocks": {
            "stem": nn.Conv2D(6, 3, padding="same", activation="silu"),
            "block": nn.Residual(
                {"conv1": nn.Conv2D(6, 3, 2, "same", activation="gelu"), "conv2": nn.Conv2D(6, 3, padding="same")},
                shortcut=nn.Conv2D(6, 1, 2, bias=False),
            ),
            "act": nn.Activation("leaky_relu"),
            "again": nn.Residual([nn.Conv2D(6, 3, padding="same", activation="elu", dilation=2)]),
            "mixed": nn.Concat(mixed),
            "mean": nn.GlobalAvgPool2D(),
            "output": nn.Dense(3),
        },
        "begins with branches": {
            "both": nn.Concat(
                [nn.MaxPool2D(2), {"a": nn.AvgPool2D(2)}, nn.Sequential([nn.Conv2D(2, 2, 2), nn.Activation("relu")])]
            ),
            "same": nn.Residual(nn.Activation("sigmoid")),
            "output": nn.Dense(3),
        },
        "begins with branches without weights": {
            "same": nn.Residual({"pool": nn.AvgPool2D(3, 1, 1)}),
            "both": nn.Concat([nn.Activation("tanh"), nn.Residual(nn.MaxPool2D(1))]),
            "output": nn.Dense(3),
        },
        "begins with an activation": {"act": nn.Activation("relu"), "conv": nn.Conv2D(2, 3), "out": nn.Dense(3)},
        "begins with pooling": {"pool": nn.MaxPool2D(3, 2), "conv": nn.Conv2D(2, 2), "output": nn.Dense(3)},
        "begins with a block without weights": {
            "block": nn.Sequential({"pool": nn.MaxPool2D(2), "act": nn.Activation("identity"), "flat": nn.Flatten()}),
            "again": nn.Activation("relu"),
            "output": nn.Dense(3),
        },
        "ends with flatten": {"conv": nn.Conv2D(3, 8), "pool": nn.MaxPool2D(1, 2), "flat": nn.Flatten()},
    }
    return {name: nn.Sequential(layers) for name, layers in networks.items()}


def examples(backend: Backend, count: int, image: nn.Image = SMALL, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng([seed, count])
    x = rng.normal(size=(count, *image.shape)).astype(backend.policy.storage)
    return backend.asarray(x), backend.asarray(rng.integers(0, 3, count))


def gradients(model: nn.Model) -> dict[str, Any]:
    return {name: np.array(model.backend.to_host(p.grad)) for name, p in model.params.named()}


def train_step(model: nn.Model, x: Any, labels: Any, optimizer: Any = None, iteration: int = 0) -> float:
    """Train on a batch as a trainer does, and return the mean loss."""
    logits, backward = model.forward(x, nn.Context(train=True))
    losses, gradient = model.loss(model.backend, logits, labels)
    backward(gradient)
    if optimizer is not None:
        optimizer.step(model.params, iteration)
    return float(losses.mean())
