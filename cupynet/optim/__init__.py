"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from cupynet.core.checks import named
from cupynet.optim.adaptive import LAMB, AdaDelta, AdaGrad, Adam, AdaMax, AdamW, AMSGrad, Nadam, RMSProp
from cupynet.optim.counted import ExponentialDecay, InverseTimeDecay, PiecewiseConstant, SigmoidDecay, StepDecay
from cupynet.optim.optimizers import SGD, ElementwiseOptimizer, Momentum, Nesterov, Optimizer
from cupynet.optim.plateau import ReduceOnPlateau
from cupynet.optim.schedules import Constant, Cosine, OneCycle, Polynomial, Scaled, Schedule, Warmup, scale_factor

__all__ = [
    "ElementwiseOptimizer",
    "AMSGrad",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LAMB",
    "PiecewiseConstant",
    "Momentum",
    "Nadam",
    "Nesterov",
    "OneCycle",
    "Optimizer",
    "Polynomial",
    "RMSProp",
    "ReduceOnPlateau",
    "SGD",
    "Scaled",
    "Schedule",
    "SigmoidDecay",
    "StepDecay",
    "Warmup",
    "optimizer_of",
    "scale_factor",
]

KINDS = SGD, Momentum, Nesterov, Adam, AdamW, AMSGrad, AdaMax, Nadam, AdaGrad, AdaDelta, RMSProp, LAMB
OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__.lower(): kind for kind in KINDS}


def optimizer_of(optimizer: Optimizer | str) -> Optimizer:
    """Return the named optimizer, such as `adam`, with default arguments, or the given optimizer."""
    return named("optimizer", optimizer, OPTIMIZERS, Optimizer, "Nesterov(0.01), or the name of an optimizer")
