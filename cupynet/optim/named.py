from __future__ import annotations

from cupynet.core.checks import object_named
from cupynet.optim.adaptive import LAMB, AdaDelta, AdaGrad, Adam, AdaMax, AdamW, AMSGrad, Nadam, RMSProp
from cupynet.optim.optimizers import SGD, Momentum, Nesterov, Optimizer

KINDS = SGD, Momentum, Nesterov, Adam, AdamW, AMSGrad, AdaMax, Nadam, AdaGrad, AdaDelta, RMSProp, LAMB
OPTIMIZERS: dict[str, type[Optimizer]] = {kind.__name__.lower(): kind for kind in KINDS}


def optimizer_of(optimizer: Optimizer | str) -> Optimizer:
    """Return `optimizer`, or create one with default arguments from its name, such as `adam`."""
    return object_named("optimizer", optimizer, OPTIMIZERS, Optimizer, "Nesterov(0.01), or the name of an optimizer")
