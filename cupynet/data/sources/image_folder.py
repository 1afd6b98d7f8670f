"""The user's pictures: a folder of PNG and JPEG files for each class, or single ones to predict."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.idx_file import expanded
from cupynet.data.sources.user_files import Outline, UserFiles, path_of

ENDINGS = (".png", ".jpg", ".jpeg")
FORMATS = ("PNG", "JPEG")
GREY = ("1", "L", "LA")  # Pillow's modes
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # grey of 16 bits
BITS = (8, 10, 12, 14, 16)  # of which scanners and cameras fill as many
MOST_PIXELS = 1 << 26  # a small file may hold any number
PART = 1 << 20  # pixels per chunk of a computation


class Folder(UserFiles):
    """`<folder>/train/<class>/*.png` and `<folder>/test/<class>/*.png`, or .jpg; needs Pillow (the extra `images`).

    Classes and images are in the order of their names. With a `limit` the classes take turns, so that it keeps some of
    each, and the other images are not decoded (unless some are held out for validation). Names that begin with a dot
    are ignored. Transparency is dropped; the rotation that a camera noted is ignored.

    Args:
        folder: its path.
        size: (height, width) to which every image is resized; None: that of the first, which all must have.
        channels: 1 for grey, 3 for colour; None: as in the first image.
        The others: see `Source`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        size: Sequence[int] | None = None,
        channels: int | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: str | Mapping[str, Sequence[float]] | None = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.folder = path_of("folder", folder)
        name = Path(self.folder).resolve().name if self.folder else "folder"
        super().__init__(name, None, seed, validation, limit, normalize, augment)
        self._size = None if size is None else checks.pair("size", size, 1, ", or null for that of the first image")
        if channels not in (None, 1, 3) or checks.is_bool(channels):
            raise ConfigError(f"channels={checks.shown(channels)}: must be 1 (grey), 3 (colours), or null")
        self._channels = channels

    @cached_property
    def _listed(self) -> dict[str, dict[str, list[Path]]]:
        """part -> class -> files, all in the order of their names. ConfigError, DataError."""
        if self.folder is None:
            unnamed = checks.setting("data", "folder", None)
            raise ConfigError(f"{unnamed}: name the folder that holds train/ and test/, with a folder for each class")
        top = expanded(self.folder)
        found = {part: _classes(top / part) for part in ("train", "test")}
        names = list(found["train"])
        for strange in (name for name in found["test"] if name not in names):
            raise DataError(f"{top / 'test' / strange}: expected a class of {top / 'train'}, which has no such folder")
        return found

    def _kept(self, part: str) -> list[tuple[Path, int]]:
        """The files to read, each with its label."""
        names = list(self._listed["train"])
        classes = [[(path, names.index(name)) for path in files] for name, files in self._listed[part].items()]
        if self.limit is None:
            return list(chain(*classes))
        turns = [each for each in chain(*zip_longest(*classes)) if each is not None]
        return turns if part == "train" and self.validation else turns[: self.limit]

    def _place(self, part: str, what: str = "") -> str:
        assert self.folder is not None
        return str(expanded(self.folder) / part)

    def _look(self) -> Outline:
        listed = self._listed
        first = next(iter(listed["train"].values()))[0]
        with _opened(first) as header:
            height, width, grey = header.height, header.width, header.mode in (*GREY, *DEEP)
        if self._size is not None:
            height, width = self._size
        channels = self._channels or (1 if grey else 3)
        counts = {part: len(self._kept(part)) for part in listed}
        names = tuple(listed["train"])
        return Outline((height, width, channels), len(names), counts["train"], counts["test"], names)

    def _read(self) -> tuple[Array, Array, Array, Array]:
        return *self._pictures("train"), *self._pictures("test")

    def _pictures(self, part: str) -> tuple[Array, Array]:
        """Return images (S, H, W, C) uint8 and labels (S,) of a part."""
        (height, width, channels), listed = self.outline.image_shape, self._kept(part)
        images = np.empty((len(listed), height, width, channels), np.uint8)
        for row, (path, _) in enumerate(listed):
            pixels = picture(path, channels, deep=False)
            if self._size is None and pixels.shape[:2] != (height, width):
                raise DataError(
                    f"{path}: expected {height} x {width} pixels, as the first image has, found {pixels.shape[0]} x "
                    f"{pixels.shape[1]}: resize all with {checks.setting('data', 'size', [height, width])}"
                )
            images[row] = resized(pixels, height, width)
        return images, np.array([label for _, label in listed], np.int64)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """Return the classes in a folder and the files of each. DataError if there are none, or other files."""
    inside = _inside(folder)
    for path in inside:
        if not path.is_dir():
            raise DataError(f"{path}: expected a folder for each class in {folder}, found a file: move it away")
    if not inside:
        raise DataError(f"{folder}: expected a folder for each class, found none")
    found = {path.name: _inside(path) for path in inside}
    for name, files in found.items():
        if not files:
            raise DataError(f"{folder / name}: a class without images: bring some, or remove the folder")
        for path in files:
            if path.suffix.lower() not in ENDINGS or not path.is_file():
                raise DataError(f"{path}: expected PNG and JPEG files alone ({', '.join(ENDINGS)}): move it away")
    return found


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)
    except OSError as error:
        raise DataError(f"{folder}: expected a folder, but it cannot be read ({error.strerror or error})") from error


