"""Configuration of all tests: their markers, their order, and the devices they see."""

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

# Child processes inherit ignored signals: SIGHUP under nohup, SIGINT in a background job.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

# Writing a report takes longer than most training runs here. tests/reporting/ turns it on.
os.environ["CUPYNET_REPORT"] = "false"

TESTS = Path(__file__).parent
DEVICE_CODE = (TESTS / "standin", TESTS / "backend" / "cuda")
# The slowest tests start first. Otherwise one xdist worker would still run at the end while the others are idle.
FIRST = ("test_soak", "test_train_mpi", "test_sanitized", "test_resume")
HIDDEN = "CuPy finds no usable GPU (cudaErrorNoDevice: no CUDA-capable device is detected)"
# Long tests that repeat what tests of single operations already check.
LONG_ON_THE_STANDIN = ("gradients_of_a_network", "predictions_are_made_in_batches", "learn_what_float_learns")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of GPU code that need no GPU, skip those that need more GPUs, and start the slowest first."""
    several = GPU and device_count("cupy") > 1
    for item in items:
        if item.get_closest_marker("multi_gpu") and not several:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
        if " at 0x" in item.nodeid:  # it would differ between xdist workers
            raise pytest.UsageError(f"{item.nodeid}: has an address in its name: give it ids")
        device_code = item.get_closest_marker("standin") or any(map(item.path.is_relative_to, DEVICE_CODE))
        if device_code and item.get_closest_marker("gpu") is None:
            item.add_marker(pytest.mark.device_code)
            if any(name in item.name for name in LONG_ON_THE_STANDIN):
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.stem not in FIRST)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hide GPUs, but not stand-in devices, from a test without the mark `gpu` and from its child processes.

    CUDA looked for GPUs when tests were collected, so setting the variable has no effect on this process.
    """
    if not GPU or item.get_closest_marker("gpu"):
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
    """Exclude objects left by earlier modules from garbage collection. Python ends with a full collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """Disable the garbage collector, for tests of memory that must be freed without it."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=ON_DEVICES)
def devices(request: pytest.FixtureRequest, made_up_devices: None) -> str:
    """Return the test's devices: simulated ones on CuPy's stand-in, or GPUs."""
    return str(request.param)


@pytest.fixture(autouse=True)
def made_up_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test that is marked `standin` on CuPy's stand-in, which fails if CuPy is misused."""
    if request.node.get_closest_marker("standin") is None:
        yield
        return
    with installed():
        yield


@pytest.fixture
def cupy(made_up_devices: None) -> Any:
    """Return the module `cupy`: the stand-in in tests marked `standin`."""
    import cupy

    return cupy
