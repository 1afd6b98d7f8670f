"""The arguments of a fit, and the checks of its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend import PixelScale
from cupynet.backend.array import layout_hint
from cupynet.core.checks import integer, one_of
from cupynet.core.errors import ConfigError, DataError
from cupynet.data import Labelled, Loader
from cupynet.nn import BatchNorm, Layer, Model, check_output
from cupynet.parallel import Communicator, Synchronizer


@dataclass
class Fit:
    """The arguments of `Trainer.fit`.

    Args:
        train: the batches of all workers.
        epochs: additional epochs to train; 0 only to finish a restored, unfinished fit.
        evaluate_on: the data set to evaluate in parallel, every `evaluate_every` epochs and after the last.
        split: the name of that data set, `test` or `validation`.

    Raises:
        ConfigError: an argument is not valid.
    """

    train: Loader
    epochs: int
    evaluate_on: Loader | None = None
    evaluate_every: int = 1
    split: str = "test"

    def __post_init__(self) -> None:
        self.evaluate_every = integer("evaluate_every", self.evaluate_every, 1)
        self.split = one_of("split", self.split, ("test", "validation"))

    def check_validation(self, parts: Sequence[Any], synchronizer: Synchronizer, workers: int) -> None:
        """Refuse a fit without the evaluations that a callback or the learning-rate schedule needs. ConfigError."""
        evaluated = self.evaluate_on is not None and self.split == "validation"
        for part in parts:
            if part.needs_validation and not (evaluated and (synchronizer.evaluates or workers == 1)):
                raise ConfigError(
                    f"{type(part).__name__} needs an evaluation of images kept out of training after each epoch: "
                    "fit(..., evaluate_on=held_out, split='validation'), with replicas that are averaged then: "
                    "averaging_frequency='epoch' or a number of iterations"
                )


def check_data(dataset: Labelled, model: Model) -> None:
    """Refuse data that do not fit the network: no images, another shape, another number of classes. ConfigError."""
    if not len(dataset):
        raise ConfigError(f"data set {dataset.name!r} is empty: there is nothing to train or evaluate on")
    shape = tuple(dataset.image_shape)
    if shape != model.input.shape:
        hint = layout_hint((len(dataset), *shape), model.input.shape)
        raise ConfigError(
            f"data set {dataset.name!r} has images of {shape} (height, width, channels), and the model takes "
            f"{model.input}: build the model for Image{shape}, or reshape the images{hint}"
        )
    check_output(model.network, dataset.classes)


def check_batches(network: Layer, examples: int, replicas: int) -> None:
    """Refuse batches of one vector in front of a batch normalization, which would never learn. ConfigError.

    examples: the size of a batch, or of its largest part.
    """
    for layer in network.walk():
        vectors = isinstance(layer, BatchNorm) and layer.input.features == layer.input.shape[-1]
        if vectors and examples * (replicas if layer.syncs_replicas else 1) == 1:
            raise ConfigError(
                f"layer '{layer.path}', a BatchNorm, sees one example at a time and cannot learn its statistics: use a "
                "larger batch_size, or fewer parts of each batch"
            )


def check_pixels(dataset: Labelled, pixels: PixelScale) -> None:
    """Refuse data whose pixels are not normalized like the training data. ConfigError."""
    if dataset.pixels != pixels:
        raise ConfigError(
            f"data set {dataset.name!r}: its pixels are not normalized like the training data: use "
            "Dataset(..., pixels=model.pixels), or a pair (images, labels)"
        )


def check_same_data(loader: Loader, world: Communicator) -> None:
    """Refuse data that differ between workers. Every worker calls it.

    Raises:
        DataError: the data, or their order, are not those of worker 0.
    """
    found = world.gather_numbers(loader.signature)[:, 0]  # (W,)
    others = np.flatnonzero(found != found[0]).tolist()
    if others:
        raise DataError(
            f"ranks {others} have other data than rank 0, or in another order. Copy the same data to all machines and "
            "use the same settings"
        )
