"""What a data set is, and what promises to bring one.

Images are (S, H, W, C) bytes as they came from their file, S samples; a backend scales them when it makes a batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.data.checks import seed_number, whole
from cupynet.errors import ConfigError

# Second words of the Philox keys of this room, beside the seed. A Loader's second word is its epoch, which stays far
# below these: no two uses of one seed ever share random numbers.
SPLIT_STREAM = (1 << 63) + 1
TRAIN_STREAM = (1 << 63) + 2
TEST_STREAM = (1 << 63) + 3


def philox(seed: int, stream: int, block: int = 0) -> np.random.Generator:
    """Random numbers of the stream `(seed, stream)`; `block` starts 2**192 draws further on for each step."""
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, block], dtype=np.uint64)))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images: `images` (S, H, W, C) uint8, `labels` (S,) int64 in 0 .. classes - 1. Treated as read-only."""

    name: str
    images: Array
    labels: Array
    classes: int

    def __post_init__(self) -> None:
        where, images, labels = f"data set {self.name!r}", self.images, self.labels
        if not isinstance(images, np.ndarray) or images.ndim != 4 or images.dtype != np.uint8:
            raise ConfigError(f"{where}: images must be a NumPy array (S, H, W, C) of uint8, got {_described(images)}")
        if not isinstance(labels, np.ndarray) or labels.shape != images.shape[:1] or labels.dtype != np.int64:
            expected = f"a NumPy array ({len(images)},) of int64, one label per image"
            raise ConfigError(f"{where}: labels must be {expected}, got {_described(labels)}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < self.classes:
            found = f"{labels.min()} .. {labels.max()}"
            raise ConfigError(
                f"{where}: labels must lie in 0 .. {self.classes - 1} for {self.classes} classes, got {found}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Array) -> Dataset:
        """The samples at `indices`, in that order, as a data set of its own (a copy); a slice gives views."""
        return Dataset(self.name, self.images[indices], self.labels[indices], self.classes)


def _described(value: Any) -> str:
    """What `value` is, short enough for a message: type, and shape and dtype if it is an array."""
    if isinstance(value, np.ndarray):
        return f"{value.shape} of {value.dtype}"
    return type(value).__name__


@dataclass(frozen=True, eq=False)
class Data:
    """What a source brings: three data sets. `fallback` says that these are not the data that were asked for."""

    name: str
    train: Dataset
    validation: Dataset | None
    test: Dataset
    fallback: bool = False


class Source(ABC):
    """Promises a `Data`. A model is built from `image_shape` (H, W, C) and `classes` without anything being loaded.

    `validation` images are taken out of training by a permutation that follows from `seed`; `limit` then keeps the
    first that many training and test images, a quick look at a large set.
    """

    image_shape: tuple[int, int, int]
    classes: int

    def __init__(self, seed: int, validation: int, limit: int | None) -> None:
        self.seed = seed_number(seed)
        self.validation = whole("validation", validation, 0)
        self.limit = None if limit is None else whole("limit", limit, 1, " or null (no limit)")

    @abstractmethod
    def load(self) -> Data:
        """The data, checked. Raises DataError for what is missing or damaged."""

    def _check_validation(self, available: int, name: str) -> None:
        """Raises ConfigError if nothing would be left to train on."""
        if self.validation >= available:
            what = f"the {available} training images of {name!r}"
            raise ConfigError(
                f"validation must be smaller than {what}, of which it takes its share, got {self.validation}"
            )

    def _divided(self, name: str, train: Dataset, test: Dataset) -> Data:
        """`Data` with the validation images taken out of `train` and the limit applied; files keep their order."""
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
