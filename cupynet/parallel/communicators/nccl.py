"""Sums between GPUs over NCCL, through CuPy: one rank for each device, driven by one thread.

NCCL moves raw memory and checks nothing, so types are checked here. Its rules: every rank makes the same calls in the
same order; all ranks synchronize on the host before each call, so that no kernel waits for a dead rank; during a call
no thread allocates or frees device memory, because that waits for all kernels of the device. After a failure every
rank must be aborted. A worker may be blocked in a synchronization that only an abort ends, so another thread aborts it.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from cupynet.backend.array import Array

if TYPE_CHECKING:
    from cupynet.backend.cuda.backend import CupyBackend

Hand: TypeAlias = Callable[[bytes], bytes]  # broadcast: returns on every worker the bytes that one worker passes
TYPES = ("float16", "bfloat16", "float32", "float64")
CALL_S = 1.0  # how long `abandon` waits for a call in another thread


def missing() -> str | None:
    """Return the reason why NCCL cannot be used; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy's about a missing NCCL
            from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy has no NCCL ({error})"
    return None if getattr(nccl, "available", False) else "NCCL is not installed"


def connect(
    hand: Hand, place: int | None, leaders: int, backend: CupyBackend, opened: Callable[[NcclSum], None]
) -> NcclSum | None:
    """Connect the leaders. Every worker calls it.

    Args:
        hand: see `Hand`.
        place: this worker's rank among the leaders, or None if it is not a leader.
        leaders: the number of leaders.
        backend: the backend, for its device and stream.
        opened: called with the connection before the first sum, which only `abandon` ends if another leader fails.
    """
    # connect all devices now instead of in the first sum that is large enough (NCCL 2.22 and later)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    from cupy.cuda import nccl

    scratch = None if place is None else backend.asarray(np.zeros(1, np.float32))
    identifier = hand(bytes(nccl.get_unique_id()) if place == 0 else b"")  # no allocations from here on
    made = None if place is None else NcclSum(identifier, place, leaders, backend)
    try:
        if made is not None:
            opened(made)
        hand(b"made")  # on the host, because a sum would wait forever for a failed rank
        if made is not None:
            made.sum([scratch])  # loads the kernel, and connects the rest
            backend.synchronize()
    except BaseException:
        if made is not None:
            made.abandon()
        raise
    return made


class NcclSum:
    """One device's part in sums over all devices.

    Args:
        identifier: NCCL's, made by the first device.
        place, size: the number of this device, and the number of devices. All are made at the same time, each in its
            own thread.
        backend: of the device and its stream.
    """

    def __init__(self, identifier: bytes, place: int, size: int, backend: CupyBackend) -> None:
        from cupy.cuda import nccl

        self._nccl, self._backend, self._calling = nccl, backend, threading.Lock()
        self._types = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in TYPES}
        self._connection: Any = nccl.NcclCommunicator(size, identifier, place)

    def sum(self, arrays: Sequence[Array]) -> None:
        """Overwrite each array with its sum over all devices. RuntimeError for a type that NCCL cannot sum."""
        for array in arrays:
            kind = self._types.get(array.dtype.name)
            if kind is None or not array.flags.c_contiguous:
                raise RuntimeError(f"an array of {array.dtype} {array.shape} is not summed over NCCL")
            address, stream = self._backend.data_ptr(array), self._backend.stream()
            with self._calling:
                self._connection.allReduce(address, address, array.size, kind, self._nccl.NCCL_SUM, stream)

    def close(self) -> None:
        """Release NCCL after its pending calls."""
        self._backend.synchronize()
        with self._calling:
            self._connection.destroy()

    def abandon(self) -> None:
        """Abort NCCL and its pending calls at once, from any thread. Later calls raise an error."""
        free = self._calling.acquire(timeout=CALL_S)
        try:
            self._connection.abort()
        finally:
            if free:
                self._calling.release()
