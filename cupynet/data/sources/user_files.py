"""Data sets in user files.

Errors name the file, what was expected and found, and the remedy. Files are never removed or downloaded.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import Dataset
from cupynet.data.idx_file import Damaged, FilePath
from cupynet.data.sources.source import Data, Source

PARTS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Outline:
    """Outline of a data set, known before its images are decoded: (H, W, C), numbers of classes and images."""

    image_shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    class_names: tuple[str, ...] = ()


class UserFiles(Source):
    """Base class of data sets in user files, which are inspected on first use."""

    @abstractmethod
    def _look(self) -> Outline:
        """Return the outline. ConfigError, DataError."""

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) or (S, H, W) and labels (S,), and those to test on. DataError."""

    @abstractmethod
    def _place(self, part: str, what: str = "") -> str:
        """Return the file of `train` or `test`, or of its `images` or `labels`, for messages."""

    @cached_property
    def outline(self) -> Outline:
        """The properties that are known before `load`. ConfigError, DataError."""
        found = self._look()
        for part, images in (("train", found.train), ("test", found.test)):
            if not images:
                raise DataError(f"{self._place(part, 'images')}: expected images to {part} on, found none")
        if 0 in found.image_shape:
            raise DataError(f"{self._place('train', 'images')}: expected pixels, found images {found.image_shape}")
        self._check_validation(found.train, self.name)
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
        outline = self.outline
        images, labels, test_images, test_labels = self._read()
        parts = []
        for part, pixels, numbers in (("train", images, labels), ("test", test_images, test_labels)):
            with reported_at(self._place(part)):
                parts.append(Dataset(f"{self.name}-{part}", pixels, numbers, outline.classes))
        return self._divided(self.name, *parts)


class Header(NamedTuple):
    """Shape and dtype of an array that has not been read yet."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class UserArrays(UserFiles):
    """Base class of data sets in four user arrays. The outline needs only their headers and the training labels.

    classes: None: the largest training label + 1.
    """

    _asked_classes: int | None

    @abstractmethod
    def _header(self, part: str) -> Header:
        """Read the header of an array, a part of `PARTS`. DataError."""

    @abstractmethod
    def _array(self, part: str) -> Array:
        """Read an array, a part of `PARTS`. DataError."""

    def _look(self) -> Outline:
        headers = {part: self._header(part) for part in PARTS}
        self._check(headers)
        images, test_images = headers["train_images"].shape, headers["test_images"].shape
        height, width, channels = (*images[1:], 1)[:3]
        return Outline(
            (height, width, channels), self._classes_of(self._array("train_labels")), images[0], test_images[0]
        )

    def _read(self) -> tuple[Array, Array, Array, Array]:
        images, labels, test_images, test_labels = map(self._array, PARTS)
        return images, labels.reshape(-1), test_images, test_labels.reshape(-1)

    def _check(self, headers: Mapping[str, Header]) -> None:
        """Check that the arrays belong together. DataError."""
        train = headers["train_images"].shape
        for part in ("train", "test"):
            images, labels = headers[f"{part}_images"].shape, headers[f"{part}_labels"]
            if len(images) not in (3, 4) or images[1:] != train[1:]:
                like = "(S, H, W) or (S, H, W, C)" if part == "train" else f"like those to train on, {train}"
                raise DataError(f"{self._place(part, 'images')}: expected images {like}, found {images}")
            if labels.shape not in (images[:1], (*images[:1], 1)):
                expected = f"({images[0]},), one label per image"
                raise DataError(f"{self._place(part, 'labels')}: expected {expected}, found {labels.shape}")
            if labels.dtype.kind not in "iu":
                raise DataError(f"{self._place(part, 'labels')}: expected integers, found {labels.dtype}")

    def _classes_of(self, labels: Array) -> int:
        """Return the number of classes as given, else by the training labels (S,). DataError for unusable labels."""
        if self._asked_classes is not None or not len(labels):
            return self._asked_classes or 1
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= len(labels):
            raise DataError(
                f"{self._place('train', 'labels')}: expected labels 0, 1, 2, ..., found {least} .. {most} of "
                f"{len(labels)} images: renumber them, or set {checks.setting('data', 'classes')}"
            )
        return most + 1


@contextmanager
def reported_at(place: object) -> Iterator[None]:
    """Raise DataError that names `place` for an error in the data."""
    try:
        yield
    except (ConfigError, Damaged) as error:
        raise DataError(f"{place}: {error}") from error.__cause__


def classes_of(value: int | None) -> int | None:
    """Check the argument `classes`, a number or None. ConfigError."""
    return None if value is None else checks.integer("classes", value, 1, ", or null for the largest label + 1")


def sha256_of(name: str, value: str | None) -> str | None:
    """Return the argument `name`, a SHA-256 in hexadecimal or None, in lower case. ConfigError."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a SHA-256, 64 hexadecimal digits, or null")
    return value and value.lower()


def path_of(name: str, value: FilePath | None) -> FilePath | None:
    """Return the argument `name`, a path or None. ConfigError."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a path, or null")
    return value
