from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import ConfigError

# see `Source`
Normalize: TypeAlias = "str | Mapping[str, Sequence[float]] | None"

_AT_ONCE = 1 << 22  # bytes per chunk


def checked(normalize: Normalize) -> str | dict[str, list[float]] | None:
    if normalize is None or normalize == "auto":
        return None if normalize is None else "auto"
    try:
        if not isinstance(normalize, Mapping) or set(normalize) != {"mean", "std"}:
            raise ValueError
        pixels = PixelScale.of(normalize["mean"], normalize["std"])
    except (TypeError, ValueError) as error:
        forms = "null, auto or {mean: [...], std: [...]} with a number for each channel, on a 0-1 scale"
        raise ConfigError(f"must be {forms}", "normalize", wording.shown(normalize, wording.written)) from error
    return {"mean": list(pixels.mean), "std": list(pixels.std)}


def pixels_for(normalize: Normalize, images: Array) -> PixelScale:
    if normalize is None:
        return FRACTIONS
    if isinstance(normalize, Mapping):
        return PixelScale.of(normalize["mean"], normalize["std"])
    return PixelScale.of(*statistics(images))


def statistics(images: Array) -> tuple[list[float], list[float]]:
    """Return the mean and std (1 if constant) of each channel of images (S, H, W, C) uint8, on a 0-1 scale."""
    channels = images.shape[3]
    counts = np.zeros((channels, 256), np.int64)
    step = max(1, _AT_ONCE // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        chunk = images[start : start + step].reshape(-1, channels)
        for c in range(channels):
            counts[c] += np.bincount(chunk[:, c], minlength=256)
    means, deviations = [], []
    for row in counts.tolist():  # exact Python integers
        total = sum(row)
        first = sum(value * count for value, count in enumerate(row))
        second = sum(value * value * count for value, count in enumerate(row))
        spread = total * second - first * first  # total^2 times the variance
        means.append(first / total / 255 if total else 0.0)
        deviations.append(max(math.sqrt(spread) / total / 255, 1e-6) if spread else 1.0)
    return means, deviations
