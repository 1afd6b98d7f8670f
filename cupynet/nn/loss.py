from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.checks import instance, number, one_of
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown

Weights: TypeAlias = "Sequence[float] | Array"


class Loss(Described):
    """A function of predictions and targets, with its gradient.

    Attributes:
        capturable: see `Layer`.
        applies: the activation that the loss applies itself, or None. The network must not apply it.
    """

    capturable = False
    applies: str | None = None

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return per-example losses (N,), on the device, and the gradient of the mean loss, times the loss scale.

        Targets are class numbers (N,); after `check_targets` also (N, O), or (N, O + 1) with the weight of each
        example in the last column.
        """
        raise NotImplementedError

    def scores(self, backend: Backend, prediction: Array) -> Array:
        """Convert raw output (N, O) in place to scores for users, such as probabilities."""
        raise NotImplementedError

    def check(self, classes: int) -> None:
        """Raise ConfigError if the loss does not fit this number of outputs."""

    def check_targets(self, targets: Array) -> None:
        """Raise ConfigError unless the loss supports targets (S, O) like these, on the host, and weights."""
        name = type(self).__name__
        raise ConfigError(
            f"{name} takes class numbers, without weights or MixUp. Define {name}.check_targets if not so"
        )


class SoftmaxNLL(Loss):
    """Negative log-likelihood of softmax(logits), computed together to avoid overflow.

    The loss is -log softmax(z)[label] of logits z. The network must end with the identity activation. Deeplearning4j:
    OutputLayer with softmax and NEGATIVELOGLIKELIHOOD.

    Args:
        label_smoothing: the share of the target that is spread evenly over all classes (Szegedy et al. 2016).
        class_weights: the factor of each class's term of the loss, in the order of the labels; None for 1. With label
            smoothing every example has a term of every class, as in PyTorch. Unlike in PyTorch, the mean is over the
            number of examples, not over the sum of weights, so that means of micro-batches can be averaged.
    """

    capturable = True
    applies = "softmax"

    def __init__(self, label_smoothing: float = 0.0, class_weights: Weights | None = None) -> None:
        self.label_smoothing = number("SoftmaxNLL label_smoothing", label_smoothing, minimum=0, below=1)
        self.class_weights = None if class_weights is None else _class_weights(class_weights)

    def check(self, classes: int) -> None:
        if self.class_weights is not None and len(self.class_weights) != classes:
            reason = f"{len(self.class_weights)} weights for {classes} classes: set one for each"
            raise ConfigError(reason, "SoftmaxNLL class_weights")

    def check_targets(self, targets: Array) -> None:
        if not ((targets >= 0).all() and (abs(targets.sum(axis=1) - 1) < 1e-3).all()):
            raise ConfigError(
                "SoftmaxNLL takes class numbers, which are integers, or class probabilities, which sum to 1. To "
                "predict other numbers, use Model(..., loss='mean_squared_error')"
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
    return found


class ElementwiseLoss(Loss):
    """The mean over outputs of `Backend.target_loss`. Class numbers are one-hot encoded."""

    kind: str
    parameter = 0.0

    def check_targets(self, targets: Array) -> None:
        if self.kind in ("logistic", "hinge") and not ((targets >= 0) & (targets <= 1)).all():
            raise ConfigError(f"{type(self).__name__} takes targets from 0 to 1")

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        return backend.target_loss(self.kind, prediction, target, self.parameter)

    def scores(self, backend: Backend, prediction: Array) -> Array:
        return prediction


class MeanSquaredError(ElementwiseLoss):
    """The mean over the outputs of (z - t)²."""

    capturable = True
    kind = "squared"


class BinaryCrossEntropy(ElementwiseLoss):
    """-t · log s - (1 - t) · log(1 - s) of each output, with s = sigmoid(z). The network must end in identity."""

    capturable = True
    kind, applies = "logistic", "sigmoid"

    def scores(self, backend: Backend, prediction: Array) -> Array:
        xp, wide = backend.xp, prediction.astype(backend.policy.accumulate)
        small = xp.exp(-abs(wide))  # never overflows
        prediction[...] = xp.where(wide >= 0, 1 / (1 + small), small / (1 + small))
        return prediction


class Hinge(ElementwiseLoss):
    """The mean over the outputs of max(0, 1 - y · z), y being 1 for the class of the example and -1 for the others."""

    capturable = True
    kind = "hinge"


class Huber(ElementwiseLoss):
    """The mean over outputs of d²/2 if |d| <= delta, else delta · (|d| - delta/2), with d = z - t (Huber 1964)."""

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


def loss_of(loss: str | Loss) -> Loss:
    if isinstance(loss, str):
        return LOSSES[one_of("loss", loss, LOSSES)]()
    return instance("loss", loss, Loss, "SoftmaxNLL(), or the name of a loss")
