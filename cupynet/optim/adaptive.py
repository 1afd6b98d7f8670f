"""Optimizers whose steps follow from the size of past gradients, weight by weight.

Means begin at zero and are corrected for that where the papers do so, by the number of iterations: those of the whole
training, counted in rounds, see `Optimizer.numbers`.
"""

from __future__ import annotations

import math

from cupynet.backend import RULES
from cupynet.core.checks import number
from cupynet.optim.optimizers import ByRule, Clipping, Numbers
from cupynet.optim.schedules import Schedule


class Adam(ByRule):
    """Adam (Kingma & Ba 2015), with epsilon outside of the root, as PyTorch and Deeplearning4j have it.

        m += (1 - beta1) · (g - m);    v += (1 - beta2) · (g² - v)
        w -= lr · m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

    t counts iterations from 1.

    Args:
        beta1, beta2: the fractions of the means of gradients and of their squares that are kept in an iteration.
        epsilon: keeps steps finite where gradients are almost zero.
        learning_rate, l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["adam"]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        super().__init__(learning_rate, l2, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)
        self.beta1, self.beta2 = self._fraction("beta1", beta1), self._fraction("beta2", beta2)
        self.epsilon = self._positive("epsilon", epsilon)
        self.factors = self._constants()

    def _constants(self) -> tuple[float, float, float]:
        return 1 - self.beta1, 1 - self.beta2, self.epsilon

    def numbers(self, iteration: int) -> Numbers:
        first, second = _correction(self.beta1, iteration), _correction(self.beta2, iteration)
        return self.learning_rate(iteration), first, math.sqrt(second), 1.0


class AdamW(Adam):
    """Adam with weight decay beside its step, not in the gradient (Loshchilov & Hutter 2019).

    Args:
        weight_decay: see `Optimizer`.
        beta1, beta2, epsilon, learning_rate and the others: see `Adam`.
    """

    recordable = True

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        max_grad_norm: float | None = None,
        *,
        weight_decay: float = 0.01,
        l1: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        means = (beta1, beta2, epsilon)
        super().__init__(learning_rate, *means, 0.0, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)


class AMSGrad(Adam):
    """Adam that divides by the largest mean of squares so far (Reddi et al. 2018), corrected as in PyTorch.

    Args:
        learning_rate, beta1, beta2, epsilon and the others: see `Adam`.
    """

    recordable = True
    rule = RULES["amsgrad"]


class AdaMax(Adam):
    """Adam that divides by u = max(beta2 · u, |g| + epsilon) in place of the root of a mean (Kingma & Ba 2015).

    Args:
        learning_rate, beta1, beta2, epsilon and the others: see `Adam`.
    """

    recordable = True
    rule = RULES["adamax"]

    def _constants(self) -> tuple[float, float, float]:
        return 1 - self.beta1, self.beta2, self.epsilon


class Nadam(Adam):
    """Adam with Nesterov's momentum (Dozat 2016), whose beta1 grows with the iterations t as in PyTorch and Keras.

        mu_t = beta1 · (1 - 0.96^(t · momentum_decay) / 2);    m and v as in Adam
        w -= lr · (mu_(t+1) · m / (1 - mu_1 ... mu_(t+1)) + (1 - mu_t) · g / (1 - mu_1 ... mu_t))
             / (sqrt(v / (1 - beta2^t)) + epsilon)

    Args:
        momentum_decay: how fast mu grows to beta1; 0: it is beta1/2 throughout.
        learning_rate, beta1, beta2, epsilon and the others: see `Adam`.
    """

    recordable = True
    rule = RULES["nadam"]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.002,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        momentum_decay: float = 0.004,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        penalties = (l2, max_grad_norm)
        super().__init__(learning_rate, beta1, beta2, epsilon, *penalties, l1=l1, weight_decay=weight_decay, **clipping)
        self.momentum_decay = number("Nadam momentum_decay", momentum_decay, minimum=0)
        self._product = (0, 1.0)  # iterations, and the product of mu over as many

    def numbers(self, iteration: int) -> Numbers:
        t = iteration + 1
        mu, following, product = self._mu(t), self._mu(t + 1), self._product_of(t)
        first, second = following / (1 - product * following), (1 - mu) / (1 - product)
        return self.learning_rate(iteration), first, second, math.sqrt(_correction(self.beta2, iteration))

    def _mu(self, t: int) -> float:
        return float(self.beta1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay)))

    def _product_of(self, t: int) -> float:
        """mu_1 ... mu_t: from the last one that was asked for, or from the beginning."""
        known, product = self._product if self._product[0] <= t else (0, 1.0)
        for each in range(known + 1, t + 1):
            product *= self._mu(each)
        self._product = t, product
        return product


class AdaGrad(ByRule):
    """w -= lr · g / (sqrt(sum of g²) + epsilon) (Duchi et al. 2011).

    Args:
        epsilon: keeps the first steps finite.
        learning_rate, l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["adagrad"]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        epsilon: float = 1e-10,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        super().__init__(learning_rate, l2, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)
        self.epsilon = self._positive("epsilon", epsilon)
        self.factors = (self.epsilon, 0.0, 0.0)


class RMSProp(ByRule):
    """s += (1 - decay) · (g² - s); w -= lr · g / (sqrt(s) + epsilon) (Tieleman & Hinton 2012).

    Args:
        decay: the fraction of the mean of squares that is kept in an iteration.
        epsilon: keeps steps finite where gradients are almost zero.
        learning_rate, l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["rmsprop"]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        decay: float = 0.95,
        epsilon: float = 1e-8,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        super().__init__(learning_rate, l2, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)
        self.decay, self.epsilon = self._fraction("decay", decay), self._positive("epsilon", epsilon)
        self.factors = (1 - self.decay, self.epsilon, 0.0)


class AdaDelta(ByRule):
    """Steps as large as the last ones, over gradients as large as the last ones (Zeiler 2012).

        s += (1 - rho) · (g² - s);    d = sqrt(u + epsilon) / sqrt(s + epsilon) · g;    u += (1 - rho) · (d² - u)
        w -= lr · d

    Args:
        learning_rate: a factor on the steps, 1 in the paper.
        rho: the fraction of both means that is kept in an iteration.
        epsilon: decides how large the first steps are.
        l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["adadelta"]

    def __init__(
        self,
        learning_rate: float | Schedule = 1.0,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        super().__init__(learning_rate, l2, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)
        self.rho, self.epsilon = self._fraction("rho", rho), self._positive("epsilon", epsilon)
        self.factors = (1 - self.rho, self.epsilon, 0.0)


def _correction(beta: float, iteration: int) -> float:
    """What a mean that began at zero is multiplied with after this iteration, which is counted from 0."""
    return 1 / (1 - beta ** (iteration + 1))
