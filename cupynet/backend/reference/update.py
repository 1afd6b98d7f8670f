from __future__ import annotations

import math
from collections.abc import Sequence

from cupynet.backend.array import Array
from cupynet.backend.device import Device
from cupynet.backend.update_rules import Layers, Rule, UpdateScalars

BLOCK = 16384  # values processed at a time, so that temporary arrays stay in the cache


class UpdateOps(Device):
    def mean_in_place(self, parts: list[Array], shares: list[float]) -> None:
        """Overwrite each host vector in `parts` with sum_r shares[r] · parts[r], in order, skipping zero shares."""
        contributors = [(part, share) for part, share in zip(parts, shares, strict=True) if share > 0]
        # in double, because shares in single precision would not sum to 1
        total = contributors[0][0].astype("float64") * contributors[0][1]
        for part, share in contributors[1:]:
            total += part.astype("float64") * share
        for part in parts:
            part[...] = total

    def weighted_sum(self, out: Array, parts: list[Array], shares: list[float]) -> None:
        """Set out = sum_r shares[r] · parts[r], in order and in double, skipping zero shares. `out` may be a part."""
        for start in range(0, len(out), BLOCK):
            block = slice(start, start + BLOCK)
            total = self.xp.zeros(out[block].shape, "float64")
            for part, share in zip(parts, shares, strict=True):
                if share:
                    total += part[block].astype("float64") * share
            out[block] = total

    def squared_norm(self, grad: Array) -> Array:
        """Return the sum of squares of a vector: a number, or a 0-d device array that the next call overwrites."""
        return (grad * grad).sum()

    def total(self, vector: Array) -> Array:
        """Return the sum of a vector: a number, or a 0-d device array that the next call overwrites."""
        return vector.sum()

    def clip_norm(self, grad: Array, squared_norm: Array, largest: float) -> None:
        """Scale a gradient or part of it, so that the whole has a norm of at most `largest` (Pascanu et al. 2013)."""
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
        """Update weights (P,), and the optimizer vectors `states` (P,), in place with an elementwise rule.

            g = clip(scale · grad) + l2 · w + l1 · sign(w);    w -= step(g) + rate · decay · w;    grad = 0

        With `scalars.norm`, grad is first clipped, as in `clip_norm`. If the rule does not update the weights directly,
        they do not change, and grad becomes step(g) + decay · w, for `trust_weights`. `stored`, the copy of the weights
        that layers read, is updated too, unless it is None.
        """
        xp = self.xp
        if scalars.norm is not None:
            self.clip_norm(grad, *scalars.norm)
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
        """Return each layer's sum of squares of a vector (P,): (L,), borrowed, with the dtype of the vector."""
        result = self.borrow((layers.count,), vector.dtype)
        result[...] = 0
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            result[layer] += self.squared_norm(vector[start:stop])
        return result

    def clip_norms(self, grad: Array, squared_norms: Array, layers: Layers, largest: float) -> None:
        """Clip the gradient (P,) in place, so that each layer's norm is at most `largest`."""
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            self.clip_norm(grad[start:stop], squared_norms[layer], largest)

    def trust_weights(
        self, weight: Array, grad: Array, norms: tuple[Array, Array], layers: Layers, rate: float,
        stored: Array | None = None,
    ) -> None:  # fmt: skip
        """Apply w -= rate · |w| / |g| · g to each layer in place, and set g = 0 (LAMB, You et al. 2020).

        norms: |w|² and |g|² of each layer (L,). If either is zero, the ratio is 1. stored: see `move_weights`.
        """
        xp, (squares, steps) = self.xp, norms
        both = (squares > 0) & (steps > 0)
        ratios = xp.sqrt(xp.where(both, squares, 1) / xp.where(both, steps, 1))
        for (start, stop), layer in zip(layers.bounds, layers.group, strict=True):
            weight[start:stop] -= rate * ratios[layer] * grad[start:stop]
            grad[start:stop] = 0
            if stored is not None:
                self.convert(weight[start:stop], stored[start:stop])
