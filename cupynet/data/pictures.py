"""Read PNG, JPEG, BMP and WebP files with Pillow (extra `images`)."""

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
ORIENTATION = 0x0112  # EXIF tag; 1 is upright, 5 to 8 swap height and width
GRAY = ("1", "L", "LA")  # Pillow modes
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # 16-bit grayscale


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("pictures need Pillow, which is not installed: pip install 'cupynet[images]'") from error
    return Image


def picture(path: Path, channels: int) -> Array:
    """Read a picture as (H, W, C) uint8, with 1 channel (grayscale) or 3 (color).

    EXIF orientation is applied, and transparent pixels become white.

    Raises:
        DataError: the file is missing, damaged, too large or of another type, or white on a transparent background.
        ConfigError: Pillow is not installed.
    """
    images = pillow()
    from PIL import ImageOps

    with opened_picture(path) as opened:
        if orientation(opened) != 1:
            opened = ImageOps.exif_transpose(opened)
        if opened.has_transparency_data:
            ink = opened.convert("RGBA")
            opened = images.alpha_composite(images.new("RGBA", ink.size, "white"), ink).convert("RGB")
            if _is_plain(opened) and not _is_plain(ink.getchannel("A")):
                raise DataError(
                    f"{wording.one_line(path)}: white on a transparent background. Save it without transparency"
                )
        pixels = opened.convert("L" if channels == 1 else "RGB")
        return np.asarray(pixels, np.uint8).reshape(opened.height, opened.width, channels)


def orientation(opened: Any) -> int:
    return int(opened.getexif().get(ORIENTATION, 1))


def size_of(path: Path) -> tuple[int, int]:
    with opened_picture(path) as opened:
        return opened.size if orientation(opened) in (5, 6, 7, 8) else (opened.height, opened.width)


def is_gray(opened: Any) -> bool:
    return opened.mode in GRAY


def _is_plain(opened: Any) -> bool:
    levels = opened.getextrema()  # (lowest, highest), or one pair for each channel
    return all(low == high for low, high in ([levels] if isinstance(levels[0], int) else levels))


@contextmanager
def opened_picture(path: Path) -> Iterator[Any]:
    """Open a picture and read its header. Errors in the context become DataError."""
    images, name = pillow(), wording.one_line(path)
    if os.path.isdir(path):
        raise DataError(f"{name}: contains no pictures ({', '.join(ENDINGS)}). Subfolders are not searched")
    if not os.path.isfile(path):
        raise DataError(f"{name}: no such picture file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata
            warnings.simplefilter("error", images.DecompressionBombWarning)  # many pixels in few bytes
            with images.open(path, formats=FORMATS) as opened:
                if opened.mode in DEEP:
                    raise DataError(f"{name}: expected 8 bits per channel, found 16. Convert it to 8 bits")
                yield opened
    except (DataError, MemoryError):
        raise
    except Exception as error:  # decoders may raise anything
        reason = getattr(error, "strerror", None) or wording.one_line(error).partition(" '")[0]  # without the path
        raise DataError(f"{name}: cannot be read as a PNG, JPEG, BMP or WebP file ({reason})") from error


def resized(pixels: Array, height: int, width: int) -> Array:
    if pixels.shape[:2] == (height, width):
        return pixels
    images, channels = pillow(), pixels.shape[2]
    opened = images.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    found = opened.resize((width, height), images.Resampling.BILINEAR)
    return np.asarray(found, np.uint8).reshape(height, width, channels)
