"""Optimizers over flat vectors, and learning-rate schedules."""

from cupynet.optim.optimizers import SGD, Momentum, Nesterov, Optimizer
from cupynet.optim.schedules import Constant, OneCycle, Schedule

__all__ = ["SGD", "Constant", "Momentum", "Nesterov", "OneCycle", "Optimizer", "Schedule"]
