from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.files import FilePath
from cupynet.data.pictures import ENDINGS, is_gray, opened_picture, picture, resized, size_of
from cupynet.data.sources.user_files import UserFiles, required_path

FOLDERS = {"train": ("train",), "validation": ("val", "valid", "validation"), "test": ("test",)}  # folder names
OF_WINDOWS = ("Thumbs.db", "desktop.ini")
NAMED = 9  # maximum number of further pictures to name in an error


@dataclass(eq=False)
class ImageFolder(UserFiles):
    """PNG, JPEG, BMP or WebP files in one folder per class. Requires Pillow (extra `images`).

    Images are in `<folder>/train/<class>/`, `<folder>/val/<class>/` and `<folder>/test/<class>/`, each of which may be
    missing. Alternatively, all images are in `<folder>/<class>/`, and `validation` holds out some of them.

    Classes and images are sorted by name. Names that begin with a dot, Thumbs.db and desktop.ini are ignored. `limit`
    takes images from the classes in turn. Transparent pixels become white, and EXIF orientation is applied.

    Args:
        size: (height, width) to which images are resized; None if all images have the same size.
        channels: 1 for grayscale or 3 for color; None if all images are grayscale or all are color.
        class_names: names of the classes in order; by default the folder names. A listed class need not have a folder.
        seed and others: see `Source`.
    """

    folder: FilePath | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    class_names: tuple[str, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None:
            self.size = checks.pair("size", self.size, 1, ", or null for the size of the first image")
        if self.channels not in (None, 1, 3) or checks.is_bool(self.channels):
            raise ConfigError("must be 1 (grayscale), 3 (color), or null", "channels", wording.shown(self.channels))
        if not isinstance(self.class_names, Sequence | None) or isinstance(self.class_names, str):
            reason = "must be a list of folder names, or null"
            raise ConfigError(reason, "class_names", wording.shown(self.class_names))
        if len({*map(str, self.class_names or ())}) < len(self.class_names or ()):
            raise ConfigError("must not contain a name twice", "class_names", wording.shown(self.class_names))
        self.place = required_path("folder", self.folder, "the folder that contains a folder for each class, or train/")
        self.name = self.place.resolve().name
        self._listed = self._list(tuple(map(str, self.class_names or ())))
        if self.validation and "validation" in self._listed:
            reason = f"{self.place} has its own validation images. Remove this setting"
            raise ConfigError(reason, "validation", str(self.validation))
        with opened_picture(self._first) as first:
            channels = self.channels or (1 if is_gray(first) else 3)
        samples = {part: len(self._kept(part)) for part in self._listed}
        self._describe((*(self.size or size_of(self._first)), channels), len(self.class_names), samples)

    @property
    def validates(self) -> bool:
        return bool(self.validation) or "validation" in self._listed

    @property
    def _first(self) -> Path:
        return next(files[0] for classes in self._listed.values() for files in classes.values())

    def _list(self, names: tuple[str, ...]) -> dict[str, dict[str, list[Path]]]:
        """Return sorted files by part and class, and set `class_names`, by default the classes of the first part."""
        top, folders = self.place, dict[str, Path]()
        for part, alternatives in FOLDERS.items():
            for folder in filter(os.path.isdir, (top / name for name in alternatives)):
                if part in folders:
                    raise DataError(f"{top}: has both {folders[part].name}/ and {folder.name}/. Keep one of them")
                folders[part] = folder
        folders = folders or {"train": top}
        found = {part: {path.name: _inside(path) for path in _inside(folder)} for part, folder in folders.items()}
        self.class_names = names or tuple(next(iter(found.values())))
        for part, classes in found.items():
            if not classes:
                exists = os.path.isdir(folders[part])
                reason = "expected a folder for each class, found none" if exists else "there is no such folder"
                raise DataError(f"{folders[part]}: {reason}")
            for name, files in classes.items():
                if os.path.isfile(folders[part] / name):  # False without permission
                    raise DataError(f"{folders[part] / name}: expected only folders of classes. Move it elsewhere")
                if not files:
                    broken = not os.path.exists(folders[part] / name) and os.path.islink(folders[part] / name)
                    reason = "is a broken link" if broken else "expected pictures of this class, found none"
                    raise DataError(f"{folders[part] / name}: {reason}")
                if name not in self.class_names:
                    known = wording.shown([*self.class_names])
                    raise DataError(f"{folders[part] / name}: expected only folders named after the classes {known}")
                for path in files:
                    if path.suffix.lower() not in ENDINGS:
                        raise DataError(f"{path}: expected only {', '.join(ENDINGS)} files. Move it elsewhere")
        return found

    def _kept(self, part: str) -> list[tuple[Path, int]]:
        labels = {name: label for label, name in enumerate(self.class_names)}
        classes = [[(path, labels[name]) for path in files] for name, files in self._listed[part].items()]
        if self.limit is None:
            return list(chain(*classes))
        turns = [each for each in chain(*zip_longest(*classes)) if each is not None]
        return turns if part == "train" and self.validation else turns[: self.limit]

    def _read(self, part: str) -> tuple[Array, Array]:
        listed, failed = self._kept(part), dict[Path, DataError]()
        images = np.empty((len(listed), *self.image_shape), np.uint8)
        for row, (path, _) in enumerate(listed):
            try:
                images[row] = self._picture(path)
            except DataError as error:
                failed[path] = error
        if failed:
            first, *others = failed
            named = ", ".join(map(str, others[:NAMED])) + ", ..." * (len(others) > NAMED)
            more = f" (and {wording.counted(len(others), 'other picture')}: {named})" if others else ""
            raise DataError(f"{failed[first]}{more}")
        return images, np.array([label for _, label in listed], np.int64)

    def _picture(self, path: Path) -> Array:
        height, width, channels = self.image_shape
        if self.channels is None:
            self._check_kind(path)
        pixels = picture(path, channels)
        if self.size is None and pixels.shape[:2] != (height, width):
            raise DataError(
                f"{path}: expected {height} x {width} pixels like the first image, found {pixels.shape[0]} x "
                f"{pixels.shape[1]}. Resize all with {wording.setting('data', 'size', [height, width])}"
            )
        return resized(pixels, height, width)

    def _check_kind(self, path: Path) -> None:
        with opened_picture(path) as opened:
            kind, others = ("grayscale", "in color") if is_gray(opened) else ("in color", "grayscale")
        if (kind == "grayscale") != (self.image_shape[2] == 1):
            remedy = " or ".join(wording.setting("data", "channels", channels) for channels in (1, 3))
            raise DataError(f"{path}: is {kind}, but the first image, {self._first}, is {others}. Set {remedy}")


def _inside(folder: Path) -> list[Path]:
    found = folder.glob("[!.]*") if os.path.isdir(folder) else ()  # isdir returns False for invalid names
    return sorted(path for path in found if path.name not in OF_WINDOWS)
