"""Running statistics of batch normalization, recomputed for weights that were not trained with them."""

from __future__ import annotations

import numpy as np

from cupynet.backend import FRACTIONS
from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Context
from cupynet.training.fit import Examples, check_same_data, evaluation_loader, examples
from cupynet.training.parallel_wrapper import ParallelWrapper
from cupynet.training.trainer import Trainer


def recompute_statistics(
    wrapper: ParallelWrapper, x: Examples, y: Array = None, *, batch_size: int | None = None
) -> None:
    """Recompute the running mean and variance of every `BatchNorm` that is not frozen on training images.

    Use it after stochastic weight averaging, or after loading or changing weights. As `update_bn` of PyTorch it makes
    one forward pass over the data, in training mode. Statistics are the means over all batches, here weighted by their
    samples, so that they are those of one worker to rounding, for any number of workers. Batches of one sample are left
    out.

    Args:
        wrapper: its replicas must be identical, as after `fit`.
        x, y, batch_size: see `ParallelWrapper.fit`.

    Raises:
        ConfigError: an argument is invalid, or the replicas differ.
    """
    model = wrapper.model
    known = model.pixels if model.pixels != FRACTIONS else None
    loader = evaluation_loader(examples(x, y), batch_size, model, known)
    if min(loader.batch_size, len(loader.dataset)) < 2:
        raise ConfigError("must be at least 2", "batch_size", str(loader.batch_size))

    def task(trainer: Trainer) -> bool:
        if trainer.synchronizer.identical:
            check_same_data(loader, trainer.world)
            trainer.replica.begin()
            trainer.synchronizer.begin(trainer.replica)
            _recompute(trainer, loader)
        return trainer.synchronizer.identical

    if not wrapper.on_workers(task, batch_size=loader.batch_size):
        raise ConfigError("the replicas differ between two averages: call fit first")


def _recompute(trainer: Trainer, loader: Loader) -> None:
    """Recompute the statistics on this worker's batches, and average them over all replicas."""
    replica, samples = trainer.replica, 0
    layers = {layer: layer.momentum for layer in trainer.model.network.walk() if isinstance(layer, BatchNorm)}
    quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")
    try:
        with quiet, trainer.feeds.of_evaluation(loader) as feed:
            for batch in feed.epoch(0):
                if batch is None:
                    break
                trainer.world.check()
                if len(batch) < 2:
                    continue
                for layer in layers:
                    layer.momentum = samples / (samples + len(batch))  # of a cumulative mean
                samples += len(batch)
                replica.scores(batch, Context(train=True, samples=batch.samples, seed=trainer.model.seed))
            trainer.groups.replicas.allreduce_mean(trainer.params.running, samples)
    finally:
        for layer, momentum in layers.items():
            layer.momentum = momentum
    replica.assemble()
