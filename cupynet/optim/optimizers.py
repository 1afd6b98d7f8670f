"""Updates of the flat weight vector from the flat gradient vector: what all optimizers share, and the oldest three.

An optimizer sees `Params`, never layers: its state is flat vectors like the weights, and is averaged and saved like
them. Those whose steps follow from the size of past gradients are in adaptive.py.
"""

from __future__ import annotations

import math
from typing import TypeAlias, TypedDict

from cupynet.backend import RULES, Backend, Layers, Move, Rule
from cupynet.backend.array import Array
from cupynet.core.checks import number, single
from cupynet.core.errors import ConfigError
from cupynet.nn.params import Params, Segment
from cupynet.optim.schedules import Schedule, schedule

Numbers: TypeAlias = "tuple[float, float, float, float]"


class Clipping(TypedDict):
    """Two arguments that all optimizers hand on."""

    clip_layer_norm: float | None
    clip_value: float | None


class Optimizer:
    """What all optimizers share: a learning rate, penalties, clipping, and the walk over the segments of the weights.

    Penalties are for weights, not for biases and whatever else is declared with `decay=False`. A gradient is shortened
    as a whole first, then layer by layer, then value by value, each where that is asked for, and before penalties are
    added.

    Args:
        learning_rate: a number or a `Schedule`.
        l1: the factor in the penalty l1 · |w|_1, as its gradient l1 · sign(w).
        l2: the factor in the penalty l2/2 · |w|², as its gradient l2 · w.
        weight_decay: the fraction of a weight, times the learning rate, that it loses beside its step (Loshchilov &
            Hutter 2019). For a rule that looks at the size of gradients this is something else than l2: not both.
        max_grad_norm: the largest length of a gradient (of all weights together): a longer one is scaled down to it, so
            that a rare gradient that is far too long does not end training. None for no limit.
        clip_layer_norm: the same for each layer's gradient by itself, its weights and biases together.
        clip_value: the largest value in a gradient, either way: larger ones become this.

    Attributes:
        state: name -> flat (P,) vector; exists after `init`.
        recordable: whether `update` asks for the same operations in every step, with nothing of the host in them but
            its arguments: a GPU may record it then, and repeat what it has recorded. Not inherited.
        factors: what its rule has besides, see `Move`.

    Raises:
        ConfigError: an argument cannot work.
    """

    recordable = False
    factors: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __init__(
        self,
        learning_rate: float | Schedule,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        owner = type(self).__name__
        self.learning_rate = schedule(owner, learning_rate)
        self.l1, self.l2 = self._fraction("l1", l1), self._fraction("l2", l2)
        self.weight_decay = self._fraction("weight_decay", weight_decay)
        if self.l2 and self.weight_decay:
            raise ConfigError(
                f"{owner} l2={self.l2:g} and weight_decay={self.weight_decay:g}: both draw weights to zero, in the "
                "gradient or beside it: set one of them to 0"
            )
        self.max_grad_norm = self._limit("max_grad_norm", max_grad_norm)
        self.clip_layer_norm = self._limit("clip_layer_norm", clip_layer_norm)
        self.clip_value = self._limit("clip_value", clip_value)
        self.state: dict[str, Array] = {}
        self._layers: Layers | None = None  # where each has a limit of its own

    def _limit(self, name: str, value: float | None) -> float | None:
        return None if value is None else number(f"{type(self).__name__} {name}", value, above=0, also=", or null")

    def _fraction(self, name: str, value: float) -> float:
        return number(f"{type(self).__name__} {name}", value, minimum=0, below=1)

    def _positive(self, name: str, value: float) -> float:
        return single(f"{type(self).__name__} {name}", value, above=0)

    def init(self, params: Params, backend: Backend) -> None:
        """Make the state for these weights."""
        self.backend = backend
        self.state = {}
        self._layers = None
        if self.clip_layer_norm is not None:
            names = dict.fromkeys(name.rpartition(".")[0] for name in params.places)
            order = {name: i for i, name in enumerate(names)}
            group = [order[name.rpartition(".")[0]] for name in params.places]
            self._layers = backend.layers(list(params.places.values()), group)

    def numbers(self, iteration: int) -> Numbers:
        """What changes from one iteration to the next: the learning rate, and up to three numbers of the rule's own.

        They follow from the iteration alone, which is counted in rounds and alike on all replicas: whether a replica
        had a batch in each of them, or left one out, makes no difference.
        """
        return self.learning_rate(iteration), 1.0, 1.0, 1.0

    def step(self, params: Params, iteration: int, squared_norm: Array | None = None) -> None:
        """Move the weights by the gradients, set the gradients to zero, and let the layers see the new weights.

        Args:
            squared_norm: 0-d, of the whole gradient, which `max_grad_norm` limits, where `params` hold a part of it;
                by default that of `params.grad`.
        """
        self.move(params, self.numbers(iteration), 1.0 / self.backend.loss_scale, squared_norm)

    def move(
        self,
        params: Params,
        numbers: Numbers = (1.0, 1.0, 1.0, 1.0),
        scale: float = 1.0,
        squared_norm: Array | None = None,
    ) -> None:
        """What `step` does, with these `numbers` and a factor on the gradients; `squared_norm` is 0-d.

        In a step that runs ahead of the host all are 1: operations know more, see `Recorder.steered`.
        """
        if self.max_grad_norm is not None:
            norm = self.backend.squared_norm(params.grad) if squared_norm is None else squared_norm
            self.backend.clip_norm(params.grad, norm, self.max_grad_norm / scale)
        if self._layers is not None and self.clip_layer_norm is not None:
            norms = self.backend.squared_norms(params.grad, self._layers)
            self.backend.clip_norms(params.grad, norms, self._layers, self.clip_layer_norm / scale)
            self.backend.give_back(norms)
        published = True
        rate, *more = numbers
        clip, own = (math.inf if self.clip_value is None else self.clip_value), (more[0], more[1], more[2])
        for segment in params.segments:
            l1, l2, decay = (self.l1, self.l2, self.weight_decay) if segment.decay else (0.0, 0.0, 0.0)
            change = Move(rate * segment.lr_scale, scale, clip, l1, l2, decay, own, self.factors)
            published &= self.update(params, segment, change) is True
        if not published:
            params.publish()

    def update(self, params: Params, segment: Segment, move: Move) -> bool | None:
        """Update one segment of the weights. Return True if the copy that layers read (`params.stored`) is updated too.

        A subclass applies all of `move` (scale, clip, l1, l2, decay) and sets the gradient to zero; `ByRule` does.
        """
        raise NotImplementedError


class ByRule(Optimizer):
    """An optimizer that treats each weight by itself. Its state is the vectors of its rule.

    Attributes:
        rule: see `cupynet.backend.update_rules`.
    """

    rule: Rule

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        for name in self.rule.states:
            self.state[name] = backend.allocate(params.master.shape, params.master.dtype)
            with backend.here():
                self.state[name][...] = 0

    def update(self, params: Params, segment: Segment, move: Move) -> bool | None:
        self._by(self.rule, params, segment, move)
        return True

    def _by(self, rule: Rule, params: Params, segment: Segment, move: Move, *, stored: bool = True) -> None:
        """Move a stretch of the weights by a rule that has these vectors."""
        part = segment.part
        states = [self.state[name][part] for name in rule.states]
        copy = params.stored(part) if stored else None
        self.backend.move_weights(rule, params.master[part], params.grad[part], states, move, copy)


class SGD(ByRule):
    """w -= lr · g.

    Args:
        learning_rate, l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["sgd"]


class Momentum(ByRule):
    """v = mu · v - lr · g; w += v (Polyak 1964). The learning rate is inside the velocity.

    Args:
        momentum: mu.
        learning_rate, l2, max_grad_norm, l1, weight_decay, clip_layer_norm, clip_value: see `Optimizer`.
    """

    recordable = True
    rule = RULES["momentum"]

    def __init__(
        self,
        learning_rate: float | Schedule,
        momentum: float = 0.9,
        l2: float = 0.0,
        max_grad_norm: float | None = None,
        *,
        l1: float = 0.0,
        weight_decay: float = 0.0,
        clip_layer_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        clipping: Clipping = {"clip_layer_norm": clip_layer_norm, "clip_value": clip_value}
        super().__init__(learning_rate, l2, max_grad_norm, l1=l1, weight_decay=weight_decay, **clipping)
        self.momentum = self._fraction("momentum", momentum)
        self.factors = (self.momentum, 0.0, 0.0)


class Nesterov(Momentum):
    """v = mu · v - lr · g; w += mu · v - lr · g (Sutskever et al. 2013).

    Deeplearning4j's Nesterovs, torch's nesterov=True.

    Args:
        momentum, learning_rate and the others: see `Momentum`.
    """

    recordable = True
    rule = RULES["nesterov"]
