"""All weights of a model as one flat vector, of which layers hold named views.

Averaging is then one all-reduce, an update one pass, a checkpoint a walk over names. Weights that are treated alike by
the optimizer (decayed or not, same learning-rate factor) lie next to each other, so an update is one call per kind.

What a model is beside its weights, such as the running means of batch normalisation, is another flat vector: buffers.
No optimizer moves them; training passes do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.nn.init import Initializer

ALIGNMENT = 64  # bytes


@dataclass
class Parameter:
    """One named weight. The arrays are views into the flat vectors of its `Params`; they exist after `allocate`.

    Attributes:
        name: with its layer, `conv1.weight`.
        decay: whether l2 applies (weights yes, biases no, as in Deeplearning4j).
        lr_scale: factor on the learning rate.
        master: what the optimizer moves and what is averaged and saved, at least float32.
        data: what layers read; the same array, or its half copy.
        grad: the gradient of the loss, in master's precision; layers add to it, the optimizer sets it to zero.
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    decay: bool = True
    lr_scale: float = 1.0
    master: Array = field(default=None, repr=False)
    data: Array = field(default=None, repr=False)
    grad: Array = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass
class Buffer:
    """Named numbers that are part of what a model is, and no weights: moved by training passes, never by an optimizer.

    Attributes:
        name: with its layer, `norm1.mean`.
        fill: what they are at first.
        data: a view into the flat vector of its `Params`, in the accumulation precision; exists after `allocate`.
    """

    name: str
    shape: tuple[int, ...]
    fill: float = 0.0
    data: Array = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """A stretch of the flat vector whose weights are treated alike."""

    start: int
    stop: int
    decay: bool
    lr_scale: float

    @property
    def part(self) -> slice:
        """Where it lies."""
        return slice(self.start, self.stop)


