"""Makes tests/golden/optim.npz with PyTorch, a source independent of this project: python tests/golden/make_optim.py.

Weights after up to 50 steps of its optimizers in double, from gradients that are drawn once, and its learning-rate
schedules over 50 iterations. Made with torch 2.13.0, which the tests that read it do not need.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler

STEPS, SIZE, RATE = 50, 24, 0.05
KEPT = [0, 1, 4, 9, 24, 49]  # steps after which weights are kept
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.8),
    "nesterov": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.8, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.8, 0.95)),
    "adam, l2": lambda p: torch.optim.Adam(p, lr=RATE, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=RATE, betas=(0.8, 0.9), amsgrad=True),
    "adamax": lambda p: torch.optim.Adamax(p, lr=RATE),
    "nadam": lambda p: torch.optim.NAdam(p, lr=RATE),
    "nadam, decayed": lambda p: torch.optim.NAdam(p, lr=RATE, weight_decay=0.1, decoupled_weight_decay=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=RATE),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=RATE, alpha=0.9),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, rho=0.9),
}
CLIPPED: dict[str, Callable[[Any], Any]] = {
    "value": lambda p: torch.nn.utils.clip_grad_value_(p, 0.4),
    "norm": lambda p: torch.nn.utils.clip_grad_norm_(p, 2.0),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 7, 0.5),
    "map": lambda o: lr_scheduler.MultiStepLR(o, [5, 20], 0.1),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS - 1, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS - 1, eta_min=0.01),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10, 2, eta_min=0.01),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.ExponentialLR(o, 0.9)],
        [10],
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(
        o, RATE, STEPS, pct_start=11 / STEPS, div_factor=25, final_div_factor=40
    ),
}


def trained(optimizer: Callable[[Any], torch.optim.Optimizer], clip: Any, start: Any, gradients: Any) -> np.ndarray:
    weight = torch.from_numpy(start.copy()).requires_grad_()
    own, found = optimizer([weight]), []
    for gradient in gradients:
        weight.grad = torch.from_numpy(gradient.copy())
        if clip is not None:
            clip([weight])
        own.step()
        found.append(weight.detach().numpy().copy())
    return np.array(found)[KEPT]


def rates(make: Callable[[Any], Any]) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    schedule, found = make(optimizer), []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


def plateau(losses: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    schedule, found = lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, 3, 0.02, "abs", 2, 0.004), []
    for loss in losses:
        schedule.step(loss)
        found.append(float(optimizer.param_groups[0]["lr"]))
    return found


def make() -> dict[str, Any]:
    rng = np.random.default_rng(77)
    start = rng.normal(size=SIZE)
    gradients = rng.normal(size=(STEPS, SIZE)) * 10.0 ** rng.integers(-2, 1, SIZE)
    losses = 1 / (1 + np.arange(STEPS) // 4) + 0.05 * rng.normal(size=STEPS)
    golden = {"start": start, "gradients": gradients, "losses": losses, "plateau": np.array(plateau(losses))}
    golden |= {f"optimizer/{name}": trained(each, None, start, gradients) for name, each in OPTIMIZERS.items()}
    golden |= {
        f"clipped/{name}": trained(OPTIMIZERS["momentum"], clip, start, gradients) for name, clip in CLIPPED.items()
    }
    return golden | {f"schedule/{name}": np.array(rates(each)) for name, each in SCHEDULES.items()}


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).parent / "optim.npz", **make())
