"""Means of vectors that live on GPUs: added up on each device first, then between devices, then taken back by all.

The workers are threads, each with the arrays and the stream of its own device. On a device the first of its workers,
its leader, adds up what all there have, times their shares, in rank order and in double precision. Where there are
several devices these sums meet: over NCCL, one rank for each device, or on the first device, in the order of the
devices. With one device the bits are those of a mean in host memory, but for floats and bfloat16 too small to be normal
(below 1.2e-38), which a GPU takes for zero; with several they are those of the same devices again, but of no other way.

Nobody on the host waits for a device: what has to wait for another stream waits on it, for a mark that was set there.
Buffers are made in the first mean and kept, so that nothing is allocated while others stand in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.checks import one_of
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.base import REDUCES, Communicator
from cupynet.parallel.communicators.nccl import Hand

log = logging.getLogger(__name__)

# Every worker's value by reference, in rank order; all have met when it returns.
Exchange: TypeAlias = Callable[[Any], list[Any]]


def check_reduce(reduce: str, backend: str, *, processes: bool, stages: int = 1) -> str:
    """How averages are computed where `reduce` is asked for. ConfigError where they cannot be.

    Threads that are stages average in a group for each stage, which meet at different times. NCCL would have each group
    stand still while no thread of the process allocates anything, so theirs meet on a device.

    backend: its name. processes: whether the workers are processes. stages: of each replica.
    """
    one_of("reduce", reduce, REDUCES)
    if reduce in ("nccl", "device") and backend != "cupy":
        raise ConfigError(f"reduce={reduce}: is for GPUs, and {backend} computes on the CPU: leave it out")
    if reduce == "device" and processes:
        raise ConfigError("reduce=device: processes cannot read each other's arrays: take reduce=nccl or reduce=host")
    if reduce == "nccl" and (why := nccl.missing()):
        raise ConfigError(f"reduce=nccl: {why}: {nccl.way_out()}; or take reduce=host")
    if stages == 1 or processes or backend != "cupy":
        return reduce
    if reduce == "nccl":
        raise ConfigError(
            f"reduce=nccl: {stages} stages in threads average at different times, and NCCL can wait for ever: take "
            "reduce=device, or processes (launcher=mpi)"
        )
    return "device" if reduce == "auto" else reduce


class Sum(Protocol):
    """How the leaders of several devices make one sum of theirs."""

    def sum(self, arrays: Sequence[Array]) -> None:
        """Overwrite each array with its sum over the leaders, in the order of this leader's stream."""

    def close(self) -> None:
        """Let go of what it holds; every leader calls it."""

    def abandon(self) -> None:
        """Let go of it after a failure, without the others."""


Connect: TypeAlias = Callable[[Hand, "int | None", int, Backend], "Sum | None"]


@dataclass(frozen=True)
class Contribution:
    """What a worker brings to a mean.

    mark: set on its stream behind all that made the arrays what they are.
    """

    backend: Backend
    arrays: list[Array]
    weight: float
    mark: Any

    @property
    def forms(self) -> list[tuple[Any, Any]]:
        """Of each array its length and dtype, which must be those of all."""
        return [(array.shape, array.dtype) for array in self.arrays]


