"""Data sets in user files.

Errors name the file or folder, what was expected and found, and the remedy. Files are never removed or downloaded.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from functools import cached_property
from typing import NamedTuple

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import count_classes, read_dataset
from cupynet.data.files import FilePath
from cupynet.data.sources.source import Data, Source

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


class Outline(NamedTuple):
    """Outline of a data set, known before its images are decoded: (H, W, C), numbers of classes and images."""

    image_shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    class_names: tuple[str, ...] = ()


class UserFiles(Source):
    """Base class of data sets in user files, which are inspected on first use.

    Attributes:
        place: the file or the folder, for messages.
    """

    place: FilePath

    @abstractmethod
    def _look(self) -> Outline:
        """Return the outline. ConfigError, DataError."""

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) or (S, H, W) and labels (S,), and those to test on. DataError."""

    @cached_property
    def outline(self) -> Outline:
        """The properties that are known before `load`. ConfigError, DataError."""
        found = self._look()
        if 0 in (*found.image_shape, found.train, found.test):
            images = f"{found.train} and {found.test} of {found.image_shape}"
            raise DataError(f"{self.place}: expected images to train and to test on, found {images}")
        return found

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        return self.outline.image_shape

    @cached_property
    def classes(self) -> int:  # type: ignore[override]
        return self.outline.classes

    @cached_property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.outline.class_names

    def expected(self) -> dict[str, int]:
        return {"train": self.outline.train, "test": self.outline.test}

    def load(self) -> Data:
        """Return the data. ConfigError; DataError for missing or damaged files."""
        classes = self.classes
        images, labels, test_images, test_labels = self._read()
        train = read_dataset(self.place, f"{self.name}-train", images, labels, classes)
        test = read_dataset(self.place, f"{self.name}-test", test_images, test_labels, classes)
        return self._divided(self.name, train, test)


class UserArrays(UserFiles):
    """Base class of data sets in four user arrays. The outline needs only shapes and the training labels.

    classes: None: the largest training label + 1.
    """

    _asked_classes: int | None

    @abstractmethod
    def _shape(self, part: str) -> tuple[int, ...]:
        """Read the shape of an array, a part of `PARTS`. DataError."""

    @abstractmethod
    def _array(self, part: str) -> Array:
        """Read an array, a part of `PARTS`. DataError."""

    def _look(self) -> Outline:
        images, _, test_images, _ = map(self._shape, PARTS)
        if len(images) not in (3, 4) or not test_images:
            raise DataError(f"{self.place}: expected images (S, H, W) or (S, H, W, C), found {images}")
        classes = self._asked_classes or count_classes(self.place, [self._array("train_labels")])
        height, width, channels = (*images[1:], 1)[:3]
        return Outline((height, width, channels), classes, images[0], test_images[0])

    def _read(self) -> tuple[Array, Array, Array, Array]:
        images, labels, test_images, test_labels = map(self._array, PARTS)
        return images, labels.reshape(-1), test_images, test_labels.reshape(-1)


def classes_of(value: int | None) -> int | None:
    """Check the argument `classes`, a number or None. ConfigError."""
    return None if value is None else checks.integer("classes", value, 1, ", or null for the largest label + 1")


def sha256_of(name: str, value: str | None) -> str:
    """Return the argument `name`, a SHA-256 in hexadecimal, in lower case; "" for None. ConfigError."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a SHA-256, 64 hexadecimal digits, or null")
    return (value or "").lower()
