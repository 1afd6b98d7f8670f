"""Reference implementation of activations.

Pointwise activations are computed in accumulation precision, with formulas that neither overflow nor lose precision for
large |x|. Derivatives are functions of the output y, or of the input x (`OF_INPUT`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from cupynet.backend.array import Array
from cupynet.backend.device import Device

Function: TypeAlias = Callable[[Any, Array, float], Array]

# W. J. Cody 1969, "Rational Chebyshev approximations for the error function". NEAR: erf(z) / z in z², up to 0.46875.
# MIDDLE: exp(z²) erfc(z) in z, up to 4. FAR: (1 / (z sqrt(pi)) - exp(z²) erfc(z)) · z³, in 1 / z². The highest power
# comes first.
NEAR = (
    (1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)
MIDDLE = (
    (
        2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
        2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
        1.23033935479799725e3,
    ),
    (
        1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
        3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3,
    ),
)  # fmt: skip
FAR = (
    (
        1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
        1.60837851487422766e-2, 6.58749161529837803e-4,
    ),
    (
        1.0, 2.56852019228982242, 1.87295284992346725, 5.27905102951428412e-1, 6.05183413124413191e-2,
        2.33520497626869185e-3,
    ),
)  # fmt: skip
FIRST, SECOND, LAST = 0.46875, 4.0, 30.0  # exp(-30²) is 0 in double


def _polynomial(x: Array, coefficients: tuple[float, ...]) -> Array:
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total = (total + coefficient) * x
    return total + coefficients[-1]


def _ratio(x: Array, of: tuple[tuple[float, ...], tuple[float, ...]]) -> Array:
    return _polynomial(x, of[0]) / _polynomial(x, of[1])


def erfc(xp: Any, z: Array) -> Array:
    """Return erfc(z) for z >= 0, with a relative error of at most max(8, z²) times the machine epsilon."""
    near, middle = xp.minimum(z, FIRST), xp.minimum(xp.maximum(z, FIRST), SECOND)
    far = xp.minimum(xp.maximum(z, SECOND), LAST)
    small, inverse = 1 - near * _ratio(near * near, NEAR), 1 / (far * far)
    tail = xp.exp(-far * far) / far * (1 / math.sqrt(math.pi) - inverse * _ratio(inverse, FAR))
    large = xp.where(z <= SECOND, xp.exp(-middle * middle) * _ratio(middle, MIDDLE), tail)
    return xp.where(z <= FIRST, small, large)


def normal_cdf(xp: Any, x: Array) -> Array:
    half = erfc(xp, abs(x) * math.sqrt(0.5)) * 0.5
    return xp.where(x > 0, 1 - half, half)


def _sigmoid(xp: Any, x: Array) -> Array:
    small = xp.exp(-abs(x))
    return xp.where(x < 0, small, 1) / (1 + small)


def _gelu_slope(xp: Any, x: Array) -> Array:
    bounded = xp.minimum(abs(x), LAST * 2)
    return normal_cdf(xp, x) + x * xp.exp(bounded * bounded * -0.5) * (1 / math.sqrt(2 * math.pi))


@dataclass(frozen=True)
class Pointwise:
    """Activation: y = forward(xp, x, slope) and dy/dx = derivative(xp, kept, slope), where kept is y or x."""

    forward: Function
    derivative: Function


# in the order of the enumeration in cuda/kernels/activation.cu
POINTWISE = {
    "leaky_relu": Pointwise(
        lambda xp, x, slope: xp.where(x > 0, x, x * slope),
        lambda xp, y, slope: xp.where(y > 0, y.dtype.type(1), y.dtype.type(slope)),
    ),
    "elu": Pointwise(
        lambda xp, x, _: xp.where(x > 0, x, xp.expm1(xp.minimum(x, 0))),
        lambda xp, y, _: xp.where(y > 0, y.dtype.type(1), y + 1),
    ),
    "tanh": Pointwise(lambda xp, x, _: xp.tanh(x), lambda xp, y, _: 1 - y * y),
    "sigmoid": Pointwise(lambda xp, x, _: _sigmoid(xp, x), lambda xp, y, _: y * (1 - y)),
    "softplus": Pointwise(
        lambda xp, x, _: xp.maximum(x, 0) + xp.log1p(xp.exp(-abs(x))), lambda xp, y, _: -xp.expm1(-y)
    ),
    "gelu": Pointwise(lambda xp, x, _: x * normal_cdf(xp, x), lambda xp, x, _: _gelu_slope(xp, x)),
    "silu": Pointwise(
        lambda xp, x, _: x * _sigmoid(xp, x), lambda xp, x, _: _sigmoid(xp, x) * (1 + x * _sigmoid(xp, -x))
    ),
}
NAMES = tuple(POINTWISE)
OF_INPUT = ("gelu", "silu")  # y does not determine x, so the derivative needs x


class ActivationOps(Device):
    def add(self, a: Array, b: Array, out: Array) -> Array:
        """Compute out = a + b, and return `out`, which may be a."""
        return self.xp.add(a, b, out=out)

    def relu(self, x: Array) -> Array:
        """Compute max(x, 0) in place."""
        return self.xp.maximum(x, 0, out=x)

    def relu_backward(self, dy: Array, y: Array) -> Array:
        """Set dy to 0 in place wherever the output y is not positive."""
        self.xp.copyto(dy, dy.dtype.type(0), where=~(y > 0))  # not a product, because 0 times NaN is NaN
        return dy

    def softmax(self, x: Array) -> Array:
        """Compute exp(x) / sum(exp(x)) over the last axis of (..., O), in place, without overflow."""
        wide = x.astype(self.policy.accumulate)
        wide -= wide.max(axis=-1, keepdims=True)
        self.xp.exp(wide, out=wide)
        wide /= wide.sum(axis=-1, keepdims=True)
        x[...] = wide
        return x

    def softmax_backward(self, dy: Array, y: Array) -> Array:
        """Compute y · (dy - sum(dy · y)) over the last axis of (..., O), in place in dy."""
        wide = dy.astype(self.policy.accumulate)
        wide -= (wide * y).sum(axis=-1, keepdims=True)
        wide *= y
        dy[...] = wide
        return dy

    def pointwise(self, name: str, x: Array, out: Array, slope: float = 0.0) -> Array:
        """Compute out = activation(x) for a name in `POINTWISE`, and return `out`, which may be x."""
        out[...] = POINTWISE[name].forward(self.xp, x.astype(self.policy.accumulate), slope)
        return out

    def pointwise_backward(self, name: str, dy: Array, kept: Array, slope: float = 0.0) -> Array:
        """Multiply dy by the derivative of the activation, in place. kept: y, or x for `OF_INPUT`."""
        factor = POINTWISE[name].derivative(self.xp, kept.astype(self.policy.accumulate), slope)
        dy[...] = dy * factor
        return dy
