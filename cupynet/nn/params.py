from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array, on_host
from cupynet.core import wording
from cupynet.core.errors import ConfigError, errors_of
from cupynet.nn.init import Initializer, initializer

ALIGNMENT = 64  # bytes


@dataclass
class Named:
    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass
class Parameter(Named):
    """A named weight. Its arrays are views into the vectors of `Params`, created by `allocate`.

    Attributes:
        decay: True if penalties such as l2 apply: to weights but not to biases, as in Deeplearning4j.
        master: the weight that is updated, averaged and saved; at least float32.
        data: the array that layers read: `master` or its 16-bit copy.
        grad: the gradient of the loss, with the dtype of `master`. Layers add to it, and the optimizer clears it.
    """

    init: Initializer
    decay: bool = True
    frozen: bool = False
    master: Array = field(default=None, repr=False)
    data: Array = field(default=None, repr=False)
    grad: Array = field(default=None, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise AttributeError if a view would be replaced: the new array would not be trained."""
        before = self.__dict__.get(name)
        if name in ("master", "data", "grad") and before is not None and value is not before:
            raise AttributeError(
                f"weight '{self.name}': {name} cannot be replaced. Write into it, as in {name}[...] += ..."
            )
        super().__setattr__(name, value)


@dataclass
class Buffer(Named):
    """Values that forward passes update (running means). `data` is a view of `Params.buffers`, initially `fill`."""

    fill: float = 0.0
    data: Array = field(default=None, repr=False)


N = TypeVar("N", Parameter, Buffer)


@dataclass(frozen=True)
class Segment:
    """A slice of the flat vector whose weights share the weight decay and the learning-rate factor `rate`."""

    start: int
    stop: int
    decay: bool
    rate: float = 1.0

    @property
    def part(self) -> slice:
        return slice(self.start, self.stop)


class Unmatched(NamedTuple):
    """Names of weights that were not loaded. If only the shape differs, the name is in both lists."""

    missing: list[str]
    unexpected: list[str]


class Params:
    """The weights of a model. Layers declare them in a `Scope`, and `allocate` creates the arrays.

    Attributes:
        master, data, grad: flat (P,) vectors (see `Parameter`). P includes padding between parameters, which is zero.
        segments: slices that an optimizer updates in one call each.
        rates: learning-rate factors other than 1, by name; 0 for frozen weights.
        buffers: flat (B,) vector in the accumulation dtype (see `Buffer`); may be empty.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Parameter] = {}
        self._offsets: dict[str, int] = {}
        self._buffers: dict[str, Buffer] = {}
        self.segments: list[Segment] = []
        self.rates: dict[str, float] = {}
        self.master: Array = None
        self.data: Array = None
        self.grad: Array = None
        self.buffers: Array = None
        self.buffer_snapshot: Array = None

    def scope(self, name: str = "", *, needs_dx: bool = True) -> Scope:
        return Scope(self, f"{name}." if name else "", needs_dx)

    def add(self, declared: N) -> N:
        name = declared.name
        if name in self._entries or name in self._buffers:
            raise ConfigError(f"parameter '{name}' is declared twice. Give each layer a unique name")
        if isinstance(declared, Buffer):
            self._buffers[name] = declared
        else:
            self._entries[name] = declared
        return declared

    @property
    def count(self) -> int:
        """The number of weights, excluding padding."""
        return sum(p.size for p in self._entries.values())

    def named(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._entries.items()

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """The (start, stop) of each weight in the flat vector, by name."""
        return {name: (self._offsets[name], self._offsets[name] + p.size) for name, p in self._entries.items()}

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        yield from self._buffers.items()

    def arrays(self) -> dict[str, Array]:
        """Return the `master` of each weight and the `data` of each buffer, by name."""
        weights = {name: p.master for name, p in self._entries.items()}
        return weights | {name: buffer.data for name, buffer in self._buffers.items()}

    @property
    def vectors(self) -> list[Array]:
        """`master` (P,), and the buffers (B,) if there are any."""
        return [self.master, *self.running]

    @property
    def running(self) -> list[Array]:
        return [self.buffers] if self._buffers else []

    def views(self, vector: Array) -> Iterator[tuple[str, Array]]:
        """Yield (name, view) of each weight in a (P,) vector."""
        for name, p in self._entries.items():
            start = self._offsets[name]
            yield name, vector[start : start + p.size].reshape(p.shape)

    def buffer_views(self, vector: Array) -> Iterator[tuple[str, Array]]:
        """Yield (name, view) of each buffer in a (B,) vector."""
        start, step = 0, ALIGNMENT // vector.dtype.itemsize
        for name, buffer in self._buffers.items():
            yield name, vector[start : start + buffer.size].reshape(buffer.shape)
            start += _padded(buffer.size, step)

    def allocate(self, backend: Backend, seed: int) -> None:
        """Allocate the flat vectors and draw the initial weights, which depend only on (seed, name)."""
        accumulate, storage = backend.policy.accumulate, backend.policy.storage
        kinds = dict.fromkeys(p.decay for p in self._entries.values())  # weights with and without decay apart
        placed = [p for decay in kinds for p in self._entries.values() if p.decay == decay]
        total = self._place(placed, ALIGNMENT // storage.itemsize)  # also aligns the narrower copy
        host = np.zeros(total, accumulate)
        for name, p in self._entries.items():
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            start = self._offsets[name]
            drawn = np.asarray(p.init(rng, p.shape))
            if drawn.shape != p.shape or not np.isfinite(drawn).all():
                raise ConfigError(
                    f"weight '{name}': its initializer returned {drawn.shape} of {drawn.dtype}, but must return finite "
                    f"numbers of shape {p.shape}"
                )
            host[start : start + p.size] = drawn.reshape(-1)
        self.master = backend.allocate((total,), accumulate)
        self.grad = backend.allocate((total,), accumulate)
        with backend.activated():
            self.master[...] = backend.asarray(host)
            self.grad[...] = 0
        self.data = self.master if storage == accumulate else backend.allocate((total,), storage)
        self._backend = backend
        for attribute, vector in (("master", self.master), ("grad", self.grad), ("data", self.data)):
            for name, view in self.views(vector):
                setattr(self._entries[name], attribute, view)
        self.set_rates({})
        self._allocate_buffers(backend)
        self.publish()

    def _allocate_buffers(self, backend: Backend) -> None:
        accumulate = backend.policy.accumulate
        buffers = list(self._buffers.values())
        host = np.zeros(self._place(buffers, ALIGNMENT // accumulate.itemsize), accumulate)
        self.buffers, self.buffer_snapshot = (backend.allocate(host.shape, accumulate) for _ in range(2))
        for buffer in buffers:
            part = slice(self._offsets[buffer.name], self._offsets[buffer.name] + buffer.size)
            host[part], buffer.data = buffer.fill, self.buffers[part].reshape(buffer.shape)
        if buffers:
            with backend.activated():
                self.buffers[...] = backend.asarray(host)
                self.buffer_snapshot[...] = self.buffers

    @property
    def frozen(self) -> list[str]:
        return [name for name, rate in self.rates.items() if not rate]

    def set_rates(self, rates: Mapping[str, float]) -> None:
        """Set the learning-rate factor of each weight, 1 if not in `rates`. Frozen weights are in no segment."""
        if not self._entries:
            return
        self.rates = {name: rates[name] for name in self._entries if rates.get(name, 1.0) != 1.0}
        for name, p in self._entries.items():
            p.frozen = not self.rates.get(name, 1.0)
        ordered = sorted(self._entries.values(), key=lambda p: self._offsets[p.name])
        self.segments.clear()
        runs = groupby(ordered, key=lambda p: (p.decay, self.rates.get(p.name, 1.0)))
        ends = [*(self._offsets[p.name] for p in ordered[1:]), len(self.master)]
        stops = dict(zip((p.name for p in ordered), ends, strict=True))
        for (decay, rate), run in runs:
            members = list(run)
            if rate:
                self.segments.append(Segment(self._offsets[members[0].name], stops[members[-1].name], decay, rate))

    def check_trainable(self) -> None:
        """Raise ConfigError if all weights are frozen."""
        if self._entries and all(p.frozen for p in self._entries.values()):
            raise ConfigError("all weights are frozen. Unfreeze at least one")

    def matching(self, patterns: Collection[str]) -> set[str]:
        """Return names of weights that match or are in a matching layer. Raise ConfigError for unmatched patterns."""
        found: set[str] = set()
        for pattern in patterns:
            names = [
                name
                for name in self._entries
                if any(each == pattern or fnmatchcase(each, pattern) for each in _and_parents(name))
            ]
            if not names:
                raise ConfigError(f"no layer or weight matches '{pattern}'. The weights are {', '.join(self._entries)}")
            found.update(names)
        return found

    def unmatched(self, weights: Mapping[str, Any]) -> Unmatched:
        """Compare weights by name and shape. Raise ConfigError if none match or a matching value is not finite."""
        own = {name: each.shape for name, each in (*self._entries.items(), *self._buffers.items())}
        given = {name: tuple(np.shape(each)) for name, each in weights.items()}
        differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        if own and len(differing) == len(own.keys() | given.keys()):
            raise ConfigError(f"none of these weights match. They are {wording.shown(given)}, but the model has {own}")
        for name, each in weights.items():
            if name not in differing:
                _check_finite(name, each, np.float64 if self.master is None else self.master.dtype)
        return Unmatched(*([name for name in differing if name in names] for names in (own, given)))

    def check_fit(self, weights: Mapping[str, Any]) -> None:
        """Raise ConfigError unless names and shapes of all weights are equal, and values are finite."""
        unmatched = self.unmatched(weights)
        if any(unmatched):
            raise ConfigError(
                f"these weights are from another network: missing {unmatched.missing}, unexpected "
                f"{unmatched.unexpected} (a name in both differs in shape)"
            )

    def trained(self, vector: Array) -> list[Array]:
        """Return the parts of a (P,) vector whose weights are not frozen."""
        return [vector[segment.part] for segment in self.segments] if self.frozen else [vector]

    def clear_frozen(self, vector: Array) -> None:
        for name in self.frozen:
            start = self._offsets[name]
            vector[start : start + self._entries[name].size] = 0

    def snapshot_buffers(self) -> None:
        if self._buffers:
            self.buffer_snapshot[...] = self.buffers

    def restore_buffers(self) -> None:
        if self._buffers:
            self.buffers[...] = self.buffer_snapshot

    def _place(self, members: Sequence[Named], step: int) -> int:
        """Place `members` one after another at multiples of `step`, and return the end."""
        position = 0
        for each in members:
            self._offsets[each.name] = position
            position += _padded(each.size, step)
        return position

    def publish(self) -> None:
        """Copy `master` to the 16-bit `data`, if there is one."""
        if self.data is not self.master:
            self._backend.convert(self.master, self.data)

    def stored(self, part: slice) -> Array | None:
        """Return the 16-bit copy of a part of `master` (P,), or None if layers read `master` itself."""
        return None if self.data is self.master else self.data[part]


def weight_array(name: str, weight: Any) -> Array:
    """Convert a weight given by the user to a host array, unless it is on a device."""
    if hasattr(weight, "__cuda_array_interface__"):
        return weight
    with errors_of(f"weights[{name!r}]"):
        return on_host(weight)


def _check_finite(name: str, weights: Any, dtype: Any) -> None:
    array = weights if hasattr(weights, "__cuda_array_interface__") else np.asarray(weights)
    if array.dtype.kind in "cOSU":
        raise ConfigError(f"weights '{name}' must be real numbers, not {array.dtype}")
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(dtype, copy=False))
    if not finite.all():
        raise ConfigError(f"weights '{name}' are not finite in {dtype}. Use other weights or a wider dtype")


def _and_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _padded(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True)
class Scope:
    """Declares the weights of a layer during `build`.

    Attributes:
        prefix: the layer's name and a dot; empty for the network itself.
        needs_dx: True if an earlier layer has weights or is on another device. Otherwise `backward` may return None.
    """

    params: Params
    prefix: str
    needs_dx: bool = True

    def scope(self, name: str, needs_dx: bool | None = None) -> Scope:
        """Return the scope of a child layer. By default it inherits `needs_dx`."""
        return Scope(self.params, f"{self.prefix}{name}.", self.needs_dx if needs_dx is None else needs_dx)

    @property
    def layer(self) -> str:
        """The name of the layer; empty for the network itself."""
        return self.prefix.rstrip(".")

    def add(self, name: str, shape: tuple[int, ...], init: str | Initializer, *, decay: bool = True) -> Parameter:
        """Declare a weight. `init` is an initializer or its name, such as `he`."""
        return self.params.add(Parameter(self.prefix + name, shape, initializer(init), decay))

    def add_buffer(self, name: str, shape: tuple[int, ...], fill: float = 0.0) -> Buffer:
        """Declare a buffer with the initial value `fill`."""
        return self.params.add(Buffer(self.prefix + name, shape, fill))
