"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cupynet.backend.cuda import gpus
from cupynet.backend.select import device_count
from tests.standin import installed, machine
from tests.support.backends import GPU, ON_DEVICES

# under nohup SIGHUP is ignored, in the background of a script SIGINT, by whatever a test starts too: here they mean
# what they mean from a terminal
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Drawing a page takes longer than training as little as most tests do: tests/reporting/ has it on.
os.environ["CUPYNET_REPORT"] = "false"

TESTS = Path(__file__).parent
DEVICE_CODE = (TESTS / "standin", TESTS / "backend" / "cuda")
# What takes longest begins first: else one process works at the end while the others have nothing left.
FIRST = ("test_soak", "test_train_mpi", "test_sanitized", "test_resume")
HIDDEN = "CuPy finds no usable GPU (cudaErrorNoDevice: no CUDA-capable device is detected)"
# Thousands of operations, which show again that single operations are right.
LONG_ON_THE_STANDIN = ("gradients_of_a_network", "predictions_are_made_in_batches", "half_learns_what_float_learns")


@cache
def is_device_code(file: Path) -> bool:
    return any(folder in file.parents for folder in DEVICE_CODE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of the GPU code that run without a GPU, skip those that need more GPUs, start the longest first."""
    several = GPU and device_count("cupy") > 1
    for item in items:
        if item.get_closest_marker("multi_gpu") and not several:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if " at 0x" in item.nodeid:  # it would differ between the processes that share the tests
            raise pytest.UsageError(f"{item.nodeid}: has an address in its name: give it ids")
        if item.get_closest_marker("gpu") is None and (item.get_closest_marker("standin") or is_device_code(item.path)):
            item.add_marker(pytest.mark.device_code)
            if any(name in item.name for name in LONG_ON_THE_STANDIN):
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test that is not marked `gpu` sees none, nor does what it starts: it says what a processor does.

    Devices that it makes up itself are there. (CUDA has looked for GPUs before, when tests were collected: for this
    process the variable comes too late, and other tests go on with what was found.)
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
    """What a test needs of memory must not wait for the garbage collector."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=ON_DEVICES)
def devices(request: pytest.FixtureRequest, made_up_devices: None) -> str:
    """Where the test computes: on the stand-in of CuPy, or on GPUs."""
    found: str = request.param
    return found


@pytest.fixture(autouse=True)
def made_up_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked `standin` runs on the stand-in of CuPy, and fails where CuPy is misused."""
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
