"""The arguments of a fit, and the checks of its data."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupynet.backend import PixelScale
from cupynet.core.checks import integer, layout_hint, one_of, setting
from cupynet.core.errors import ConfigError, DataError
from cupynet.data import Labelled, Loader, Shards
from cupynet.data.loader import read_of
from cupynet.nn import BatchNorm, Layer, Model, check_output
from cupynet.optim import Schedule
from cupynet.parallel import Communicator, Synchronizer
from cupynet.training.callbacks.base import Callback

BRIGHT = 1 / 4  # as scaled: images without a pixel of this size are nearly black
AMPLE = 10  # images of each class, on average: then a class without any is unlikely by chance
AT_ONCE = 1 << 22  # bytes

log = logging.getLogger(__name__)


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

    def check_validation(self, parts: Sequence[Callback | Schedule], synchronizer: Synchronizer, workers: int) -> None:
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


def warn_of_pixels(dataset: Labelled) -> bool:
    """Log a warning if all pixels are so small that the network would see almost nothing. Return True if it did."""
    enough = min(math.ceil(BRIGHT / max(dataset.pixels.scale)), 255)
    largest = _brightest(dataset, enough)
    if largest >= enough:
        return False
    remedy = (
        f"multiply images by {255 // largest}, or set {setting('data', 'normalize', 'auto')}" if largest else "check"
    )
    log.warning(
        "data set %r: its largest pixel is %d, and pixels are scaled as 0 to 255: %s",
        *(dataset.name, largest, remedy),
    )
    return True


def _brightest(dataset: Labelled, enough: int) -> int:
    """Return the largest pixel of the shards or images that are here; or the first found of at least `enough`."""
    largest = 0
    with read_of(dataset):
        for part in dataset.parts():
            step = max(1, AT_ONCE // part.images[:1].nbytes)
            for start in range(0, len(part), step):
                largest = max(largest, int(part.images[start : start + step].max()))
                if largest >= enough:
                    return largest
    return largest


def warn_of_classes(dataset: Labelled) -> None:
    """Log a warning if classes have no images at all, or many of them none in one of the shards."""
    shards = dataset.labels if isinstance(dataset, Shards) else [dataset.labels]
    valid = [labels[(labels >= 0) & (labels < dataset.classes)] for labels in shards]  # others are refused later
    counts = np.array([np.bincount(labels, minlength=dataset.classes) for labels in valid])  # (shards, classes)
    missing = np.flatnonzero(counts.sum(axis=0) == 0)
    if len(missing) and len(dataset) >= AMPLE * dataset.classes:
        first = ", ".join(map(str, missing[:5].tolist())) + (", ..." if len(missing) > 5 else "")
        log.warning(
            "data set %r: no images of %d of %d classes (%s): is it sorted and cut off, or do labels not begin at 0?",
            *(dataset.name, len(missing), dataset.classes, first),
        )
    present = dataset.classes - len(missing)
    for number, own in enumerate(counts):
        if own.sum() >= AMPLE * present and np.count_nonzero(own) <= present / 2:
            log.warning(
                "data set %r: shard %d has images of %d of %d classes, and its worker sees no others: shuffle before "
                "writing shards",
                *(dataset.name, number, np.count_nonzero(own), present),
            )
            return
