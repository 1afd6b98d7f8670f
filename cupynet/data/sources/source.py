from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augment, augmentations, check_augmentations
from cupynet.data.dataset import Dataset, held_out_count, hold_out, in_turns
from cupynet.data.normalize import Normalize, checked, pixels_for
from cupynet.data.shards import Shards


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a source.

    Attributes:
        train: a `Dataset`, or `Shards`; empty if there are only test images.
        validation: images held out of training, or None.
        test: not used for any choice; may be empty.
        fallback: True if these are not the requested data.
    """

    name: str
    train: Dataset | Shards
    validation: Dataset | None
    test: Dataset
    fallback: bool = False

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in parts.items() if part is not None)
        return f"<Data {self.name!r}: {sizes} images of {self.test.image_shape}, {self.test.classes} classes>"

    def check(self, image_shape: tuple[int, int, int], classes: int) -> None:
        """Raise DataError if images (H, W, C) or classes differ from those declared by the source."""
        for dataset in (self.train, self.validation, self.test):
            if dataset is not None and (dataset.image_shape, dataset.classes) != (tuple(image_shape), classes):
                raise DataError(
                    f"data {self.name!r}: its source declared images of {tuple(image_shape)} in {classes} classes, but "
                    f"{dataset.name!r} has images of {dataset.image_shape} in {dataset.classes}"
                )


@dataclass(eq=False, kw_only=True)
class Source(ABC):
    """Base class of sources. A model is built from `image_shape` and `classes` without loading anything.

    Args:
        seed: of the choice of validation images, and of images that are drawn.
        validation: the number of images held out of training, or a fraction below 1 of each class. The choice depends
            on `seed`.
        limit: keep only the first `limit` training images and the first `limit` test images; None for all. Unless
            `mixed`, they are taken from the classes in turn.
        normalize: scaling of pixels. None: fractions of 255; "auto": the training images get mean 0 and deviation 1 in
            each channel; {"mean": [...], "std": [...]}: these values, in fractions of 255, are subtracted and divided
            by. Validation and test images are scaled like the training images.
        augment: augmentations of the training images, in this order, see `augmentations`.

    Attributes:
        image_shape: (H, W, C).
        class_names: the names of the classes, in order; empty if they have only numbers.
        samples: the numbers of training, test and separate validation images; empty if unknown, or if images are
            memory-mapped.
        mixed: False if images may be sorted by class, so that the first are not a fair sample.
        on_black: True if the images are light on a black background.
        centered: True if each is centered in its image as MNIST's digits are, see `centered_as_mnist`.
    """

    image_shape: tuple[int, int, int] = field(init=False, repr=False)
    classes: int = field(init=False, repr=False)
    class_names: tuple[str, ...] = field(default=(), init=False, repr=False)
    samples: tuple[int, ...] = field(default=(), init=False, repr=False)
    name = "data"
    mixed, on_black, centered = True, False, False

    seed: int = 12345
    validation: float = 0
    limit: int | None = None
    normalize: Normalize = None
    augment: Augment = ()

    def __post_init__(self) -> None:
        self.seed = checks.seed("seed", self.seed)
        if not isinstance(self.validation, float | np.floating) or not 0 < self.validation < 1:
            self.validation = checks.integer("validation", self.validation, 0, ", or a fraction below 1")
        if self.limit is not None:
            self.limit = checks.integer("limit", self.limit, 1, ", or null for no limit")
        self.normalize = checked(self.normalize)
        self.augment = augmentations(self.augment)

    @abstractmethod
    def load(self) -> Data:
        """Load the data. Raise DataError for missing or damaged files."""

    @property
    def validates(self) -> bool:
        return bool(self.validation)

    def check(self, *, trains: bool = True) -> None:
        """Check that `validation`, `normalize` and `augment` fit the images.

        If `trains`, also reject data without images to train on, or to evaluate on.
        """
        channels = self.image_shape[2]
        if isinstance(self.normalize, Mapping) and len(self.normalize["mean"]) not in (1, channels):
            images = f"images have {wording.counted(channels, 'channel')}"
            raise ConfigError(f"{images}: give a number for each", "normalize", wording.written(self.normalize))
        check_augmentations(augmentations(self.augment), self.image_shape)
        found = self.expected()
        if trains and found.get("train") == 0:
            raise ConfigError(f"{self.name} has images to test on, but none to train on")
        if trains and found.get("test") == 0 and not self.validates:
            reason = f"{self.name} has no images to evaluate on. Hold some out, such as 0.1 of each class"
            raise ConfigError(reason, "validation", "0")
        if self.validation and found.get("train"):
            held_out_count(self.validation, found["train"], "validation")

    def expected(self) -> dict[str, int]:
        """Return the numbers of images that `load` holds in memory, by part; empty if unknown."""
        return dict(zip(("train", "test", "validation"), self.samples, strict=False))

    def _divided(self, name: str, train: Dataset, test: Dataset, validation: Dataset | None = None) -> Data:
        """Return `Data` with validation images taken out of `train` and the limit applied; samples keep their order."""
        of_train, of_validation, of_test = self._chosen(train.labels, test.labels)
        if of_validation is not None:
            validation = replace(train.take(of_validation), name=f"{name}-validation")
        train, test = train.take(of_train), test.take(of_test)
        pixels = pixels_for(self.normalize, train.images)
        train, test = replace(train, pixels=pixels), replace(test, pixels=pixels)
        return Data(name, train, validation and replace(validation, pixels=pixels), test)

    def _chosen(self, labels: Array, test_labels: Array, *, mixed: bool | None = None) -> tuple[Any, Any, Any]:
        """Return training, validation (or None) and test images, as indices or slices."""
        first = self.mixed if mixed is None else mixed
        limited = slice(self.limit) if first else in_turns(test_labels, self.limit)
        if not self.validation:
            return slice(self.limit) if first else in_turns(labels, self.limit), None, limited
        kept, held_out = hold_out(labels, self.validation, self.seed, "validation")
        return kept[slice(self.limit) if first else in_turns(labels[kept], self.limit)], held_out, limited

    def changed(self) -> str:
        """Return how images differ from version 0.1.0, whose checkpoints do not identify their data, or ""."""
        return ""
