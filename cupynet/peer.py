"""PyTorch on the tutorials' LeNet, for `cupynet.bench` to compare with: `python -m cupynet.peer --threads 2`.

The only file that imports torch, run in a process of its own. Forward, backward and Nesterov update on resident data,
nothing else: no loading, no shuffling, no logging. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Measure PyTorch's training step of LeNet on the CPU.")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--layout", choices=["contiguous", "channels_last"], default="channels_last")
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.threads, arguments.batch, arguments.layout, arguments.seconds)))


def measure(threads: int, batch: int, layout: str, seconds: float) -> dict[str, object]:
    """Images per second, from the median step of `seconds` of training after a warm-up."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    convolutions = (nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2))
    network = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10))
    network = network.to(memory_format=memory_format)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, foreach=True)
    images = torch.rand(batch, 1, 28, 28).to(memory_format=memory_format)
    labels = torch.randint(0, 10, (batch,))

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
        return time.perf_counter() - began

    for _ in range(10):
        step()
    times: list[float] = []
    while sum(times) < seconds:
        times.append(step())
    median = statistics.median(times)
    return {"version": torch.__version__, "step_ms": median * 1e3, "images_per_s": batch / median}


if __name__ == "__main__":
    main()
