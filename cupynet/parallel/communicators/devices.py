"""Averages vectors on GPUs, first within each device and then between devices.

The first worker of each device is its leader. It computes the weighted sum of the arrays on this device, in rank order
and in double precision. The leaders then add their sums over NCCL, or on the first leader's device in rank order. The
host never waits for a device: streams wait for each other's events.

With one device, results are bit-identical to averages on the host, except for subnormal float32 and bfloat16 numbers
(below 1.2e-38), which GPUs flush to zero. With several devices, results are reproducible only on the same devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core import shared_options
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.base import Communicator
from cupynet.parallel.communicators.nccl import NcclSum

if TYPE_CHECKING:
    from cupynet.backend.cuda.backend import CupyBackend

log = logging.getLogger(__name__)

ALIGNED = 16  # alignment in bytes, equal to a kernel's widest load

# gathers all workers' values by reference, in rank order
Exchange: TypeAlias = Callable[[Any], list[Any]]


def check_reduce(reduce: str, backend: str, *, processes: bool, stages: int = 1) -> str:
    """Validate the setting `reduce` and return the method to use. Raise ConfigError if it is not possible.

    Pipeline stages in threads are averaged at different times, so NCCL could deadlock (see nccl.py). `auto` then
    selects `device`.
    """
    shared_options.reduce("reduce", reduce)
    if reduce in ("nccl", "device") and backend != "cupy":
        raise ConfigError(
            f"requires a GPU, but backend {backend} runs on the CPU. Remove this setting", "reduce", reduce
        )
    if reduce == "device" and processes:
        raise ConfigError("processes cannot read each other's arrays. Use reduce=nccl or reduce=host", "reduce", reduce)
    if reduce == "nccl" and (reason := nccl.unavailable_reason()):
        remedy = "Install the extra for your CUDA version, cuda12x or cuda13x, or use reduce=host"
        raise ConfigError(f"{reason}. {remedy}", "reduce", reduce)
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
    """Device buffers, kept after their first use because nothing may be allocated during NCCL calls (see nccl.py)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[Any, tuple[list[Array], list[Array]]] = {}

    def like(self, arrays: Sequence[Array], rank: int = -1) -> tuple[list[Array], list[Array]]:
        """Return a buffer for each array, and the flat arrays that contain them, one per dtype, to save NCCL calls.

        rank: the rank whose arrays are copied to the buffers, if it is not this worker's own.
        """
        key = rank, *((array.shape, array.dtype) for array in arrays)
        if key not in self._buffers:
            self._buffers[key] = self._laid_out(arrays)
        return self._buffers[key]

    def _laid_out(self, arrays: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        offsets: list[tuple[Any, int]] = []  # with the dtype
        sizes: dict[Any, int] = {}
        for array in arrays:
            offsets.append((array.dtype, sizes.get(array.dtype, 0)))
            sizes[array.dtype] = offsets[-1][1] + -(-array.nbytes // ALIGNED) * ALIGNED // array.dtype.itemsize
        flat = {dtype: self._backend.allocate((size,), dtype) for dtype, size in sizes.items() if size}
        for buffer in flat.values():
            buffer[...] = 0  # including the padding
            self._backend.weighted_sum(buffer, [buffer], [1.0])  # load the kernel now, as loading waits for the device
        empty = {dtype: self._backend.allocate((0,), dtype) for dtype in sizes.keys() - flat.keys()}
        buffers = [
            (flat | empty)[dtype][start : start + array.size].reshape(array.shape)
            for array, (dtype, start) in zip(arrays, offsets, strict=True)
        ]
        return buffers, list(flat.values())


class DeviceMeans:
    """Averages arrays on GPUs, for one worker thread. Without NCCL, one device adds the sums of the leaders."""

    def __init__(self, exchange: Exchange, rank: int, backend: CupyBackend, *, over_nccl: bool) -> None:
        self._exchange, self.rank, self._backend, self._over_nccl = exchange, rank, backend, over_nccl
        self._buffers = Buffers(backend)
        self._devices: list[int] = []  # by rank
        self._between: NcclSum | None = None  # set on leaders

    def mean(self, arrays: list[Array], weight: float) -> None:
        self._connect()
        leader = self._devices.index(self._devices[self.rank])
        buffers, flat = self._buffers.like(arrays if leader == self.rank else ())
        # arrays and weight of each worker, and the event after which the arrays are complete
        contributions = self._exchange((arrays, weight, self._backend.record_event()))
        total = sum(weight for _, weight, _ in contributions)
        if total <= 0:
            return
        if leader == self.rank:
            self._sum_here(contributions, total, buffers)
        if self._between is not None:
            self._between.sum(flat)
        elif len(self._leaders) > 1 and not self._over_nccl:
            self._sum_on_first(flat)
        # this is also a barrier, because no worker may allocate memory before all leaders have called NCCL
        result, event = self._exchange((buffers, self._backend.record_event()))[leader]
        self._backend.wait_event(event)
        for array, buffer in zip(arrays, result, strict=True):
            array[...] = buffer

    def close(self) -> None:
        if self._between is not None:
            self._between.close()
            self._between = None

    def abandon(self) -> None:
        if self._between is not None:
            self._between.abandon()

    def _connect(self) -> None:
        """Gather the device of each rank and connect the leaders, before the first mean. Collective."""
        if self._devices:
            return
        self._devices = self._exchange(self._backend.device)
        leaders = self._leaders
        if len(leaders) > 1 and self._over_nccl:
            rank = leaders.index(self.rank) if self.rank in leaders else None
            nccl.connect(self._broadcast_bytes, rank, len(leaders), self._backend, self._open)

    def _broadcast_bytes(self, content: bytes) -> bytes:
        first: bytes = next(filter(None, self._exchange(content)))
        return first

    def _open(self, between: NcclSum) -> None:
        self._between = between

    @property
    def _leaders(self) -> list[int]:
        return [rank for rank, device in enumerate(self._devices) if device not in self._devices[:rank]]

    def _sum_here(self, contributions: list[Any], total: float, buffers: list[Array]) -> None:
        here = self._devices[self.rank]
        local = [entry for entry, device in zip(contributions, self._devices, strict=True) if device == here]
        # wait for all events, because other devices may still be fetching the last sum
        self._backend.wait_event(*(event for _, _, event in contributions))
        shares = [weight / total for _, weight, _ in local]
        for index, buffer in enumerate(buffers):
            self._backend.weighted_sum(buffer, [arrays[index] for arrays, _, _ in local], shares)

    def _sum_on_first(self, buffers: list[Array]) -> None:
        """Add the sums of all leaders on the first leader's device, and copy the total to the other devices."""
        backend, leaders = self._backend, self._leaders
        offers = self._exchange((backend, buffers, backend.record_event()))
        first = leaders[0]
        if self.rank == first:  # may allocate, because no collective is running
            backend.wait_event(*(offers[rank][2] for rank in leaders))
            copies = {rank: self._buffers.like(buffers, rank)[0] for rank in leaders[1:]}
            for index, buffer in enumerate(buffers):
                for rank, own in copies.items():
                    backend.fetch(own[index], offers[rank][1][index], offers[rank][0])
                backend.weighted_sum(buffer, [buffer, *(own[index] for own in copies.values())], [1.0] * len(leaders))
        events = self._exchange(backend.record_event())
        if self.rank in leaders[1:]:
            backend.wait_event(events[first])
            for buffer_here, total in zip(buffers, offers[first][1], strict=True):
                backend.fetch(buffer_here, total, offers[first][0])


class RankMeans:
    """Averages arrays with NCCL, with one process per GPU. The constructor and `close` are collective."""

    def __init__(self, communicator: Communicator, backend: CupyBackend) -> None:
        self._communicator, self._backend = communicator, backend
        self._buffers = Buffers(backend)
        rank, size = communicator.rank, communicator.size
        nccl_sum = nccl.connect(self._broadcast_bytes, rank, size, backend, lambda opened: None)
        assert nccl_sum is not None  # every rank is a leader
        self._sum = nccl_sum

    def mean(self, arrays: list[Array], weight: float) -> None:
        buffers, flat = self._buffers.like(arrays)
        total = sum(self._communicator.gather_numbers(weight)[:, 0].tolist())  # also synchronizes the ranks
        if total <= 0:
            return
        for array, buffer in zip(arrays, buffers, strict=True):
            self._backend.weighted_sum(buffer, [array], [weight / total])
        self._sum.sum(flat)
        for array, buffer in zip(arrays, buffers, strict=True):
            array[...] = buffer

    def close(self) -> None:
        self._sum.close()

    def abandon(self) -> None:
        self._sum.abandon()

    def _broadcast_bytes(self, content: bytes) -> bytes:
        texts = self._communicator.all_gather(np.frombuffer(content, np.uint8))
        return next(text.tobytes() for text in texts if len(text))


def means_of_ranks(communicator: Communicator, backend: Backend, reduce: str) -> RankMeans | None:
    """Return the object that averages over the GPUs of processes, or None to average on the host. Collective.

    Raise ConfigError on all ranks if one of them does not support `reduce`.
    """
    if backend.name != "cupy" or reduce == "host":
        return None
    reason = nccl.unavailable_reason() or ""
    gpu = cast("CupyBackend", backend)
    places = communicator.all_gather(np.frombuffer((f"!{reason}" if reason else gpu.place()).encode(), np.uint8))
    names = [place.tobytes().decode() for place in places]
    missing = [f"on rank {rank} {place[1:]}" for rank, place in enumerate(names) if place.startswith("!")]
    shared = sorted({place for place in names if names.count(place) > 1})
    if not missing and shared:
        missing = [f"several ranks share a GPU ({shared[0]})"]
    if missing and reduce == "nccl":
        raise ConfigError(
            f"{missing[0]}. Install NCCL and start one rank per GPU, or use reduce=host", "reduce", "nccl"
        )
    if missing:
        if communicator.rank == 0:
            log.info("averaging in host memory: %s", missing[0])
        return None
    return RankMeans(communicator, gpu)


def means_on_devices(exchange: Exchange, rank: int, backend: Backend, reduce: str) -> DeviceMeans | None:
    """Return the object that averages over the GPUs of threads, or None to average on the host."""
    if backend.name != "cupy" or reduce == "host":
        return None
    over_nccl = reduce == "nccl" or (reduce == "auto" and nccl.unavailable_reason() is None)
    return DeviceMeans(exchange, rank, cast("CupyBackend", backend), over_nccl=over_nccl)
