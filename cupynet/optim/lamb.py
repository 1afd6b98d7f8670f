"""LAMB: steps proportional to the norm of the weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupynet.backend import RULES, Backend, Layers, Move
from cupynet.nn.params import Params, Segment
from cupynet.optim.adaptive import Adam
from cupynet.optim.optimizers import fraction, positive


@dataclass(eq=False, repr=False)
class LAMB(Adam):
    """Adam whose step for each weight array has the norm of the array times the learning rate (You et al. 2020).

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay · w;    w -= lr · |w| / |r| · r

    The ratio is one if |w| or |r| is zero. Biases, and other parameters without decay, use the steps of Adam, as in
    the authors' implementation.

    Args:
        epsilon: 1e-6, as in that implementation.
        learning_rate and the others: see `Adam`.
    """

    recordable = True
    _direction = RULES["lamb"]
    epsilon: float = positive(1e-6)
    l2: float = field(default=0.0, init=False)
    weight_decay: float = fraction(0.01, kw_only=True)

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        self._arrays: dict[int, Layers] = {}
        for segment in params.segments:
            inside = [(start, stop) for start, stop in params.places.values() if segment.start <= start < segment.stop]
            bounds = [(start - segment.start, stop - segment.start) for start, stop in inside]
            self._arrays[segment.start] = Layers(backend, bounds, range(len(bounds)))

    def update(self, params: Params, segment: Segment, move: Move) -> bool | None:
        if not segment.decay:
            return super().update(params, segment, move)
        backend, part, arrays = self.backend, segment.part, self._arrays[segment.start]
        self._by(self._direction, params, segment, move, stored=False)
        weight, direction = params.master[part], params.grad[part]
        norms = backend.squared_norms(weight, arrays), backend.squared_norms(direction, arrays)
        backend.trust_weights(weight, direction, norms, arrays, move.rate, params.stored(part))
        return True
