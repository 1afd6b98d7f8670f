"""Averaging of vectors on GPUs: within each device, then between devices.

Workers are threads, each with arrays and a stream on its device. The first worker of each device, its leader, computes
the weighted sum of the arrays there, in rank order and in double precision. With several devices, the leaders then add
their sums, either over NCCL or on the first device, in the order of devices. With one device, results are bit-identical
to averaging in host memory. Only subnormal float32 and bfloat16 numbers (below 1.2e-38) differ, because GPUs flush them
to zero. With several devices, results are reproducible only on the same devices.

The host never waits for a device: a stream that needs results of another stream waits for its event. Buffers are
allocated in the first averaging step and kept, so that nothing is allocated during a collective.
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

# Gathers values of all workers by reference, in rank order.
Exchange: TypeAlias = Callable[[Any], list[Any]]
Opened: TypeAlias = Callable[[NcclSum], None]
Connect: TypeAlias = (
    "Callable[[nccl.BroadcastBytes, int | None, int, CupyBackend, Opened], NcclSum | None]"  # see nccl.connect
)


def check_reduce(reduce: str, backend: str, *, processes: bool, stages: int = 1) -> str:
    """Return how to compute means, for the setting `reduce`. Raises ConfigError if it is not possible.

    Stages in threads are averaged in one group per stage, at different times. During NCCL calls, no other thread of the
    process could allocate device memory. These groups therefore average on one of the devices.

    processes: True if workers are processes.
    """
    one_of("reduce", reduce, REDUCES)
    if reduce in ("nccl", "device") and backend != "cupy":
        raise ConfigError(
            f"requires a GPU, but backend {backend} runs on the CPU. Remove this setting", "reduce", reduce
        )
    if reduce == "device" and processes:
        raise ConfigError("processes cannot read each other's arrays. Use reduce=nccl or reduce=host", "reduce", reduce)
    if reduce == "nccl" and (why := nccl.unavailable_reason()):
        remedy = "Install the extra for your CUDA version, cuda12x or cuda13x, or use reduce=host"
        raise ConfigError(f"{why}. {remedy}", "reduce", reduce)
    if stages == 1 or processes or backend != "cupy":
        return reduce
    if reduce == "nccl":
        raise ConfigError(
            f"{stages} stages in threads average at different times, so NCCL can deadlock. Use reduce=device, or "
            "processes (launcher=mpi)",
            setting="reduce",
            value=reduce,
        )
    return "device" if reduce == "auto" else reduce


class Buffers:
    """Device buffers, allocated on first use, before other workers are in a collective."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Any, Array] = {}
        self._flat: dict[Any, tuple[list[Array], list[Array]]] = {}

    def like(self, name: object, array: Array) -> Array:
        """Return the buffer with this name and the shape and dtype of `array`."""
        key = (name, array.shape, array.dtype)
        if key not in self._buffers:
            made = self._buffers[key] = self._backend.allocate(array.shape, array.dtype)
            self._backend.weighted_sum(made, [array], [1.0])  # loads the kernel now: loading waits for devices
        return self._buffers[key]

    def like_all(self, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        """Return a buffer for each array, and the flat arrays that contain them, one per dtype.

        Collectives use the flat arrays, because each call costs as much as sending a few kilobytes.
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
            self._backend.weighted_sum(whole, [whole], [1.0])  # loads the kernel now, as in `like`
        empty = {dtype: self._backend.allocate((0,), dtype) for dtype in sizes.keys() - flat.keys()}
        buffers = [
            (flat | empty)[dtype][start : start + array.size].reshape(array.shape)
            for array, (dtype, start) in zip(arrays, places, strict=True)
        ]
        return buffers, list(flat.values())


class DeviceMeans:
    """Averages arrays on GPUs for one worker of a group of threads.

    nccl: connects the leaders over NCCL. None to add their sums on the first device.
    """

    def __init__(self, exchange: Exchange, rank: int, backend: CupyBackend, nccl: Connect | None = None) -> None:
        self._exchange, self.rank, self._backend, self._nccl = exchange, rank, backend, nccl
        self._buffers = Buffers(backend)
        self._devices: list[int] = []  # by rank
        self._between: NcclSum | None = None  # set on leaders

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`."""
        self._connect()
        leader = self._devices.index(self._devices[self.rank])
        buffers, flat = self._buffers.like_all(arrays if leader == self.rank else ())
        # by worker: its arrays, its weight, and an event recorded when the arrays were complete
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
        """Release NCCL. Either all workers call it, or none."""
        if self._between is not None:
            self._between.close()
            self._between = None

    def abandon(self) -> None:
        """Abort NCCL after a failure. Any thread may call it."""
        if self._between is not None:
            self._between.abandon()

    def _connect(self) -> None:
        """Gather the device of each rank, and connect the leaders. Every worker calls it before the first mean."""
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
        """First rank of each device, in rank order."""
        return [rank for rank, device in enumerate(self._devices) if device not in self._devices[:rank]]

    def _sum_here(self, given: list[Any], total: float, buffers: list[Array]) -> None:
        """Compute this device's part of the weighted sums in `buffers`."""
        mine = [each for each, device in zip(given, self._devices, strict=True) if device == self._devices[self.rank]]
        self._backend.wait_event(*(mark for _, _, mark in given))  # other devices may still be fetching the last sum
        shares = [weight / total for _, weight, _ in mine]
        for place, buffer in enumerate(buffers):
            self._backend.weighted_sum(buffer, [arrays[place] for arrays, _, _ in mine], shares)

    def _sum_on_first(self, buffers: list[Array]) -> None:
        """Add the sums of all leaders on the first device, and copy the total to the others."""
        backend, leaders = self._backend, self._leaders
        offers = self._exchange((backend, buffers, backend.record_event()))
        first = leaders[0]
        if self.rank == first:  # may allocate: no collective is running
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
    """Averages arrays over NCCL for one process per GPU. Every rank creates and closes it.

    communicator: used for small host arrays.
    """

    def __init__(self, communicator: Communicator, backend: CupyBackend, connect: Connect) -> None:
        self._communicator, self._backend = communicator, backend
        self._buffers = Buffers(backend)
        made = connect(self._broadcast_bytes, communicator.rank, communicator.size, backend, lambda opened: None)
        assert made is not None  # every rank is a leader
        self._sum = made

    def mean(self, arrays: list[Array], weight: float) -> None:
        """See `Communicator.allreduce_mean`."""
        buffers, flat = self._buffers.like_all(arrays)
        total = sum(self._communicator.gather_numbers(weight)[:, 0].tolist())  # also synchronizes the ranks
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

    def _broadcast_bytes(self, own: bytes) -> bytes:
        texts = self._communicator.all_gather(np.frombuffer(own, np.uint8))
        return next(each.tobytes() for each in texts if len(each))


def means_of_ranks(communicator: Communicator, backend: Backend, reduce: str) -> RankMeans | None:
    """Return the averaging of processes on GPUs, or None if the host averages. Every rank calls it.

    Raises:
        ConfigError: on all ranks, if `reduce` is not possible for one of them.
    """
    if backend.name != "cupy" or reduce == "host":
        return None
    why = nccl.unavailable_reason() or ""
    gpu = cast("CupyBackend", backend)
    places = communicator.all_gather(np.frombuffer((f"!{why}" if why else gpu.place()).encode(), np.uint8))
    found = [place.tobytes().decode() for place in places]
    missing = [f"on rank {rank} {place[1:]}" for rank, place in enumerate(found) if place.startswith("!")]
    shared = sorted({place for place in found if found.count(place) > 1})
    if not missing and shared:
        missing = [f"several ranks share a GPU ({shared[0]})"]
    if missing and reduce == "nccl":
        raise ConfigError(f"{missing[0]}. Start one rank per GPU, with NCCL, or use reduce=host", "reduce", "nccl")
    if missing:
        if communicator.rank == 0:
            log.info("averaging in host memory: %s", missing[0])
        return None
    return RankMeans(communicator, gpu, nccl.connect)


def means_on_devices(exchange: Exchange, rank: int, backend: Backend, reduce: str) -> DeviceMeans | None:
    """Return the averaging of threads on GPUs, or None if the host averages."""
    if backend.name != "cupy" or reduce == "host":
        return None
    over_nccl = reduce == "nccl" or (reduce == "auto" and nccl.unavailable_reason() is None)
    return DeviceMeans(exchange, rank, cast("CupyBackend", backend), nccl.connect if over_nccl else None)
