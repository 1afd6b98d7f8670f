"""How much memory a run needs, about, and what there is: what cannot fit is refused before anything is allocated.

An estimate adds up what grows with a setting: buffers of activations (each layer knows its own, `Layer.buffers`), the
weights and the vectors beside them, batches made ahead, the images of the data set. It is meant to be right to half of
itself, so a run is refused only where it needs `MARGIN` times what there is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from cupynet.backend import DtypePolicy, create_backend
from cupynet.checks import amount
from cupynet.nn import Layer, Params
from cupynet.nn.init import zeros
from cupynet.nn.params import Parameter
from cupynet.optim import Optimizer
from cupynet.parallel import Synchronizer
from cupynet.training.callbacks import Callback

PROCESS = 170_000_000  # bytes, of a run with one worker and small batches, less what is counted: Python, NumPy, numba
MARGIN = 1.5
BUFFERS = 2  # of a ring beyond the batches ahead; in pinned memory of the host, too
LABEL = 8  # bytes of a label, and of a sample's number


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What the memory of a run follows from, on one machine.

    Attributes:
        network: built; weights: values of all its weights.
        policy: how many bytes a value has.
        vectors: of as many values as there are weights, that a replica has beside them and their gradients: the
            optimizer's, the synchronizer's, and those of callbacks.
        batch_size, workers, prefetch: as in the settings; `prefetch` is of all workers.
        stages, micro_batches: of each replica, and of a batch, in a pipeline or where gradients are accumulated.
        trained: images of an epoch, which are all that is ever made ahead; 0 where it is not known.
        images: of each part of the data set that is loaded, by the name of the argument that says how many.
        processes: on this machine.
        where: what of it is asked about: all, or what lies on each `device` or on the `host` where they are apart.
        devices: how many share it.
        products: bytes that products are made in by each worker, of a device's own; 0 on a CPU.
        feeds: how batches come to devices: from images that stay on each (`resident`), or over buffers that are sent in
            turn (`ring`), of the training and of the evaluation; `plain` on a CPU.
    """

    network: Layer
    weights: int
    policy: DtypePolicy
    vectors: int
    batch_size: int
    workers: int = 1
    prefetch: int = 0
    stages: int = 1
    micro_batches: int = 1
    trained: int = 0
    images: Mapping[str, int] = field(default_factory=dict)
    processes: int = 1
    where: Literal["all", "device", "host"] = "all"
    devices: int = 1
    products: int = 0
    feeds: Literal["plain", "ring", "resident"] = "plain"

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        on_device = {"activations": self._activations(), "weights": self._weights(), "batches ahead": self._ahead()}
        if self.products:
            on_device["products"] = self.workers * self.stages * self.products
        count, pixels = sum(self.images.values()), self.network.input.features
        on_host = {"images": count * (pixels + LABEL), "the program": self.processes * PROCESS}
        if self.feeds == "resident":
            on_device["images that stay"] = self.devices * count * pixels + self.workers * count * 2 * LABEL
        elif self.feeds == "ring":
            pinned = 1 << max(self.batch_size * pixels - 1, 0).bit_length()  # of which CuPy takes powers of two
            on_host["batches on their way"] = 2 * self.workers * BUFFERS * pinned
        if self.where == "device":
            return {part: -(-size // self.devices) for part, size in on_device.items()}
        return on_host if self.where == "host" else on_device | on_host

    def total(self) -> int:
        """Bytes."""
        return sum(self.parts().values())

    def _batch(self) -> int:
        """A batch on the device."""
        return self.batch_size * (self.network.input.features * self.policy.storage.itemsize + 2 * LABEL)

    def _activations(self) -> int:
        held = self.batch_size
        if max(self.stages, self.micro_batches) > 1:
            # as many micro-batches as there are stages; evaluations pass whole batches, forward alone
            held = held * min(self.stages, self.micro_batches) // self.micro_batches + held // 2
        return self.workers * (held * self.network.buffers() + self._batch())

    def _weights(self) -> int:
        wide, narrow = self.policy.accumulate, self.policy.storage
        model = self.weights * (2 * wide.itemsize + (narrow.itemsize if narrow != wide else 0))  # with gradients
        replica = model + self.vectors * self.weights * wide.itemsize
        rehearsal = replica + 2 * self.weights * wide.itemsize  # the copy that kernels are tried on, while it is made
        return self.workers * (replica + rehearsal) + self.processes * model * (
            self.stages > 1
        )  # from which stages take theirs

    def _ahead(self) -> int:
        batches = -(-self.trained // self.batch_size)
        ahead = min(self.prefetch, batches)
        if self.feeds == "plain":
            return ahead * self._batch()
        if self.feeds == "resident":
            return 2 * self.workers * self._batch()
        pixels = self.workers * self.batch_size * self.network.input.features
        return 2 * ((ahead + BUFFERS * self.workers) * self._batch() + pixels)


@dataclass(frozen=True)
class Verdict:
    """What is to be said of a demand; `refused`: and the run is not to begin."""

    text: str = ""
    refused: bool = False


def verdict(demand: Demand, there: int, place: str, names: Mapping[str, str]) -> Verdict:
    """Compare a demand with the bytes that are `there`.

    Args:
        place: whose they are, as the subject of a sentence: `this machine has`.
        names: what messages call `batch_size`, `workers`, `prefetch` and the entries of `images`: those that somebody
            may lower; and `layer`, what goes before a layer's name.
    """
    total = demand.total()
    if total <= there:
        return Verdict()
    most, bytes_of_it = max(demand.parts().items(), key=lambda part: part[1])
    needs = f"about {amount(total)} of memory, {amount(bytes_of_it)} of it for {most}, and {place} {amount(there)}"
    if total <= MARGIN * there:
        return Verdict(f"this run needs {needs}: it may be killed for that")
    knobs = [name for name in names if name != "layer" and _value(demand, name) > _least(name)]
    lowest = demand
    for name in knobs:
        lowest = _with(lowest, name, _least(name))
    if not knobs or lowest.total() > there:
        name, layer = _at_fault(demand, there)
        return Verdict(f"{names['layer']}{name} ({layer.describe()}): needs {needs}: make it smaller", refused=True)
    name = min(knobs, key=lambda name: _with(demand, name, _least(name)).total())
    shown, fits = f"{names[name]}={_value(demand, name)}", _fitting(demand, name, there)
    way_out = f"lower it, to {fits} or less" if fits is not None else "lower it"
    return Verdict(f"{shown}: needs {needs}: {way_out}", refused=True)


def vectors_of(optimizer: Optimizer, synchronizer: Synchronizer, callbacks: Iterable[Callback], workers: int) -> int:
    """How many vectors of the weights' length a worker keeps beside them.

    The optimizer is asked to make its own for a small network. A callback that only one worker has counts as if all
    had it.
    """
    params, backend = Params(), create_backend("numpy", "double")
    params.add(Parameter("weight", (64,), zeros))
    params.allocate(backend, 0)
    asked = copy.copy(optimizer)
    asked.init(params, backend)
    own = -(-sum(int(vector.nbytes) for vector in asked.state.values()) // int(params.master.nbytes))
    return own + synchronizer.vectors(workers) + sum(callback.vectors for callback in callbacks)


def _least(name: str) -> int:
    return 0 if name == "prefetch" else 1


def _value(demand: Demand, name: str) -> int:
    return demand.images[name] if name in demand.images else int(getattr(demand, name, 0))


def _with(demand: Demand, name: str, value: int) -> Demand:
    """The same with another value of what messages have a name for."""
    if name in demand.images:
        return replace(demand, images={**demand.images, name: value})
    return replace(demand, **{name: value})  # type: ignore[arg-type]


def _fitting(demand: Demand, name: str, there: int) -> int | None:
    """The largest value that fits, in two figures; None where the least does not."""
    low, high = _least(name), _value(demand, name)
    if _with(demand, name, low).total() > there:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if _with(demand, name, middle).total() <= there:
            low = middle
        else:
            high = middle
    rounding = int(10 ** max(len(str(low)) - 2, 0))
    return low // rounding * rounding


def _at_fault(demand: Demand, there: int) -> tuple[str, Layer]:
    """The first layer of the network that is too large by itself (those behind it are large because of it), or else the
    largest."""
    each = 4 * demand.policy.accumulate.itemsize
    layers = [(name, layer) for name, layer in demand.network.children() if hasattr(layer, "output")]
    sizes = [layer.declared * each + demand.batch_size * layer.buffers() for _, layer in layers]
    if not layers:
        return "network", demand.network
    return layers[next((i for i, size in enumerate(sizes) if size > there), sizes.index(max(sizes)))]
