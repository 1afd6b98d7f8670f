"""A rough estimate of a run's memory, to refuse settings that cannot fit into this machine.

It is a lower bound: the layers' outputs, the im2col rows of convolutions, weights with gradients and optimizer
state, prefetched batches, and images.
"""

from __future__ import annotations

from cupynet.backend import DtypePolicy
from cupynet.nn import Layer, Sequential
from cupynet.optim import Optimizer
from cupynet.optim.optimizers import ByRule


def replica_bytes(
    network: Layer, weights: int, optimizer: Optimizer, policy: DtypePolicy, examples: float
) -> dict[str, int]:
    """Estimate the memory of one replica in bytes, by its use.

    Args:
        network: built; its `weights` may be declared only.
        examples: the number of examples whose activations are held at once.
    """
    wide, narrow = policy.accumulate.itemsize, policy.storage.itemsize
    states = len(optimizer.rule.states) if isinstance(optimizer, ByRule) else 0
    copies = (2 + states) * wide + (narrow if narrow != wide else 0)  # weights, their gradient, state
    return {"weights": weights * copies, "activations": int(examples * output_values(network)) * narrow}


def output_values(layer: Layer) -> int:
    """Return the number of values that a training pass stores per example. Fused layers store only the last output."""
    if isinstance(layer, Sequential):
        steps = [(layer.layers[names[-1]], each) for names, each in layer.steps]
        return sum(output_values(last) + (0 if each is last else each.saved_values()) for last, each in steps)
    children = [child for _, child in layer.children() if hasattr(child, "output")]
    return sum(map(output_values, children)) if children else layer.output.features + layer.saved_values()
