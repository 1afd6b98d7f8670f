"""Find the origin of a value that is not finite: the worker, the batch, its samples and the layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet.data import Batch
from cupynet.nn import Context, Layer, Sequential
from cupynet.parallel import parts
from cupynet.training.replica import Replica

MAX_SAMPLES = 5  # of a batch that a message lists


def diagnose(rank: int, replica: Replica, batch: Batch) -> str:
    """Describe the first value that is not finite: the worker, the batch, its samples and the layer.

    Repeats the forward pass of the batch, layer by layer, with its own statistics and dropout.
    """
    at = f"of worker {rank} at batch {batch.index} of epoch {batch.epoch + 1}"
    for name, values in replica.params.views(replica.params.master):
        if not _finite(replica, values).all():
            return f"the weights of layer '{name.partition('.')[0]}' {at} are not finite"
    layer, bad = _first_output(replica, batch) if replica.model is replica.whole else ("", [])
    if layer:
        samples = _samples(batch.samples[bad])
        return f"the loss {at} is not finite, for {samples}, first in the output of layer '{layer}'"
    synced = next((layer.path for layer in replica.model.network.walk() if layer.syncs_replicas), None)
    if synced is not None and not replica.loss_is_finite:
        return f"the loss {at} is not finite, because of other replicas' batches, which layer '{synced}' uses"
    for name, values in reversed(list(replica.params.views(replica.params.grad))):
        if not _finite(replica, values).all():
            layer = name.partition(".")[0]
            return f"the gradient of layer '{layer}' {at} is not finite, of {_samples(batch.samples)}"
    return f"the loss {at} is not finite, or the gradient too large, of {_samples(batch.samples)}"


def _first_output(replica: Replica, batch: Batch) -> tuple[str, list[int]]:
    """Return the first layer whose output is not finite, and the places of the samples; "" if all are finite."""
    network = replica.model.network
    layers = list(network.children()) if isinstance(network, Sequential) else [("network", network)]
    found: dict[int, list[int]] = {}  # by the number of the layer
    for part in parts(len(batch), replica.accumulate):
        with replica.backend.loans() as loans:  # there is no backward pass
            number, bad = _first_of_part(replica, [layer for _, layer in layers], batch, part)
            loans.end()
        if len(bad):
            found.setdefault(number, []).extend(bad + part.start)
    replica.params.restore_buffers()
    if not found:
        return "", []
    first = min(found)
    return layers[first][0], found[first]


def _first_of_part(replica: Replica, layers: Sequence[Layer], batch: Batch, part: slice) -> tuple[int, Any]:
    """Return the number of the first layer whose output is not finite, and the places of the samples in this part.

    Layers that exchange values with other replicas use this batch alone.
    """
    model, x, samples = replica.model, batch.images[part], batch.samples[part]
    context = Context(train=True, epoch=batch.epoch, iteration=replica.updates, samples=samples, seed=model.seed)
    for number, layer in enumerate(layers):
        x, _ = layer.forward(x, context)  # one by one, without fusion
        fine = _finite(replica, x)
        bad = np.flatnonzero(~fine.reshape(len(fine), -1).all(axis=1))
        if len(bad):
            return number, bad
    losses, _ = model.loss(replica.backend, x, batch.labels[part])
    return len(layers) - 1, np.flatnonzero(~_finite(replica, losses))


def _finite(replica: Replica, array: Any) -> Any:
    return np.isfinite(np.asarray(replica.backend.to_host(array), np.float64))


def _samples(indices: Any) -> str:
    named = ", ".join(str(index) for index in indices[:MAX_SAMPLES])
    more = f" and {len(indices) - MAX_SAMPLES} more" if len(indices) > MAX_SAMPLES else ""
    return f"sample{'s' * (len(indices) > 1)} {named}{more}"
