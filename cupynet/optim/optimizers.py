"""The base class of optimizers, SGD and momentum. Adaptive optimizers are in adaptive.py.

An optimizer sees `Params`, never layers: its state is flat vectors like the weights, and is averaged and saved like
them.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import partial
from typing import Any, ClassVar, TypeAlias

from cupynet.backend import RULES, Backend, Layers, Rule, UpdateScalars
from cupynet.backend.array import Array
from cupynet.core.checks import number
from cupynet.core.described import Described
from cupynet.core.errors import ConfigError
from cupynet.nn.params import Params, Segment
from cupynet.optim.schedules import schedule

Numbers: TypeAlias = "tuple[float, float, float, float]"


def fraction(default: float, **options: Any) -> Any:
    """Return a field of an optimizer for a number of at least 0 and below 1. options: of `dataclasses.field`."""
    return field(default=default, metadata={"check": partial(number, minimum=0, below=1)}, **options)


def positive(default: float) -> Any:
    """Return a field of an optimizer for a number above 0."""
    return field(default=default, metadata={"check": partial(number, above=0)})


def limit() -> Any:
    """Return a field of an optimizer for a number above 0, or None for no limit, the default."""
    return field(default=None, metadata={"check": partial(number, above=0, also=", or null")})


@dataclass(eq=False, repr=False)
class Optimizer(Described):
    """Base class of optimizers: learning rate, penalties, clipping, and the loop over the segments of the weights.

    Penalties apply to weights, not to biases and other parameters that are declared with `decay=False`. Gradients are
    clipped before penalties are added: by the norm of all, then by that of each layer, then by value.

    Args:
        learning_rate: a number; or a `Schedule`, its name (`cosine`, `one_cycle`, `step` ...), or a mapping with its
            name and arguments, {"name": "cosine", "initial": 0.1}. The highest rate of a named schedule is by default
            that of the optimizer. Stored as a `Schedule`.
        l2: the factor of the penalty l2/2 · |w|², whose gradient is l2 · w.
        max_grad_norm: the largest norm of the gradient of all weights; a larger one is scaled down. None: no limit.
        l1: the factor of the penalty l1 · |w|_1, whose gradient is l1 · sign(w).
        weight_decay: decoupled weight decay (Loshchilov & Hutter 2019), times the learning rate; not together with l2.
        clip_layer_norm: like `max_grad_norm`, for the gradient of each layer, weights and biases together.
        clip_value: the largest magnitude of a value in a gradient; larger ones are clipped to it.

    Attributes:
        state: name -> flat (P,) vector; exists after `init`.
        capturable: True if `update` launches the same operations in every step and uses no host values besides its
            arguments, so that it can be captured in a graph. Not inherited.
        factors: constants of the rule, see `UpdateScalars`.

    Raises:
        ConfigError: an argument is invalid.
    """

    learning_rate: Any = 0.01
    _: KW_ONLY
    l2: float = fraction(0.0)
    max_grad_norm: float | None = limit()
    l1: float = fraction(0.0)
    weight_decay: float = fraction(0.0)
    clip_layer_norm: float | None = limit()
    clip_value: float | None = limit()

    capturable: ClassVar[bool] = False
    factors = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        self.learning_rate = schedule(owner, self.learning_rate, type(self).learning_rate)
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default and "check" in each.metadata:
                setattr(self, each.name, each.metadata["check"](f"{owner} {each.name}", value))
        if self.l2 and self.weight_decay:
            reason = f"shrinks the weights as weight_decay={self.weight_decay:g} does: set one of them to 0"
            raise ConfigError(reason, f"{owner} l2", f"{self.l2:g}")
        self.factors = self.constants()
        self.state: dict[str, Array] = {}
        self._layers: Layers | None = None  # for `clip_layer_norm`

    def constants(self) -> tuple[float, float, float]:
        """Return the factors of the rule, computed from the arguments; by default those of the class."""
        return self.factors

    def init(self, params: Params, backend: Backend) -> None:
        """Allocate the state for these weights."""
        self.backend = backend
        self.state = {}
        self._layers = None
        if self.clip_layer_norm is not None:
            names = dict.fromkeys(name.rpartition(".")[0] for name in params.places)
            order = {name: i for i, name in enumerate(names)}
            group = [order[name.rpartition(".")[0]] for name in params.places]
            self._layers = Layers(backend, list(params.places.values()), group)

    def numbers(self, iteration: int) -> Numbers:
        """Return the values that change in each iteration: the learning rate, and up to three values of the rule.

        They depend only on the iteration, which is the same on all replicas even if one had no batch or skipped it.
        """
        return self.learning_rate(iteration), 1.0, 1.0, 1.0

    def step(self, params: Params, iteration: int, squared_norm: Array | None = None) -> None:
        """Update the weights by the gradients, set the gradients to zero, and publish the weights to the layers.

        Args:
            squared_norm: 0-d, of the whole gradient if `params` hold a part of it, for `max_grad_norm`; by default
                that of `params.grad`.
        """
        self.move(params, self.numbers(iteration), 1.0 / self.backend.loss_scale, squared_norm)

    def move(
        self,
        params: Params,
        numbers: Numbers = (1.0, 1.0, 1.0, 1.0),
        scale: float = 1.0,
        squared_norm: Array | None = None,
    ) -> None:
        """Do the work of `step`, with these `numbers` and the factor `scale` on the gradients; `squared_norm` is 0-d.

        In a step that runs ahead of the host, all are 1, and the operations read the values on the device, see
        `Recorder.steered`.
        """
        if self.max_grad_norm is not None:
            norm = self.backend.squared_norm(params.grad) if squared_norm is None else squared_norm
            self.backend.clip_norm(params.grad, norm, self.max_grad_norm / scale)
        if self._layers is not None and self.clip_layer_norm is not None:
            norms = self.backend.squared_norms(params.grad, self._layers)
            self.backend.clip_norms(params.grad, norms, self._layers, self.clip_layer_norm / scale)
            del norms
        published = True
        rate, *more = numbers
        clip, own = (math.inf if self.clip_value is None else self.clip_value), (more[0], more[1], more[2])
        for segment in params.segments:
            l1, l2, decay = (self.l1, self.l2, self.weight_decay) if segment.decay else (0.0, 0.0, 0.0)
            change = UpdateScalars(rate * segment.rate, scale, clip, l1, l2, decay, own, self.factors)
            published &= self.update(params, segment, change) is True
        if not published:
            params.publish()

    def update(self, params: Params, segment: Segment, scalars: UpdateScalars) -> bool | None:
        """Update one segment of the weights. Return True if the copy that layers read (`params.stored`) is updated too.

        A subclass applies all of `scalars` (scale, clip, l1, l2, decay) and sets the gradient to zero, as
        `ElementwiseOptimizer` does.
        """
        raise NotImplementedError


class ElementwiseOptimizer(Optimizer):
    """An optimizer that updates each weight independently. Its state is the vectors of its rule.

    Attributes:
        rule: see `cupynet.backend.update_rules`.
    """

    rule: ClassVar[Rule]

    def init(self, params: Params, backend: Backend) -> None:
        super().init(params, backend)
        for name in self.rule.states:
            self.state[name] = backend.allocate(params.master.shape, params.master.dtype)
            with backend.activated():
                self.state[name][...] = 0

    def update(self, params: Params, segment: Segment, scalars: UpdateScalars) -> bool | None:
        self._by(self.rule, params, segment, scalars)
        return True

    def _by(self, rule: Rule, params: Params, segment: Segment, scalars: UpdateScalars, *, stored: bool = True) -> None:
        """Update a segment of the weights by a rule."""
        part = segment.part
        states = [self.state[name][part] for name in rule.states]
        copy = params.stored(part) if stored else None
        self.backend.move_weights(rule, params.master[part], params.grad[part], states, scalars, copy)


class SGD(ElementwiseOptimizer):
    """w -= lr · g. For its arguments see `Optimizer`."""

    capturable = True
    rule = RULES["sgd"]


@dataclass(eq=False, repr=False)
class Momentum(ElementwiseOptimizer):
    """v = mu · v - lr · g; w += v (Polyak 1964). The learning rate is inside the velocity.

    Args:
        momentum: mu.
        learning_rate and the others: see `Optimizer`.
    """

    capturable = True
    rule = RULES["momentum"]
    momentum: float = fraction(0.9)

    def constants(self) -> tuple[float, float, float]:
        return self.momentum, 0.0, 0.0


class Nesterov(Momentum):
    """v = mu · v - lr · g; w += mu · v - lr · g (Sutskever et al. 2013).

    Deeplearning4j's Nesterovs, torch's nesterov=True. For its arguments see `Momentum`.
    """

    capturable = True
    rule = RULES["nesterov"]
