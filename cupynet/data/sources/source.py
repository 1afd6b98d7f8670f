"""What a source of data is, and what it loads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation, augmentations
from cupynet.data.dataset import SPLIT_STREAM, Dataset, philox
from cupynet.data.normalize import check_channels, checked, pixels_for
from cupynet.data.shards import Shards


@dataclass(frozen=True, eq=False)
class Data:
    """What a source loads: data sets to train, choose by (`validation`, where images are held out) and `test` on.

    `name` is of all of them. `fallback` says that these are not the data that were asked for.

    `train` is a `Dataset`, or the `Shards` of one.
    """

    name: str
    train: Dataset | Shards
    validation: Dataset | None
    test: Dataset
    fallback: bool = False

    def check(self, image_shape: tuple[int, int, int], classes: int) -> None:
        """Raises DataError where these data are not what their source promised; it says what is and what should be.

        Args:
            image_shape, classes: (H, W, C) and the number of classes that a model was built for.
        """
        for dataset in (self.train, self.validation, self.test):
            if dataset is None:
                continue
            found = dataset.image_shape
            if found != tuple(image_shape) or dataset.classes != classes:
                promised = f"images of {_by(image_shape)} in {checks.counted(classes, 'class')}"
                loaded = f"images of {_by(found)} in {checks.counted(dataset.classes, 'class')}"
                raise DataError(
                    f"data {self.name!r}: its source promised {promised}, but {dataset.name!r} has {loaded}"
                )


def _by(axes: tuple[int, ...]) -> str:
    return " x ".join(map(str, axes))


class Source(ABC):
    """Promises a `Data`. A model is built from `image_shape` (H, W, C) and `classes` without anything being loaded.

    `validation` images are taken out of training by a permutation that follows from `seed`. Then `limit` keeps only the
    first so many training images, and as many test images: a quick look at a large set.

    `normalize` says what becomes of pixels in a batch: None, fractions of 255; "auto", the training images get mean 0
    and deviation 1 in each channel; {"mean": [...], "deviation": [...]}, these are what is taken to be 0 and 1, in
    fractions. The images that are held out or tested on are treated like those trained on.

    `augment` is what training images go through each time they are trained on (see `Augmentation`), in this order.

    Attributes:
        class_names: what people call the classes, in order; empty where they have no names but numbers.
        on_black: whether its images show something light on a black ground.
        centred: whether each is drawn into the middle of its image as MNIST's digits are, see `centred_as_mnist`.
    """

    image_shape: tuple[int, int, int]
    classes: int
    name: str = "data"
    class_names: tuple[str, ...] = ()
    on_black = False
    centred = False
    seed = 12345  # these of a source that was made without `__init__`
    normalize: str | Mapping[str, Sequence[float]] | None = None
    augment: tuple[Augmentation, ...] = ()

    def __init__(
        self,
        seed: int,
        validation: int,
        limit: int | None,
        normalize: str | Mapping[str, Sequence[float]] | None = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.seed = checks.seed("seed", seed)
        self.validation = checks.integer("validation", validation, 0)
        self.limit = None if limit is None else checks.integer("limit", limit, 1, ", or null for no limit")
        self.normalize = checked(normalize)
        self.augment = augmentations(augment)

    @abstractmethod
    def load(self) -> Data:
        """The data, checked. Raises DataError for what is missing or damaged."""

    def check_normalize(self) -> None:
        """Refuse what is told of another number of channels than images have. ConfigError, DataError."""
        check_channels(self.normalize, self.image_shape[2])

    def expected(self) -> dict[str, int]:
        """How many training and test images `load` is about to hold in memory, as `train` and `test`.

        Empty where that is not known before, or where they are read from files when they are needed.
        """
        return {}

    @property
    def downloads_to(self) -> Path | None:
        """The folder into which `load` would download files; None if it downloads none."""
        return None

    def _check_validation(self, available: int, name: str) -> None:
        """Raises ConfigError if nothing would be left to train on."""
        if self.validation >= available:
            what = f"the {checks.counted(available, 'training image')} of {name!r}"
            raise ConfigError(f"validation={self.validation}: must be below {what}, which it is taken from")

    def _divided(self, name: str, train: Dataset, test: Dataset) -> Data:
        """`Data` with the validation images taken out of `train` and the limit applied; samples keep their order."""
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
