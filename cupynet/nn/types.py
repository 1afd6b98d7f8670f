from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown


@dataclass(frozen=True)
class Image:
    """The type of an image; batches are (N, H, W, C)."""

    height: int
    width: int
    channels: int

    def __post_init__(self) -> None:
        for name in ("height", "width", "channels"):
            object.__setattr__(self, name, integer(f"Image {name}", getattr(self, name), 1))

    @property
    def features(self) -> int:
        return self.height * self.width * self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.height, self.width, self.channels)

    def __str__(self) -> str:
        return f"Image({self.height}, {self.width}, {self.channels})"


@dataclass(frozen=True)
class Flat:
    """The type of a vector; batches are (N, F)."""

    features: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", integer("Flat features", self.features, 1))

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.features,)

    def __str__(self) -> str:
        return f"Flat({self.features})"


InputType: TypeAlias = Image | Flat


def input_type(shape: InputType | Sequence[int]) -> InputType:
    """Return the `Image` for a shape (H, W, C), or (H, W) for one channel. Return an `Image` or `Flat` unchanged."""
    if isinstance(shape, Image | Flat):
        return shape
    if isinstance(shape, list | tuple) and len(shape) in (2, 3):
        return Image(shape[0], shape[1], shape[2] if len(shape) == 3 else 1)
    reason = "must be (height, width, channels). Pass vectors of F features as images of shape (1, F, 1)"
    raise ConfigError(reason, "input", shown(shape))