class Params:
    """The weights of a model: declared by its layers through a `Scope`, then laid out by `allocate`.

    Attributes:
        master, data, grad: flat (P,) vectors, see `Parameter`. P counts the padding between parameters, which is and
            stays zero.
        segments: the stretches an optimizer updates with one call each.
        buffers: flat (B,) vector in the accumulation precision, see `Buffer`; empty where no layer has any.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Parameter] = {}
        self._offsets: dict[str, int] = {}
        self._buffers: dict[str, Buffer] = {}
        self._places: dict[str, int] = {}  # of buffers
        self.segments: list[Segment] = []
        self.master: Array = None
        self.data: Array = None
        self.grad: Array = None
        self.buffers: Array = None
        self._kept: Array = None

    def scope(self, name: str = "", *, needs_dx: bool = True) -> Scope:
        """Where a network declares its weights, under `name.` if it has one; `needs_dx`: see `Scope`."""
        return Scope(self, f"{name}." if name else "", needs_dx)

    def add(self, parameter: Parameter) -> Parameter:
        """Declare a weight; its arrays exist after `allocate`."""
        self._refuse_twice(parameter.name)
        self._entries[parameter.name] = parameter
        return parameter

    def add_buffer(self, buffer: Buffer) -> Buffer:
        """Declare a buffer; its array exists after `allocate`."""
        self._refuse_twice(buffer.name)
        self._buffers[buffer.name] = buffer
        return buffer

    def _refuse_twice(self, name: str) -> None:
        if name in self._entries or name in self._buffers:
            raise ConfigError(f"parameter '{name}' is declared twice: give each layer its own name")

    @property
    def count(self) -> int:
        """Number of weights, without padding."""
        return sum(p.size for p in self._entries.values())

    def named(self) -> Iterator[tuple[str, Parameter]]:
        """Name and parameter, in order of declaration."""
        yield from self._entries.items()

    @property
    def places(self) -> dict[str, tuple[int, int]]:
        """Where each weight lies in the flat vector, name -> (start, stop); after `allocate`."""
        return {name: (start, start + self._entries[name].size) for name, start in self._offsets.items()}

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Name and buffer, in order of declaration."""
        yield from self._buffers.items()

    @property
    def vectors(self) -> list[Array]:
        """`master` (P,), and the buffers (B,) where there are any: what makes a trained model what it is."""
        return [self.master, *self.running]

    @property
    def running(self) -> list[Array]:
        """The buffers as one vector (B,); nothing where there are none, so that nothing is done about them."""
        return [self.buffers] if self._buffers else []

    def views(self, vector: Array) -> Iterator[tuple[str, Array]]:
        """Name and part, in order of declaration, of any (P,) vector laid out like the weights; after `allocate`.

        Raises:
            ConfigError: the vector is of another network.
        """
        if self.master is None or vector.shape != self.master.shape:
            own = "nothing is allocated" if self.master is None else f"these weights are {self.master.shape}"
            raise ConfigError(f"a vector of shape {tuple(vector.shape)} is not laid out like the weights: {own}")
        for name, p in self._entries.items():
            start = self._offsets[name]
            yield name, vector[start : start + p.size].reshape(p.shape)

    def allocate(self, backend: Backend, seed: int) -> None:
        """Lay out the flat vectors on the backend and draw the initial weights.

        A weight's numbers follow from (seed, name) alone: adding a layer does not change the others.
        """
        accumulate, storage = backend.policy.accumulate, backend.policy.storage
        total = self._layout(ALIGNMENT // storage.itemsize)  # in elements, so that the narrower copy is aligned too
        host = np.zeros(total, accumulate)
        for name, p in self._entries.items():
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            start = self._offsets[name]
            host[start : start + p.size] = _drawn(p, rng, storage).reshape(-1)
        self.master = backend.allocate((total,), accumulate)
        self.grad = backend.allocate((total,), accumulate)
        with backend.here():
            self.master[...] = backend.asarray(host)
            self.grad[...] = 0
        self.data = self.master if storage == accumulate else backend.allocate((total,), storage)
        self._backend = backend
        for attribute, vector in (("master", self.master), ("grad", self.grad), ("data", self.data)):
            for name, view in self.views(vector):
                setattr(self._entries[name], attribute, view)
        self._allocate_buffers(backend)
        self.publish()

    def _allocate_buffers(self, backend: Backend) -> None:
        """Lay out the buffers, each on a cache line of its own."""
        accumulate, size = backend.policy.accumulate, 0
        step = ALIGNMENT // accumulate.itemsize
        for name, buffer in self._buffers.items():
            self._places[name] = size
            size += -(-buffer.size // step) * step
        host = np.zeros(size, accumulate)
        for name, buffer in self._buffers.items():
            host[self._places[name] :][: buffer.size] = buffer.fill
        self.buffers, self._kept = (backend.allocate((size,), accumulate) for _ in range(2))
        for name, buffer in self._buffers.items():
            buffer.data = self.buffers[self._places[name] :][: buffer.size].reshape(buffer.shape)
        if self._buffers:
            with backend.here():
                self.buffers[...] = backend.asarray(host)
                self._kept[...] = self.buffers

    def snapshot_buffers(self) -> None:
        """Copy the buffers before a training pass, for `restore_buffers`."""
        if self._buffers:
            self._kept[...] = self.buffers

    def restore_buffers(self) -> None:
        """Reset the buffers to the last snapshot, as if the pass since then had not happened."""
        if self._buffers:
            self.buffers[...] = self._kept

    @property
    def buffer_snapshot(self) -> Array:
        """The copy that `snapshot_buffers` made, (B,)."""
        return self._kept

    def _layout(self, step: int) -> int:
        """P; decides where each parameter starts, in steps of `step`, and fills `segments`."""
        kinds: dict[tuple[bool, float], list[Parameter]] = {}
        for p in self._entries.values():
            kinds.setdefault((p.decay, p.lr_scale), []).append(p)
        position = 0
        self.segments.clear()
        for (decay, lr_scale), members in kinds.items():
            start = position
            for p in members:
                self._offsets[p.name] = position
                position += -(-p.size // step) * step
            self.segments.append(Segment(start, position, decay, lr_scale))
        return position

    def publish(self) -> None:
        """Let layers see what the optimizer or an average did to `master`; nothing to do where `data` is `master`."""
        if self.data is not self.master:
            self._backend.convert(self.master, self.data)

    def stored(self, part: slice) -> Array | None:
        """The narrower copy that layers read of a stretch of `master` (P,); None where they read `master` itself."""
        return None if self.data is self.master else self.data[part]


def _drawn(p: Parameter, rng: np.random.Generator, storage: np.dtype[Any]) -> Array:
    """The first numbers of a weight, if its initialiser has made what it must: real numbers of its shape that `storage`
    holds. ConfigError."""
    try:
        made = np.asarray(p.init(rng, p.shape))
    except ConfigError as error:
        raise ConfigError(f"weight '{p.name}': {error}") from error
    if made.shape != p.shape or made.dtype.kind not in "biuf":
        raise ConfigError(
            f"weight '{p.name}': its initialiser made {made.shape} of {made.dtype}: must return numbers of the shape "
            f"that it is given, {p.shape}"
        )
    with np.errstate(over="ignore"):
        held = made.astype(storage)
    if not np.isfinite(held).all():
        raise ConfigError(
            f"weight '{p.name}': its initialiser made numbers that are not finite in {storage}: let it make smaller "
            "ones"
        )
    return made


@dataclass(frozen=True)
class Scope:
    """What a layer sees of `Params` while it is built: a place to declare weights under its own name.

    Attributes:
        params: where the weights go.
        prefix: the layer's name and a dot; empty at the top.
        needs_dx: whether the derivative with respect to the layer's input is of use: something before it has weights,
            or stands on another device. Where it is not, `backward` may return None.
    """

    params: Params
    prefix: str
    needs_dx: bool = True

    def scope(self, name: str, needs_dx: bool | None = None) -> Scope:
        """A scope inside this one, for a layer within the layer; `needs_dx` by default as here."""
        return Scope(self.params, f"{self.prefix}{name}.", self.needs_dx if needs_dx is None else needs_dx)

    @property
    def layer(self) -> str:
        """The name of the layer being built, for messages; empty at the top."""
        return self.prefix.rstrip(".")

    def add(
        self, name: str, shape: tuple[int, ...], init: Initializer, *, decay: bool = True, lr_scale: float = 1.0
    ) -> Parameter:
        """Declare the weight `name` of this layer."""
        return self.params.add(Parameter(self.prefix + name, shape, init, decay, lr_scale))

    def add_buffer(self, name: str, shape: tuple[int, ...], fill: float = 0.0) -> Buffer:
        """Declare the buffer `name` of this layer, all of whose numbers are `fill` at first."""
        return self.params.add_buffer(Buffer(self.prefix + name, shape, fill))
