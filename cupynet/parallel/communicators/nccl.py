"""Sums between GPUs over NCCL, through CuPy: one rank for each device, driven by one thread.

NCCL moves raw memory and checks nothing, so it is looked at here. Its rules: every rank makes the same calls in the
same order; all have met on the host before each, so that one that is dead is not waited for in a kernel; while they are
in one nobody allocates or frees memory of a device, which waits for all its kernels.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import Backend
from cupynet.backend.array import Array

Hand: TypeAlias = Callable[[bytes], bytes]  # what one worker gives and the others, who give nothing, get


def missing() -> str | None:
    """Why NCCL cannot be used, in a few words; None where it can."""
    try:
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not installed, which is said here
            from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy has no NCCL ({error})"
    return None if getattr(nccl, "available", False) else "NCCL is not installed"


def way_out() -> str:
    """What brings NCCL: the extra of the CUDA that the CuPy at hand is made for, as two cannot be there together."""
    extras = {"cupy-cuda12x": "cuda12x", "cupy-cuda13x": "cuda13x"}
    for package, extra in extras.items():
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return f"install it with pip install 'cupynet[{extra}]'"
    return "install it with pip install 'cupynet[cuda12x]', or cuda13x, by its CUDA"


def connect(hand: Hand, place: int | None, leaders: int, backend: Backend) -> NcclSum | None:
    """The sum of the leaders, of whom this worker is number `place`; None for a worker that is none of them.

    Every worker calls it: the first leader's identifier is handed to the others.
    """
    # all ways between devices are made now, not in the first sum that is large enough for them (NCCL 2.22 and later)
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    from cupy.cuda import nccl

    scratch = None if place is None else backend.asarray(np.zeros(1, np.float32))
    identifier = hand(bytes(nccl.get_unique_id()) if place == 0 else b"")  # all have met: nobody allocates any more
    made = None if place is None else NcclSum(identifier, place, leaders, backend)
    try:
        hand(b"made")  # on the host: in a sum nobody hears that one of them could not be made
        if made is not None:
            made.sum([scratch])  # in which its kernel is loaded, and what is not connected yet is
            backend.synchronize()
    except BaseException:
        if made is not None:
            made.abandon()
        raise
    return made


class NcclSum:
    """One device's end of a sum over all devices.

    Args:
        identifier: of the first one, the same for all.
        place, size: its number, and how many there are. All are made at the same time, each in its own thread.
        backend: its device and stream.
    """

    def __init__(self, identifier: bytes, place: int, size: int, backend: Backend) -> None:
        from cupy.cuda import nccl

        self._nccl, self._backend = nccl, backend
        self._types = {np.dtype(np.float16): nccl.NCCL_FLOAT16, np.dtype(np.float32): nccl.NCCL_FLOAT32}
        self._types[np.dtype(np.float64)] = nccl.NCCL_FLOAT64
        self._connection: Any = nccl.NcclCommunicator(size, identifier, place)

    def sum(self, arrays: Sequence[Array]) -> None:
        """Overwrite each array with its sum over all devices. RuntimeError: it is none that NCCL can add up."""
        for array in arrays:
            kind = self._types.get(np.dtype(array.dtype))
            if kind is None or not array.flags.c_contiguous:
                raise RuntimeError(f"an array of {array.dtype} {array.shape} is not summed over NCCL")
            address = self._backend.address(array)
            self._connection.allReduce(address, address, array.size, kind, self._nccl.NCCL_SUM, self._backend.stream())

    def close(self) -> None:
        """Let go of NCCL's buffers, after what was asked for is done."""
        self._backend.synchronize()
        self._connection.destroy()

    def abandon(self) -> None:
        """End it at once, and with it what this device waits for; every leader ends its own."""
        self._connection.abort()
