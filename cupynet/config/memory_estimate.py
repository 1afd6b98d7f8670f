"""Memory estimates, to reject settings that do not fit on this machine. Estimates are lower bounds."""

from __future__ import annotations

from cupynet.backend import DtypePolicy, memory
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from cupynet.core.wording import amount, counted
from cupynet.data import Source
from cupynet.nn import Layer, Sequential
from cupynet.optim import Optimizer
from cupynet.optim.optimizers import ElementwiseOptimizer
from cupynet.parallel import MpiJob
from cupynet.training.options import CheckedOptions


def check_memory(
    settings: Settings, checked: CheckedOptions, network: Layer, weights: int, source: Source, job: MpiJob | None
) -> None:
    """Raise ConfigError on all ranks if the run needs more memory than this machine or a device has."""
    placement, refused = checked.placement, ""
    needed = needed_bytes(settings, checked, network, weights, source, job)
    if placement.devices:
        from cupynet.backend.cuda import gpus

        devices = placement.of_process(None if job is None else job.rank)
        limit: tuple[int, str] | None = (gpus.memory(devices), "the device has")
    else:
        limit = memory()
    total = sum(needed.values())
    if limit is not None and total > limit[0]:
        uses = ", ".join(f"{use} {amount(size)}" for use, size in needed.items())
        refused = (
            f"with {counted(placement.workers, 'worker')} the run needs about {amount(total)} of memory ({uses}), but "
            f"{limit[1]} {amount(limit[0])}. Lower batch_size, workers or parallel.prefetch_buffer, or use a "
            "smaller network or data set"
        )
    if job is not None:
        refused = job.first_word(refused)
    if refused:
        raise ConfigError(refused, "batch_size", str(settings.batch_size))


def needed_bytes(
    settings: Settings, checked: CheckedOptions, network: Layer, weights: int, source: Source, job: MpiJob | None
) -> dict[str, int]:
    """Estimate the bytes that a run needs for each purpose, per GPU or, if it uses no GPUs, on this machine."""
    placement, policy = checked.placement, DtypePolicy.of(settings.dtype)
    examples = settings.batch_size * min(placement.stages, checked.parts) / checked.parts
    ranks = placement.ranks if job is None else job.on_machine
    replicas, pixels = -(-ranks // placement.stages), network.input.features
    needed = replica_bytes(network, weights, checked.optimizer, policy, examples)
    if placement.devices:
        return {use: replicas * size // len(placement.devices) for use, size in needed.items()}
    needed = {use: replicas * size for use, size in needed.items()}
    images = source.expected()
    ahead = min(settings.parallel.prefetch_buffer * settings.batch_size, images.get("train", 0))
    needed["prefetched batches"] = ahead * pixels * policy.storage.itemsize
    needed["images"] = sum(images.values()) * pixels * (1 if job is None else ranks)  # each rank loads all images
    return needed


def replica_bytes(
    network: Layer, weights: int, optimizer: Optimizer, policy: DtypePolicy, examples: float
) -> dict[str, int]:
    """Estimate the bytes that one replica needs for each purpose. `examples` is the number of samples in memory."""
    wide, narrow = policy.accumulate.itemsize, policy.storage.itemsize
    states = len(optimizer.rule.states) if isinstance(optimizer, ElementwiseOptimizer) else 0
    copies = (2 + states) * wide + (narrow if narrow != wide else 0)  # weights, gradients, optimizer state
    return {"weights": weights * copies, "activations": int(examples * output_values(network)) * narrow}


def output_values(layer: Layer) -> int:
    """Return the number of activations stored per sample. Fused layers store only the last output."""
    if isinstance(layer, Sequential):
        steps = [(layer.layers[names[-1]], each) for names, each in layer.steps]
        return sum(output_values(last) + (0 if each is last else each.saved_values()) for last, each in steps)
    children = [child for _, child in layer.children() if hasattr(child, "output")]
    return sum(map(output_values, children)) if children else layer.output.features + layer.saved_values()
