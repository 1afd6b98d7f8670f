"""The images that `Model.predict` takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend import PixelScale
from cupynet.backend.array import layout_hint, on_host
from cupynet.core.errors import ConfigError

FLAT = 1 / 15  # images with a smaller range of scaled pixels are nearly blank


def as_images(images: Any, shape: tuple[int, ...], xp: Any) -> Any:
    """Convert images to an array (N, *shape) of uint8 or floats, on the host or on the device of module `xp`."""
    if type(images) is not xp.ndarray:  # a subclass may have masked values
        try:
            images = on_host(images)
        except ConfigError:
            if not isinstance(images, tuple | list):
                raise
            images = np.empty((), object)  # (images, labels), or images of several shapes
    if images.dtype == object:
        raise ConfigError("must be one array, without labels: predict(x), or predict(dataset.images)", "images")
    given = tuple(images.shape)
    wide = images.dtype.kind in "iu" and images.dtype != np.uint8 and images.size
    if wide and 0 <= images.min() <= images.max() <= 255:
        images = images.astype(np.uint8)
    if images.ndim < 4 and shape[2:] == (1,) and given != shape and given[-2:] == shape[:2]:
        images = images[..., None]
    if images.shape == shape:
        images = images[None]
    if images.shape[1:] != shape or not (images.dtype == np.uint8 or is_floating(images)):
        raise ConfigError(
            f"images of shape {given} and type {images.dtype}: expected N images of shape {shape}, "
            f"uint8 or floating point scaled as in training{layout_hint(given, shape)}"
        )
    return images


def range_warning(images: Any, trained_on: str, pixels: PixelScale) -> str:
    """Return a warning if the range of the images differs greatly from the training images', or "".

    `trained_on` and `pixels` are attributes of the model.
    """
    if not trained_on or not images.size:
        return ""
    raw = images.dtype == np.uint8
    if trained_on == "floats":
        return "the network was trained on floating-point images. Scale images the same way" if raw else ""
    least, most = float(images.min()), float(images.max())
    low, high = (each + 0.0 for each in pixels.range)  # removes the sign of -0.0
    scale = max(pixels.scale) if raw else 1.0
    outside = not raw and (most > 2 * high - low or least < 2 * low - high)
    if not outside and not 0 < scale * (most - least) < FLAT * min(1.0, 255 * scale):
        return ""
    trained = "0 to 255" if raw else f"{low:.3g} to {high:.3g}"
    return (
        f"images range from {least:.3g} to {most:.3g}, but the network was trained on {trained}. Pass uint8 from 0 to "
        "255, or floating point scaled as in training"
    )


def is_floating(x: Any) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating)) or x.dtype.name == "bfloat16"
