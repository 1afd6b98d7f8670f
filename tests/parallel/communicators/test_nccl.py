"""Sums over NCCL on the one GPU that most machines have: by a rank that is alone, and by two that share it.

What several GPUs do is tested with them (test_communicators.py), and on the stand-in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Backend, create_backend
from cupynet.backend.policy import stored_dtype
from cupynet.parallel import SerialCommunicator
from cupynet.parallel.communicators import nccl
from cupynet.parallel.communicators.devices import means_of_ranks
from cupynet.parallel.communicators.threads import ThreadCommunicator
from tests.standin import installed, machine
from tests.support.backends import needs_bfloat16
from tests.support.training import on_threads

ROOT = Path(__file__).resolve().parents[3]
MASTERS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
SHARES_A_GPU = 23003  # NCCL 2.30.3, the first in which ranks may: NCCL_MULTI_RANK_GPU_ENABLE
SIZES = (1, 1000, 431_080)


@pytest.fixture
def backend(devices: str) -> Any:
    if why := nccl.missing():
        pytest.skip(why)
    made = create_backend("cupy", "float")
    made.activate()
    yield made
    made.deactivate()


def vectors(backend: Backend, dtype: str, seed: int) -> tuple[list[np.ndarray], list[Any]]:
    """Numbers of which two add up exactly, on the host and on the device."""
    rng = np.random.default_rng(seed)
    made = [rng.integers(-512, 512, size).astype(stored_dtype(dtype)) for size in SIZES]
    return made, [backend.asarray(each) for each in made]


@pytest.mark.parametrize("dtype", ["half", pytest.param("bfloat16", marks=needs_bfloat16), "float", "double"])
def test_a_rank_that_is_alone_has_its_own_sum(backend: Backend, dtype: str) -> None:
    """Made as for several devices, asked, let go of; and once more. (What moves numbers is the sum of two.)"""
    from cupy.cuda.nccl import NcclError

    for turn in range(2):
        made = nccl.connect(lambda own: own, 0, 1, backend, [].append)
        assert made is not None
        wanted, arrays = vectors(backend, MASTERS[dtype], turn)
        for _ in range(3):
            made.sum(arrays)
        found = [backend.to_host(array) for array in arrays]
        made.close()
        assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]
        with pytest.raises(NcclError):
            made.sum(arrays)


def test_a_process_that_is_alone_has_its_own_mean(backend: Backend) -> None:
    made = means_of_ranks(SerialCommunicator(), backend, "nccl")
    assert made is not None
    wanted, arrays = vectors(backend, "float32", 1)
    made.mean(arrays, 3.0)
    found = [backend.to_host(array) for array in arrays]
    made.close()
    assert [each.tobytes() for each in found] == [each.tobytes() for each in wanted]


def test_integer_arrays_are_refused(backend: Backend) -> None:
    made = nccl.connect(lambda own: own, 0, 1, backend, [].append)
    assert made is not None
    with pytest.raises(RuntimeError, match="int32"):
        made.sum([backend.asarray(np.zeros(3, np.int32))])
    made.close()


def test_two_ranks_that_share_a_gpu_have_one_sum(backend: Backend) -> None:
    """In a process of its own: NCCL reads its variables once."""
    from cupy.cuda.nccl import get_version

    if get_version() < SHARES_A_GPU:
        pytest.skip(f"NCCL {get_version()} lets no two ranks share a GPU: that takes {SHARES_A_GPU}")
    made_up = machine.switched_on() is not None  # for this test, or for all: `python -m tests.standin -m pytest`
    code = f"from tests.parallel.communicators import test_nccl; test_nccl.two_on_one(standin={made_up})"
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the same on both\n"), done.stdout + done.stderr


def two_on_one(*, standin: bool) -> None:
    """Two threads with a stream each on device 0, of a GPU or made up."""
    with installed(devices=1) if standin else nullcontext():
        host = create_backend("numpy")
        both = [vectors(host, "float32", rank)[0] for rank in range(2)]
        wanted = [(one + other).tobytes() for one, other in zip(*both, strict=True)]
        assert on_threads(2, _sum) == [wanted, wanted]
    print("the same on both")


def _sum(communicator: ThreadCommunicator) -> list[bytes]:
    def hand(own: bytes) -> bytes:
        given: bytes = next(filter(None, communicator._exchange(own)))
        return given

    backend = create_backend("cupy", "float")
    backend.activate()
    _, arrays = vectors(backend, "float32", communicator.rank)
    made = nccl.connect(hand, communicator.rank, 2, backend, [].append)
    assert made is not None
    made.sum(arrays)
    backend.synchronize()
    communicator.barrier()  # nobody is in a sum any more: memory may be asked for
    found = [backend.to_host(array).tobytes() for array in arrays]
    made.close()
    return found
