"""The kernel launcher: argument types, rejected arguments, and the table of kernels."""

import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Control, create_backend
from cupynet.backend.cuda import launch
from cupynet.backend.cuda.launch import FOLDER, INSTANCES, KINDS, OPTIONS, Kernels, options, source
from cupynet.backend.reference.activation import NAMES
from cupynet.core.errors import ConfigError
from tests.standin.host import exported_by, host_library
from tests.support.refusals import refused

FILES = sorted(path.stem for path in FOLDER.glob("*.cu"))
every_file = pytest.mark.parametrize("file", FILES)


# the table ------------------------------------------------------------------------------------------------------------


@every_file
def test_the_table_has_the_parameters_of_the_kernels(file: str) -> None:
    kernels = host_library(source(file), options=OPTIONS)
    assert kernels.keys() == {name for name, instance in INSTANCES.items() if instance.file == file}
    for name, kernel in kernels.items():
        ways = [word.partition(":")[0] for word in launch.TAKES[file][base(name)].split() if ":" in word]
        assert [parameter.type for parameter in INSTANCES[name].takes] == [
            word.rpartition(":")[2] for word in kernel.takes
        ], name
        assert ways == [word.partition(":")[0] for word in kernel.takes if ":" in word], name


def base(name: str) -> str:
    """Return an instance's kernel, such as `max_pool` for max_pool_half_uint8."""
    words = name.split("_")
    last = max(position for position, word in enumerate(words) if word in KINDS)
    return "_".join(words[:last])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("enum", "file", "names"),
    [("Control", "common.cuh", [place.name for place in Control]), ("Activation", "activation.cu", NAMES)],
)
def test_numbers_have_the_names_of_the_kernels(enum: str, file: str, names: list[str]) -> None:
    words = re.search(rf"enum {enum} \{{([^}}]*)\}}", (FOLDER / file).read_text())
    assert words is not None
    assert [word.strip().lower() for word in words[1].split(",")] == [name.lower() for name in names]


@pytest.mark.smoke
@every_file
def test_a_module_has_the_kernels_of_one_precision(file: str) -> None:
    for kind in KINDS:
        wanted = {name for name, instance in INSTANCES.items() if instance.file == file and kind in instance.modules}
        own = {name for name, instance in INSTANCES.items() if instance.file == file and instance.kind == kind}
        assert set(exported_by(source(file), options(kind))) == wanted
        assert own <= wanted


# launches -------------------------------------------------------------------------------------------------------------


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


def test_numbers_have_the_type_of_their_parameter(xp: Recorded, x: Any) -> None:
    """CuPy would pass a float as a double, and an int as 64 bits."""
    kernels(xp).launch("begin_double", (1,), (1,), x.astype(np.float64), 0.5, 0, np.int32(3))
    kernels(xp).launch("clip_norm_float", (1,), (32,), x, x, 0.5, None, np.int32(8))
    begun, clipped = (arguments for _, _, _, arguments in xp.launched)
    assert [(type(given), float(given)) for given in begun[1:]] == [(np.float64, each) for each in (0.5, 0, 3)]
    assert [type(given) for given in clipped[2:]] == [np.float32, np.uint64, np.int64]
    assert [float(given) for given in clipped[2:]] == [0.5, 0, 8]


def test_a_file_is_compiled_once_for_each_precision(xp: Recorded, x: Any) -> None:
    """Kernels that accumulate in float are in the same module."""
    own, code = kernels(xp, kind="half"), source("update")
    own.launch("begin_double", (1,), (1,), x.astype(np.float64), 1, 1, 1)
    own.flat("undo_float", 8, x, x, x.astype(np.float64), 8)
    assert xp.compiled == [(code, ["-DONLY_HALF"])]
    for _ in range(2):
        own.flat("relu_float", 8, x, 8)
    assert xp.compiled[1:] == [(source("activation"), ["-DONLY_FLOAT"])]


@pytest.mark.standin
def test_files_are_compiled_in_parallel(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until another one is running. Later launches compile nothing more."""
    monkeypatch.setattr(launch, "usable_cores", lambda: {0, 1})
    own, both, made = create_backend("cupy", "float"), threading.Barrier(2), list[Any]()

    def compile(self: Any) -> None:
        made.append(self.options)
        if len(made) <= len(FILES) // 2 * 2:  # with an odd number of files, the last one is alone
            both.wait(20)

    monkeypatch.setattr(cupy.RawModule, "compile", compile)
    own.prepare()
    assert made == [launch.options("float")] * len(FILES)
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


def test_empty_arrays_launch_no_kernel(xp: Recorded, x: Any) -> None:
    own = kernels(xp)
    own.flat("relu_float", 0, x, 0)
    own.rows("softmax_float", 0, 10, x, 0, 10)
    own.images("load_images_float", 0, 4, x, None, x, x, x, 0, 4, 1)
    assert xp.launched == []


@pytest.mark.standin
@pytest.mark.parametrize("limits", [{"max_block_size": 31}, {"max_block_size": 1025}, {"max_grid_size": 0}])
def test_bounds_out_of_range_are_refused(limits: dict[str, Any]) -> None:
    with refused(next(iter(limits))):
        create_backend("cupy", **limits)
