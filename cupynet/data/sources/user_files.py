"""Data sets in user files.

Errors name the file or folder, what was expected and found, and the remedy. Files are never removed or downloaded.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import check_layout, count_classes, read_dataset, read_from
from cupynet.data.files import FilePath, checked_path, expanded
from cupynet.data.sources.source import Data, Source

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


class UserFiles(Source):
    """Base class of data sets in user files. The constructor inspects the files, but reads no images.

    Attributes:
        place: the file or the folder, for messages.
    """

    place: Path

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) or (S, H, W) and labels (S,), and those to test on. DataError."""

    def _describe(self, image_shape: tuple[int, int, int], classes: int, samples: tuple[int, int]) -> None:
        """Set what is known before `load`. DataError if there are no images."""
        if 0 in (*image_shape, *samples):
            images = f"{samples[0]} and {samples[1]} of {image_shape}"
            raise DataError(f"{self.place}: expected images to train and to test on, found {images}")
        self.image_shape, self.classes, self.samples = image_shape, classes, samples

    def load(self) -> Data:
        """Return the data. ConfigError; DataError for missing or damaged files."""
        images, labels, test_images, test_labels = self._read()
        train = read_dataset(self.place, f"{self.name}-train", images, labels, self.classes)
        test = read_dataset(self.place, f"{self.name}-test", test_images, test_labels, self.classes)
        return self._divided(self.name, train, test)


@dataclass(eq=False)
class UserArrays(UserFiles):
    """Base class of data sets in four user arrays. The constructor reads their shapes and the training labels.

    classes: None: the largest training label + 1.
    """

    mixed = False

    classes: int | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    @abstractmethod
    def _shape(self, part: str) -> tuple[int, ...]:
        """Read the shape of an array, a part of `PARTS`. DataError."""

    @abstractmethod
    def _array(self, part: str) -> Array:
        """Read an array, a part of `PARTS`. DataError."""

    def _look(self) -> None:
        """Inspect the files, and set the number of classes if it is not given."""
        images, _, test_images, _ = map(self._shape, PARTS)
        if len(images) not in (3, 4) or not test_images:
            raise DataError(f"{self.place}: expected images (S, H, W) or (S, H, W, C), found {images}")
        height, width, channels = (*images[1:], 1)[:3]
        with read_from(self.place):
            check_layout("train_images", images)
        classes = count_classes(self.place, [self._labels("train_labels")], self.classes)
        self._describe((height, width, channels), classes, (images[0], test_images[0]))
        for part in ("train_images", "test_images"):
            self._check_size(part)

    def _check_size(self, part: str) -> None:
        """Raise DataError if a header claims more images than its file has, before memory is estimated."""

    def _labels(self, part: str) -> Array:
        """Read labels, (S,) or (S, 1), as (S,). DataError."""
        labels = self._array(part)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim != 1:
            raise DataError(f"{self.place}: {part}: labels must be (S,) integers, got {labels.shape} of {labels.dtype}")
        return labels

    def _read(self) -> tuple[Array, Array, Array, Array]:
        images, labels = self._array("train_images"), self._labels("train_labels")
        return images, labels, self._array("test_images"), self._labels("test_labels")

    def changed(self) -> str:
        labels = self._labels("train_labels"), self._labels("test_labels")
        (train, _, test), (first, _, first_tests) = (self._chosen(*labels, mixed=mixed) for mixed in (False, True))
        every, every_test = (np.arange(len(each)) for each in labels)
        same = np.array_equal(every[train], every[first]) and np.array_equal(every_test[test], every_test[first_tests])
        return "" if same else f"limit={self.limit} kept the first images, and now takes images from each class"


def required_path(name: str, value: FilePath | None, what: str) -> Path:
    """Return the argument `name`, the path of `what`. ConfigError if it is not given."""
    path = checked_path(name, value)
    if path is None:
        raise ConfigError(f"name {what}", name, "null")
    return expanded(path)


def checked_sha256(name: str, value: str | None) -> str:
    """Return the argument `name`, a SHA-256 in hexadecimal, in lower case; "" for None. ConfigError."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value)):
        raise ConfigError("must be a SHA-256, 64 hexadecimal digits, or null", name, wording.shown(value))
    return (value or "").lower()
