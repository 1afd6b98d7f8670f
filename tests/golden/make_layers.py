"""Makes tests/golden/layers.npz with PyTorch, a source independent of this project: python tests/golden/make_layers.py.

Outputs and gradients in double of single layers over a spread of windows: convolutions with stride, padding, dilation
and groups, pools with padding, activations. Made with torch 2.13.0, which the tests that read it do not need. Arrays
are in the layouts of this project: images (N, H, W, C), weights of convolutions (K_h, K_w, C / groups, O).

`convolution`, `pool` and `activation` are what a test with PyTorch at hand compares with, too.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

# filters, kernel, stride, padding, dilation, groups; images (H, W, C)
CONVOLUTIONS: dict[str, Any] = {
    "plain": ((5, (3, 3), (1, 1), (0, 0), (1, 1), 1), (6, 7, 3)),
    "strides": ((4, (3, 2), (2, 3), (1, 0), (1, 1), 1), (8, 7, 2)),
    "gaps": ((3, (3, 2), (1, 1), (2, 3), (2, 3), 1), (7, 6, 2)),
    "gaps and strides": ((3, (2, 3), (2, 1), (0, 2), (3, 2), 1), (9, 8, 1)),
    "groups": ((6, (3, 3), (1, 1), (1, 1), (1, 1), 3), (5, 6, 6)),
    "groups, strides and gaps": ((4, (2, 2), (2, 2), (1, 1), (2, 1), 2), (7, 8, 4)),
    "depthwise": ((5, (3, 3), (1, 1), (1, 1), (1, 1), 5), (6, 5, 5)),
    "depthwise, two filters each": ((6, (3, 2), (2, 1), (2, 1), (2, 2), 3), (7, 6, 3)),
    "one pixel": ((4, (1, 1), (2, 2), (0, 0), (1, 1), 1), (5, 4, 3)),
}
# kernel, stride, padding
POOLS: dict[str, Any] = {
    "apart": (((2, 2), (2, 2), (0, 0)), (6, 7, 2)),
    "overlapping": (((3, 2), (1, 2), (0, 0)), (5, 6, 3)),
    "padded": (((3, 3), (2, 2), (1, 1)), (7, 6, 2)),
    "padded on two sides": (((2, 4), (2, 1), (0, 2)), (6, 5, 1)),
}
ACTIVATIONS: dict[str, Any] = {
    "relu": functional.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.01),
    "elu": functional.elu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": lambda x: functional.softplus(x, threshold=1e9),  # its formula everywhere
}


def images(x: Any) -> torch.Tensor:
    return torch.from_numpy(x.transpose(0, 3, 1, 2).copy()).requires_grad_()


def back(x: torch.Tensor) -> Any:
    return x.detach().numpy().transpose(0, 2, 3, 1).copy()


def convolution(x: Any, weight: Any, bias: Any, dy_seed: int, settings: Any) -> dict[str, Any]:
    """y, and for a dy drawn from `dy_seed` dx and the gradients of weight and bias."""
    _, _, stride, padding, dilation, groups = settings
    given, b = images(x), torch.from_numpy(bias.copy()).requires_grad_()
    w = torch.from_numpy(weight.transpose(3, 2, 0, 1).copy()).requires_grad_()
    y = functional.conv2d(given, w, b, stride, padding, dilation, groups)
    dy = np.random.default_rng(dy_seed).normal(size=back(y).shape)
    y.backward(torch.from_numpy(dy.transpose(0, 3, 1, 2).copy()))
    return {
        "y": back(y),
        "dy": dy,
        "dx": back(given.grad),
        "dw": w.grad.numpy().transpose(2, 3, 1, 0).copy(),
        "db": b.grad.numpy(),
    }


def pool(kind: str, x: Any, dy_seed: int, settings: Any) -> dict[str, Any]:
    """y, and for a dy drawn from `dy_seed` dx, of `max` or `avg`."""
    kernel, stride, padding = settings
    given = images(x)
    if kind == "max":
        y = functional.max_pool2d(given, kernel, stride, padding)
    else:
        y = functional.avg_pool2d(given, kernel, stride, padding, count_include_pad=False)
    dy = np.random.default_rng(dy_seed).normal(size=back(y).shape)
    y.backward(torch.from_numpy(dy.transpose(0, 3, 1, 2).copy()))
    return {"y": back(y), "dy": dy, "dx": back(given.grad)}


def activation(name: str, x: Any) -> dict[str, Any]:
    given = torch.from_numpy(x.copy()).requires_grad_()
    y = ACTIVATIONS[name](given)
    y.sum().backward()
    return {"y": y.detach().numpy(), "slope": given.grad.numpy()}


def drawn(settings: Any, image: tuple[int, int, int], seed: int) -> tuple[Any, Any, Any]:
    filters, kernel, _, _, _, groups = settings
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(*kernel, image[2] // groups, filters))
    return rng.normal(size=(2, *image)), weight, rng.normal(size=filters)


def make() -> dict[str, Any]:
    golden: dict[str, Any] = {}
    for seed, (case, (settings, image)) in enumerate(CONVOLUTIONS.items()):
        x, weight, bias = drawn(settings, image, seed)
        found = {"x": x, "weight": weight, "bias": bias, **convolution(x, weight, bias, 100 + seed, settings)}
        golden |= {f"convolution/{case}/{name}": value for name, value in found.items()}
    for seed, (case, (settings, image)) in enumerate(POOLS.items()):
        x = np.random.default_rng(200 + seed).normal(size=(2, *image)) - 3  # zeros around it would be the largest
        for kind in ("max", "avg"):
            found = {"x": x, **pool(kind, x, 300 + seed, settings)}
            golden |= {f"{kind}/{case}/{name}": value for name, value in found.items()}
    x = np.concatenate([np.linspace(-6, 6, 97), [-40.0, 40.0, 1e-6, -1e-6]])
    golden["x"] = x
    for name in ACTIVATIONS:
        golden |= {f"activation/{name}/{key}": value for key, value in activation(name, x).items()}
    return golden


if __name__ == "__main__":
    np.savez_compressed(Path(__file__).with_name("layers.npz"), **make())
