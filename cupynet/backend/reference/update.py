from __future__ import annotations

import math
from collections.abc import Sequence

from cupynet.backend.array import Array
from cupynet.backend.device import Device
from cupynet.backend.update_rules import Layers, Rule, UpdateScalars

BLOCK = 16384  # values at a time, so that temporary arrays in double precision stay in the cache


class UpdateOps(Device):
    """Means, norms, clipping and optimizer steps of flat vectors."""

    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        """Overwrite the host vectors `parts` with sum_r shares[r] · parts[r], in this order, without shares of 0."""
        contributors = [(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        # in double: shares in single precision do not add up to one
        total = contributors[0][0].astype("float64") * contributors[0][1]
        for part, share in contributors[1:]:
            total += part.astype("float64") * share
        for part in parts:
            part[...] = total

    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """out = sum_r shares[r] · parts[r], added in double in this order, without shares of 0; `out` may be a part."""
        for start in range(0, len(out), BLOCK):
            block = slice(start, start + BLOCK)
            total = self.xp.zeros(out[block].shape, "float64")
            for part, share in zip(parts, shares, strict=True):
                if share:
                    total += part[block].astype("float64") * share
            out[block] = total

    def squared_norm(self, grad: Array) -> Array:
        """Return the sum of squares of a (P,) vector: a number, or a 0-d device array that the next call overwrites."""
        return (grad * grad).sum()

    def total(self, vector: Array) -> Array:
        """Return the sum of a vector: a number, or a 0-d device array that the next call overwrites."""
        return vector.sum()

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        """Scale the gradient (P,), or a part, so that its whole norm is at most `largest` (Pascanu et al. 2013)."""
        length = self.xp.sqrt(self.xp.asarray(squared_norm, grad.dtype))
        grad *= largest / self.xp.maximum(length, largest)

    def move_weights(
        self,
        rule: Rule,
        weight: Array,
        grad: Array,
        states: Sequence[Array],
        scalars: UpdateScalars,
        stored: Array | None = None,
    ) -> None:
        """Update the weights in place by an elementwise rule; (P,) vectors.

            g = clip(scale · grad) + l2 · w + l1 · sign(w);    w -= step(g) + rate · decay · w;    grad = 0

        If the rule does not update the weights directly, grad = step(g) + decay · w instead, for `trust_weights`.
        `states` are updated too, and `stored`, the copy of the weights that layers read, if there is one.
        """
        xp = self.xp
        if scalars.scale != 1.0:
            grad *= scalars.scale
        if scalars.clip < math.inf:
            xp.clip(grad, -scalars.clip, scalars.clip, out=grad)
        if scalars.l2:
            grad += scalars.l2 * weight
        if scalars.l1:
            grad += scalars.l1 * xp.sign(weight)
        step, *changed = rule.formula((scalars.rate, *scalars.numbers, *scalars.factors), grad, *states)
        for vector, new in zip(states, changed, strict=True):
            vector[...] = new
        if not rule.moves:
            grad[...] = step + scalars.decay * weight if scalars.decay else step
            return
        if scalars.decay:
            step = step + scalars.rate * scalars.decay * weight
        weight -= step
        grad[...] = 0
        if stored is not None:
            self.convert(weight, stored)

    def squared_norms(self, vector: Array, layers: Layers) -> Array:
        """Return the sum of squares of each layer's part of a (P,) vector: (L,), borrowed, in its precision."""
        found = self.borrow((layers.count,), vector.dtype)
        found[...] = 0
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            found[layer] += self.squared_norm(vector[start:stop])
        return found

    def clip_norms(self, grad: Array, squared_norms: Array, layers: Layers, largest: float) -> None:
        """Shorten each layer's part of the gradient (P,) to the length `largest` if it is longer, in place."""
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            self.clip_norm(grad[start:stop], squared_norms[layer], largest)

    def trust_weights(
        self, weight: Array, grad: Array, norms: tuple[Array, Array], layers: Layers, rate: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        """w -= rate · |w| / |g| · g, layer by layer and in place; g is set to zero (You et al. 2020, LAMB).

        `norms` are |w|² and |g|² of each layer (L,). The ratio is 1 if either is zero. `stored`: see `move_weights`.
        """
        xp, (squares, steps) = self.xp, norms
        both = (squares > 0) & (steps > 0)
        ratios = xp.sqrt(xp.where(both, squares, 1) / xp.where(both, steps, 1))
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            weight[start:stop] -= rate * ratios[layer] * grad[start:stop]
            grad[start:stop] = 0
            if stored is not None:
                self.convert(weight[start:stop], stored[start:stop])
