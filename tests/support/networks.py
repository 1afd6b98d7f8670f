"""Networks shared by tests."""

from typing import Any

import numpy as np

from cupynet.backend import Backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    Activation,
    AvgPool2D,
    Backward,
    Concat,
    Context,
    Conv2D,
    Dense,
    Flatten,
    GlobalAvgPool2D,
    Image,
    InputType,
    Layer,
    MaxPool2D,
    Model,
    Residual,
    Scope,
    Sequential,
    no_backward,
)

SMALL = Image(9, 8, 2)


class Around(Layer):
    """A user-defined x + branch(x). The sum is a new array because the branch's backward pass needs its output."""

    def __init__(self, branch: Layer) -> None:
        self.branch = branch

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        output = self.branch.build(input, params.scope("branch"), backend)
        if output != input:
            raise ConfigError(f"Around '{params.layer}': the branch returns {output} for {input}")
        return input

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        backend = self.backend
        out, branch_backward = self.branch.forward(x, context)
        y = backend.borrow(x.shape)
        backend.xp.add(x, out, out=y)

        def backward(dy: Any) -> Any:
            through = backend.borrow(dy.shape)  # the branch's backward pass may overwrite its argument
            through[...] = dy
            dx = branch_backward(through)
            if dx is not None:
                dx += dy
            return dx

        return y, backward if context.train else no_backward


def lenet() -> Sequential:
    """Deeplearning4j's LeNet: convolutions without activation, disjoint pooling windows, one hidden layer with ReLU."""
    return Sequential(
        {
            "conv1": Conv2D(20, 5),
            "pool1": MaxPool2D(2, 2),
            "conv2": Conv2D(50, 5),
            "pool2": MaxPool2D(2, 2),
            "dense1": Dense(500, "relu"),
            "output": Dense(10),
        }
    )


def small_networks() -> dict[str, Sequential]:
    """Small networks with every kind of layer in different positions: SMALL images, three logits."""
    mixed: dict[str, Any] = {
        "narrow": Conv2D(2, 1, activation="softplus"),
        "wide": [Conv2D(3, 3, padding=1, activation="tanh"), MaxPool2D(3, 1, 1)],
        "mean": AvgPool2D(3, 1, "same"),
    }
    return {
        "lenet": Sequential(
            {
                "conv1": Conv2D(3, 3, padding="same"),
                "pool1": MaxPool2D(2),
                "conv2": Conv2D(4, 2, activation="relu"),
                "pool2": MaxPool2D(2, 1),
                "dense1": Dense(6, "relu"),
                "output": Dense(3),
            }
        ),
        "nested": Sequential(
            {
                "block": Sequential({"conv": Conv2D(3, 2, stride=2), "relu": Activation("relu")}),
                "head": Sequential({"inner": Sequential({"flat": Flatten(), "a": Dense(5), "b": Dense(5, "softmax")})}),
                "output": Dense(3),
            }
        ),
        "dense only": Sequential({"a": Dense(4, "relu", bias=False), "output": Dense(3)}),
        "begins with flatten": Sequential({"flat": Flatten(), "output": Dense(3)}),
        "residual": Sequential(
            {
                "pool": MaxPool2D(2),
                "block": Around(Sequential({"conv": Conv2D(2, 3, padding="same"), "relu": Activation("relu")})),
                "again": Around(Sequential([Conv2D(2, (1, 3), padding=(0, 1), activation="relu")])),
                "output": Dense(3),
            }
        ),
        "blocks": Sequential(
            {
                "stem": Conv2D(4, 3, padding="same", activation="silu"),
                "block": Residual(
                    {"conv1": Conv2D(6, 3, 2, "same", activation="gelu"), "conv2": Conv2D(6, 3, padding="same")},
                    shortcut=Conv2D(6, 1, 2, bias=False),
                ),
                "act": Activation("leaky_relu"),
                "again": Residual([Conv2D(6, 3, padding="same", activation="elu", dilation=2)]),
                "mixed": Concat(mixed),
                "mean": GlobalAvgPool2D(),
                "output": Dense(3),
            }
        ),
        "begins with branches": Sequential(
            {
                "both": Concat([MaxPool2D(2), {"a": AvgPool2D(2)}, Sequential([Conv2D(2, 2, 2), Activation("relu")])]),
                "same": Residual(Activation("sigmoid")),
                "output": Dense(3),
            }
        ),
        "begins with branches without weights": Sequential(
            {
                "same": Residual({"pool": AvgPool2D(3, 1, 1)}),
                "both": Concat([Activation("tanh"), Residual(MaxPool2D(1))]),
                "output": Dense(3),
            }
        ),
        "begins with an activation": Sequential({"act": Activation("relu"), "conv": Conv2D(2, 3), "out": Dense(3)}),
        "begins with pooling": Sequential({"pool": MaxPool2D(3, 2), "conv": Conv2D(2, 2), "output": Dense(3)}),
        "begins with a block without weights": Sequential(
            {
                "block": Sequential({"pool": MaxPool2D(2), "act": Activation("identity"), "flat": Flatten()}),
                "again": Activation("relu"),
                "output": Dense(3),
            }
        ),
        "ends with flatten": Sequential({"conv": Conv2D(3, (8)), "pool": MaxPool2D(1, 2), "flat": Flatten()}),
    }


def examples(backend: Backend, count: int, image: Image = SMALL, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng([seed, count])
    x = rng.normal(size=(count, *image.shape)).astype(backend.policy.storage)
    return backend.asarray(x), backend.asarray(rng.integers(0, 3, count))


def gradients(model: Model) -> dict[str, Any]:
    return {name: np.array(model.backend.to_host(p.grad)) for name, p in model.params.named()}


def train_step(model: Model, x: Any, labels: Any, optimizer: Any = None, iteration: int = 0) -> float:
    """Train on a batch as a trainer does, and return the mean loss."""
    logits, backward = model.forward(x, Context(train=True))
    losses, gradient = model.loss(model.backend, logits, labels)
    backward(gradient)
    if optimizer is not None:
        optimizer.step(model.params, iteration)
    return float(losses.mean())
