"""Layers. `forward` returns the output and a `backward` function, a closure over the arrays it needs.

Layers store no activations, so several micro-batches can be in flight. A layer writes only to arrays that it borrowed,
not to x. `backward` is called at most once and may overwrite `dy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn, TypeAlias

from cupynet.backend import Backend, Window
from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.described import PLAIN, Described
from cupynet.core.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.params import Params, Scope
from cupynet.nn.types import Image, InputType

Backward: TypeAlias = Callable[[Array], "Array | None"]


class KerasAttribute:
    """A Keras attribute that does not exist here. Accessing it raises an AttributeError that names the replacement."""

    def __init__(self, replacement: str) -> None:
        self._replacement = replacement

    def __get__(self, *_: object) -> NoReturn:
        raise AttributeError(self._replacement)

    def __set__(self, owner: object, value: object) -> None:
        raise AttributeError(self._replacement)


TRAINABLE = KerasAttribute("there is no attribute `trainable`. Freeze layers by name: model.freeze('conv1')")


def no_backward(dy: Array) -> Array:
    """Backward function of an inference pass; always raises RuntimeError."""
    raise RuntimeError("this forward pass was not for training. Call forward with Context(train=True)")


class Layer(Described):
    """Base class of layers.

    A new layer is a specification. `build` infers its shapes and declares its weights. A layer may be built several
    times, for different replicas and backends.

    Subclasses implement `build` and `forward` (see guides/extending.md). They build each child with
    `params.scope(name)`, where `name` is the attribute that holds it.

    Attributes:
        capturable: True if CUDA graphs can capture the layer: it performs the same operations for all batches of one
            size, and reads only `train`, `epoch`, `samples` and `seed` of the context. Not inherited.
        uses_rng: True if the layer reads `context.samples` and `context.epoch` in training.
        syncs_replicas: True if the layer exchanges data with other replicas in training (see `Context`). Not supported
            in pipelines.
        backend: the backend. `build` sets this and the following attributes.
        path: the full name, such as `block.conv1`; empty for a network of one layer.
        needs_dx: if False, `backward` may return None (see `Scope`).
        input, output: types of one sample before and after the layer.
        declared: number of weights, including children.
        fused: a tuple with the layer that fuses this layer with the previous one, or (). Not a child.
    """

    trainable = TRAINABLE

    backend: Backend
    path = ""
    capturable = False
    uses_rng = False
    syncs_replicas = False
    _declared_in: Params | None = None
    needs_dx = True
    declared = 0
    fused: tuple[Layer, ...] = ()
    input: InputType
    output: InputType

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "build" in vars(cls):
            cls.build = _noted(cls.build)  # type: ignore[method-assign]

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        """Infer shapes from `input`, declare weights in `params`, and return the output type."""
        raise NotImplementedError

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        """Return the output for x (N, ...), and a function that maps dy to dx and adds to the weights' gradients."""
        raise NotImplementedError

    def fuse(self, following: Layer) -> Layer | None:
        """Return a layer that fuses this built layer with the following one, or None."""
        return None

    def children(self) -> Iterable[tuple[str, Layer]]:
        """Return (name, layer) for each child, by default for each attribute that is a layer."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, Layer)]

    @property
    def output_activation(self) -> str:
        """The name of the output activation, `identity` if there is none."""
        return "identity"

    def multiply_adds(self) -> int:
        """Return the number of multiply-adds per sample in a forward pass, excluding children."""
        return 0

    def walk(self) -> Iterator[Layer]:
        """Yield this layer and its built descendants in order."""
        yield self
        for _, child in self.children():
            if hasattr(child, "output"):
                yield from child.walk()

    def describe(self) -> str:
        """Return the layer's settings for `Model.summary`."""
        return ""


def _noted(build: Callable[..., InputType]) -> Callable[..., InputType]:
    @functools.wraps(build)
    def noted(self: Layer, input: InputType, params: Scope, backend: Backend) -> InputType:
        first = self.path
        if self._declared_in is params.params and first != params.layer:  # the first build's weights would be lost
            raise ConfigError(
                f"layers '{first}' and '{params.layer}' are the same object. "
                f"Create a separate {type(self).__name__} for each"
            )
        self._declared_in = params.params
        self.backend, self.path, self.needs_dx, self.input = backend, params.layer, params.needs_dx, input
        before = params.params.count
        self.output = build(self, input, params, backend)
        if not isinstance(self.output, InputType):
            found = wording.shown(self.output)
            raise ConfigError(f"layer '{self.path}': build must return its output type, an Image or Flat, not {found}")
        self.declared = params.params.count - before
        now = {name: getattr(self, name, None) for name in self._made}  # `build` may have changed them
        self._made = {name: value for name, value in now.items() if isinstance(value, PLAIN)}
        return self.output

    return noted


def check_image(kind: str, name: str, input: InputType, window: Window, remedy: str) -> Image:
    """Return `input`. Raise ConfigError if it is not an Image, or if the window does not fit into the padded image."""
    if not isinstance(input, Image):
        raise ConfigError(f"{kind} '{name}' needs an Image, got {input}. Put it before the first Dense layer")
    if not window.fits(input.height, input.width):
        size = f"kernel_size={window.kernel}, dilation={window.dilation}"
        raise ConfigError(f"{kind} '{name}' {size} is larger than its input {input}. {remedy}")
    return input


EXAMPLE = "Dense(10), in YAML {_target_: cupynet.nn.Dense, units: 10}"


