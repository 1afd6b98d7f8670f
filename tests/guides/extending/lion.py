"""An optimizer: Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

import numpy as np

from cupynet.backend import Rule
from cupynet.optim import ElementwiseOptimizer


def lion(numbers, g, mean):
    """Return the step, which is subtracted from the weights, and the new mean. g: the gradient."""
    rate, _, _, _, beta1, beta2, _ = numbers
    return rate * np.sign(beta1 * mean + (1 - beta1) * g), beta2 * mean + (1 - beta2) * g


class Lion(ElementwiseOptimizer):
    """w -= lr · sign(beta1 · m + (1 - beta1) · g); m = beta2 · m + (1 - beta2) · g."""

    rule = Rule(lion, ("mean",))

    def __init__(self, learning_rate=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(learning_rate, weight_decay=weight_decay)
        self.factors = (beta1, beta2, 0.0)
