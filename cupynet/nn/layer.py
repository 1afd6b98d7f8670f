"""What a layer is, and how layers are chained.

`forward` returns its output *and the function that is its derivative*, which stands right below it and owns what it
needs. There is no tape and nothing is kept on the layer, so any number of micro-batches may be in flight.

Who owns an array:

- `forward` borrows its output y from the workspace. In training the layer's own `backward` gives it back, otherwise
  the caller does.
- Or y is x itself, or a view of it, of a layer that changes nothing (`Flatten`, `Dropout` outside training): then it is
  whose x is. A layer that holds others gives back what they made of x by `Layer.release`, which leaves x alone: given
  back by two, it would be lent to a third while one still reads it.
- `backward(dy)` owns dy: it may overwrite it, and gives it back or returns it as dx. It is called once.
- dy is None where the layers above computed no dx, as nothing from here down has weights: then `backward` only gives
  back what it holds, and returns None.
- The input x is never the layer's: it is not written to, and not given back.
- Nor is what another layer's `forward` returned, not even where a layer holds that other one: `y += x` on the output
  of a branch that ends in ReLU makes the branch's `backward`, which still reads it, silently wrong. A layer adds into
  an array that it borrowed itself.

After a training step nothing is on loan; a test checks that. Where an exception ends a pass, `Model` gives back its
loans.

Running statistics are buffers (`params.add_buffer`): a training pass moves them, and whoever trains takes that back
where the batch is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from cupynet.backend import Backend, Window
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.params import Params, Scope
from cupynet.nn.types import Image, InputType

Backward: TypeAlias = Callable[["Array | None"], "Array | None"]


def no_backward(dy: Array) -> Array:
    """In place of a derivative, after a pass that was not made for training."""
    raise RuntimeError("this forward pass was not made for training: call forward with Context(train=True)")


class Layer:
    """A differentiable function with weights.

    Constructed, it is only a description; `build` infers its shapes and declares its weights. A description may be
    copied and built again, for another replica or another backend.

    A layer of one's own needs `build` and `forward`: guides/extending.md shows one.

    A layer that holds other layers builds them with `params.scope(name)`, under the names of its attributes.

    What `build` is given and returns is set on the layer at every call.

    Attributes:
        recordable: whether `forward` and its derivative ask for the same operations for every batch of one size,
            whatever is in it and whenever: a GPU may record them then, and repeat what it has recorded. Not inherited:
            each class says so of itself. Of the context it looks at `train`, `epoch`, `samples` and `seed` alone.
        uses_rng: whether a training pass looks at `context.samples` and `context.epoch`, to draw at random: a recorded
            step has them on the device then.
        syncs_replicas: whether a training pass exchanges something with the other replicas. A replica without a batch
            then passes an example along that does not count, see `Context`; pipelines refuse such layers.
        least: examples that a training pass needs for its output to tell anything of them. Fewer, the last of an epoch
            say, are passed through; batches that are all so small are refused, see `check_batches`.
        backend: where the layer computes.
        path: the layer's name with those it lies in, `block.conv1`; empty for a network that is one layer.
        needs_dx: see `Scope`; where it is false, `backward` may return None.
        input, output: what one example is, before and after the layer.
        declared: how many weights the layer has, with those of the layers that it holds.
    """

    backend: Backend
    path = ""
    recordable = False
    uses_rng = False
    syncs_replicas = False
    least = 1
    _declared_in: Params | None = None
    needs_dx = True
    declared = 0
    input: InputType
    output: InputType

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for former, name in (("draws", "uses_rng"), ("meets", "syncs_replicas")):
            if former in vars(cls):
                raise ConfigError(f"{cls.__name__}.{former}: is called {name} now")
        if "build" in vars(cls):
            cls.build = _noted(cls.build)  # type: ignore[method-assign]

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

    def children(self) -> Iterable[tuple[str, Layer]]:
        """The layers that this one holds, with their names: by default its attributes that are layers."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Layer)]

    @property
    def output_activation(self) -> str:
        """The activation that the output has been through, by name; a loss may apply that itself."""
        return "identity"

    def ending(self) -> Layer:
        """The layer that makes the output: this one, or the last of those it holds."""
        return self

    def release(self, x: Array, *made: Array) -> None:
        """Outside training, in `forward`: give back what others made of x (N, ...), but x itself, reshaped or not."""
        given = self.backend.address(x)
        self.backend.give_back(*(each for each in made if self.backend.address(each) != given))

    def activated(self) -> list[Layer]:
        """The layers by whose `output_activation` the output has gone last: this one, or those it holds.

        Empty where values are handed on as they are: then it is the layer before that counts.
        """
        return [self]

    def multiply_adds(self) -> int:
        """Multiplications (each with an addition) of a forward pass per example, without those of its children."""
        return 0

    def walk(self) -> Iterator[Layer]:
        """This layer and all built ones that it holds, at any depth, in order."""
        yield self
        for _, child in self.children():
            if hasattr(child, "output"):
                yield from child.walk()

    def computed(self) -> Iterator[tuple[str, Layer]]:
        """What is computed in here in turn, once it is built, at any depth: paths, and whose `forward` it is.

        Two that the backend computes as one are one, `conv1+pool1`.
        """
        for _, child in self.children():
            if hasattr(child, "output"):
                yield child.path, child
                yield from child.computed()

    def describe(self) -> str:
        """The layer's settings in a few words, for `Model.summary`."""
        return ""