class Sequential(Layer):
    """A sequence of layers: a mapping from name to layer, or a list.

    Parameters and settings are named after the layers. Names must not contain a dot. In a list, layers are named by
    type and number: conv2d1, maxpool2d1, conv2d2, dense1.
    """

    capturable = True
    _first = 0  # the first step with weights to train

    def __init__(self, layers: Mapping[str, Layer] | Iterable[Layer]) -> None:
        if not isinstance(layers, Mapping | list | tuple) or not layers:
            reason = "must be a non-empty list of layers, or a non-empty mapping from names to layers"
            raise ConfigError(reason, "Sequential layers", wording.shown(layers))
        named = dict(layers) if isinstance(layers, Mapping) else _named(layers)
        for name, layer in named.items():
            if not isinstance(name, str) or "." in name or not name.isprintable() or name in ("", "_target_"):
                raise ConfigError(f"layer name {name!r} is invalid: use printable text without a dot, and not _target_")
            checks.instance(f"Sequential layers.{name}", layer, Layer, EXAMPLE)
        self.layers: dict[str, Layer] = named

    def __iter__(self) -> Iterator[tuple[str, Layer]]:
        return iter(self.layers.items())

    def children(self) -> Iterable[tuple[str, Layer]]:
        return self.layers.items()

    @property
    def output_activation(self) -> str:
        return list(self.layers.values())[-1].output_activation

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        needs_dx = params.needs_dx
        for name, layer in self:
            input = layer.build(input, params.scope(name, needs_dx), backend)
            needs_dx = needs_dx or layer.declared > 0
        self.steps = self._fused()  # the layers after fusion, each with the names of the layers that it fuses
        return input

    def train_only(self, names: Set[str]) -> None:
        """Limit `backward` to the derivatives needed to train these layers."""
        trained = [not names.isdisjoint(step) for step, _ in self.steps]
        self._first = trained.index(True) if True in trained else len(trained)
        for i, (step, layer) in enumerate(self.steps):
            layer.needs_dx = self.layers[step[0]].needs_dx = i > self._first

    def together(self) -> list[list[str]]:
        """Return the names of the built layers in order, grouped by fusion."""
        return [names for names, _ in self.steps]

    def _fused(self) -> list[tuple[list[str], Layer]]:
        steps: list[tuple[list[str], Layer]] = []
        for name, layer in self:
            names, before = steps[-1] if steps else ([], None)
            pair = None if before is None else before.fuse(layer)
            if before is None or pair is None:
                steps.append(([name], layer))
            else:
                steps[-1] = ([*names, name], pair)
                pair.path, pair.needs_dx = f"{before.path}+{name}", before.needs_dx
                layer.fused = (pair,)
        return steps

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        derivatives: list[tuple[Layer, Backward, tuple[int, ...]]] = []
        for i, (names, layer) in enumerate(self.steps):
            shape = x.shape
            expected = (len(x), *self.layers[names[-1]].output.shape)
            x, derivative = _pair(layer, layer.forward(x, context), train=context.train)
            if getattr(x, "shape", None) != expected:
                raise ConfigError(f"layer '{layer.path}': forward returned {_found(x)}, but must return {expected}")
            x = self._readable(x)
            if context.train and i >= self._first:
                derivatives.append((layer, derivative, shape))
            del derivative
        if not context.train:
            return x, no_backward

        def backward(dy: Array) -> Array | None:
            if not derivatives and self._first < len(self.steps):
                raise RuntimeError("backward was already called and its arrays were released")
            gradients = [dy]  # a list, so that this frame holds no reference to dy
            del dy
            while derivatives:
                layer, derivative, shape = derivatives.pop()  # this also frees the arrays of the following layer
                dx = derivative(gradients.pop())
                if dx is None and not layer.needs_dx:  # no earlier layer has weights
                    derivatives.clear()
                    return None
                if dx is None or getattr(dx, "shape", None) != shape:
                    raise ConfigError(f"layer '{layer.path}': backward returned {_found(dx)}, but must return {shape}")
                gradients.append(self._readable(dx))
                del dx
            return None if self._first else gradients.pop()

        return x, backward

    def _readable(self, array: Array) -> Array:
        """Convert an array whose dtype or strides kernels do not support, for example after x * np.float64(2)."""
        policy = self.backend.policy
        supported = array.dtype in (policy.storage, policy.accumulate) and array.flags.c_contiguous
        return array if supported else self.backend.compact(array)


def _pair(layer: Layer, returned: Any, *, train: bool) -> tuple[Any, Backward]:
    values = returned if isinstance(returned, tuple | list) else [returned]
    if len(values) != 2 or (train and not callable(values[1])):
        found = ", ".join(type(value).__name__ for value in values)
        raise ConfigError(f"layer '{layer.path}': forward must return an array and a function, got ({found})")
    return values[0], values[1]


def _found(returned: Any) -> str:
    if hasattr(returned, "shape"):
        return f"an array of shape {returned.shape}"
    return "None" if returned is None else wording.one(type(returned).__name__)


def _named(layers: Iterable[Layer]) -> dict[str, Layer]:
    named: dict[str, Layer] = {}
    counts: dict[str, int] = {}
    for layer in layers:
        kind = type(layer).__name__.lower()
        counts[kind] = counts.get(kind, 0) + 1
        named[f"{kind}{counts[kind]}"] = layer
    return named
