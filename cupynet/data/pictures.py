"""Read a picture, PNG, JPEG, BMP or WebP, with Pillow (the extra `images`). The only file that imports Pillow."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import ConfigError, DataError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "WEBP")
ORIENTATION = 0x0112  # EXIF's tag: 1 is upright, 5 to 8 swap height and width
GREY = ("1", "L", "LA")  # Pillow's modes
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # grey of 16 bits
MOST_PIXELS = 1 << 26  # a small file may claim any number


def pillow() -> Any:
    """Import PIL.Image. ConfigError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("pictures need Pillow, which is not installed: pip install 'cupynet[images]'") from error
    return Image


def picture(path: Path, channels: int) -> Array:
    """Read a picture of any size as (H, W, C) uint8, of 1 channel (grey) or 3.

    It is rotated and mirrored by its EXIF orientation. Transparent pixels become white.

    Raises:
        DataError: the file is missing, damaged, too large, of another type, or all white on a transparent
            background.
        ConfigError: Pillow is not installed.
    """
    images = pillow()
    from PIL import ImageOps

    with opened_picture(path) as opened:
        if orientation(opened) != 1:
            opened = ImageOps.exif_transpose(opened)
        if has_alpha(opened):
            ink = opened.convert("RGBA")
            opened = images.alpha_composite(images.new("RGBA", ink.size, "white"), ink).convert("RGB")
            if _is_plain(opened) and not _is_plain(ink.getchannel("A")):
                raise DataError(
                    f"{wording.one_line(path)}: is white on a transparent background. Save it without transparency."
                )
        pixels = opened.convert("L" if channels == 1 else "RGB")
        return np.asarray(pixels, np.uint8).reshape(opened.height, opened.width, channels)


def orientation(opened: Any) -> int:
    """Return the EXIF orientation of an opened picture, 1 by default."""
    return int(opened.getexif().get(ORIENTATION, 1))


def size_of(path: Path) -> tuple[int, int]:
    """Return height and width of a picture, as `picture` reads it. DataError."""
    with opened_picture(path) as opened:
        return opened.size if orientation(opened) >= 5 else (opened.height, opened.width)


def is_grey(opened: Any) -> bool:
    """Return True if an opened picture is grey according to its header."""
    return opened.mode in GREY


def has_alpha(opened: Any) -> bool:
    """Return True if an opened picture may have transparent pixels."""
    return opened.mode in ("LA", "PA", "RGBA") or "transparency" in opened.info


def is_rotated_or_transparent(path: Path) -> bool:
    """Return True if a picture has an EXIF orientation, or transparent pixels. DataError."""
    with opened_picture(path) as opened:
        return (
            orientation(opened) != 1
            or has_alpha(opened)
            and opened.convert("RGBA").getchannel("A").getextrema()[0] < 255
        )


def _is_plain(opened: Any) -> bool:
    """Return True if all pixels are equal."""
    levels = opened.getextrema()  # (lowest, highest), or one pair for each channel
    return all(low == high for low, high in ([levels] if isinstance(levels[0], int) else levels))


@contextmanager
def opened_picture(path: Path) -> Iterator[Any]:
    """Open a picture and read its header. DataError, also if decoding fails in the context."""
    images, name = pillow(), wording.one_line(path)
    if not os.path.isfile(path):
        raise DataError(f"{name}: expected a picture, found no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes, which are checked here, and about camera metadata
            with images.open(path, formats=FORMATS) as opened:
                if opened.width * opened.height > MOST_PIXELS:
                    raise DataError(
                        f"{name}: expected at most {MOST_PIXELS:,} pixels, found {opened.width} x "
                        f"{opened.height}: make it smaller"
                    )
                if opened.mode in DEEP:
                    raise DataError(f"{name}: expected 8 bits in each channel, found 16: convert it")
                yield opened
    except (DataError, MemoryError):
        raise
    except Exception as error:  # a decoder may raise anything
        reason = getattr(error, "strerror", None) or wording.one_line(error).partition(" '")[0]  # without the path
        raise DataError(f"{name}: cannot be read as a PNG, JPEG, BMP or WebP ({reason})") from error


def resized(pixels: Array, height: int, width: int) -> Array:
    """Resize pixels (H, W, C) uint8, bilinearly."""
    if pixels.shape[:2] == (height, width):
        return pixels
    images, channels = pillow(), pixels.shape[2]
    opened = images.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    found = opened.resize((width, height), images.Resampling.BILINEAR)
    return np.asarray(found, np.uint8).reshape(height, width, channels)
