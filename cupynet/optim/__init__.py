"""Optimizers over flat vectors, and learning-rate schedules."""

from cupynet.optim.optimizers import SGD, Momentum, Nesterov, Optimizer
from cupynet.optim.schedules import Constant, OneCycle, Scaled, Schedule, scale_factor

__all__ = ["SGD", "Constant", "Momentum", "Nesterov", "OneCycle", "Optimizer", "Scaled", "Schedule", "scale_factor"]
