from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Context
from cupynet.training.agreement import on_identical_replicas
from cupynet.training.fit import Examples, evaluation_loader, examples
from cupynet.training.parallel_wrapper import ParallelWrapper
from cupynet.training.trainer import Trainer


def recompute_statistics(
    wrapper: ParallelWrapper, x: Examples, y: Array = None, *, batch_size: int | None = None
) -> None:
    """Recompute the running mean and variance of every `BatchNorm` that is not frozen, from training images.

    Use this after stochastic weight averaging, or after changing weights. Like `update_bn` in PyTorch, it makes one
    forward pass over the data in training mode. The statistics are means over batches of at least two samples, weighted
    by batch size. Apart from rounding, they therefore do not depend on the number of workers.

    Args:
        wrapper: a wrapper with identical replicas, as after `fit`.
        x, y, batch_size: see `ParallelWrapper.fit`.

    Raises:
        ConfigError: an argument is invalid, or the replicas are not identical.
    """
    loader = evaluation_loader(examples(x, y), batch_size, wrapper.model)
    if min(loader.batch_size, len(loader.dataset)) < 2:
        raise ConfigError("must be at least 2", "batch_size", str(loader.batch_size))
    on_identical_replicas(wrapper.on_workers, loader, lambda trainer: _recompute(trainer, loader))


def _recompute(trainer: Trainer, loader: Loader) -> None:
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
                    layer.momentum = samples / (samples + len(batch))  # cumulative mean
                samples += len(batch)
                replica.scores(batch, Context(train=True, samples=batch.samples, seed=trainer.model.seed))
            trainer.groups.replicas.allreduce_mean(trainer.params.running, samples)
    finally:
        for layer, momentum in layers.items():
            layer.momentum = momentum
    replica.assemble()
