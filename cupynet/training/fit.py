"""The arguments of a fit, and the data that it refuses: what does not fit the model, or differs between workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupynet.backend import PixelScale
from cupynet.core.checks import integer, one_of
from cupynet.core.errors import ConfigError, DataError
from cupynet.data import Batches, Labelled
from cupynet.nn import Model, check_output
from cupynet.optim import Schedule
from cupynet.parallel import Communicator, Synchronizer
from cupynet.training.callbacks.base import Callback


@dataclass(frozen=True)
class Fit:
    """The arguments of `Trainer.fit`.

    Attributes:
        unfinished: the fit continues a restored one, which may have no epoch left to train.

    Raises:
        ConfigError: an argument is not valid.
    """

    train: Batches
    epochs: int
    evaluate_on: Batches | None
    evaluate_every: int
    split: str
    unfinished: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", integer("epochs", self.epochs, 0 if self.unfinished else 1))
        object.__setattr__(self, "evaluate_every", integer("evaluate_every", self.evaluate_every, 1))
        one_of("split", self.split, ("test", "validation"))

    def check_choosers(self, choosers: Sequence[Callback | Schedule], synchronizer: Synchronizer, workers: int) -> None:
        """Refuse a fit without the evaluations, on validation images, that something chooses by. ConfigError.

        choosers: callbacks, and the schedule of the learning rate.
        """
        for chooser in choosers:
            if not chooser.needs_validation:
                continue
            name = type(chooser).__name__
            if self.evaluate_on is None:
                raise ConfigError(
                    f"{name} chooses by evaluations, and nothing is evaluated: fit(..., evaluate_on=held_out, "
                    "split='validation')"
                )
            if self.split != "validation":
                raise ConfigError(
                    f"split={self.split}: {name} never chooses by the test images: hold others out of training, and "
                    "then fit(..., evaluate_on=held_out, split='validation')"
                )
            if not (synchronizer.evaluates or workers == 1):
                raise ConfigError(
                    "averaging_frequency: replicas are evaluated only once they are averaged, which not every epoch "
                    f"ends with, and {name} chooses between epochs: average after each, averaging_frequency='epoch'"
                )


def check_data(dataset: Labelled, model: Model) -> None:
    """Refuse data that do not fit the network: no images, another shape, another number of classes. ConfigError."""
    if not len(dataset):
        raise ConfigError(f"data set {dataset.name!r} is empty: there is nothing to train or evaluate on")
    shape = tuple(dataset.image_shape)
    if shape != model.input.shape:
        raise ConfigError(
            f"data set {dataset.name!r} has images of {shape} (height, width, channels), and the model is made for "
            f"{model.input}: build the model for Image{shape}, or bring the images to its shape"
        )
    check_output(model.network, dataset.classes)


def check_pixels(dataset: Labelled, pixels: PixelScale) -> None:
    """Refuse data whose pixels become something else than those trained on: the answers would mean nothing.

    ConfigError.
    """
    if dataset.pixels != pixels:
        raise ConfigError(
            f"data set {dataset.name!r}: its pixels become {_become(dataset.pixels)}, and those trained on "
            f"{_become(pixels)}: give it the same pixels, Dataset(..., pixels=model.pixels), or a pair (images, labels)"
        )


def _become(pixels: PixelScale) -> str:
    found = pixels.normalization()
    return "fractions of 255" if found is None else f"(x - {found['mean']}) / {found['deviation']}"


def check_loader(loader: Batches, model: Model, world: Communicator) -> None:
    """Refuse data that do not fit the network, or differ between workers: processes load for themselves.

    Every worker calls it.

    Raises:
        ConfigError: the data do not fit the network.
        DataError: the data, or their order, are not those of worker 0.
    """
    check_data(loader.dataset, model)
    if world.size == 1:
        return
    found = world.gather_numbers(loader.signature)[:, 0]  # (W,)
    others = np.flatnonzero(found != found[0]).tolist()
    if others:
        who = f"worker{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        raise DataError(
            f"{who} would train on other data than worker 0, or in another order: bring the same data to all "
            "machines, and start them with the same settings"
        )
