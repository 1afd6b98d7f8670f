"""Steps that are as long as the weights they move: LAMB."""

from __future__ import annotations

from cupynet.backend import RULES, Backend, Layers, Move
from cupynet.nn.params import Params, Segment
from cupynet.optim.adaptive import Adam
from cupynet.optim.optimizers import Clipping
from cupynet.optim.schedules import Schedule


class LAMB(Adam):
    """Adam's steps, each weight array's as long as the array itself times the learning rate (You et al. 2020).

        r = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay · w;    w -= lr · |w| / |r| · r

    The ratio is one where |w| or |r| is zero. Biases, and whatever else is not decayed, take Adam's steps, as in the
    authors' own program.

    Args:
        epsilon: 1e-6, as there.
        learning_rate, beta1, beta2 and the others: see `Adam`.
    """

    recordable = True
    _direction = RULES["lamb"]

    def __init__(
        self,
        learning_rate: float | Schedule = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        max_grad_norm: float | None = None,
        *,
        weight_decay: float = 0.01,
        l1: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        means = (beta1, beta2, epsilon)
        super().__init__(learning_rate, *means, 0.0, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        self._arrays: dict[int, Layers] = {}
        for segment in params.segments:
            inside = [(start, stop) for start, stop in params.places.values() if segment.start <= start < segment.stop]
            bounds = [(start - segment.start, stop - segment.start) for start, stop in inside]
            self._arrays[segment.start] = backend.layers(bounds, range(len(bounds)))

    def update(self, params: Params, segment: Segment, move: Move) -> bool | None:
        if not segment.decay:
            return super().update(params, segment, move)
        backend, part, arrays = self.backend, segment.part, self._arrays[segment.start]
        self._by(self._direction, params, segment, move, stored=False)
        weight, direction = params.master[part], params.grad[part]
        norms = backend.squared_norms(weight, arrays), backend.squared_norms(direction, arrays)
        backend.trust_weights(weight, direction, norms, arrays, move.rate, params.stored(part))
        backend.give_back(*norms)
        return True
