"""Fusion of a convolution and its max-pool. `Backend.fused_pair` returns a `FusedPair` for a `Convolution`, or None."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cupynet.backend.array import Array
from cupynet.backend.window import Window

Weights: TypeAlias = "tuple[Array, ...]"  # None for a missing bias


@dataclass(frozen=True)
class Convolution:
    """A convolution of images (H, W, C); its weights are (weight, bias or None). A pair may apply its activation."""

    image: tuple[int, int, int]
    filters: int
    window: Window
    activation: str = "identity"
    groups: int = 1


class FusedPair:
    """A convolution and its max-pool as one operation; weights and gradients are those of the convolution.

    Attributes:
        activates: True if both passes include the activation. Otherwise the layer applies it to the output.
        saves_windows: True if `forward` saves the im2col rows of its images, like the reference `conv2d`.
    """

    activates, saves_windows = False, True

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """Return the output for x (N, ...), and what the backward pass needs, all borrowed."""
        raise NotImplementedError

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        """Add to `grads`, return dx (borrowed) or None; `saved` is from `forward`."""
        raise NotImplementedError
