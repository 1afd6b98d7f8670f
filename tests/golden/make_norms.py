"""Makes norms.npz with PyTorch: what normalisation makes of fixed numbers, in double. Run once, in this folder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS = 3
EPSILON = 1e-3


def drawn(seed: int, *shape: int) -> Any:
    return torch.tensor(np.random.default_rng(seed).normal(size=shape) * 1.5 + 0.7, dtype=torch.float64)


def channels_first(x: Any) -> Any:
    return x.permute(0, 3, 1, 2) if x.dim() == 4 else x


def channels_last(x: Any) -> Any:
    return x.permute(0, 2, 3, 1) if x.dim() == 4 else x


def batch_norm(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Some batches in training, then one in an evaluation."""
    of = torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d
    norm = of(shape[-1], eps=EPSILON, momentum=0.2, dtype=torch.float64)
    found: dict[str, Any] = {}
    with torch.no_grad():
        norm.weight.copy_(drawn(1, shape[-1]))
        norm.bias.copy_(drawn(2, shape[-1]))
    found["scale"], found["shift"] = norm.weight.detach().clone(), norm.bias.detach().clone()
    for step in range(STEPS):
        x, dy = drawn(10 + step, *shape).requires_grad_(), drawn(20 + step, *shape)
        norm.zero_grad()
        y = channels_last(norm(channels_first(x)))
        y.backward(dy)
        found |= {f"{name}{step}": value.clone() for name, value in {
            "x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad, "scale_grad": norm.weight.grad,
            "shift_grad": norm.bias.grad, "mean": norm.running_mean, "variance": norm.running_var,
        }.items()}  # fmt: skip
    norm.eval()
    found["inferred"] = channels_last(norm(channels_first(drawn(10, *shape)))).detach()
    return {f"{kind}.{name}": value.numpy() for name, value in found.items()}


def layer_norm(kind: str, shape: tuple[int, ...], over: int) -> dict[str, Any]:
    """over: how many of the last axes."""
    norm = torch.nn.LayerNorm(shape[-over:], eps=EPSILON, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(drawn(3, *shape[-over:]))
        norm.bias.copy_(drawn(4, *shape[-over:]))
    x, dy = drawn(5, *shape).requires_grad_(), drawn(6, *shape)
    y = norm(x)
    y.backward(dy)
    found = {
        "scale": norm.weight, "shift": norm.bias, "x": x, "dy": dy, "y": y, "dx": x.grad,
        "scale_grad": norm.weight.grad, "shift_grad": norm.bias.grad,
    }  # fmt: skip
    return {f"{kind}.{name}": value.detach().numpy() for name, value in found.items()}


if __name__ == "__main__":
    arrays = {
        **batch_norm("images", (4, 3, 5, 6)),
        **batch_norm("vectors", (7, 5)),
        **layer_norm("features", (3, 4, 2, 5), 3),
        **layer_norm("channels", (3, 4, 2, 5), 1),
        **layer_norm("flat features", (3, 9), 1),
    }
    np.savez_compressed(Path(__file__).with_name("norms.npz"), **arrays)
