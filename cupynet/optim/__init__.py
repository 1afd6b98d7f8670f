"""Optimizers and learning-rate schedules."""

from cupynet.optim.adaptive import LAMB, AdaDelta, AdaGrad, Adam, AdaMax, AdamW, AMSGrad, Nadam, RMSProp
from cupynet.optim.counted import ExponentialDecay, InverseTimeDecay, PiecewiseConstant, SigmoidDecay, StepDecay
from cupynet.optim.named import optimizer_of
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
