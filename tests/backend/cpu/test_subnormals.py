"""On x86, work of the numba backend treats subnormal numbers as zero, and the caller's arithmetic stays as it was."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("numba")

from cupynet.backend import create_backend
from cupynet.backend.cpu.kernels.subnormals import IS_X86
from cupynet.training import ParallelWrapper
from tests.support.training import small_dataset, small_model

pytestmark = pytest.mark.skipif(not IS_X86, reason="other CPUs calculate with subnormal numbers at full speed")

SUBNORMAL, SMALL = np.array([1e-40, 2e-38], np.float32)


def are_zero() -> bool:
    """Return whether this thread treats subnormal numbers as zero, as operands and as results."""
    found = {bool(SUBNORMAL * np.float32(1e10) == 0), bool(SMALL * np.float32(0.01) == 0)}
    assert len(found) == 1
    return found.pop()


def test_subnormal_numbers_are_zero_inside_the_with_block_and_only_in_its_thread() -> None:
    backend = create_backend("numba", "float")
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(are_zero).result()  # its thread exists now: threads inherit this from their creator
        with suppress(ZeroDivisionError), backend.subnormals_as_zero():
            with backend.subnormals_as_zero():
                assert are_zero()
            assert are_zero()
            assert not other.submit(are_zero).result()
            raise ZeroDivisionError
    assert not are_zero()


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_treat_subnormal_numbers_as_zero_but_their_caller_does_not(workers: int) -> None:
    model, found = small_model("float", "numba"), list[bool]()
    with ParallelWrapper(model, workers=workers) as wrapper:
        wrapper.on_workers(lambda trainer: found.append(are_zero()))
        assert found == [True] * workers
        wrapper.fit(small_dataset(32))
        assert not are_zero()


def test_predictions_treat_subnormal_numbers_as_zero_too() -> None:
    model = small_model("float", "numba")
    model.load_weights({name: weight * 1e-13 for name, weight in model.weights().items()})  # of three layers
    images = np.ones((4, 8, 8, 1), np.float32)
    _, raw = model.scores(images)
    assert not raw.any()


def test_numpy_does_not_warn_that_subnormal_numbers_are_zero() -> None:
    with warnings.catch_warnings(), create_backend("numba", "float").subnormals_as_zero():
        warnings.simplefilter("error")
        assert np.finfo(np.float32).smallest_subnormal is not None
