"""Makes tests/golden/torch_{small,norms}.safetensors and torch_logits.npz with PyTorch, in this folder.

A small network in double, and one with normalisation in float that was trained for some steps, as torch.nn.Sequential
keeps them, and their logits for images of whole numbers. Made with torch 2.13.0 and safetensors 0.8.0, which the tests
that read them do not need.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 4, (3, 2)),  # 9 x 8 -> 7 x 7
        nn.ReLU(),
        nn.MaxPool2d(2),  # -> 3 x 3
        nn.Conv2d(4, 5, 2, bias=False),  # -> 2 x 2
        nn.Flatten(),
        nn.Linear(20, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ).double()


def normalised(x: torch.Tensor) -> nn.Sequential:
    """Trained on these images for a few steps, so that running statistics are of something."""
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),  # 9 x 8 -> 7 x 6
        nn.BatchNorm2d(6, eps=1e-3),
        nn.ReLU(),
        nn.MaxPool2d(2),  # -> 3 x 3
        nn.LayerNorm((6, 3, 3)),
        nn.Flatten(),
        nn.BatchNorm1d(54),  # of values in the order C, H, W
        nn.Linear(54, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    labels = torch.arange(len(x)) % 3
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimizer.step()
    return net.eval()


if __name__ == "__main__":
    folder, net = Path(__file__).parent, network()
    images = np.random.default_rng(6).integers(0, 256, (7, 9, 8, 3), np.uint8)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
    norms = normalised(x.float())
    with torch.no_grad():
        logits, of_norms = net(x), norms(x.float())
    save_file(net.state_dict(), folder / "torch_small.safetensors")
    save_file(norms.state_dict(), folder / "torch_norms.safetensors")
    np.savez(folder / "torch_logits.npz", images=images, logits=logits.numpy(), of_norms=of_norms.numpy())
