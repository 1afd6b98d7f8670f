"""Optimizers that adapt the step of each weight to its past gradients. Moving averages start at zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cupynet.backend import RULES, Backend, Layers, UpdateScalars
from cupynet.core.checks import number
from cupynet.nn.params import Params, Segment
from cupynet.optim.optimizers import ElementwiseOptimizer, Numbers, fraction, positive


@dataclass(eq=False, repr=False)
class Adam(ElementwiseOptimizer):
    """Adam (Kingma & Ba 2015), with epsilon outside the square root, as in PyTorch and Deeplearning4j.

        m += (1 - beta1) · (g - m);    v += (1 - beta2) · (g² - v)
        w -= lr · m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)

    t counts the iterations of all fits, starting at 1. For the other arguments, see `Optimizer`.
    """

    capturable = True
    rule = RULES["adam"]
    learning_rate: Any = 0.001
    beta1: float = fraction(0.9)
    beta2: float = fraction(0.999)
    epsilon: float = positive(1e-8)

    def constants(self) -> tuple[float, float, float]:
        return 1 - self.beta1, 1 - self.beta2, self.epsilon

    def numbers(self, iteration: int) -> Numbers:
        first, second = _correction(self.beta1, iteration), _correction(self.beta2, iteration)
        return self.rate(iteration), first, math.sqrt(second), 1.0


@dataclass(eq=False, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019). See `Adam` and `Optimizer` for the arguments."""

    capturable = True
    l2: float = field(default=0.0, init=False)
    weight_decay: float = fraction(0.01, kw_only=True)


class AMSGrad(Adam):
    """Adam with the running maximum of v (Reddi et al. 2018), bias-corrected as in PyTorch. See `Adam`."""

    capturable = True
    rule = RULES["amsgrad"]


class AdaMax(Adam):
    """Adam with u = max(beta2 · u, |g| + epsilon) as the denominator (Kingma & Ba 2015). See `Adam`."""

    capturable = True
    rule = RULES["adamax"]

    def constants(self) -> tuple[float, float, float]:
        return 1 - self.beta1, self.beta2, self.epsilon


@dataclass(eq=False, repr=False)
class Nadam(Adam):
    """Adam with Nesterov momentum (Dozat 2016). As in PyTorch and Keras, momentum grows with the iteration t.

        mu_t = beta1 · (1 - 0.96^(t · momentum_decay) / 2);    m and v as in Adam
        w -= lr · (mu_(t+1) · m / (1 - mu_1 ... mu_(t+1)) + (1 - mu_t) · g / (1 - mu_1 ... mu_t))
             / (sqrt(v / (1 - beta2^t)) + epsilon)

    For the other arguments, see `Adam`.
    """

    capturable = True
    rule = RULES["nadam"]
    learning_rate: Any = 0.002
    momentum_decay: float = 0.004

    def __post_init__(self) -> None:
        super().__post_init__()
        self.momentum_decay = number("Nadam momentum_decay", self.momentum_decay, minimum=0)
        self._product = (0, 1.0)  # t, and mu_1 ... mu_t

    def numbers(self, iteration: int) -> Numbers:
        t = iteration + 1
        mu, following, product = self._mu(t), self._mu(t + 1), self._product_of(t)
        first, second = following / (1 - product * following), (1 - mu) / (1 - product)
        return self.rate(iteration), first, second, math.sqrt(_correction(self.beta2, iteration))

    def _mu(self, t: int) -> float:
        return float(self.beta1 * (1 - 0.5 * 0.96 ** (t * self.momentum_decay)))

    def _product_of(self, t: int) -> float:
        """Return mu_1 ... mu_t, reusing the last product if possible."""
        known, product = self._product if self._product[0] <= t else (0, 1.0)
        for each in range(known + 1, t + 1):
            product *= self._mu(each)
        self._product = t, product
        return product


@dataclass(eq=False, repr=False)
class AdaGrad(ElementwiseOptimizer):
    """AdaGrad (Duchi et al. 2011): w -= lr · g / (sqrt(sum of g²) + epsilon). See `Optimizer`."""

    capturable = True
    rule = RULES["adagrad"]
    learning_rate: Any = 0.01
    epsilon: float = positive(1e-10)

    def constants(self) -> tuple[float, float, float]:
        return self.epsilon, 0.0, 0.0


@dataclass(eq=False, repr=False)
class RMSProp(ElementwiseOptimizer):
    """RMSProp (Tieleman & Hinton 2012): s += (1 - decay) · (g² - s); w -= lr · g / (sqrt(s) + epsilon)."""

    capturable = True
    rule = RULES["rmsprop"]
    learning_rate: Any = 0.001
    decay: float = fraction(0.95)
    epsilon: float = positive(1e-8)

    def constants(self) -> tuple[float, float, float]:
        return 1 - self.decay, self.epsilon, 0.0


@dataclass(eq=False, repr=False)
class AdaDelta(ElementwiseOptimizer):
    """AdaDelta (Zeiler 2012): scales the gradient by the RMS of past steps over the RMS of past gradients.

        s += (1 - rho) · (g² - s);    d = sqrt(u + epsilon) / sqrt(s + epsilon) · g;    u += (1 - rho) · (d² - u)
        w -= lr · d

    The learning rate is 1 in the paper. `epsilon` determines the size of the first steps. See `Optimizer`.
    """

    capturable = True
    rule = RULES["adadelta"]
    learning_rate: Any = 1.0
    rho: float = fraction(0.95)
    epsilon: float = positive(1e-6)

    def constants(self) -> tuple[float, float, float]:
        return 1 - self.rho, self.epsilon, 0.0


def _correction(beta: float, iteration: int) -> float:
    """Return the bias correction of a moving average after iteration `iteration` (from 0)."""
    return 1 / (1 - beta ** (iteration + 1))


@dataclass(eq=False, repr=False)
class LAMB(Adam):
    """LAMB: Adam with a trust ratio for each weight array (You et al. 2020).

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay · w;    w -= lr · |w| / |r| · r

    The trust ratio |w| / |r| is 1 if |w| or |r| is zero. As in the authors' implementation, epsilon is 1e-6 by default,
    and parameters without weight decay, such as biases, are updated with Adam. See `Adam` for the arguments.
    """

    capturable = clips_norm = True
    _direction = RULES["lamb"]
    epsilon: float = positive(1e-6)
    l2: float = field(default=0.0, init=False)
    weight_decay: float = fraction(0.01, kw_only=True)

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        self._arrays: dict[int, Layers] = {}
        for segment in params.segments:
            inside = [(start, stop) for start, stop in params.places.values() if segment.start <= start < segment.stop]
            bounds = [(start - segment.start, stop - segment.start) for start, stop in inside]
            self._arrays[segment.start] = Layers(backend, bounds, range(len(bounds)))

    def update(self, params: Params, segment: Segment, scalars: UpdateScalars) -> bool | None:
        if not segment.decay:
            return super().update(params, segment, scalars)
        backend, part, arrays = self.backend, segment.part, self._arrays[segment.start]
        self._by(self._direction, params, segment, scalars, stored=False)
        weight, direction = params.master[part], params.grad[part]
        norms = backend.squared_norms(weight, arrays), backend.squared_norms(direction, arrays)
        backend.trust_weights(weight, direction, norms, arrays, scalars.rate, params.stored(part))
        return True
