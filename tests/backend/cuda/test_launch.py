"""The launcher of kernels: argument types, refusals, and the table of kernels."""

from __future__ import annotations

import re
import threading
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

on_devices = pytest.mark.usefixtures("devices")
FILES = sorted(path.stem for path in FOLDER.glob("*.cu"))


@pytest.mark.parametrize("file", FILES)
def test_the_table_has_the_parameters_of_the_kernels(file: str) -> None:
    kernels = host_library(source(file), options=OPTIONS)
    assert kernels.keys() == {name for name, instance in INSTANCES.items() if instance.file == file}
    for name, kernel in kernels.items():
        words = launch.TAKES[file][base(name)].split()
        written = [parameter.type for parameter in INSTANCES[name].takes]
        assert written == [word.rpartition(":")[2] for word in kernel.takes], name
        assert [word.partition(":")[0] for word in words if ":" in word] == [
            word.partition(":")[0] for word in kernel.takes if ":" in word
        ], name


@pytest.mark.smoke
def test_the_places_of_controls_are_those_of_the_kernels() -> None:
    words = re.search(r"enum Control \{([^}]*)\}", (FOLDER / "common.cuh").read_text())
    assert words is not None and [place.name for place in Control] == [word.strip() for word in words[1].split(",")]
    assert list(Control) == list(range(len(Control)))


@pytest.mark.smoke
def test_activations_have_the_numbers_of_the_kernels() -> None:
    words = re.search(r"enum Activation \{([^}]*)\}", (FOLDER / "activation.cu").read_text())
    assert words is not None and [word.strip().lower() for word in words[1].split(",")] == list(NAMES)


def base(name: str) -> str:
    """The kernel of an instance: `max_pool` of max_pool_half_uint8."""
    words = name.split("_")
    last = max(position for position, word in enumerate(words) if word in KINDS)
    return "_".join(words[:last])


class Recorded:
    """CuPy's RawModule, which notes what is launched and runs nothing."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.compiled: list[str] = []
        self.options: list[str] = []

    def RawModule(self, code: str, options: tuple[str, ...]) -> Any:
        self.compiled.append(code)
        self.options += [option for option in options if option.startswith("-D")]
        return self

    def get_function(self, name: str) -> Any:
        return lambda *launched: self.launched.append((name, *launched))


@pytest.fixture
def xp() -> Recorded:
    return Recorded()


def asarray(values: Any) -> Any:
    import cupy

    return cupy.asarray(values)


def kernels(xp: Any, **limits: Any) -> Kernels:
    return Kernels(xp, 0, nullcontext, **limits)


@on_devices
def test_numbers_have_the_type_of_their_parameter(xp: Recorded) -> None:
    """CuPy would pass a float as a double, and an int as 64 bits."""
    x = asarray(np.zeros(8, np.float32))
    numbers = 0.5, 0, np.float64(2), np.int32(3)
    kernels(xp).launch("steer_double", (1,), (1,), x.astype(np.float64), *numbers)
    kernels(xp).launch("clip_norm_float", (1,), (32,), x, x, 0.5, None, np.int32(8))
    (steered, (name, grid, block, arguments)) = xp.launched
    assert [type(given) for given in steered[3][1:]] == [np.float64] * 4
    assert [float(given) for given in steered[3][1:]] == [0.5, 0, 2, 3]
    assert (name, grid, block) == ("clip_norm_float", (1,), (32,))
    assert all(given is x for given in arguments[:2])
    kinds = [type(given) for given in arguments[2:]]
    assert kinds == [np.float32, np.uint64, np.int64]
    assert [float(given) for given in arguments[2:]] == [0.5, 0, 8]


@on_devices
def test_each_file_is_compiled_once(xp: Recorded) -> None:
    x, own = asarray(np.zeros(8, np.float32)), kernels(xp)
    for _ in range(2):
        own.flat("relu_float", 8, x, 8)
        own.flat("relu_backward_float", 8, x, x, 8)
    assert xp.compiled == [source("activation")]


@pytest.mark.smoke
@pytest.mark.parametrize("file", FILES)
def test_a_module_has_the_kernels_of_one_precision(file: str) -> None:
    for kind in KINDS:
        wanted = {name for name, instance in INSTANCES.items() if instance.file == file and kind in instance.modules}
        assert set(exported_by(source(file), options(kind))) == wanted
        assert {name for name in wanted if INSTANCES[name].kind == kind} == {
            name for name, instance in INSTANCES.items() if instance.file == file and instance.kind == kind
        }


@on_devices
@pytest.mark.parametrize("kind", ["half", "float"])
def test_kernels_are_compiled_in_the_precision_of_the_backend(kind: str, xp: Recorded) -> None:
    """Kernels that sum in float are in the same module. Only other types need another one."""
    x, own = asarray(np.zeros(8, np.float32)), kernels(xp, kind=kind)
    own.launch("steer_double", (1,), (1,), x.astype(np.float64), 1, 1, 1, 1)
    own.flat("undo_float", 8, x, x, x.astype(np.float64), 8)
    assert xp.options == [f"-DONLY_{kind.upper()}"]
    own.flat("relu_float", 8, x, 8)
    assert xp.options[1:] == ["-DONLY_FLOAT"] and len(xp.compiled) == 2


@pytest.mark.standin
def test_files_are_compiled_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compilation waits until another one runs. Later launches compile no further module."""
    import cupy

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
    own.activate()
    own.convert(own.asarray(np.zeros(8, np.float32)), own.asarray(np.zeros(8, np.float32)))
    own.deactivate()


