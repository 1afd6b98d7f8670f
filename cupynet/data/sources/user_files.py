"""Images and labels of one's own, in files that are looked at before a model is built.

What is wrong with such a file is told as of a file of the user's: it is named with what was expected, found, and the
way out; nothing is ever removed or downloaded.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cupynet import checks
from cupynet.backend.array import Array
from cupynet.data.augment import Augmentation
from cupynet.data.dataset import Dataset
from cupynet.data.idx_file import Damaged, IdxFile, expanded, opened, read_opened
from cupynet.data.sources.source import Data, Source
from cupynet.errors import ConfigError, DataError


@dataclass(frozen=True)
class Outline:
    """What is known of a data set before its images are read: (H, W, C), the classes, how many images there are."""

    image_shape: tuple[int, int, int]
    classes: int
    train: int
    test: int
    class_names: tuple[str, ...] = ()


class OwnData(Source):
    """What one has in files of one's own. `image_shape` and `classes` are read from them when they are first asked for.

    `classes` None: as many as the largest label of the training images says, or as there are folders of them.
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
        """What is known without reading the images. ConfigError, DataError."""

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Training images (S, H, W, C) or (S, H, W) and labels (S,), and those to test on. DataError."""

    @abstractmethod
    def _place(self, part: str, what: str = "") -> str:
        """Where `train` or `test` is, or its `images` or `labels`, for messages."""

    @cached_property
    def outline(self) -> Outline:
        """What is known before the images are read. ConfigError, DataError."""
        found = self._look()
        for part, images in (("train", found.train), ("test", found.test)):
            if not images:
                raise DataError(f"{self._place(part, 'images')}: expected images to {part} on, found none")
        if 0 in found.image_shape:
            place, size = self._place("train", "images"), _by(found.image_shape)
            raise DataError(f"{place}: expected pixels, found images of {size} (H x W x C)")
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
        """The data. ConfigError, and DataError for what is missing, damaged, or no such data set."""
        outline = self.outline
        images, labels, test_images, test_labels = self._read()
        parts = []
        for part, pixels, numbers in (("train", images, labels), ("test", test_images, test_labels)):
            with _told(self._place(part)):
                parts.append(Dataset(f"{self.name}-{part}", pixels, numbers, outline.classes))
        return self._divided(self.name, *parts)

    def expected(self) -> dict[str, int]:
        return {"train": self.outline.train, "test": self.outline.test}

    def _classes_of(self, labels: Array) -> int:
        """How many classes there are, by what was asked for and else by the training labels (S,) integers.

        DataError where that would be labels below 0, or more classes than images.
        """
        if self._asked_classes is not None or not len(labels):
            return self._asked_classes or 1
        least, most = int(labels.min()), int(labels.max())
        if least < 0 or most >= len(labels):
            many = "" if least < 0 else f", or say how many: {checks.setting('data', 'classes')}"
            raise DataError(
                f"{self._place('train', 'labels')}: expected classes numbered 0, 1, 2, ..., found labels {least} .. "
                f"{most} of {checks.counted(len(labels), 'image')}: number them so{many}"
            )
        return most + 1


@contextmanager
def _told(place: object) -> Iterator[None]:
    """What is wrong with data as an error that names the place where they are."""
    try:
        yield
    except (ConfigError, Damaged) as error:
        raise DataError(f"{place}: {error}") from error.__cause__


IDX_NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


class Idx(OwnData):
    """Four IDX files of unsigned bytes, gzip or plain: images (S, H, W) or (S, H, W, C), and labels (S,).

    Args:
        folder: holds them under the names that MNIST's have, with or without .gz.
        train_images, train_labels, test_images, test_labels: paths in place of those names; relative ones lie in
            `folder`, if there is one.
        classes: how many there are; None: as the training labels say.
        sha256: name of one of these four arguments -> SHA-256 of the file, or of what is unpacked.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        train_images: str | os.PathLike[str] | None = None,
        train_labels: str | os.PathLike[str] | None = None,
        test_images: str | os.PathLike[str] | None = None,
        test_labels: str | os.PathLike[str] | None = None,
        classes: int | None = None,
        sha256: Mapping[str, str] | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: str | Mapping[str, Sequence[float]] | None = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        given = dict(zip(IDX_NAMES, (train_images, train_labels, test_images, test_labels), strict=True))
        self.folder = path_of("folder", folder)
        self._given = {part: path_of(part, path) for part, path in given.items()}
        known = self.folder or self._given["train_images"]
        name = Path(known).resolve().name.partition(".")[0] if known else "idx"
        super().__init__(name, classes, seed, validation, limit, normalize, augment)
        if not isinstance(sha256, Mapping | None):
            found = checks.shown(sha256)
            raise ConfigError(f"sha256={found}: must say which file's it is, such as {{train_images: ...}}, or null")
        if unknown := [name for name in sha256 or {} if name not in IDX_NAMES]:
            raise ConfigError(f"sha256: {checks.shown(unknown[0], str)} is none of {', '.join(IDX_NAMES)}")
        self._sha256 = {part: sha256_of(f"sha256.{part}", value) for part, value in (sha256 or {}).items()}

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """Where each of the four files is."""
        if self.folder is None and None in self._given.values():
            unnamed = checks.setting("data", "folder", None)
            raise ConfigError(f"{unnamed}: name the folder with the four IDX files, or the files one by one")
        folder, found = Path("." if self.folder is None else expanded(self.folder)), {}
        for part, given in self._given.items():
            usual = [f"{IDX_NAMES[part]}.gz", IDX_NAMES[part]]
            names = [os.fspath(expanded(given))] if given else usual
            there = [folder / name for name in names if os.path.lexists(folder / name)]
            if not there:
                other = f", nor without .gz: bring it there, or name a file in {checks.setting('data', part)}"
                raise DataError(f"{folder / names[0]}: is not there{'' if given else other}")
            found[part] = there[0]
        return found

    def _place(self, part: str, what: str = "") -> str:
        return str(self._paths[f"{part}_{what or 'labels'}"])

    @cached_property
    def _headers(self) -> dict[str, IdxFile]:
        """What each file says of itself, images and labels fitting each other."""
        found = {}
        for part, path in self._paths.items():
            with _told(path):
                found[part] = opened(path, (3, 4) if part.endswith("images") else (1,))
        for part in ("train", "test"):
            images, labels = found[f"{part}_images"].shape, found[f"{part}_labels"].shape
            if images[0] != labels[0]:
                where = self._paths[f"{part}_labels"]
                raise DataError(
                    f"{where}: expected {images[0]} labels, one for each image of "
                    f"{self._paths[f'{part}_images']}, found {labels[0]}"
                )
        train, test = found["train_images"].shape[1:], found["test_images"].shape[1:]
        if train != test:
            place = self._paths["test_images"]
            raise DataError(f"{place}: expected images of {_by(train)}, as those to train on, found {_by(test)}")
        return found

    def _part(self, part: str) -> Array:
        with _told(self._paths[part]):
            return read_opened(self._paths[part], self._headers[part], self._sha256.get(part) or "")

    def _look(self) -> Outline:
        shape = self._headers["train_images"].shape
        return Outline(
            (shape[1], shape[2], shape[3] if len(shape) == 4 else 1),
            self._classes_of(self._part("train_labels")),
            shape[0],
            self._headers["test_images"].shape[0],
        )

    def _read(self) -> tuple[Array, Array, Array, Array]:
        first, second, third, fourth = (self._part(part) for part in IDX_NAMES)
        return first, second, third, fourth


def sha256_of(name: str, value: str | None) -> str | None:
    """`value` as the argument `name`, in small letters, if it is a SHA-256 in hexadecimal or None; else ConfigError."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-fA-F]{64}", value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a SHA-256, 64 hexadecimal digits, or null")
    return value and value.lower()


def path_of(name: str, value: str | os.PathLike[str] | None) -> str | os.PathLike[str] | None:
    """`value` as the argument `name`, if it is a path or None; else ConfigError."""
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
        raise ConfigError(f"{name}={checks.shown(value)}: must be a path, or null")
    return value


def _by(axes: Sequence[int]) -> str:
    return " x ".join(map(str, axes))
