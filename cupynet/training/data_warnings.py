"""Warnings about data that are valid but probably wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.wording import setting
from cupynet.data import Dataset, LabeledData, Loader, Shards
from cupynet.data.loader import read_of
from cupynet.nn import Model
from cupynet.training.fit import Fit

BRIGHT = 1 / 4  # images are nearly black if all scaled pixels are smaller
UNSCALED = 64  # floating-point images with larger values are probably not scaled
AMPLE = 10  # with this many images per class on average, an empty class is unlikely to be chance
CHUNK_BYTES = 1 << 22  # size of the chunks in which images are checked

log = logging.getLogger(__name__)


class DataWarnings:
    """Logs warnings about data if `speaks` is True. Pixels and classes are checked once per data set."""

    def __init__(self, *, speaks: bool, metrics: bool = False) -> None:
        self._speaks, self._metrics = speaks, metrics
        self._dark = False  # True after a warning that training images are dark
        self._known: set[tuple[int, str]] = set()  # signatures of loaders, and situations

    def of_fit(self, fit: Fit, model: Model, workers: int, restored: tuple[int, int] | None) -> None:
        """Warn about the data of a fit. `restored` is the `Loader.identity` of the resumed fit, or None."""
        if not self._speaks:
            return
        train = fit.train
        if train.batches < workers:
            idle = workers - train.batches
            log.warning("%d of %d workers have no batches. Lower workers or batch_size", idle, workers)
        if restored is not None and restored != train.identity:
            log.warning("data set %r: its labels have changed since the checkpoint", train.dataset.name)
        if model.trained_on == "floats":  # their scale is unknown
            warn_of_integers(train.dataset)
        elif model.trained_on and model.pixels != train.dataset.pixels:
            log.warning(
                "data set %r: its images are scaled differently from those that the model was trained on. To keep the "
                "scale, pass uint8 images as Dataset(..., pixels=model.pixels), or as a pair (images, labels)",
                train.dataset.name,
            )
        if self._metrics and fit.evaluate_on is None:
            self._metrics = False
            log.warning("metrics are not computed, because there are no validation data. Pass validation_split=0.1")
        if self._is_new(train):
            warn_of_classes(train.dataset)
            self._dark = warn_of_pixels(train.dataset)
        if fit.evaluate_on is not None:
            self.of_evaluation(fit.evaluate_on, floats=train.dataset.scaled)

    def of_evaluation(self, loader: Loader, *, floats: bool) -> None:
        """Warn about dark images, unless the training images are dark too, and about integers after floats."""
        if not self._speaks or self._dark:
            return
        if self._is_new(loader):
            warn_of_pixels(loader.dataset)
        if floats and self._is_new(loader, "after floats"):
            warn_of_integers(loader.dataset)

    def _is_new(self, loader: Loader, situation: str = "") -> bool:
        known = (loader.signature, situation) in self._known
        self._known.add((loader.signature, situation))
        return not known


def warn_of_integers(dataset: LabeledData) -> None:
    """Warn if images are integers, although the network was trained on floating-point images."""
    if not dataset.scaled:
        log.warning(
            "data set %r: the network was trained on floating-point images, but these are integers, which are only "
            "divided by 255. Scale them as in training",
            dataset.name,
        )


def warn_of_pixels(dataset: LabeledData) -> bool:
    """Warn and return True if all images are nearly black, or floating-point images are probably unscaled."""
    if isinstance(dataset, Dataset) and dataset.scaled:
        return _warn_of_floats(dataset)
    if 255 * max(dataset.pixels.scale) < BRIGHT:
        log.warning(
            "data set %r: its pixels are divided by a std of %g. Give mean and std for pixels scaled to 0..1",
            *(dataset.name, min(dataset.pixels.std)),
        )
        return True
    enough = math.ceil(BRIGHT / max(dataset.pixels.scale))
    largest = _brightest(dataset, enough)
    if largest >= enough:
        return False
    remedy = ""
    if largest:
        remedy = f": multiply images by {255 // largest}, or set {setting('data', 'normalize', 'auto')}"
    log.warning(
        "data set %r: its largest pixel value is %d, but a range of 0 to 255 is assumed%s",
        dataset.name,
        largest,
        remedy,
    )
    return True


def _warn_of_floats(dataset: Dataset) -> bool:
    largest = max(float(abs(chunk).max()) for chunk in _chunks(dataset))
    if largest <= UNSCALED:
        return False
    remedy = "Divide them by 255, or pass uint8 images" if largest <= 255 else "Standardize them"
    log.warning("data set %r: floating-point images must be scaled, but reach %g. %s", dataset.name, largest, remedy)
    return True


def _brightest(dataset: LabeledData, enough: int) -> int:
    """Return the largest pixel value of the local data, or the maximum so far when it reaches `enough`."""
    largest = 0
    for chunk in _chunks(dataset):
        largest = max(largest, int(chunk.max()))
        if largest >= enough:
            break
    return largest


def _chunks(dataset: LabeledData) -> Iterator[Array]:
    with read_of(dataset):
        for part in dataset.parts():
            step = max(1, CHUNK_BYTES // part.images[:1].nbytes)
            for start in range(0, len(part), step):
                yield part.images[start : start + step]


def warn_of_classes(dataset: LabeledData) -> None:
    """Warn if some classes have no images, or if a shard has at most half of the classes that have images."""
    if isinstance(dataset, Dataset) and dataset.labels.ndim == 2:
        return
    shards = dataset.labels if isinstance(dataset, Shards) else [dataset.labels]
    valid = [labels[(labels >= 0) & (labels < dataset.classes)] for labels in shards]  # invalid labels fail later
    counts = np.array([np.bincount(labels, minlength=dataset.classes) for labels in valid])  # (shards, classes)
    missing = np.flatnonzero(counts.sum(axis=0) == 0)
    if len(missing) and len(dataset) >= AMPLE * dataset.classes:
        first = ", ".join(map(str, missing[:5].tolist())) + (", ..." if len(missing) > 5 else "")
        log.warning(
            "data set %r: %d of %d classes have no images (%s). Was it sorted and truncated, or do labels start at 1?",
            *(dataset.name, len(missing), dataset.classes, first),
        )
    present = dataset.classes - len(missing)
    for number, own in enumerate(counts):
        if own.sum() >= AMPLE * present and np.count_nonzero(own) <= present / 2:
            log.warning(
                "data set %r: shard %d has images of only %d of %d classes, so one worker never sees the others. "
                "Shuffle before writing shards",
                *(dataset.name, number, np.count_nonzero(own), present),
            )
            return
