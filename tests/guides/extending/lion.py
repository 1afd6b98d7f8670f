"""An optimizer: Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms")."""

from cupynet.backend import Rule
from cupynet.optim import ByRule


def step(xp, move, g, mean):
    """Return what the weights go down by, for the slope g; `mean` is the optimizer's own vector."""
    beta1, beta2, _ = move.factors
    direction = xp.sign(beta1 * mean + (1 - beta1) * g)
    mean *= beta2
    mean += (1 - beta2) * g
    return move.rate * direction


class Lion(ByRule):
    """w -= lr · sign(beta1 · m + (1 - beta1) · g); m = beta2 · m + (1 - beta2) · g."""

    rule = Rule("lion", ("mean",), step)

    def __init__(self, learning_rate=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(learning_rate, weight_decay=weight_decay)
        self.factors = (beta1, beta2, 0.0)