def _noted(build: Callable[..., InputType]) -> Callable[..., InputType]:
    """A layer's `build` that notes on the layer what it was given and what it returns."""

    @functools.wraps(build)
    def noted(self: Layer, input: InputType, params: Scope, backend: Backend) -> InputType:
        first = self.path
        if self._declared_in is params.params and first != params.layer:  # it would keep the weights of the second
            raise ConfigError(
                f"layers '{first}' and '{params.layer}' are one object: make a {type(self).__name__} for each"
            )
        self._declared_in = params.params
        self.backend, self.path, self.needs_dx, self.input = backend, params.layer, params.needs_dx, input
        before = params.params.count
        self.output = build(self, input, params, backend)
        self.declared = params.params.count - before
        return self.output

    return noted


def check_image(kind: str, name: str, input: InputType, window: Window, way_out: str) -> Image:
    """`input` if it is an Image with room for the window; else a ConfigError that names the layer and the way out."""
    if not isinstance(input, Image):
        raise ConfigError(f"{kind} '{name}' needs an Image, got {input}: put it before the first Dense layer")
    if not window.fits(input.height, input.width):
        size = window.kernel[0] if window.kernel[0] == window.kernel[1] else window.kernel
        gaps = f" with dilation={window.dilation}" if window.dilates else ""
        raise ConfigError(f"{kind} '{name}' kernel={size}{gaps} is larger than its input {input}: {way_out}")
    return input


EXAMPLE = "Dense(10), in YAML {_target_: cupynet.nn.Dense, units: 10}"


class Sequential(Layer):
    """Layers one after the other. Their names are parameter names and command-line handles.

    Args:
        layers: name -> layer, in order; names must not contain a dot. A list names them by kind and count: conv2d1,
            maxpool2d1, conv2d2, dense1.
    """

    recordable = True

    def __init__(self, layers: Mapping[str, Layer] | Iterable[Layer]) -> None:
        if not isinstance(layers, Mapping | list | tuple) or not layers:
            found = checks.shown(layers)
            raise ConfigError(
                f"Sequential layers={found}: must map names to layers, or list layers: at least one layer"
            )
        named = dict(layers) if isinstance(layers, Mapping) else _named(layers)
        names: dict[int, str] = {}
        for name, layer in named.items():
            if not isinstance(name, str) or "." in name or not name or not name.isprintable():
                raise ConfigError(f"layer name {name!r}: must be printable text, not empty, without a dot")
            checks.instance(f"layer '{name}'", layer, Layer, EXAMPLE)
            first = names.setdefault(id(layer), name)
            if first != name:  # built twice, it would keep the weights of the second place only
                raise ConfigError(
                    f"layers '{first}' and '{name}' are one object: make a {type(layer).__name__} for each"
                )
        self.layers: dict[str, Layer] = named

    def __iter__(self) -> Iterator[tuple[str, Layer]]:
        return iter(self.layers.items())

    def children(self) -> Iterable[tuple[str, Layer]]:
        return self.layers.items()

    def ending(self) -> Layer:
        return list(self.layers.values())[-1].ending()

    def activated(self) -> list[Layer]:
        return next(filter(None, (layer.activated() for layer in reversed(self.layers.values()))), [])

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        needs_dx = params.needs_dx
        for name, layer in self:
            input = layer.build(input, params.scope(name, needs_dx), backend)
            needs_dx = needs_dx or layer.declared > 0
        self.steps = [step for _, step in self._steps()]
        return input

    def together(self) -> list[list[str]]:
        """The layers' names, in order, once it is built; those that the backend computes as one stand together."""
        return [names for names, _ in self._steps()]

    def computed(self) -> Iterator[tuple[str, Layer]]:
        for names, step in zip(self.together(), self.steps, strict=True):
            first = self.layers[names[0]]
            yield "+".join([first.path, *names[1:]]), step
            if len(names) == 1:
                yield from first.computed()

    def _steps(self) -> list[tuple[list[str], Layer]]:
        """What is computed in turn, with the names of the layers it does: each pair that the backend has is one."""
        steps: list[tuple[list[str], Layer]] = []
        for name, layer in self:
            names, before = steps[-1] if steps else ([], None)
            pair = None if before is None else before.fuse(layer)
            if pair is None:
                steps.append(([name], layer))
            else:
                steps[-1] = ([*names, name], pair)
        return steps

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


def _named(layers: Iterable[Layer]) -> dict[str, Layer]:
    """Names for layers that have none: their kind and a count."""
    named: dict[str, Layer] = {}
    counts: dict[str, int] = {}
    for layer in layers:
        kind = (layer if isinstance(layer, type) else type(layer)).__name__.lower()
        counts[kind] = counts.get(kind, 0) + 1
        named[f"{kind}{counts[kind]}"] = layer
    return named