def _reason(error: BaseException) -> str:
    """The reason from the system, or Pillow's without the path."""
    return getattr(error, "strerror", None) or checks.one_line(error).partition(" '")[0]


# a single picture -----------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("pictures need Pillow, which is not installed: pip install 'cupynet[images]'") from error
    return Image


def picture(path: Path, channels: int, *, drawn: bool = False, deep: bool = True) -> Array:
    """Read a PNG or JPEG of any size and mode as (H, W, C) uint8, of 1 channel (grey) or 3.

    Args:
        drawn: True for a drawing: transparent pixels become paper, white, or black if the drawing is light, and a
            photograph is rotated as its camera noted. If False, transparency is dropped and nothing is rotated.
        deep: False to refuse grey of 16 bits, whose range would be guessed for each picture.

    Raises:
        DataError: the file is missing, damaged, too large, or of another type.
        ConfigError: Pillow is not installed.
    """
    with _opened(path) as opened:
        if opened.mode in DEEP and not deep:
            raise DataError(
                f"{one_name(path)}: expected 8 bits in each channel, found 16 (mode {opened.mode}): convert it"
            )
        return _levels(_turned(opened) if drawn else opened, channels, drawn)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a picture, whose header is read. Raises DataError, also if decoding fails in the context."""
    images = _pillow()
    if not os.path.isfile(path):
        raise DataError(f"{one_name(path)}: expected a picture, found no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and about camera metadata
            with images.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise DataError(
                        f"{one_name(path)}: expected at most {MOST_PIXELS:,} pixels, found {opened.width} x "
                        f"{opened.height}: make it smaller"
                    )
                yield opened
    except (DataError, MemoryError):
        raise
    except images.DecompressionBombError as error:
        raise DataError(f"{one_name(path)}: expected at most {MOST_PIXELS:,} pixels: make it smaller") from error
    except Exception as error:  # a decoder may raise anything
        raise DataError(f"{one_name(path)}: is no PNG or JPEG, or damaged ({_reason(error)})") from error


def one_name(path: Path) -> str:
    """Return a file's name in printable characters, without control sequences for the terminal."""
    return "".join(each if each.isprintable() else "?" for each in str(path))


def _turned(opened: Any) -> Any:
    """Rotate an opened picture as its camera noted."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(opened)


def _levels(opened: Any, channels: int, drawn: bool) -> Array:
    """Return (H, W, C) uint8 of an opened picture."""
    images = _pillow()
    if opened.mode in DEEP:
        deep = np.asarray(opened).clip(0, 65535).astype(np.uint32)
        bits = next(bits for bits in BITS if int(deep.max()) < 1 << bits)
        opened = images.fromarray((deep >> (bits - 8)).astype(np.uint8))
    if drawn and (opened.mode in ("LA", "PA", "RGBA") or "transparency" in opened.info):
        shown = opened.convert("RGBA")
        alpha, grey = np.asarray(shown.getchannel("A")), np.asarray(shown.convert("RGB").convert("L"))
        parts = (slice(at, at + PART) for at in range(0, alpha.size, PART))  # a small file may be a large picture
        levels = sum(int((grey.ravel()[each].astype(np.uint32) * alpha.ravel()[each]).sum()) for each in parts)
        light = alpha.any() and levels / int(alpha.sum(dtype=np.int64)) > 127.5
        paper = images.new("RGBA", shown.size, "black" if light and alpha.min() < 128 else "white")
        opened = images.alpha_composite(paper, shown).convert("RGB")
    pixels = opened.convert("L" if channels == 1 else "RGB")
    return np.asarray(pixels, np.uint8).reshape(opened.height, opened.width, channels)


def resized(pixels: Array, height: int, width: int) -> Array:
    """Resize pixels (H, W, C) uint8, bilinearly."""
    if pixels.shape[:2] == (height, width):
        return pixels
    images, channels = _pillow(), pixels.shape[2]
    opened = images.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    found = opened.resize((width, height), images.Resampling.BILINEAR)
    return np.asarray(found, np.uint8).reshape(height, width, channels)
