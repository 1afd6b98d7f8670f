"""Two operations that a backend may do as one, faster than one after the other.

A layer describes what it does (`Convolution`, `MaxPool`); `Backend.fused_pair` returns a `FusedPair` or None. A new
pair is a class and an entry in the table of the backend that has it, never a method of `Backend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cupynet.backend.array import Array
from cupynet.backend.window import Window

Weights: TypeAlias = "tuple[Array | None, ...]"


@dataclass(frozen=True)
class Convolution:
    """A convolution of images (H, W, C) to `filters` channels; its weights are (weight, bias or None).

    activation: what the layer applies to it, by name; a pair that applies it itself says so (`FusedPair.activates`).
    groups: see `Backend.conv2d`.
    """

    image: tuple[int, int, int]
    filters: int
    window: Window
    activation: str = "identity"
    groups: int = 1

    @property
    def depthwise(self) -> bool:
        """Whether each filter sees one channel, of several."""
        return 1 < self.groups == self.image[2]


@dataclass(frozen=True)
class MaxPool:
    """A max-pool; it has no weights."""

    window: Window


Operation: TypeAlias = Convolution | MaxPool


class FusedPair:
    """Two operations as one. Weights, and their gradients, are those of the first operation, then of the second.

    Attributes:
        activates: whether both passes include the activation of the first operation; else it is applied to the output.
    """

    activates = False

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """The output for x (N, ...), and what the backward pass needs; all of it is borrowed.

        Raises:
            ConfigError: the arrays have other shapes than those the pair was made for.
        """
        raise NotImplementedError

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        """Adds to `grads`, returns dx (borrowed) or None; `saved` came with y. dy stays the caller's."""
        raise NotImplementedError
