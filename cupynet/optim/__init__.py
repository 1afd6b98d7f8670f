"""Optimizers over flat vectors, and learning-rate schedules."""

from cupynet.optim.adaptive import LAMB, AdaDelta, AdaGrad, Adam, AdaMax, AdamW, AMSGrad, Nadam, RMSProp
from cupynet.optim.counted import Exponential, Inverse, Map, Sigmoid, Step
from cupynet.optim.optimizers import SGD, ByRule, Momentum, Nesterov, Optimizer
from cupynet.optim.plateau import ReduceOnPlateau
from cupynet.optim.schedules import Constant, Cosine, OneCycle, Polynomial, Scaled, Schedule, Warmup, scale_factor

__all__ = [
    "ByRule",
    "AMSGrad",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adam",
    "AdamW",
    "Constant",
    "Cosine",
    "Exponential",
    "Inverse",
    "LAMB",
    "Map",
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
    "Sigmoid",
    "Step",
    "Warmup",
    "scale_factor",
]