def other_device() -> Any:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two devices")
    with cupy.cuda.Device(1):
        return asarray(np.zeros(8, np.float32))


@on_devices
@pytest.mark.parametrize(
    "arguments",
    [
        lambda x: (x.astype(np.float64), 8),
        lambda x: (x[::2], 4),
        lambda x: (np.zeros(8, np.float32), 8),
        lambda x: (other_device(), 8),
        lambda x: (None, 8),
        lambda x: (x.data.ptr, 8),
    ],
    ids=["another precision", "gaps", "NumPy", "another device", "none", "an address"],
)
def test_arguments_that_a_kernel_would_misread_are_refused(arguments: Any, xp: Recorded) -> None:
    x = asarray(np.zeros(8, np.float32))
    with pytest.raises(ConfigError, match="relu_float"):
        kernels(xp).launch("relu_float", (1,), (32,), *arguments(x))
    assert xp.launched == []


@on_devices
def test_a_number_that_its_parameter_cannot_hold_is_refused(xp: Recorded) -> None:
    x = asarray(np.zeros(8, np.float32))
    for wrong, error in ((2**31, OverflowError), (2.5, TypeError)):
        with pytest.raises(error):
            kernels(xp).launch("add_bias_float", (1,), (32,), x, x, 1, wrong, 0)


@on_devices
@pytest.mark.parametrize(
    ("limits", "threads", "grid"),
    [({}, 256, (4,)), ({"max_block_size": 1000}, 512, (2,)), ({"max_grid_size": 3}, 256, (3,))],
)
def test_launches_keep_within_their_bounds(
    limits: dict[str, Any], threads: int, grid: tuple[int, ...], xp: Recorded
) -> None:
    x, own = asarray(np.zeros(1000, np.float32)), kernels(xp, **limits)
    own.flat("relu_float", 1000, x, 1000)
    assert xp.launched[-1][1:3] == (grid, (threads,))
    own.rows("softmax_float", 100, 10, x, 100, 10)
    _, (blocks,), (across, down), _ = xp.launched[-1]
    assert across * down == threads and across == 16 and blocks == min(-(-100 // down), own.blocks)
    windows = (1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0)
    own.images("max_pool_backward_float_uint8", 70_000, 2000, x, x.astype(np.uint8), x, 70_000, *windows)
    across, down = xp.launched[-1][1]
    assert down <= 65535 and across * down <= own.blocks


@on_devices
def test_empty_arrays_launch_no_kernel(xp: Recorded) -> None:
    own, x = kernels(xp), asarray(np.zeros(0, np.float32))
    own.flat("relu_float", 0, x, 0)
    own.rows("softmax_float", 0, 10, x, 0, 10)
    own.images("load_images_float", 0, 4, x, None, x, x, x, 0, 4, 1)
    assert xp.launched == []


@on_devices
@pytest.mark.parametrize("limits", [{"max_block_size": 31}, {"max_block_size": 1025}, {"max_grid_size": 0}])
def test_bounds_out_of_range_are_refused(limits: dict[str, int]) -> None:
    with refused(next(iter(limits))):
        create_backend("cupy", **limits)


def test_the_header_is_included_in_the_text() -> None:
    """CuPy caches a compiled kernel by its text: it would not notice a change of a header."""
    for file in FILES:
        text = source(file)
        assert "common.cuh" not in text.replace("CUPYNET_COMMON", "") and "#define KERNEL" in text
        assert host_library(text)
