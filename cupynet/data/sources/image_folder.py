"""User images: a folder of PNG and JPEG files for each class."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.files import FilePath
from cupynet.data.pictures import ENDINGS, is_grey, is_transparent, opened_picture, picture, resized
from cupynet.data.sources.user_files import UserFiles, required_path


@dataclass(eq=False)
class ImageFolder(UserFiles):
    """`<folder>/train/<class>/*.png` and `<folder>/test/<class>/*.png`, or .jpg; needs Pillow (the extra `images`).

    Classes and images are in the order of their names. With a `limit` the classes take turns, so that it keeps some of
    each, and the other images are not decoded (unless some are held out for validation). Names that begin with a dot
    are ignored. Transparent pixels become white; the EXIF orientation is ignored.

    Args:
        folder: its path.
        size: (height, width) to which every image is resized; None: that of the first, which all must have.
        channels: 1 for grey, 3 for colour; None: as in the first image, which all must match.
        seed, validation, limit, normalize, augment: see `Source`.
    """

    folder: FilePath | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None:
            self.size = checks.pair("size", self.size, 1, ", or null for that of the first image")
        if self.channels not in (None, 1, 3) or checks.is_bool(self.channels):
            raise ConfigError("must be 1 (grey), 3 (colours), or null", "channels", wording.shown(self.channels))
        what = "the folder that holds train/ and test/, with a folder for each class"
        self.place = required_path("folder", self.folder, what)
        self.name = self.place.resolve().name
        self._listed = self._list()
        with opened_picture(self._first) as first:
            size, grey = (first.height, first.width), is_grey(first)
        self.class_names = tuple(self._listed["train"])
        samples = len(self._kept("train")), len(self._kept("test"))
        self._describe((*(self.size or size), self.channels or (1 if grey else 3)), len(self.class_names), samples)

    @property
    def _first(self) -> Path:
        """The first picture of the first class."""
        return next(iter(self._listed["train"].values()))[0]

    def _list(self) -> dict[str, dict[str, list[Path]]]:
        """Return part -> class -> files, all in the order of their names. DataError."""
        top = self.place
        found = {part: {path.name: _inside(path) for path in _inside(top / part)} for part in ("train", "test")}
        for part, classes in found.items():
            for name, files in classes.items():
                if name not in found["train"] or not files:
                    raise DataError(f"{top / part / name}: expected pictures of a class of train/")
                for path in files:
                    if path.suffix.lower() not in ENDINGS:
                        raise DataError(f"{path}: expected only {', '.join(ENDINGS)} files: move it elsewhere")
        if not found["train"]:
            raise DataError(f"{top / 'train'}: expected a folder for each class, found none")
        return found

    def _kept(self, part: str) -> list[tuple[Path, int]]:
        """Return the files to read, each with its label."""
        names = list(self._listed["train"])
        classes = [[(path, names.index(name)) for path in files] for name, files in self._listed[part].items()]
        if self.limit is None:
            return list(chain(*classes))
        turns = [each for each in chain(*zip_longest(*classes)) if each is not None]
        return turns if part == "train" and self.validation else turns[: self.limit]

    def _read(self) -> tuple[Array, Array, Array, Array]:
        return *self._pictures("train"), *self._pictures("test")

    def _pictures(self, part: str) -> tuple[Array, Array]:
        """Return images (S, H, W, C) uint8 and labels (S,) of a part."""
        (height, width, channels), listed = self.image_shape, self._kept(part)
        images = np.empty((len(listed), height, width, channels), np.uint8)
        for row, (path, _) in enumerate(listed):
            if self.channels is None:
                self._check_kind(path)
            pixels = picture(path, channels)
            if self.size is None and pixels.shape[:2] != (height, width):
                raise DataError(
                    f"{path}: expected {height} x {width} pixels, as the first image has, found {pixels.shape[0]} x "
                    f"{pixels.shape[1]}: resize all with {wording.setting('data', 'size', [height, width])}"
                )
            images[row] = resized(pixels, height, width)
        return images, np.array([label for _, label in listed], np.int64)

    def _check_kind(self, path: Path) -> None:
        """Raise DataError for a grey picture if the first is in colour, or the reverse."""
        with opened_picture(path) as opened:
            kind, others = ("grey", "in colour") if is_grey(opened) else ("in colour", "grey")
        if (kind == "grey") != (self.image_shape[2] == 1):
            ways = " or ".join(wording.setting("data", "channels", channels) for channels in (1, 3))
            raise DataError(f"{path}: is {kind}, but the first, {self._first}, is {others}. Set {ways}")

    def changed(self) -> str:
        transparent = any(is_transparent(path) for part in ("train", "test") for path, _ in self._kept(part))
        return "transparent pixels kept their stored colour, and are now white" if transparent else ""


def _inside(folder: Path) -> list[Path]:
    """Return what is in a folder, by name; nothing if it cannot be read."""
    return sorted(folder.glob("[!.]*")) if os.path.isdir(folder) else []  # False for invalid names
