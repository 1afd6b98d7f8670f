"""Optimizers over flat vectors, and learning-rate schedules."""

from cupynet.optim.adaptive import AdaDelta, AdaGrad, Adam, AdaMax, AdamW, AMSGrad, Nadam, RMSProp
from cupynet.optim.lamb import LAMB
from cupynet.optim.optimizers import SGD, Momentum, Nesterov, Optimizer
from cupynet.optim.schedules import Constant, OneCycle, Scaled, Schedule, scale_factor

__all__ = [
    "LAMB",
    "SGD",
    "AMSGrad",
    "AdaDelta",
    "AdaGrad",
    "AdaMax",
    "Adam",
    "AdamW",
    "Constant",
    "Momentum",
    "Nadam",
    "Nesterov",
    "OneCycle",
    "Optimizer",
    "RMSProp",
    "Scaled",
    "Schedule",
    "scale_factor",
]
