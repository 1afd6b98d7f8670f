"""What holds for all tests: marks, order, and which devices they see."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cupynet.backend.cuda import gpus
from cupynet.backend.select import device_count
from tests.standin import installed, machine
from tests.support.backends import GPU, ON_DEVICES

# nohup ignores SIGHUP, and a background job SIGINT, for everything that a test starts too
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Drawing a page takes longer than most trainings here: tests/reporting/ turns it on.
os.environ["CUPYNET_REPORT"] = "false"

TESTS = Path(__file__).parent
DEVICE_CODE = (TESTS / "standin", TESTS / "backend" / "cuda")
# The longest begin first. Otherwise one process works at the end while the others have nothing left.
FIRST = ("test_soak", "test_train_mpi", "test_sanitized", "test_resume")
HIDDEN = "CuPy finds no usable GPU (cudaErrorNoDevice: no CUDA-capable device is detected)"
# Thousands of operations, which show again that single operations are right.
LONG_ON_THE_STANDIN = ("gradients_of_a_network", "predictions_are_made_in_batches", "half_learns_what_float_learns")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of the GPU code that run without a GPU, skip those that need more GPUs, start the longest first."""
    several = GPU and device_count("cupy") > 1
    for item in items:
        if item.get_closest_marker("multi_gpu") and not several:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if " at 0x" in item.nodeid:  # it would differ between the processes that share the tests
            raise pytest.UsageError(f"{item.nodeid}: has an address in its name: give it ids")
        device_code = item.get_closest_marker("standin") or any(map(item.path.is_relative_to, DEVICE_CODE))
        if device_code and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.device_code)
            if any(name in item.name for name in LONG_ON_THE_STANDIN):
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide the GPUs from a test that is not marked `gpu`, and from what it starts, but not devices of the stand-in.

    CUDA looked for GPUs when tests were collected. For this process the variable comes too late.
    """
    if not GPU or any(item.get_closest_marker(mark) for mark in ("gpu", "multi_gpu")):
        return (yield)
    real, at_first = gpus.probe, machine.switched_on()

    def probe(device: int = 0) -> str | None:
        return HIDDEN if machine.switched_on() is at_first else real(device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpus, "probe", probe)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture(scope="module", autouse=True)
def freeze_gc() -> None:
    """Exclude objects left by earlier modules from garbage collection. Each run ends with a full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """For tests of memory that must be freed without the garbage collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=ON_DEVICES)
def devices(request: pytest.FixtureRequest, made_up_devices: None) -> str:
    """Where the test computes: on the stand-in of CuPy, or on GPUs."""
    return str(request.param)


@pytest.fixture(autouse=True)
def made_up_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test that is marked `standin` on the stand-in of CuPy, which fails if CuPy is misused."""
    if request.node.get_closest_marker("standin") is None:
        yield
        return
    with installed():
        yield


@pytest.fixture
def cupy(made_up_devices: None) -> Any:
    """CuPy: the stand-in in a test that is marked `standin`."""
    import cupy

    return cupy
