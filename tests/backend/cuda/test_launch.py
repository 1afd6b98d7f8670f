"""The kernel launcher: compilation, rejected arguments, and sizes of launches.

On the stand-in, every launch checks the table of kernels: the number and types of their parameters.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import launch
from cupynet.backend.cuda.launch import FOLDER, TAKES, Kernels, source
from cupynet.core.errors import ConfigError
from tests.support.refusals import refused


class Recorded:
    """Stands in for CuPy's RawModule; records launches without running anything."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[tuple[str, list[str]]] = []

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        self.compiled.append((code, [option for option in options if option.startswith("-D")]))
        return self

    def get_function(self, name: str) -> Any:
        return lambda *launched: self.launched.append((name, *launched))


@pytest.fixture
def xp() -> Recorded:
    return Recorded()


@pytest.fixture
def x(devices: str, cupy: Any) -> Any:
    return cupy.zeros(8, np.float32)


def kernels(xp: Any, **limits: Any) -> Kernels:
    return Kernels(xp, 0, nullcontext, **limits)


def test_a_cuda_file_is_compiled_once_for_each_precision(xp: Recorded, x: Any) -> None:
    """Kernels that accumulate in float are in the same module."""
    own, code = kernels(xp, kind="half"), source("update")
    own.launch("begin_double", (1,), (1,), x.astype(np.float64), 1, 1, 1)
    own.flat("undo_float", 8, x, x, x.astype(np.float64), 8)
    assert xp.compiled == [(code, ["-DONLY_HALF"])]
    for _ in range(2):
        own.flat("relu_float", 8, x, 8)
    assert xp.compiled[1:] == [(source("activation"), ["-DONLY_FLOAT"])]


@pytest.mark.standin
def test_cuda_files_are_compiled_in_parallel(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until another one is running. Later launches compile nothing more."""
    monkeypatch.setattr(launch, "usable_cores", lambda: {0, 1})
    own, both, made = create_backend("cupy", "float"), threading.Barrier(2), list[Any]()

    def compile(self: Any) -> None:
        made.append(self.options)
        if len(made) <= len(TAKES) // 2 * 2:  # with an odd number of files, the last one is alone
            both.wait(20)

    monkeypatch.setattr(cupy.RawModule, "compile", compile)
    own.prepare()
    assert made == [launch.options("float")] * len(TAKES)
    monkeypatch.setattr(cupy, "RawModule", None)
    own.convert(own.asarray(np.zeros(8, np.float32)), own.asarray(np.zeros(8, np.float32)))


MISREAD: dict[str, Callable[[Any], Any]] = {
    "another precision": lambda x: x.astype(np.float64),
    "gaps": lambda x: x[::2],
    "an array of NumPy": lambda x: np.zeros(8, np.float32),
    "none": lambda x: None,
    "an address": lambda x: x.data.ptr,
}


@pytest.mark.parametrize("argument", MISREAD.values(), ids=MISREAD)
def test_arguments_that_a_kernel_would_misread_are_refused(argument: Any, xp: Recorded, x: Any) -> None:
    with pytest.raises(ConfigError, match="relu_float"):
        kernels(xp).launch("relu_float", (1,), (32,), argument(x), 8)
    assert xp.launched == []


@pytest.mark.standin
def test_arrays_of_another_device_are_refused(xp: Recorded, cupy: Any) -> None:
    with cupy.cuda.Device(1), pytest.raises(ConfigError, match="relu_float"):
        kernels(xp).launch("relu_float", (1,), (32,), cupy.zeros(8, np.float32), 8)


@pytest.mark.parametrize(("wrong", "error"), [(2**31, OverflowError), (2.5, TypeError)])
def test_a_number_that_its_parameter_cannot_hold_is_refused(
    wrong: float, error: type[Exception], xp: Recorded, x: Any
) -> None:
    with pytest.raises(error):
        kernels(xp).launch("add_bias_float", (1,), (32,), x, x, 1, wrong, 0)


@pytest.mark.parametrize(
    ("limits", "threads", "grid"),
    [({}, 256, (4,)), ({"max_block_size": 1000}, 512, (2,)), ({"max_grid_size": 3}, 256, (3,))],
)
def test_launches_keep_within_their_bounds(
    limits: dict[str, Any], threads: int, grid: tuple[int, ...], xp: Recorded, x: Any
) -> None:
    own = kernels(xp, **limits)
    own.flat("relu_float", 1000, x, 1000)
    assert xp.launched[-1][1:3] == (grid, (threads,))
    own.rows("softmax_float", 100, 10, x, 100, 10)
    _, (blocks,), (across, down), _ = xp.launched[-1]
    assert across * down == threads and across == 16 and blocks == min(-(-100 // down), own.blocks)
    windows = (1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0)
    own.images("max_pool_backward_float_uint8", 70_000, 2000, x, x.astype(np.uint8), x, 70_000, *windows)
    across, down = xp.launched[-1][1]
    assert down <= 65535 and across * down <= own.blocks


def test_blocks_for_images_are_as_large_as_their_kernels_allow() -> None:
    assert f"#define IMAGE_THREADS {launch.IMAGE_THREADS} " in (FOLDER / launch.HEADER).read_text("utf-8")


@pytest.mark.standin
@pytest.mark.parametrize("limits", [{"max_block_size": 31}, {"max_block_size": 1025}, {"max_grid_size": 0}])
def test_bounds_of_launches_out_of_range_are_refused(limits: dict[str, Any]) -> None:
    with refused(next(iter(limits))):
        create_backend("cupy", **limits)
