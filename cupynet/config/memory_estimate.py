"""A rough estimate of a run's memory, to refuse settings that cannot fit into this machine.

It is a lower bound: the layers' outputs, weights with gradients and optimizer state, prefetched batches, and images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cupynet.backend import DtypePolicy
from cupynet.core.checks import amount
from cupynet.nn import Layer, Sequential
from cupynet.optim import Optimizer
from cupynet.optim.optimizers import ByRule


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The settings that determine the memory of a run on one machine.

    Attributes:
        network, weights: the built network and its number of weights.
        batch_size, workers, prefetch: as in the settings; `prefetch` is that of all workers.
        held: the share of a batch whose activations are held at once.
        images: of each part of the data set, by the name of the argument that limits it.
        loads: how often they are loaded: by each process of the machine.
        trained: images of an epoch, an upper bound of those prefetched.
        devices: how many share it, if it is the memory of devices.
    """

    network: Layer
    weights: int
    policy: DtypePolicy
    optimizer: Optimizer
    batch_size: int
    workers: int = 1
    prefetch: int = 0
    held: float = 1.0
    images: Mapping[str, int] = field(default_factory=dict)
    loads: int = 1
    trained: int = 0
    devices: int = 1

    def by_setting(self) -> dict[str, int]:
        """Return the bytes by the setting they grow with: `batch_size`, `workers`, `prefetch` and those of `images`."""
        wide, narrow = self.policy.accumulate.itemsize, self.policy.storage.itemsize
        states = len(self.optimizer.rule.states) if isinstance(self.optimizer, ByRule) else 0
        copies = (2 + states) * wide + (narrow if narrow != wide else 0)  # weights, their gradient, state
        pixels, ahead = self.network.input.features, min(self.prefetch * self.batch_size, self.trained)
        outputs = int(self.batch_size * self.held) * output_values(self.network)
        needed = {
            "batch_size": self.workers * outputs * narrow,
            "workers": self.workers * self.weights * copies,
            "prefetch": ahead * pixels * narrow,
            **{name: self.loads * count * pixels for name, count in self.images.items()},
        }
        return {name: size // self.devices for name, size in needed.items()}

    def refusal(self, there: int, place: str, names: Mapping[str, str]) -> str:
        """Return why the run does not fit into `there` bytes; "" if it does.

        place: the owner of that memory, as the beginning of a sentence: `this machine has`.
        names: the settings' names in messages, and the prefix of a layer's name (`layer`).
        """
        total, wide = sum(self.by_setting().values()), self.policy.accumulate.itemsize
        if total <= there:
            return ""
        needs = f"needs about {amount(total)} of memory, and {place} {amount(there)}"
        layers = [(name, layer) for name, layer in self.network.children() if hasattr(layer, "output")]
        if (2 * self.weights + output_values(self.network)) * wide > there and layers:  # one worker, one example
            sizes = [(2 * layer.declared + self.batch_size * layer.output.features) * wide for _, layer in layers]
            first = next((i for i, size in enumerate(sizes) if size > there), sizes.index(max(sizes)))
            name, layer = layers[first]
            return f"{names['layer']}{name} ({layer.describe()}): {needs}: make it smaller"
        name = min(self.by_setting(), key=lambda each: sum(self._lowered(each).by_setting().values()))
        value = self.images[name] if name in self.images else getattr(self, name)
        return f"{names[name]}={value}: {needs}: lower it"

    def _lowered(self, name: str) -> Usage:
        """Return the usage with one setting at its lowest value."""
        if name in self.images:
            return replace(self, images={**self.images, name: 1})
        return replace(self, **{name: 0 if name == "prefetch" else 1})  # type: ignore[arg-type]


def output_values(layer: Layer) -> int:
    """Count the values that a training pass keeps for one example; of layers computed as one, the last one's."""
    children = [child for _, child in layer.children() if hasattr(child, "output")]
    if isinstance(layer, Sequential):
        children = [layer.layers[names[-1]] for names in layer.together()]
    return sum(map(output_values, children)) if children else layer.output.features
