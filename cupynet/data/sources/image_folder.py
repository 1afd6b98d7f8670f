"""Pictures of one's own: a folder of PNG and JPEG files for each class, or one for a trained model to look at."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
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
MOST_PIXELS = 1 << 26  # of a picture that is looked at: a small file may unfold into any number
PART = 1 << 20  # pixels that are computed with at once
COLOURS = (*GREY, "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")  # of 8 bits in each channel, or brought to it


class Folder(UserFiles):
    """`<folder>/train/<class>/*.png` and `<folder>/test/<class>/*.png`, or .jpg; needs Pillow (the extra `images`).

    Classes are numbered in the order of their folders' names, and images come in that of their files'. Where there is a
    `limit` classes take turns, so that it keeps some of each, and what it leaves out is not decoded (unless images are
    first taken for validation). What begins with a dot is passed over. Transparency is dropped; a photograph is not
    turned by what its camera has noted.

    Args:
        folder: its path.
        size: (height, width) to which every image is brought; None: that of the first, which all must have.
        channels: 1 for grey, 3 for red, green and blue; None: as the first image has it.
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
        """The files that are read, each with its label."""
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
        height, width, grey = _looked_at(first)
        if self._size is not None:
            height, width = self._size
        channels = self._channels or (1 if grey else 3)
        counts = {part: len(self._kept(part)) for part in listed}
        names = tuple(listed["train"])
        return Outline((height, width, channels), len(names), counts["train"], counts["test"], names)

    def _read(self) -> tuple[Array, Array, Array, Array]:
        return *self._pictures("train"), *self._pictures("test")

    def _pictures(self, part: str) -> tuple[Array, Array]:
        """Images (S, H, W, C) uint8 and labels (S,) of a part."""
        (height, width, channels), listed = self.outline.image_shape, self._kept(part)
        images = np.empty((len(listed), height, width, channels), np.uint8)
        resized = self._size is not None
        for row, (path, _) in enumerate(listed):
            images[row] = _decoded(path, height, width, channels, resized)
        return images, np.array([label for _, label in listed], np.int64)


def _classes(folder: Path) -> dict[str, list[Path]]:
    """The classes in a folder and the files of each. DataError: there are none, one is empty, or has other things."""
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


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("pictures need Pillow, which is not installed: pip install 'cupynet[images]'") from error
    return Image


def _looked_at(path: Path) -> tuple[int, int, bool]:
    """Height, width, and whether a picture is grey, by its header. DataError."""
    with _open(path) as picture:
        return picture.height, picture.width, picture.mode in GREY


def _open(path: Path) -> Any:
    """A picture of which the header was read. DataError; ConfigError without Pillow."""
    images = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", images.DecompressionBombWarning)
            picture = images.open(path, formats=FORMATS)
    except (images.DecompressionBombError, images.DecompressionBombWarning) as error:  # by its header alone
        times = 1 if isinstance(error, Warning) else 2  # of the limit, to be an error of Pillow's
        raise _too_large(str(path), times * images.MAX_IMAGE_PIXELS, "more") from error
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: is no PNG or JPEG ({_reason(error)}): replace it, or move it away") from error
    if picture.mode not in COLOURS:
        picture.close()
        raise DataError(f"{path}: expected a picture of 8 bits in each channel, found mode {picture.mode}: save it so")
    return picture


def _decoded(path: Path, height: int, width: int, channels: int, resized: bool) -> Array:
    """A picture as (H, W, C) uint8. DataError."""
    images = _pillow()
    with _open(path) as picture:
        if not resized and (picture.height, picture.width) != (height, width):
            raise DataError(
                f"{path}: expected {height} x {width} pixels, as the first image has, found {picture.height} x "
                f"{picture.width}: bring all to one size with "
                f"{checks.setting('data', 'size', [height, width])}"
            )
        try:
            pixels = picture.convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{path}: damaged ({_reason(error)}): replace it, or move it away") from error
    if pixels.size != (width, height):
        pixels = pixels.resize((width, height), images.Resampling.BILINEAR)
    return np.asarray(pixels, np.uint8).reshape(height, width, channels)


def _reason(error: BaseException) -> str:
    """The system's words, or Pillow's without the path."""
    return getattr(error, "strerror", None) or checks.one_line(error).partition(" '")[0]


# a single picture -----------------------------------------------------------------------------------------------------


def picture(path: Path, channels: int, *, drawn: bool = False) -> Array:
    """A PNG or JPEG of whatever size and mode as (H, W, C) uint8, of 1 channel (grey) or 3.

    Args:
        drawn: whether it is of something that was drawn: what is transparent is laid on paper then, white, or black
            where what is drawn is light, and a photograph is turned by what its camera has noted. Else transparency is
            dropped and nothing turned, as `Folder` does it.

    Raises:
        DataError: it is not there, is no such file, damaged, empty, or too large.
        ConfigError: Pillow is not installed.
    """
    images = _pillow()
    if not os.path.isfile(path):  # which knows of names that cannot be
        raise DataError(f"{one_name(path)}: expected a picture, found no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes, which are looked at here, and of what cameras note
            with images.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise _too_large(one_name(path), MOST_PIXELS, f"{opened.width} x {opened.height}")
                return _levels(_turned(opened) if drawn else opened, channels, drawn)
    except DataError:
        raise
    except images.DecompressionBombError as error:
        raise _too_large(one_name(path), MOST_PIXELS, "more") from error
    except Exception as error:  # whatever a decoder makes of bytes that may be anything
        raise DataError(f"{one_name(path)}: is no PNG or JPEG, or damaged ({_reason(error)})") from error


def one_name(path: Path) -> str:
    """A file's name as it can be printed: on one line, nothing in it that a terminal obeys."""
    return "".join(each if each.isprintable() else "?" for each in str(path))


def _too_large(place: str, most: int, found: str) -> DataError:
    return DataError(f"{place}: expected at most {most:,} pixels, found {found}: make it smaller")


def _turned(opened: Any) -> Any:
    """An opened picture as its camera was held."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(opened)


def _levels(opened: Any, channels: int, drawn: bool) -> Array:
    """(H, W, C) uint8 of an opened picture."""
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
    """Pixels (H, W, C) uint8 brought to another size, as `Folder` does it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    images, channels = _pillow(), pixels.shape[2]
    opened = images.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    found = opened.resize((width, height), images.Resampling.BILINEAR)
    return np.asarray(found, np.uint8).reshape(height, width, channels)
