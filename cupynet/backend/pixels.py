"""The scaling of pixels on their way to a network: a factor and a shift for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class PixelScale:
    """(pixel / 255 - mean[c]) / deviation[c] of a pixel from 0 to 255 in channel c; one number applies to all channels.

    Computed as pixel · scale[c] + shift[c]. By default pixels become fractions from 0 to 1.
    """

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, mean: Sequence[float], deviation: Sequence[float]) -> PixelScale:
        """Return the scaling of pixels with this mean and deviation (fractions, by channel) to 0 and 1."""
        return cls(tuple(map(float, mean)), tuple(map(float, deviation)))

    @cached_property
    def scale(self) -> tuple[float, ...]:
        """The factor of pixels in each channel."""
        return tuple(1 / 255 / deviation for deviation in self.deviation)

    @cached_property
    def shift(self) -> tuple[float, ...]:
        """The shift of scaled pixels in each channel."""
        return tuple(-mean / deviation for mean, deviation in zip(self.mean, self.deviation, strict=True))

    def normalization(self) -> dict[str, list[float]] | None:
        """Mean and deviation by name; None for fractions."""
        return None if self == FRACTIONS else {"mean": list(self.mean), "deviation": list(self.deviation)}


FRACTIONS = PixelScale()
