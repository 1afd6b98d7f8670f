"""What a layer is, and how layers are chained.

`forward` returns its output *and the function that is its derivative*, which stands right below it and owns what it
needs. There is no tape and nothing is kept on the layer, so any number of micro-batches may be in flight.

Who owns an array:
- `forward` borrows its output y from the workspace. Training: the layer's own `backward` gives it back. Otherwise:
whoever called.
- `backward(dy)` owns dy: it may overwrite it, and gives it back or returns it as dx. It is called once.
- dy is None where the layers above computed no dx, as nothing from here down has weights: then `backward` only gives
back what it holds, and returns None.
- The input x is never the layer's.
After a training step nothing is on loan; a test says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.params import Scope
from cupynet.nn.types import InputType

Backward: TypeAlias = Callable[["Array | None"], "Array | None"]


def check_integer(owner: str, name: str, value: Any, minimum: int) -> int:
    """`value` if it is an integer of at least `minimum`; else a ConfigError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{owner} {name}={value!r}: must be an integer of at least {minimum}")
    return value


def check_flag(owner: str, name: str, value: Any) -> bool:
    """`value` if it is True or False; else a ConfigError that names it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{owner} {name}={value!r}: must be true or false")
    return value


def no_backward(dy: Array) -> Array:
    """The derivative of a pass that was not made for training."""
    raise RuntimeError("this forward pass was not made for training: call forward with Context(train=True)")


class Layer:
    """A differentiable function with weights.

    Constructed, it is only a description; `build` infers its shapes and declares its weights. A description may be
    copied and built again, for another replica or another backend.

    Attributes:
        needs_dx: whether anything before this layer has weights; where nothing has, `backward` returns None.
    """

    needs_dx = True
    backend: Backend

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        """Infer shapes from `input`, declare weights in `params`, and return what this layer feeds the next.

        Raises:
            ConfigError: this layer cannot take `input`; the message names the layer.
        """
        raise NotImplementedError

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        """The output for x (N, ...), and the function from dy to dx that also adds to the gradients of the weights."""
        raise NotImplementedError

    def fuse(self, following: Layer) -> Layer | None:
        """One layer that does what these two built ones do, in one operation of the backend; None if there is none."""
        return None

    def members(self) -> list[Layer]:
        """The layers this one stands for: itself, or those it was fused of."""
        return [self]

    def describe(self) -> str:
        """The layer's settings in a few words, for `Model.summary`."""
        return ""


def check_image(kind: str, name: str, input: InputType) -> Any:
    """`input` if it is an Image; else a ConfigError that names the layer and the way out."""
    from cupynet.nn.types import Image

    if not isinstance(input, Image):
        raise ConfigError(f"{kind} '{name}' needs an Image, got {input}: put it before the first Dense layer")
    return input


class Sequential(Layer):
    """Layers one after the other. Their names are parameter names and command-line handles.

    Args:
        layers: name -> layer, in order. Names must not contain a dot.
    """

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        if not isinstance(layers, Mapping) or not layers:
            raise ConfigError(f"Sequential layers={layers!r}: must map names to layers, at least one layer")
        names: dict[int, str] = {}
        for name, layer in layers.items():
            if not isinstance(name, str) or "." in name or not name:
                raise ConfigError(f"layer name {name!r}: must be text, not empty, without a dot")
            if not isinstance(layer, Layer):
                raise ConfigError(f"layer '{name}' is a {type(layer).__name__}, not a Layer")
            first = names.setdefault(id(layer), name)
            if first != name:  # built twice, it would keep the weights of the second place only
                raise ConfigError(
                    f"layers '{first}' and '{name}' are one object: make a {type(layer).__name__} for each"
                )
        self.layers = dict(layers)

    def __iter__(self) -> Iterator[tuple[str, Layer]]:
        return iter(self.layers.items())

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        self.backend = backend
        self.types: dict[str, tuple[InputType, InputType]] = {}
        weights_before = self.needs_dx
        for name, layer in self:
            layer.needs_dx = weights_before
            declared = params.params.count
            output = layer.build(input, params.scope(name), backend)
            weights_before = weights_before or params.params.count > declared
            self.types[name] = (input, output)
            input = output
        self.steps = fused(list(self.layers.values()))
        return input

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        if not context.train:
            return self._infer(x, context), no_backward
        derivatives: list[Backward] = []
        for layer in self.steps:
            x, backward_of_layer = layer.forward(x, context)
            derivatives.append(backward_of_layer)

        def backward(dy: Array) -> Array | None:
            dx: Array | None = dy
            for derivative in reversed(derivatives):
                dx = derivative(dx)  # of None, too: a layer before the first weights still holds its output
            return dx

        return x, backward

    def _infer(self, x: Array, context: Context) -> Array:
        """Forward alone: each activation goes back as soon as the next layer has read it."""
        address = self.backend.address
        given = address(x)  # the caller's, in whatever shape
        for layer in self.steps:
            y, _ = layer.forward(x, context)
            if address(x) not in (given, address(y)):
                self.backend.give_back(x)
            x = y
        return x


def fused(layers: list[Layer]) -> list[Layer]:
    """The layers with each pair that the backend does faster in one operation replaced by one layer."""
    steps: list[Layer] = []
    for layer in layers:
        pair = steps[-1].fuse(layer) if steps else None
        if pair is None:
            steps.append(layer)
        else:
            steps[-1] = pair
    return steps
