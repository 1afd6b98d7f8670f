"""Checks for non-finite losses and gradients, before they change weights or reach other replicas."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.core.errors import DivergedError
from cupynet.data import Batch
from cupynet.nn import Context, Sequential
from cupynet.parallel.pipeline import parts
from cupynet.training.replica import Replica, Step

REMEDY = ". Lower learning_rate, clip the gradient with max_grad_norm, or train in a wider dtype"
MAX_SAMPLES = 5  # maximum number of samples to list in a message


def check_finite(replica: Replica, step: Step) -> None:
    """Raise a DivergedError that names the worker, batch, samples and layer, unless the step is finite."""
    if not step.finite and step.batch is not None:
        text = diagnose(replica, step.batch)
        replica.forget()
        raise DivergedError(text + REMEDY)


def diagnose(replica: Replica, batch: Batch) -> str:
    """Describe the first non-finite value of the last batch: worker, batch, samples, and layer or weight."""
    rank, stages = replica.groups.world.rank, replica.groups.stages
    when = f"at batch {batch.index} of epoch {batch.epoch + 1}"
    at = f"of worker {rank} {when}"
    for name, values in replica.params.views(replica.params.master):
        if not _finite(replica, values).all():
            return f"the weights of layer '{name.partition('.')[0]}' {at} are not finite"
    layer, samples = _first_output(replica, batch) if replica.model is replica.whole else ("", ())
    replica.params.restore_buffers()
    if layer:
        return f"the loss {at} is not finite for {_named(replica, samples)}, because of the output of layer '{layer}'"
    named = _named(replica, batch.samples)
    if replica.losses is not None and not _finite(replica, replica.losses).all():
        last = rank - stages.rank + stages.size - 1  # the last stage sends its losses to the first
        return f"the loss of worker {last} {when} is not finite for {named}"
    for name, gradient in reversed([*replica.params.views(replica.params.grad)]):  # in the order of the backward pass
        if not _finite(replica, gradient).all():
            return f"the gradient {at} is not finite for {named}, first for the weight '{name}'"
    return f"the gradient {at} is too large for {named}"


def _first_output(replica: Replica, batch: Batch) -> tuple[str, Any]:
    """Repeat the forward pass. Return the first layer that causes a non-finite loss, and the affected samples."""
    model = replica.model
    layers = list(model.network) if isinstance(model.network, Sequential) else [("network", model.network)]
    for part in parts(len(batch), replica.accumulation_steps):
        x, samples = batch.images[part], batch.samples[part]
        context = Context(train=True, epoch=batch.epoch, iteration=replica.updates, samples=samples, seed=model.seed)
        for name, layer in layers:  # one at a time, without fusion
            x, at = layer.forward(x, context)[0], name
            fine = _finite(replica, x).reshape(len(samples), -1).all(axis=1)
            if not fine.all():
                break
        else:
            fine = _finite(replica, model.loss(replica.backend, x, batch.labels[part])[0])
        if not fine.all():
            return at, samples[~fine]
    return "", ()


def _finite(replica: Replica, array: Any) -> Any:
    return np.isfinite(np.asarray(replica.backend.to_host(array), np.float64))


def _named(replica: Replica, samples: Any) -> str:
    samples = samples if replica.origin is None else replica.origin[samples]
    named = ", ".join(str(sample) for sample in samples[:MAX_SAMPLES])
    return f"sample{'s' * (len(samples) > 1)} {named}{' ...' * (len(samples) > MAX_SAMPLES)}"
