"""Normalization of images by mean and deviation of each channel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError

# None, `auto`, or {mean: [...], deviation: [...]}, see `Source`
Normalize: TypeAlias = "str | Mapping[str, Sequence[float]] | None"

_AT_ONCE = 1 << 22  # bytes per histogram pass

WAYS = "must be null, auto or {mean: [...], deviation: [...]}, a number for each channel, in fractions of 255"


def checked(normalize: Normalize) -> str | dict[str, list[float]] | None:
    """Check the argument `normalize`: None, "auto", or `mean` and `deviation` of each channel. ConfigError."""
    if normalize is None or normalize == "auto":
        return None if normalize is None else "auto"
    if not isinstance(normalize, Mapping) or set(normalize) != {"mean", "deviation"}:
        raise ConfigError(f"normalize={checks.shown(normalize, checks.written)}: {WAYS}")
    found: dict[str, list[float]] = {}
    for name in ("mean", "deviation"):
        numbers = normalize[name]
        if isinstance(numbers, str | bytes) or not isinstance(numbers, Sequence) or not numbers:
            raise ConfigError(f"normalize.{name}={checks.shown(numbers, checks.written)}: {WAYS}")
        above = 0.0 if name == "deviation" else None
        found[name] = [checks.number(f"normalize.{name}", each, above=above) for each in numbers]
    if len(found["mean"]) != len(found["deviation"]):
        raise ConfigError(f"normalize={checks.written(found)}: {WAYS}")
    pixels = PixelScale.of(found["mean"], found["deviation"])
    if max(map(abs, (*pixels.scale, *pixels.shift))) > checks.MOST or min(pixels.scale) < checks.LEAST:
        shown = checks.shown(found, checks.written)
        raise ConfigError(f"normalize={shown}: results in numbers that single precision cannot represent: {WAYS}")
    return found


def check_channels(normalize: Normalize, channels: int) -> None:
    """Refuse values unless there is one per channel or one for all channels. ConfigError."""
    if isinstance(normalize, Mapping) and len(normalize["mean"]) not in (1, channels):
        many = f"{channels} channel{'s' * (channels > 1)}"
        raise ConfigError(f"normalize={checks.written(normalize)}: images have {many}: give a number for each")


def pixels_for(normalize: Normalize, images: Array) -> PixelScale:
    """Return the scaling of pixels; `images`: the training images (S, H, W, C) uint8."""
    if normalize is None:
        return FRACTIONS
    if isinstance(normalize, Mapping):
        return PixelScale.of(normalize["mean"], normalize["deviation"])
    return PixelScale.of(*statistics(images))


def statistics(images: Array) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each channel of images (S, H, W, C) uint8, in fractions of 255.

    They are computed from a histogram in integers, so they are the same on every machine. A constant channel has
    deviation 1.
    """
    channels = images.shape[3]
    counts = np.zeros((channels, 256), np.int64)
    step = max(1, _AT_ONCE // max(1, images[:1].nbytes))
    for start in range(0, len(images), step):
        some = images[start : start + step].reshape(-1, channels)
        for c in range(channels):
            counts[c] += np.bincount(some[:, c], minlength=256)
    means, deviations = [], []
    for row in counts.tolist():  # Python's integers, which are exact
        total = sum(row)
        first = sum(value * count for value, count in enumerate(row))
        second = sum(value * value * count for value, count in enumerate(row))
        spread = total * second - first * first  # total^2 times the variance
        means.append(first / total / 255 if total else 0.0)
        deviations.append(math.sqrt(spread) / total / 255 if spread else 1.0)
    return means, deviations
