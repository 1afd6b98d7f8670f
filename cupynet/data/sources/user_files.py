"""The user's images and labels, in files whose sizes are read before a model is built.

Errors name the file, what was expected and found, and the remedy. Nothing is ever removed or downloaded.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.dataset import Dataset
from cupynet.data.idx_file import Damaged
from cupynet.data.sources.source import Data, Source


@dataclass(frozen=True)
class Outline:
    """The properties of a data set that are known before its images are read: (H, W, C), and counts."""

    image_shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    class_names: tuple[str, ...] = ()


class UserFiles(Source):
    """Base class of data sets in files of the user, from which `image_shape` and `classes` are read on first use.

    classes: None: the largest training label + 1, or the number of class folders.
    """

    def __init__(
        self,
        name: str,
        classes: int | None,
        seed: int,
        validation: int,
        limit: int | None,
        normalize: str | Mapping[str, Sequence[float]] | None,
        augment: Sequence[Augmentation],
    ) -> None:
        super().__init__(seed, validation, limit, normalize, augment)
        self.name = name
        also = ", or null to take them from the training images"
        self._asked_classes = None if classes is None else checks.integer("classes", classes, 1, also)

    @abstractmethod
    def _look(self) -> Outline:
        """Return what is known without reading the images. ConfigError, DataError."""

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) or (S, H, W) and labels (S,), and those to test on. DataError."""

    @abstractmethod
    def _place(self, part: str, what: str = "") -> str:
        """Return the file of `train` or `test`, or of its `images` or `labels`, for messages."""

    @cached_property
    def outline(self) -> Outline:
        """What is known before the images are read. ConfigError, DataError."""
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

    def load(self) -> Data:
        """Return the data. ConfigError; DataError for missing or damaged files."""
        outline = self.outline
        images, labels, test_images, test_labels = self._read()
        parts = []
        for part, pixels, numbers in (("train", images, labels), ("test", test_images, test_labels)):
            with reported_at(self._place(part)):
                parts.append(Dataset(f"{self.name}-{part}", pixels, numbers, outline.classes))
        train, test = parts
        if test.image_shape != train.image_shape:
            raise DataError(f"{self._place('test', 'images')}: expected {train.image_shape}, found {test.image_shape}")
        return self._divided(self.name, train, test)

    def expected(self) -> dict[str, int]:
        return {"train": self.outline.train, "test": self.outline.test}

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that arrays of these shapes belong together; the keys are train_images and so on. DataError."""
        train = shapes["train_images"]
        for part in ("train", "test"):
            images, labels = shapes[f"{part}_images"], shapes[f"{part}_labels"]
            if len(images) not in (3, 4) or images[1:] != train[1:]:
                like = "(S, H, W) or (S, H, W, C)" if part == "train" else f"like those to train on, {train}"
                raise DataError(f"{self._place(part, 'images')}: expected images {like}, found {images}")
            if labels not in (images[:1], (*images[:1], 1)):
                raise DataError(
                    f"{self._place(part, 'labels')}: expected ({images[0]},), one label per image, found {labels}"
                )

    def _classes_of(self, labels: Array) -> int:
        """Return the number of classes as given, else by the training labels (S,). DataError for unusable labels."""
        if self._asked_classes is not None or not len(labels):
            return self._asked_classes or 1
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= len(labels):
            raise DataError(
                f"{self._place('train', 'labels')}: expected labels 0, 1, 2, ..., found {least} .. {most} of "
                f"{len(labels)} images: number them so, or set {checks.setting('data', 'classes')}"
            )
        return most + 1


@contextmanager
def reported_at(place: object) -> Iterator[None]:
    """Raise DataError that names `place` for an error in the data."""
    try:
        yield
    except (ConfigError, Damaged) as error:
        raise DataError(f"{place}: {error}") from error.__cause__


def sha256_of(name: str, value: str | None) -> str | None:
    """Return the argument `name`, a SHA-256 in hexadecimal or None, in lower case. ConfigError."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a SHA-256, 64 hexadecimal digits, or null")
    return value and value.lower()


def path_of(name: str, value: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """Return the argument `name`, a path or None. ConfigError."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a path, or null")
    return value
