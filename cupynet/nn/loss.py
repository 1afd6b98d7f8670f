"""Losses: what training minimises."""

from __future__ import annotations

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.errors import ConfigError


class Loss:
    """A function of predictions and targets, with its gradient.

    Attributes:
        recordable: see `Layer`.
    """

    recordable = False

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        """The loss of each example (N,), on the device; the gradient of their mean, times the policy's loss scale."""
        raise NotImplementedError

    def scores(self, backend: Backend, prediction: Array) -> Array:
        """What a user wants to see of a network's raw output: probabilities, say. In place."""
        raise NotImplementedError


class SoftmaxNLL(Loss):
    """Negative log-likelihood of softmax(logits): softmax and logarithm in one, so that neither overflows.

    The network ends in logits z (activation identity). The loss is -log softmax(z)[label], the gradient of the mean
    (softmax(z) - onehot) / N. Deeplearning4j's OutputLayer with softmax and NEGATIVELOGLIKELIHOOD.
    """

    recordable = True

    def __call__(self, backend: Backend, prediction: Array, target: Array) -> tuple[Array, Array]:
        """prediction: (N, O) logits, target: (N,) class numbers -> (N,), (N, O)."""
        if prediction.ndim != 2:
            raise ConfigError(f"SoftmaxNLL needs logits (N, O), got {prediction.shape}: end in a Dense layer")
        return backend.softmax_cross_entropy(prediction, target)

    def scores(self, backend: Backend, prediction: Array) -> Array:
        """(N, O) logits -> probabilities."""
        return backend.softmax(prediction)