class Kept:
    """Buffers of a device, made when they are first asked for, before others stand in a collective."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Any, Array] = {}

    def like(self, name: object, array: Array) -> Array:
        """That of this name, of the form of `array`."""
        key = (name, array.shape, array.dtype)
        if key not in self._buffers:
            made = self._buffers[key] = self._backend.allocate(array.shape, array.dtype)
            self._backend.weighted_sum(made, [array], [1.0])  # loads what is launched later: loading waits for devices
        return self._buffers[key]


class DeviceMeans:
    """One worker's part in the means of a group.

    Args:
        exchange: how it hands things to the others of the group, and meets them.
        rank: its number in the group.
        backend: where its arrays live.
        nccl: makes the leaders' sum over NCCL where there are several devices; called by every worker, with its place
            among the leaders or None, how many these are, and its backend. Without it they meet on the first device.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        backend: Backend,
        nccl: Connect | None = None,
    ) -> None:
        self._exchange, self.rank, self._backend = exchange, rank, backend
        self._nccl = nccl
        self._kept = Kept(backend)
        self._devices: list[int] = []  # of each rank
        self._over_nccl = False
        self._between: Sum | None = None  # of a leader, where they meet over NCCL

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`. RuntimeError where workers bring arrays of different forms."""
        self._meet_first()
        leader = self._leader(self.rank)
        buffers = [self._kept.like(place, array) for place, array in enumerate(arrays)] if leader == self.rank else []
        own = Contribution(self._backend, arrays, weight, self._backend.record_event())
        given: list[Contribution] = self._exchange(own)
        for rank, each in enumerate(given):
            if each.forms != given[0].forms:
                raise RuntimeError(f"worker {rank} brings {each.forms} to a mean, and worker 0 {given[0].forms}")
        total = sum(each.weight for each in given)
        if total <= 0:
            return
        if leader == self.rank:
            self._sum_here(given, total, buffers)
        if self._over_nccl:
            if self._between is not None:
                self._between.sum(buffers)
        elif len(self._leaders) > 1:
            self._sum_on_first(buffers)
        found, mark = self._exchange((buffers, self._backend.record_event()))[leader]
        self._backend.wait_event(mark)
        for array, buffer in zip(arrays, found, strict=True):
            array[...] = buffer

    def close(self) -> None:
        """Let go of NCCL; every worker calls it, or none."""
        if self._between is not None:
            self._between.close()
            self._between = None

    def abandon(self) -> None:
        """Let go of NCCL after a failure, without the others, whose devices would wait for this one for ever."""
        if self._between is not None:
            self._between.abandon()
            self._between = None

    def _meet_first(self) -> None:
        """Before the first mean: who is where, and how leaders meet. Every worker comes by here."""
        if self._devices:
            return
        self._devices = self._exchange(self._backend.device)
        leaders = self._leaders
        if len(leaders) > 1 and self._nccl is not None:
            place = leaders.index(self.rank) if self.rank in leaders else None
            self._between = self._nccl(self._hand, place, len(leaders), self._backend)
            self._over_nccl = True

    def _hand(self, own: bytes) -> bytes:
        given: bytes = next(filter(None, self._exchange(own)))
        return given

    @property
    def _leaders(self) -> list[int]:
        """The first rank of each device, in the order of ranks."""
        return [rank for rank, device in enumerate(self._devices) if device not in self._devices[:rank]]

    def _leader(self, rank: int) -> int:
        return self._devices.index(self._devices[rank])

    def _sum_here(self, given: list[Contribution], total: float, buffers: list[Array]) -> None:
        """The part of this device in the mean, of each vector, into the buffers."""
        mine = [each for each, device in zip(given, self._devices, strict=True) if device == self._devices[self.rank]]
        self._backend.wait_event(*(each.mark for each in given))  # those elsewhere may still be fetching the last sum
        shares = [each.weight / total for each in mine]
        for place, buffer in enumerate(buffers):
            self._backend.weighted_sum(buffer, [each.arrays[place] for each in mine], shares)

    def _sum_on_first(self, buffers: list[Array]) -> None:
        """The first leader fetches what the others have, adds it up in their order, and the others fetch the sum."""
        backend, leaders = self._backend, self._leaders
        offers = self._exchange((backend, buffers, backend.record_event()))
        first = leaders[0]
        if self.rank == first:  # (it may allocate here: nobody is in a collective)
            backend.wait_event(*(offers[rank][2] for rank in leaders))
            for place, buffer in enumerate(buffers):
                parts = [buffer]
                for rank in leaders[1:]:
                    theirs = offers[rank][1][place]
                    parts.append(self._kept.like((rank, place), buffer))
                    backend.fetch(parts[-1], theirs, offers[rank][0])
                backend.weighted_sum(buffer, parts, [1.0] * len(parts))
        done = self._exchange(backend.record_event())
        if self.rank in leaders[1:]:
            backend.wait_event(done[first])
            for mine, theirs in zip(buffers, offers[first][1], strict=True):
                backend.fetch(mine, theirs, offers[first][0])


class RankMeans:
    """The same where workers are processes: each is alone on its GPU, and all meet over NCCL.

    Every worker makes it, and closes it. (Not by the name of a device: of what each process sees that is number 0.)

    Args:
        communicator: of the group, for small things on the host.
        backend: where this worker's arrays live.
        connect: makes the sum.
    """

    def __init__(self, communicator: Communicator, backend: Backend, connect: Connect) -> None:
        self._communicator, self._backend = communicator, backend
        self._kept = Kept(backend)
        made = connect(self._hand, communicator.rank, communicator.size, backend)
        assert made is not None  # every rank is a leader
        self._sum = made

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`. RuntimeError where workers bring arrays of different lengths."""
        buffers = [self._kept.like(place, array) for place, array in enumerate(arrays)]
        gathered = self._communicator.gather_numbers(weight, *map(len, arrays))  # no rank can be missing after this
        for rank, lengths in enumerate(gathered[:, 1:].tolist()):
            if lengths != gathered[0, 1:].tolist():
                raise RuntimeError(
                    f"worker {rank} brings {lengths} numbers to a mean, and worker 0 {gathered[0, 1:].tolist()}"
                )
        total = sum(gathered[:, 0].tolist())
        if total <= 0:
            return
        for array, buffer in zip(arrays, buffers, strict=True):
            self._backend.weighted_sum(buffer, [array], [weight / total])
        self._sum.sum(buffers)
        for array, buffer in zip(arrays, buffers, strict=True):
            array[...] = buffer

    def close(self) -> None:
        """Let go of NCCL."""
        self._sum.close()

    def _hand(self, own: bytes) -> bytes:
        texts = self._communicator.all_gather_ragged(np.frombuffer(own, np.uint8))
        return next(each.tobytes() for each in texts if len(each))


def means_of_ranks(communicator: Communicator, backend: Backend, reduce: str) -> RankMeans | None:
    """What computes means of this backend's arrays without the host; None where the host does. Every rank calls it.

    ConfigError, on all ranks: something is asked for that they cannot do.
    """
    if not backend.on_gpu or reduce == "host":
        return None
    why = nccl.missing() or ""
    places = communicator.all_gather_ragged(np.frombuffer((f"!{why}" if why else backend.place()).encode(), np.uint8))
    found = [place.tobytes().decode() for place in places]
    missing = [f"on rank {rank} {place[1:]}" for rank, place in enumerate(found) if place.startswith("!")]
    shared = sorted({place for place in found if found.count(place) > 1})
    if not missing and shared:
        missing = [f"several ranks share a GPU ({shared[0]})"]
    if missing and reduce == "nccl":
        raise ConfigError(f"reduce=nccl: {missing[0]}: start one rank for each GPU, with NCCL, or take reduce=host")
    if missing:
        if communicator.rank == 0:
            log.info("averages are computed in host memory: %s", missing[0])
        return None
    return RankMeans(communicator, backend, nccl.connect)


def means_on_devices(exchange: Exchange, rank: int, backend: Backend, reduce: str) -> DeviceMeans | None:
    """What computes means of this backend's arrays without the host; None where the host does."""
    if not backend.on_gpu or reduce == "host":
        return None
    over_nccl = reduce == "nccl" or (reduce == "auto" and nccl.missing() is None)
    return DeviceMeans(exchange, rank, backend, nccl.connect if over_nccl else None)
