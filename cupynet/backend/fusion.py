from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from cupynet.backend.array import Array
from cupynet.backend.window import Window

Weights: TypeAlias = "tuple[Array, ...]"  # (weight, bias), where bias may be None


@dataclass(frozen=True)
class Convolution:
    """Parameters of a convolution. image: (H, W, C)."""

    image: tuple[int, int, int]
    filters: int
    window: Window
    activation: str = "identity"
    groups: int = 1


class FusedPair:
    """A convolution and the max pooling that follows it, fused into one operation.

    activates: True if both passes include the activation. Otherwise the layer applies it to the output.
    """

    activates = False

    def forward(self, x: Array, weights: Weights) -> tuple[Array, tuple[Array, ...]]:
        """Return the output for x (N, ...) and the arrays saved for the backward pass, all borrowed."""
        raise NotImplementedError

    def backward(
        self, dy: Array, saved: tuple[Array, ...], x: Array, weights: Weights, grads: Weights, *, need_dx: bool
    ) -> Array | None:
        """Add the gradients of the weights to `grads`. Return dx, borrowed, or None."""
        raise NotImplementedError
