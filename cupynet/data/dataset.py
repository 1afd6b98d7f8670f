"""What a data set is, and what promises to load one.

Images are (S, H, W, C) bytes as they came from their file, S samples; a backend scales them when it makes a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet import checks
from cupynet.backend.array import Array
from cupynet.errors import ConfigError, DataError

# The second words of this room's Philox keys; the first is the seed. A Loader's second word is its epoch, which stays
# far below these: no two uses of one seed ever share random numbers.
SPLIT_STREAM = (1 << 63) + 1
TRAIN_STREAM = (1 << 63) + 2
TEST_STREAM = (1 << 63) + 3


def philox(seed: int, stream: int, block: int = 0) -> np.random.Generator:
    """Random numbers of the stream `(seed, stream)`; each `block` starts 2**192 draws after the one before."""
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, block], dtype=np.uint64)))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images. Treated as read-only.

    Args:
        name: for messages and reports.
        images: (S, H, W, C) uint8, or (S, H, W) of one channel. Integers of another type from 0 to 255 and lists are
            converted; a view whose bytes do not lie in this order is copied, once.
        labels: (S,) integers of any type in 0 .. classes - 1; kept as int64.
        classes: how many there are.

    Raises:
        ConfigError: anything else, such as images of floating-point numbers.
    """

    name: str
    images: Array
    labels: Array
    classes: int

    def __post_init__(self) -> None:
        where = f"data set {self.name!r}"
        images = image_bytes(where, self.images)
        labels = label_numbers(where, self.labels)
        classes = checks.integer(f"{where}: classes", self.classes, 1)
        if labels.shape != images.shape[:1]:
            raise ConfigError(f"{where}: labels must be ({len(images)},), one per image, got {labels.shape}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            found = f"{labels.min()} .. {labels.max()}"
            raise ConfigError(f"{where}: labels must lie in 0 .. {classes - 1} for {classes} classes, got {found}")
        for field, value in (("images", images), ("labels", labels), ("classes", classes)):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Array) -> Dataset:
        """The samples at `indices`, in that order, as a data set of its own.

        A copy, or views where `indices` is a slice of adjacent ones.
        """
        return Dataset(self.name, self.images[indices], self.labels[indices], self.classes)


def image_bytes(where: str, images: Any) -> Array:
    """`images` as contiguous (S, H, W, C) uint8. Raises ConfigError; `where` begins its message."""
    array = _array(f"{where}: images", images)
    if array.dtype.kind == "f":
        way_out = "multiply by 255 if they lie in 0 to 1, then .round().astype('uint8')"
        raise ConfigError(f"{where}: images must be uint8, 0 to 255, got {_described(array)}: {way_out}")
    if array.dtype.kind not in "iu":
        raise ConfigError(f"{where}: images must be uint8, 0 to 255, got {_described(array)}")
    if array.ndim not in (3, 4):
        raise ConfigError(f"{where}: images must be (S, H, W, C), or (S, H, W) of one channel, got {_described(array)}")
    if array.dtype != np.uint8 and array.size and not 0 <= array.min() <= array.max() <= 255:
        found = f"{array.min()} .. {array.max()}"
        raise ConfigError(f"{where}: images must be uint8, 0 to 255, got {found} in {_described(array)}")
    pixels = np.ascontiguousarray(array, dtype=np.uint8)
    return pixels if pixels.ndim == 4 else pixels[..., np.newaxis]


def label_numbers(where: str, labels: Any) -> Array:
    """`labels` as contiguous int64, of whatever shape they have. Raises ConfigError; `where` begins its message."""
    array = _array(f"{where}: labels", labels)
    if array.dtype.kind not in "iu" or (
        array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max
    ):
        raise ConfigError(f"{where}: labels must be integers, one per image, got {_described(array)}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _array(what: str, value: Any) -> Array:
    """`value` as a NumPy array, where it is one, a list, or something that NumPy can read; else ConfigError."""
    kind = type(value).__name__
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal lengths, arrays of a GPU
        raise ConfigError(f"{what} must be a NumPy array, got {kind} ({checks.one_line(error)})") from error
    if array.ndim == 0:
        raise ConfigError(f"{what} must be a NumPy array, got {kind}")
    return array


def _described(array: Array) -> str:
    """Shape and type, short enough for a message."""
    return f"{array.shape} of {array.dtype}"


@dataclass(frozen=True, eq=False)
class Data:
    """What a source loads: three data sets. `fallback` says that these are not the data that were asked for."""

    name: str
    train: Dataset
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
            found = dataset.images.shape[1:]
            if found != tuple(image_shape) or dataset.classes != classes:
                promised = f"images of {_by(image_shape)} in {classes} classes"
                loaded = f"images of {_by(found)} in {dataset.classes} classes"
                raise DataError(
                    f"data {self.name!r}: its source promised {promised}, but {dataset.name!r} has {loaded}"
                )


def _by(axes: tuple[int, ...]) -> str:
    return " x ".join(map(str, axes))


class Source(ABC):
    """Promises a `Data`. A model is built from `image_shape` (H, W, C) and `classes` without anything being loaded.

    `validation` images are taken out of training by a permutation that follows from `seed`. Then `limit` keeps only the
    first so many training images, and as many test images: a quick look at a large set.
    """

    image_shape: tuple[int, int, int]
    classes: int

    def __init__(self, seed: int, validation: int, limit: int | None) -> None:
        self.seed = checks.seed("seed", seed)
        self.validation = checks.integer("validation", validation, 0)
        self.limit = None if limit is None else checks.integer("limit", limit, 1, ", or null for no limit")

    @abstractmethod
    def load(self) -> Data:
        """The data, checked. Raises DataError for what is missing or damaged."""

    def _check_validation(self, available: int, name: str) -> None:
        """Raises ConfigError if nothing would be left to train on."""
        if self.validation >= available:
            what = f"the {available} training images of {name!r}"
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
        return Data(name, train, validation, test)
