"""Sums over NCCL on a single GPU, with one rank and with two ranks that share it.

test_communicators.py and tests on the stand-in cover several GPUs.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda.backend import CupyBackend
from cupynet.backend.policy import stored_dtype
from cupynet.parallel import Communicator
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.nccl import NcclSum
from tests.standin import installed, machine
from tests.support.backends import needs_bfloat16
from tests.support.mpi import ROOT
from tests.support.training import on_threads

SHARES_A_GPU = 23003  # NCCL 2.30.3, the first version in which ranks can share a GPU


def gpu() -> CupyBackend:
    backend = create_backend("cupy", "float")
    assert isinstance(backend, CupyBackend)
    backend.activate()
    return backend


def connected(
    backend: CupyBackend, hand: nccl.BroadcastBytes = lambda own: own, rank: int = 0, size: int = 1
) -> NcclSum:
    made = nccl.connect(hand, rank, size, backend, lambda opened: None)
    assert made is not None
    return made


def vectors(dtype: str, seed: int) -> list[np.ndarray[Any, Any]]:
    """Return numbers with exact sums of two."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-512, 512, size).astype(stored_dtype(dtype)) for size in (1, 1000, 431_080)]


@pytest.fixture
def backend(devices: str) -> Iterator[CupyBackend]:
    if why := nccl.unavailable_reason():
        pytest.skip(why)
    made = gpu()
    yield made
    made.deactivate()


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=needs_bfloat16), "float32", "float64"])
def test_a_rank_that_is_alone_has_its_own_sum(backend: CupyBackend, dtype: str) -> None:
    from cupy.cuda.nccl import NcclError

    for turn in range(2):  # it can connect again
        own, numbers = connected(backend), vectors(dtype, turn)
        arrays = [backend.asarray(each) for each in numbers]
        own.sum(arrays)
        with pytest.raises(RuntimeError):
            own.sum([backend.asarray(np.zeros(3, np.int32))])
        own.close()
        assert [backend.to_host(each).tobytes() for each in arrays] == [each.tobytes() for each in numbers]
        with pytest.raises(NcclError):
            own.sum(arrays)


def test_two_ranks_that_share_a_gpu_have_one_sum(backend: CupyBackend) -> None:
    """It runs in a separate process because NCCL reads its variables only once."""
    from cupy.cuda.nccl import get_version

    if get_version() < SHARES_A_GPU:
        pytest.skip(f"NCCL {get_version()} lets no two ranks share a GPU: that takes {SHARES_A_GPU}")
    standin = machine.switched_on() is not None
    code = f"from tests.parallel.communicators.test_nccl import sum_of_two; sum_of_two(standin={standin})"
    path = os.pathsep.join([str(ROOT), *sys.path])  # sys.path: packages may be on an inherited PYTHONPATH
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def sum_of_two(*, standin: bool) -> None:
    def task(c: Communicator) -> list[bytes]:
        backend = gpu()
        arrays = [backend.asarray(each) for each in vectors("float32", c.rank)]

        def hand(own: bytes) -> bytes:
            texts = c.all_gather(np.frombuffer(own, np.uint8))
            return next(each.tobytes() for each in texts if len(each))

        own = connected(backend, hand, c.rank, 2)
        own.sum(arrays)
        backend.synchronize()
        c.barrier()  # both sums are complete, so memory may be allocated
        found = [backend.to_host(array).tobytes() for array in arrays]
        own.close()
        return found

    with installed(devices=1) if standin else nullcontext():
        both = zip(vectors("float32", 0), vectors("float32", 1), strict=True)
        expected = [(one + other).tobytes() for one, other in both]
        assert on_threads(2, task) == [expected, expected]
