"""Makes tests/golden/torch_small.safetensors and torch_logits.npz with PyTorch, in this folder.

A small torch.nn.Sequential in double precision, and its logits for integer images. Made with torch 2.13.0 and
safetensors 0.8.0; the tests need neither.
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


if __name__ == "__main__":
    folder, net = Path(__file__).parent, network()
    images = np.random.default_rng(6).integers(0, 256, (7, 9, 8, 3), np.uint8)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255
    with torch.no_grad():
        logits = net(x)
    save_file(net.state_dict(), folder / "torch_small.safetensors")
    np.savez(folder / "torch_logits.npz", images=images, logits=logits.numpy())
