"""Means of vectors on GPUs: summed on each device first, then between devices.

Workers are threads, each with the arrays and the stream of its own device. The first worker of a device, its leader,
computes the weighted sum of the arrays there, in rank order and in double precision. With several devices the leaders
then add their sums: over NCCL, one rank per device, or on the first device, in the order of devices. With one device
the bits are those of a mean in host memory, except for subnormal floats and bfloat16 (below 1.2e-38), which a GPU
flushes to zero. With several devices only repetition on the same devices gives the same bits.

The host never waits for a device: a stream that needs the results of another one waits for its event. Buffers are
allocated in the first mean and kept, so nothing is allocated while others are in a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core.checks import one_of
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.base import REDUCES, Communicator
from cupynet.parallel.communicators.nccl import NcclSum

if TYPE_CHECKING:
    from cupynet.backend.cuda.backend import CupyBackend

log = logging.getLogger(__name__)

ALIGNED = 16  # bytes: the widest load of a kernel

# Returns every worker's value by reference, in rank order, when all have called it.
Exchange: TypeAlias = Callable[[Any], list[Any]]
Opened: TypeAlias = Callable[[NcclSum], None]
Connect: TypeAlias = "Callable[[nccl.Hand, int | None, int, CupyBackend, Opened], NcclSum | None]"  # see nccl.connect


def check_reduce(reduce: str, backend: str, *, processes: bool, stages: int = 1) -> str:
    """Return the way to compute means, for the setting `reduce`. ConfigError if it is impossible.

    Stages in threads are averaged in one group per stage, at different times. With NCCL no other thread of the process
    could allocate memory meanwhile, so these groups use one of the devices.

    Args:
        backend: its name.
        processes: True if workers are processes.
        stages: the number of stages of each replica.
    """
    one_of("reduce", reduce, REDUCES)
    if reduce in ("nccl", "device") and backend != "cupy":
        raise ConfigError(
            f"requires a GPU, but backend {backend} runs on the CPU. Remove this setting", "reduce", reduce
        )
    if reduce == "device" and processes:
        raise ConfigError("processes cannot read each other's arrays: use reduce=nccl or reduce=host", "reduce", reduce)
    if reduce == "nccl" and (why := nccl.missing()):
        way_out = "install the extra of your CuPy's CUDA version, cuda12x or cuda13x, or use reduce=host"
        raise ConfigError(f"{why}: {way_out}", "reduce", reduce)
    if stages == 1 or processes or backend != "cupy":
        return reduce
    if reduce == "nccl":
        raise ConfigError(
            f"{stages} stages in threads average at different times, so NCCL can deadlock: use reduce=device, or "
            "processes (launcher=mpi)",
            setting="reduce",
            value=reduce,
        )
    return "device" if reduce == "auto" else reduce


class Buffers:
    """Buffers on a device, allocated when they are first used, before other workers are in a collective."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Any, Array] = {}
        self._flat: dict[Any, tuple[list[Array], list[Array]]] = {}

    def like(self, name: object, array: Array) -> Array:
        """Return the buffer of this name with the shape and dtype of `array`."""
        key = (name, array.shape, array.dtype)
        if key not in self._buffers:
            made = self._buffers[key] = self._backend.allocate(array.shape, array.dtype)
            self._backend.weighted_sum(made, [array], [1.0])  # loads the kernel now: loading waits for devices
        return self._buffers[key]

    def like_all(self, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Return a buffer for each array, and the flat arrays that contain them, one for each dtype.

        Collectives use the flat arrays: each call has a fixed cost, about that of a few kilobytes.
        """
        key = tuple((array.shape, array.dtype) for array in arrays)
        if key not in self._flat:
            self._flat[key] = self._laid_out(arrays)
        return self._flat[key]

    def _laid_out(self, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        places: list[tuple[Any, int]] = []  # dtype and offset
        sizes: dict[Any, int] = {}
        for array in arrays:
            places.append((array.dtype, sizes.get(array.dtype, 0)))
            sizes[array.dtype] = places[-1][1] + -(-array.nbytes // ALIGNED) * ALIGNED // array.dtype.itemsize
        flat = {dtype: self._backend.allocate((size,), dtype) for dtype, size in sizes.items() if size}
        for whole in flat.values():
            whole[...] = 0  # including the padding
            self._backend.weighted_sum(whole, [whole], [1.0])  # loads the kernel now, because loading waits for devices
        empty = {dtype: self._backend.allocate((0,), dtype) for dtype in sizes.keys() - flat.keys()}
        buffers = [
            (flat | empty)[dtype][start : start + array.size].reshape(array.shape)
            for array, (dtype, start) in zip(arrays, places, strict=True)
        ]
        return buffers, list(flat.values())


class DeviceMeans:
    """One worker's part in the means of a group of threads.

    Args:
        exchange: exchanges values with the other workers of the group.
        rank: the worker's number in the group.
        backend: of the worker's arrays.
        nccl: connects the leaders over NCCL; every worker calls it if there are several devices. None: the leaders
            average on the first device.
    """

    def __init__(self, exchange: Exchange, rank: int, backend: CupyBackend, nccl: Connect | None = None) -> None:
        self._exchange, self.rank, self._backend, self._nccl = exchange, rank, backend, nccl
        self._buffers = Buffers(backend)
        self._devices: list[int] = []  # of each rank
        self._between: NcclSum | None = None  # of a leader

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`."""
        self._connect()
        leader = self._devices.index(self._devices[self.rank])
        buffers, flat = self._buffers.like_all(arrays if leader == self.rank else ())
        # of each worker: its arrays, its weight, and an event after which the arrays are complete
        given = self._exchange((arrays, weight, self._backend.record_event()))
        total = sum(weight for _, weight, _ in given)
        if total <= 0:
            return
        if leader == self.rank:
            self._sum_here(given, total, buffers)
        if self._between is not None:
            self._between.sum(flat)
        elif len(self._leaders) > 1 and self._nccl is None:
            self._sum_on_first(flat)
        found, mark = self._exchange((buffers, self._backend.record_event()))[leader]
        self._backend.wait_event(mark)
        for array, buffer in zip(arrays, found, strict=True):
            array[...] = buffer

    def close(self) -> None:
        """Release NCCL; every worker calls it, or none."""
        if self._between is not None:
            self._between.close()
            self._between = None

    def abandon(self) -> None:
        """Abort NCCL after a failure, from any thread: the worker may be waiting for its device."""
        if self._between is not None:
            self._between.abandon()

    def _connect(self) -> None:
        """Exchange the device of each rank, and connect the leaders. Every worker calls it before the first mean."""
        if self._devices:
            return
        self._devices = self._exchange(self._backend.device)
        leaders = self._leaders
        if len(leaders) > 1 and self._nccl is not None:
            place = leaders.index(self.rank) if self.rank in leaders else None
            self._nccl(
                lambda own: next(filter(None, self._exchange(own))), place, len(leaders), self._backend, self._open
            )

    def _open(self, between: NcclSum) -> None:
        self._between = between

    @property
    def _leaders(self) -> list[int]:
        """The first rank of each device, in the order of ranks."""
        return [rank for rank, device in enumerate(self._devices) if device not in self._devices[:rank]]

    def _sum_here(self, given: list[Any], total: float, buffers: list[Array]) -> None:
        """Compute this device's part of the mean of each vector, in the buffers."""
        mine = [each for each, device in zip(given, self._devices, strict=True) if device == self._devices[self.rank]]
        self._backend.wait_event(*(mark for _, _, mark in given))  # those elsewhere may still be fetching the last sum
        shares = [weight / total for _, weight, _ in mine]
        for place, buffer in enumerate(buffers):
            self._backend.weighted_sum(buffer, [arrays[place] for arrays, _, _ in mine], shares)

    def _sum_on_first(self, buffers: list[Array]) -> None:
        """Let the first leader fetch the others' sums and add them in order, then let the others fetch the total."""
        backend, leaders = self._backend, self._leaders
        offers = self._exchange((backend, buffers, backend.record_event()))
        first = leaders[0]
        if self.rank == first:  # (it may allocate here: no collective is running)
            backend.wait_event(*(offers[rank][2] for rank in leaders))
            for place, buffer in enumerate(buffers):
                parts = [buffer]
                for rank in leaders[1:]:
                    parts.append(self._buffers.like((rank, place), buffer))
                    backend.fetch(parts[-1], offers[rank][1][place], offers[rank][0])
                backend.weighted_sum(buffer, parts, [1.0] * len(parts))
        done = self._exchange(backend.record_event())
        if self.rank in leaders[1:]:
            backend.wait_event(done[first])
            for mine, total in zip(buffers, offers[first][1], strict=True):
                backend.fetch(mine, total, offers[first][0])


class RankMeans:
    """The same for processes: each has its own GPU, and all sum over NCCL. Every rank creates and closes it.

    Args:
        communicator: of the group, for small arrays on the host.
        backend: of this worker's arrays.
        connect: see nccl.connect.
    """

    def __init__(self, communicator: Communicator, backend: CupyBackend, connect: Connect) -> None:
        self._communicator, self._backend = communicator, backend
        self._buffers = Buffers(backend)
        made = connect(self._hand, communicator.rank, communicator.size, backend, lambda opened: None)
        assert made is not None  # every rank is a leader
        self._sum = made

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`."""
        buffers, flat = self._buffers.like_all(arrays)
        total = sum(self._communicator.gather_numbers(weight)[:, 0].tolist())  # all ranks are here now
        if total <= 0:
            return
        for array, buffer in zip(arrays, buffers, strict=True):
            self._backend.weighted_sum(buffer, [array], [weight / total])
        self._sum.sum(flat)
        for array, buffer in zip(arrays, buffers, strict=True):
            array[...] = buffer

    def close(self) -> None:
        """Release NCCL."""
        self._sum.close()

    def abandon(self) -> None:
        """Abort NCCL after a failure."""
        self._sum.abandon()

    def _hand(self, own: bytes) -> bytes:
        texts = self._communicator.all_gather(np.frombuffer(own, np.uint8))
        return next(each.tobytes() for each in texts if len(each))


def means_of_ranks(communicator: Communicator, backend: Backend, reduce: str) -> RankMeans | None:
    """Return the means of processes on GPUs; None if the host computes them. Every rank calls it.

    Raises:
        ConfigError: on all ranks, if `reduce` is impossible for one of them.
    """
    if backend.name != "cupy" or reduce == "host":
        return None
    why = nccl.missing() or ""
    gpu = cast("CupyBackend", backend)
    places = communicator.all_gather(np.frombuffer((f"!{why}" if why else gpu.place()).encode(), np.uint8))
    found = [place.tobytes().decode() for place in places]
    missing = [f"on rank {rank} {place[1:]}" for rank, place in enumerate(found) if place.startswith("!")]
    shared = sorted({place for place in found if found.count(place) > 1})
    if not missing and shared:
        missing = [f"several ranks share a GPU ({shared[0]})"]
    if missing and reduce == "nccl":
        raise ConfigError(f"{missing[0]}: start one rank for each GPU, with NCCL, or use reduce=host", "reduce", "nccl")
    if missing:
        if communicator.rank == 0:
            log.info("averages are computed in host memory: %s", missing[0])
        return None
    return RankMeans(communicator, gpu, nccl.connect)


def means_on_devices(exchange: Exchange, rank: int, backend: Backend, reduce: str) -> DeviceMeans | None:
    """Return the means of threads on GPUs; None if the host computes them."""
    if backend.name != "cupy" or reduce == "host":
        return None
    over_nccl = reduce == "nccl" or (reduce == "auto" and nccl.missing() is None)
    return DeviceMeans(exchange, rank, cast("CupyBackend", backend), nccl.connect if over_nccl else None)
