"""The base class of data sources, and the data that they load."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation, augmentations
from cupynet.data.dataset import SPLIT_STREAM, Dataset, philox
from cupynet.data.normalize import Normalize, check_channels, checked, pixels_for
from cupynet.data.shards import Shards


@dataclass(frozen=True, eq=False)
class Data:
    """The data of a source.

    Attributes:
        name: for messages and reports.
        train: a `Dataset`, or `Shards`.
        validation: images held out of training; None if there are none.
        test: never used for any choice.
        fallback: True if these are not the requested data.
    """

    name: str
    train: Dataset | Shards
    validation: Dataset | None
    test: Dataset
    fallback: bool = False

    def check(self, image_shape: tuple[int, int, int], classes: int) -> None:
        """Raise DataError if the images or classes differ from those declared by the source.

        Args:
            image_shape, classes: (H, W, C) and the number of classes that a model was built for.
        """
        for dataset in (self.train, self.validation, self.test):
            if dataset is None:
                continue
            found = dataset.image_shape
            if found != tuple(image_shape) or dataset.classes != classes:
                raise DataError(
                    f"data {self.name!r}: its source declared images of {tuple(image_shape)} in {classes} classes, but "
                    f"{dataset.name!r} has images of {found} in {dataset.classes}"
                )


class Source(ABC):
    """Base class of sources. A model is built from `image_shape` and `classes` without loading anything.

    Args:
        seed: of the choice of validation images, and of images that are drawn.
        validation: the number of images held out of training. They are chosen by a permutation that depends on `seed`.
        limit: keep only the first `limit` training images and the first `limit` test images; None for all.
        normalize: scaling of pixels. None: fractions of 255; "auto": the training images get mean 0 and deviation 1 in
            each channel; {"mean": [...], "deviation": [...]}: these values, in fractions of 255, are subtracted and
            divided by. Validation and test images are scaled like the training images.
        augment: augmentations of the training images, in this order.

    Attributes:
        image_shape: (H, W, C).
        class_names: the names of the classes, in order; empty if they have only numbers.
        on_black: True if the images are light on a black background.
        centred: True if each is centred in its image as MNIST's digits are, see `centred_as_mnist`.
    """

    image_shape: tuple[int, int, int]
    classes: int
    name: str = "data"
    class_names: tuple[str, ...] = ()
    on_black = False
    centred = False
    seed = 12345  # defaults of a subclass that does not call `__init__`
    normalize: Normalize = None
    augment: tuple[Augmentation, ...] = ()

    def __init__(
        self,
        seed: int,
        validation: int,
        limit: int | None,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.seed = checks.seed("seed", seed)
        self.validation = checks.integer("validation", validation, 0)
        self.limit = None if limit is None else checks.integer("limit", limit, 1, ", or null for no limit")
        self.normalize = checked(normalize)
        self.augment = augmentations(augment)

    @abstractmethod
    def load(self) -> Data:
        """Return the data. DataError for missing or damaged files."""

    def check_normalize(self) -> None:
        """Refuse a `normalize` for another number of channels. ConfigError, DataError."""
        check_channels(self.normalize, self.image_shape[2])

    def expected(self) -> dict[str, int]:
        """Return the numbers of images that `load` holds in memory, as `train` and `test`.

        Empty if unknown, or if images are mapped from files.
        """
        return {}

    def _check_validation(self, available: int, name: str) -> None:
        """Raise ConfigError if there would be no training images left."""
        if self.validation >= available:
            what = f"the {checks.counted(available, 'training image')} of {name!r}"
            raise ConfigError(f"validation={self.validation}: must be below {what}, which it is taken from")

    def _divided(self, name: str, train: Dataset, test: Dataset) -> Data:
        """Return `Data` with validation images taken out of `train` and the limit applied; samples keep their order."""
        self._check_validation(len(train), name)
        validation = None
        if self.validation:
            order = philox(self.seed, SPLIT_STREAM).permutation(len(train))  # (S,)
            chosen = np.sort(order[-self.validation :])
            kept = np.sort(order[: -self.validation])
            taken = train.take(chosen)
            validation = Dataset(f"{name}-validation", taken.images, taken.labels, taken.classes)
            train = train.take(kept[: self.limit])
        elif self.limit is not None:
            train = train.take(slice(self.limit))
        if self.limit is not None:
            test = test.take(slice(self.limit))
        pixels = pixels_for(self.normalize, train.images)
        train, test = replace(train, pixels=pixels), replace(test, pixels=pixels)
        return Data(name, train, validation and replace(validation, pixels=pixels), test)
