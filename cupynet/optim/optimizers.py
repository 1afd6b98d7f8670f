"""Optimizers, which update the flat vectors of `Params`.

Their state has the same layout as the weights, and is averaged and saved with them.
"""

from __future__ import annotations

import inspect
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
    """Declare an optimizer argument in [0, 1)."""
    return field(default=default, metadata={"check": partial(number, minimum=0, below=1)}, **options)


def positive(default: float) -> Any:
    """Declare an optimizer argument above 0."""
    return field(default=default, metadata={"check": partial(number, above=0)})


def limit() -> Any:
    """Declare an optimizer argument above 0, or None (the default) for no limit."""
    return field(default=None, metadata={"check": partial(number, above=0, also=", or null")})


@dataclass(eq=False, repr=False)
class Optimizer(Described):
    """Base class of optimizers, with learning rate, penalties and gradient clipping.

    Penalties apply to weights, but not to biases and other parameters declared with `decay=False`. Gradients are
    clipped before penalties are added: by global norm, then by layer norm, then by value.

    Args:
        learning_rate: a number, a `Schedule`, the name of a schedule (`cosine`, `one_cycle`, `step` ...), or a mapping
            with its name and arguments, such as {"name": "cosine", "initial": 0.1}. The highest rate of a named
            schedule defaults to the optimizer's default learning rate. Stored as a `Schedule`.
        l2: coefficient of the penalty l2/2 · |w|².
        max_grad_norm: maximum global norm of the gradient; None for no limit.
        l1: coefficient of the penalty l1 · |w|_1.
        weight_decay: decoupled weight decay (Loshchilov & Hutter 2019), multiplied by the learning rate. Cannot be
            combined with l2.
        clip_layer_norm: maximum norm of each layer's gradient, including weights and biases; None for no limit.
        clip_value: maximum magnitude of each element of the gradient; None for no limit.

    Attributes:
        state: flat (P,) vectors by name, created by `init`.
        capturable: True if CUDA graphs can capture `update`: it launches the same operations in every step and uses no
            host values other than its arguments. Not inherited.
        clips_norm: True if the `update` of this class clips the global norm (`UpdateScalars.norm`); otherwise `move`
            does. Set it in the class that defines `update`; elsewhere it is ignored.
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
    clips_norm: ClassVar[bool] = False
    factors = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not each.default and "check" in each.metadata:
                setattr(self, each.name, each.metadata["check"](f"{owner} {each.name}", value))
        if self.l2 and self.weight_decay:
            reason = f"has the same purpose as weight_decay={self.weight_decay:g}. Set one of them to 0"
            raise ConfigError(reason, f"{owner} l2", f"{self.l2:g}")
        self.state: dict[str, Array] = {}
        self._layers: Layers | None = None  # for `clip_layer_norm`

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "learning_rate":
            value = schedule(type(self).__name__, value, self._default_rate())
        super().__setattr__(name, value)

    @classmethod
    def _default_rate(cls) -> Any:
        """Return the constructor's default learning rate, or the base class's if that is not a number."""
        default = getattr(inspect.signature(cls).parameters.get("learning_rate"), "default", None)
        return default if isinstance(default, int | float) else cls.learning_rate

    def constants(self) -> tuple[float, float, float]:
        """Return the constants of the update rule, by default the class attribute `factors`."""
        return self.factors

    def init(self, params: Params, backend: Backend) -> None:
        """Allocate the state for these weights."""
        self.backend = backend
        self.factors = self.constants()  # now, because the user may have set attributes such as `momentum`
        self.state = {}
        self._layers = None
        if self.clip_layer_norm is not None:
            names = dict.fromkeys(name.rpartition(".")[0] for name in params.places)
            order = {name: i for i, name in enumerate(names)}
            group = [order[name.rpartition(".")[0]] for name in params.places]
            self._layers = Layers(backend, list(params.places.values()), group)

    def numbers(self, iteration: int) -> Numbers:
        """Return the learning rate of an iteration, and up to three other values of the update rule.

        They depend only on the iteration, so that all replicas agree even if one skipped a step.
        """
        return self.rate(iteration), 1.0, 1.0, 1.0

    def rate(self, iteration: int) -> float:
        """Return the learning rate of an iteration. Raise ConfigError unless it is a finite number of at least 0."""
        found, name = self.learning_rate(iteration), f"{type(self.learning_rate).__name__} learning_rate"
        return number(name, found, minimum=0, also=f", at iteration {iteration}")

    def step(self, params: Params, iteration: int, squared_norm: Array | None = None) -> None:
        """Update the weights, clear the gradients, and publish the weights to the layers.

        iteration: counted from 0.
        squared_norm: squared norm of the whole gradient, 0-d, if `params` holds only a part of the model.
        """
        self.move(params, self.numbers(iteration), 1.0 / self.backend.loss_scale, squared_norm)

    def move(
        self,
        params: Params,
        numbers: Numbers = (1.0, 1.0, 1.0, 1.0),
        scale: float = 1.0,
        squared_norm: Array | None = None,
    ) -> None:
        """Perform `step` with these `numbers`, multiplying the gradients by `scale`.

        In a captured step, both are 1, and operations read the values on the device (see `Recorder.steered`).
        """
        norm = None
        if self.max_grad_norm is not None:
            squares = self.backend.squared_norm(params.grad) if squared_norm is None else squared_norm
            norm = squares, self.max_grad_norm / scale
            owner = next(each for each in type(self).__mro__ if "update" in vars(each))
            if not vars(owner).get("clips_norm", False) or self._layers is not None:
                self.backend.clip_norm(params.grad, *norm)
                norm = None
        if self._layers is not None and self.clip_layer_norm is not None:
            norms = self.backend.squared_norms(params.grad, self._layers)
            self.backend.clip_norms(params.grad, norms, self._layers, self.clip_layer_norm / scale)
            del norms
        published = True
        rate, *more = numbers
        clip, own = (math.inf if self.clip_value is None else self.clip_value), (more[0], more[1], more[2])
        for segment in params.segments:
            l1, l2, decay = (self.l1, self.l2, self.weight_decay) if segment.decay else (0.0, 0.0, 0.0)
            change = UpdateScalars(rate * segment.rate, scale, clip, l1, l2, decay, own, self.factors, norm)
            published &= self.update(params, segment, change) is True
        if not published:
            params.publish()

    def update(self, params: Params, segment: Segment, scalars: UpdateScalars) -> bool | None:
        """Update a segment of the weights. Return True if `params.stored`, the copy that layers read, is updated too.

        Subclasses must apply all of `scalars` (scale, clip, l1, l2, decay; norm only with `clips_norm`) and clear the
        gradient, as in `ElementwiseOptimizer`.
        """
        raise NotImplementedError


class ElementwiseOptimizer(Optimizer):
    """Base class of optimizers that update each weight independently by a `rule` (see backend/update_rules.py)."""

    clips_norm = True
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
        part = segment.part
        states = [self.state[name][part] for name in rule.states]
        copy = params.stored(part) if stored else None
        self.backend.move_weights(rule, params.master[part], params.grad[part], states, scalars, copy)


class SGD(ElementwiseOptimizer):
    """Stochastic gradient descent: w -= lr · g. See `Optimizer` for the arguments."""

    capturable = True
    rule = RULES["sgd"]


@dataclass(eq=False, repr=False)
class Momentum(ElementwiseOptimizer):
    """SGD with momentum (Polyak 1964): v = momentum · v - lr · g; w += v. See `Optimizer` for the other arguments."""

    capturable = True
    rule = RULES["momentum"]
    momentum: float = fraction(0.9)

    def constants(self) -> tuple[float, float, float]:
        return self.momentum, 0.0, 0.0


class Nesterov(Momentum):
    """SGD with Nesterov momentum (Sutskever et al. 2013): v = momentum · v - lr · g; w += momentum · v - lr · g.

    Equivalent to Nesterovs in Deeplearning4j and, at a constant learning rate, to nesterov=True in PyTorch. See
    `Optimizer` for the other arguments.
    """

    capturable = True
    rule = RULES["nesterov"]
