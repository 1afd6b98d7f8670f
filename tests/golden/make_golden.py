"""Makes tests/golden/lenet.npz with PyTorch, a source independent of this project: python tests/golden/make_golden.py.

A small LeNet in double: logits, losses, gradients, and the weights after each of three Nesterov steps with weight decay
on weights, not on biases. Made with torch 2.13.0, which the tests that read it do not need.
Arrays are in the layouts of this project: images (N, H, W, C), weights of convolutions (K, K, C, O), of dense (F, O).
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

LEARNING_RATE, MOMENTUM, L2, STEPS, BATCH = 0.05, 0.9, 0.02, 3, 5
SHAPES = {
    "conv1.weight": (3, 3, 2, 3),
    "conv1.bias": (3,),
    "conv2.weight": (2, 2, 3, 4),
    "conv2.bias": (4,),
    "dense1.weight": (16, 6),
    "dense1.bias": (6,),
    "output.weight": (6, 3),
    "output.bias": (3,),
}


def to_torch(name: str, value: Any) -> torch.Tensor:
    order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]  # (K, K, C, O) -> (O, C, K, K); (F, O) -> (O, F)
    return torch.from_numpy(value.transpose(order).copy())


def from_torch(value: torch.Tensor) -> Any:
    order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[value.ndim]
    return value.detach().numpy().transpose(order).copy()


def network(weights: dict[str, torch.Tensor], images: torch.Tensor) -> torch.Tensor:
    x = images.permute(0, 3, 1, 2)
    x = functional.conv2d(x, weights["conv1.weight"], weights["conv1.bias"])  # 9 x 10 -> 7 x 8
    x = functional.max_pool2d(x, 3, 2)  # -> 3 x 3
    x = functional.conv2d(x, weights["conv2.weight"], weights["conv2.bias"], padding=1)  # -> 4 x 4
    x = functional.max_pool2d(functional.relu(x), 2)  # -> 2 x 2
    x = x.permute(0, 2, 3, 1).flatten(1)  # in the order H, W, C
    x = functional.relu(functional.linear(x, weights["dense1.weight"], weights["dense1.bias"]))
    return functional.linear(x, weights["output.weight"], weights["output.bias"])


def make() -> dict[str, Any]:
    rng = np.random.default_rng(2024)
    start = {name: rng.normal(0, 0.4, shape) for name, shape in SHAPES.items()}
    images, labels = rng.normal(size=(STEPS, BATCH, 9, 10, 2)), rng.integers(0, 3, (STEPS, BATCH))
    weights = {name: to_torch(name, value).requires_grad_() for name, value in start.items()}
    groups = [
        {"params": [w for name, w in weights.items() if name.endswith(kind)], "weight_decay": decay}
        for kind, decay in (("weight", L2), ("bias", 0.0))
    ]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=MOMENTUM, nesterov=True)
    golden = {"images": images, "labels": labels, **{f"start/{name}": value for name, value in start.items()}}
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = network(weights, torch.from_numpy(images[step]))
        losses = functional.cross_entropy(logits, torch.from_numpy(labels[step]), reduction="none")
        losses.mean().backward()
        golden[f"logits/{step}"], golden[f"losses/{step}"] = logits.detach().numpy(), losses.detach().numpy()
        golden |= {f"gradient/{step}/{name}": from_torch(w.grad) for name, w in weights.items()}
        optimizer.step()
        golden |= {f"after/{step}/{name}": from_torch(w) for name, w in weights.items()}
    return golden


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).with_name("lenet.npz"), **make())
