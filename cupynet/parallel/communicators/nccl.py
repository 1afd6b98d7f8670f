"""NCCL all-reduce between GPUs, through CuPy. Each device is one NCCL rank, used by one thread.

- NCCL does not validate buffers, so dtypes and contiguity are checked here.
- All ranks must make the same calls in the same order. Callers synchronize them on the host before each call, so that
  no kernel waits for a dead rank.
- During a call, no thread may allocate or free device memory, because that waits for all kernels on the device.
- After a failure, another thread must abort each rank, because its worker may be blocked in a synchronization.
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

BroadcastBytes: TypeAlias = Callable[[bytes], bytes]  # returns the first non-empty argument of any worker
TYPES = ("float16", "bfloat16", "float32", "float64")
CALL_S = 1.0  # how long `abandon` waits for a call in another thread


def unavailable_reason() -> str | None:
    """Return why NCCL is unavailable, or None if it is available."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy warns if NCCL is missing
            from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy cannot import NCCL ({error})"
    return None if getattr(nccl, "available", False) else "NCCL is not installed"


def connect(
    broadcast: BroadcastBytes, rank: int | None, leaders: int, backend: CupyBackend, opened: Callable[[NcclSum], None]
) -> NcclSum | None:
    """Create the NCCL communicator of the leaders (the first worker on each device). All workers must call this.

    Args:
        rank: NCCL rank of this worker; None if it is not a leader.
        leaders: number of leaders.
        opened: called with the communicator before the warm-up. If another leader fails during the warm-up, only
            `abandon` can end the warm-up.
    """
    # connect all devices now instead of in the first large all-reduce (NCCL 2.22 and later)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    from cupy.cuda import nccl

    scratch = None if rank is None else backend.asarray(np.zeros(1, np.float32))
    # no device memory may be allocated after this
    identifier = broadcast(bytes(nccl.get_unique_id()) if rank == 0 else b"")
    nccl_sum = None if rank is None else NcclSum(identifier, rank, leaders, backend)
    try:
        if nccl_sum is not None:
            opened(nccl_sum)
        broadcast(b"made")  # host barrier, because an all-reduce would wait forever for a failed rank
        if nccl_sum is not None:
            nccl_sum.sum([scratch])  # warm-up: loads the kernel and connects the devices
            backend.synchronize()
    except BaseException:
        if nccl_sum is not None:
            nccl_sum.abandon()
        raise
    return nccl_sum


class NcclSum:
    """NCCL communicator of one device. All devices create theirs concurrently, with the `identifier` of rank 0."""

    def __init__(self, identifier: bytes, rank: int, size: int, backend: CupyBackend) -> None:
        from cupy.cuda import nccl

        self._nccl, self._backend, self._calling = nccl, backend, threading.Lock()
        self._types = {name: getattr(nccl, f"NCCL_{name.upper()}") for name in TYPES}
        self._connection: Any = nccl.NcclCommunicator(size, identifier, rank)

    def sum(self, arrays: Sequence[Array]) -> None:
        """Overwrite each array with its sum over devices. Raise RuntimeError for an unsupported dtype or layout."""
        for array in arrays:
            kind = self._types.get(array.dtype.name)
            if kind is None or not array.flags.c_contiguous:
                layout = f"dtype {array.dtype}, C-contiguous: {array.flags.c_contiguous}"
                raise RuntimeError(f"NCCL cannot sum this array ({layout})")
            address, stream = self._backend.data_ptr(array), self._backend.stream()
            with self._calling:
                self._connection.allReduce(address, address, array.size, kind, self._nccl.NCCL_SUM, stream)

    def close(self) -> None:
        """Destroy the communicator after pending calls have finished."""
        self._backend.synchronize()
        with self._calling:
            self._connection.destroy()

    def abandon(self) -> None:
        """Abort the communicator and pending calls. Any thread may call this. Later calls raise an error."""
        acquired = self._calling.acquire(timeout=CALL_S)
        try:
            self._connection.abort()
        finally:
            if acquired:
                self._calling.release()
