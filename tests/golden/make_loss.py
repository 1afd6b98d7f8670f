"""Makes tests/golden/loss.npz with PyTorch, a source independent of this project: python tests/golden/make_loss.py.

Losses of each example in double, and the gradient of their mean, of one set of outputs and labels; and of the same
outputs and targets from 0 to 1, whose last column weighs the examples. Made with torch 2.13.0, which the tests that
read it do not need. A mean is over the number of examples, whatever they and the classes weigh.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

N, CLASSES = 9, 5
WEIGHTS = [0.5, 1.0, 2.0, 0.0, 1.5]


def each(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean(dim=1)


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": lambda z, y, t: functional.cross_entropy(z, y, reduction="none"),
    "smoothed": lambda z, y, t: functional.cross_entropy(z, y, reduction="none", label_smoothing=0.1),
    "weighted": lambda z, y, t: functional.cross_entropy(
        z, y, torch.tensor(WEIGHTS, dtype=torch.double), reduction="none"
    ),
    "both": lambda z, y, t: functional.cross_entropy(
        z, y, torch.tensor(WEIGHTS, dtype=torch.double), reduction="none", label_smoothing=0.2
    ),
    "squared": lambda z, y, t: each(functional.mse_loss(z, t, reduction="none")),
    "logistic": lambda z, y, t: each(functional.binary_cross_entropy_with_logits(z, t, reduction="none")),
    "hinge": lambda z, y, t: each(torch.clamp(1 - (2 * t - 1) * z, min=0)),
    "huber": lambda z, y, t: each(functional.huber_loss(z, t, reduction="none", delta=1.0)),
    "huber, narrow": lambda z, y, t: each(functional.huber_loss(z, t, reduction="none", delta=0.25)),
}
TARGET_LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "soft": lambda z, t: functional.cross_entropy(z, t, reduction="none"),
    "soft, both": lambda z, t: functional.cross_entropy(
        z, t, torch.tensor(WEIGHTS, dtype=torch.double), reduction="none", label_smoothing=0.2
    ),
    **{name: partial(LOSSES[name], y=None) for name in ("squared", "logistic", "hinge", "huber")},
}


def make() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    outputs, labels = rng.normal(0, 3, (N, CLASSES)), rng.integers(0, CLASSES, N)
    outputs[0] = [800, -800, 0.25, -0.5, 30]
    golden = {"outputs": outputs, "labels": labels}
    y = torch.from_numpy(labels)
    target = functional.one_hot(y, CLASSES).double()
    for name, loss in LOSSES.items():
        z = torch.from_numpy(outputs.copy()).requires_grad_()
        losses = loss(z, y, target)
        losses.mean().backward()
        golden[f"{name}/losses"], golden[f"{name}/gradient"] = losses.detach().numpy(), z.grad.numpy()
    targets = rng.uniform(0, 1, (N, CLASSES + 1)).astype(np.float32).astype(float)
    golden["targets"] = targets
    for name, target_loss in TARGET_LOSSES.items():
        z, weights = torch.from_numpy(outputs.copy()).requires_grad_(), torch.from_numpy(targets[:, CLASSES])
        target = torch.from_numpy(targets[:, :CLASSES])
        losses = target_loss(z, t=target) * weights
        losses.mean().backward()
        golden[f"targets, {name}/losses"], golden[f"targets, {name}/gradient"] = losses.detach().numpy(), z.grad.numpy()
    return golden


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).parent / "loss.npz", **make())
