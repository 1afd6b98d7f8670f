from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.checks import number, object_named
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown

Weights: TypeAlias = "Sequence[float] | Array"


class Loss(Described):
    """Base class of losses.

    `applies` is the activation that the loss applies, or None; the network must not apply it too. For `capturable`, see
    `Layer`.
    """

    capturable = False
    applies: str | None = None

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses (N,) on the device, and the gradient of their mean times the loss scale.

        Targets are class indices (N,). If `check_targets` accepts them, they may also be (N, O), or (N, O + 1) with
        sample weights in the last column.
        """
        raise NotImplementedError

    def scores(self, backend: Backend, prediction: Array) -> Array:
        """Convert the raw output (N, O) to scores such as probabilities, in place."""
        raise NotImplementedError

    def check(self, classes: int) -> None:
        """Raise ConfigError if the loss does not support this number of outputs."""

    def check_targets(self, targets: Array) -> None:
        """Raise ConfigError unless the loss supports sample weights and these targets (S, O), on the host."""
        name = type(self).__name__
        raise ConfigError(
            f"{name} only supports class indices, without weights or MixUp, unless it defines check_targets"
        )


class SoftmaxNLL(Loss):
    """Softmax cross-entropy from logits: -log softmax(z)[label].

    Corresponds to OutputLayer with softmax and NEGATIVELOGLIKELIHOOD in Deeplearning4j. The last layer must be linear.

    Args:
        label_smoothing: fraction of the target that is spread evenly over all classes (Szegedy et al. 2016).
        class_weights: loss factor of each class; 1 by default. With label smoothing, they weight each class's term, as
            in PyTorch. Unlike in PyTorch, the loss of a batch is divided by the number of samples, not by the sum of
            the weights.
    """

    capturable = True
    applies = "softmax"

    def __init__(self, label_smoothing: float = 0.0, class_weights: Weights | None = None) -> None:
        self.label_smoothing = number("SoftmaxNLL label_smoothing", label_smoothing, minimum=0, below=1)
        self.class_weights = None if class_weights is None else _class_weights(class_weights)

    def check(self, classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != classes:
            reason = f"has {len(self.class_weights)} weights for {classes} classes. Set one for each class"
            raise ConfigError(reason, "SoftmaxNLL class_weights")

    def check_targets(self, targets: Array) -> None:
        if not ((targets >= 0).all() and (abs(targets.sum(axis=1) - 1) < 1e-3).all()):
            raise ConfigError(
                "SoftmaxNLL needs integer class indices, or class probabilities that sum to 1. For regression, use "
                "Model(..., loss='mean_squared_error')"
            )

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        return backend.softmax_cross_entropy(prediction, target, self.label_smoothing, self.class_weights)

    def scores(self, backend: Backend, prediction: Array) -> Array:
        return backend.softmax(prediction)


def _class_weights(given: Weights) -> tuple[float, ...]:
    name = "SoftmaxNLL class_weights"
    weights = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(weights, list | tuple) or not weights:
        raise ConfigError("must be a list of numbers, one for each class, or null", name, shown(given))
    found = tuple(number(name, each, minimum=0) for each in weights)
    if not any(found):
        raise ConfigError("must not all be 0", name, shown(given))
    return found


class ElementwiseLoss(Loss):
    """Base class of losses that are means over outputs (see `Backend.target_loss`). Encodes class indices one-hot."""

    kind: str
    parameter = 0.0

    def check_targets(self, targets: Array) -> None:
        if self.kind in ("logistic", "hinge") and not ((targets >= 0) & (targets <= 1)).all():
            raise ConfigError(f"{type(self).__name__} needs targets from 0 to 1")

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        return backend.target_loss(self.kind, prediction, target, self.parameter)

    def scores(self, backend: Backend, prediction: Array) -> Array:
        return prediction


class MeanSquaredError(ElementwiseLoss):
    """Mean squared error: the mean of (z - t)² over outputs."""

    capturable = True
    kind = "squared"


class BinaryCrossEntropy(ElementwiseLoss):
    """Binary cross-entropy from logits: the mean of -t · log s - (1 - t) · log(1 - s), where s = sigmoid(z).

    The last layer must have no activation.
    """

    capturable = True
    kind, applies = "logistic", "sigmoid"

    def scores(self, backend: Backend, prediction: Array) -> Array:
        xp, wide = backend.xp, prediction.astype(backend.policy.accumulate)
        small = xp.exp(-abs(wide))  # cannot overflow
        prediction[...] = xp.where(wide >= 0, 1 / (1 + small), small / (1 + small))
        return prediction


class Hinge(ElementwiseLoss):
    """Hinge loss: the mean of max(0, 1 - y · z) over outputs, where y is 1 for the sample's class, otherwise -1."""

    capturable = True
    kind = "hinge"


class Huber(ElementwiseLoss):
    """Huber loss (1964) with d = z - t: the mean over outputs of d²/2 if |d| <= delta, else delta · (|d| - delta/2)."""

    capturable = True
    kind = "huber"

    def __init__(self, delta: float = 1.0) -> None:
        self.delta = self.parameter = number("Huber delta", delta, above=0)


LOSSES: dict[str, type[Loss]] = {
    "softmax": SoftmaxNLL,
    "mean_squared_error": MeanSquaredError,
    "binary_cross_entropy": BinaryCrossEntropy,
    "hinge": Hinge,
    "huber": Huber,
}


ELSEWHERE = {
    **dict.fromkeys(("categorical_crossentropy", "sparse_categorical_crossentropy", "cross_entropy"), "softmax"),
    "binary_crossentropy": "binary_cross_entropy",
    "mse": "mean_squared_error",
}  # names in Keras and PyTorch


def loss_of(loss: str | Loss) -> Loss:
    return object_named("loss", loss, LOSSES, Loss, "SoftmaxNLL(), or the name of a loss", elsewhere=ELSEWHERE)
