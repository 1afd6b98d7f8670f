"""CUDA kernels on their own, run on the CPU and compared with NumPy in double.

These tests cover cases that a backend's calls do not reach: vectors of any alignment and length, NaN, ties, and step
controls. test_operations.py compares the rest. test_sanitized.py runs both under sanitizers, which end the process at
an out-of-bounds access, so every array ends where its memory ends.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Control, Rule, UpdateScalars, Window, create_backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.backend.cuda.launch import KINDS, OPTIONS, WIDE, source
from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.parallel.communicators.base import SerialCommunicator
from cupynet.training import loss_scaling as scaling
from tests.standin.host import SANITIZED, host_library
from tests.support.backends import GPU, NO_BFLOAT16
from tests.support.pairwise import pairwise

TOLERANCE = {"half": 1e-3, "bfloat16": 8e-3, "float": 1e-6, "double": 1e-14}
SIZES = [0, 1, 7, 8, 17, 101]
NULL = np.uint64(0)
REFERENCE = NumpyBackend("double")


def launches(*sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    """Return grids and blocks by names such as `3x2 blocks of 16`."""
    text = "{} blocks of {}".format
    return {text(*("x".join(map(str, size)) for size in each)): each for each in sizes}


EVERY_KIND = [kind for kind in KINDS if kind != "bfloat16" or not NO_BFLOAT16]
ONE_AXIS = launches(((1,), (1,)), ((3,), (32,)))
IMAGES = launches(((1, 1), (1,)), ((3, 2), (16,)))


class DeviceKernel:
    """A kernel on the GPU that takes host arrays, like `HostKernel`."""

    def __init__(self, file: str, name: str) -> None:
        import cupy

        self._cupy, self._kernel = cupy, cupy.RawModule(code=source(file), options=OPTIONS).get_function(name)

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        copies: dict[int, tuple[Any, Any]] = {}
        self._kernel(grid, block, tuple(self._sent(argument, copies) for argument in arguments))
        for memory, copy in copies.values():
            memory[...] = self._cupy.asnumpy(copy)

    def _sent(self, argument: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """Return the argument's view of a device copy of its base array."""
        if not isinstance(argument, np.ndarray):
            return argument
        memory = argument
        while isinstance(memory.base, np.ndarray) and argument.size:
            memory = memory.base
        _, copy = copies.setdefault(id(memory), (memory, self._cupy.asarray(memory)))
        start = (argument.ctypes.data - memory.ctypes.data) // argument.itemsize
        return copy.reshape(-1)[start : start + argument.size].reshape(argument.shape)


ON_GPU = [] if SANITIZED or not GPU else [pytest.param(DeviceKernel, id="gpu", marks=pytest.mark.gpu)]
_kernel: Any = None


@pytest.fixture(autouse=True, params=[pytest.param(None, id="host"), *ON_GPU])
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    global _kernel
    _kernel = request.param
    yield
    _kernel = None


def kernel(file: str, name: str) -> Any:
    if _kernel is not None:
        return _kernel(file, name)
    return host_library(source(file), options=OPTIONS)[name]  # compiled as by the CuPy stand-in


def array(values: Any, dtype: Any, start: int = 0) -> Any:
    """Return a copy that starts `start` elements after a multiple of 16 bytes and ends with its memory."""
    values = np.asarray(values)
    memory = np.empty(start + values.size, dtype)
    assert memory.ctypes.data % 16 == 0 or not values.size
    view = memory[start:].reshape(values.shape)
    view[...] = values.astype(dtype)
    return view


def exact(values: Any) -> Any:
    return np.array(values, np.float64)


def ints(*numbers: int) -> tuple[np.int32, ...]:
    return tuple(map(np.int32, numbers))


class Case:
    """Arrays and kernels of one precision, and the grid and block of their launches."""

    def __init__(self, kind: str, launch: Any = ((1,), (32,)), seed: int = 1) -> None:
        self.kind, self.launch = kind, launch
        self.storage, self.accumulate = (stored_dtype(name) for name in KINDS[kind])
        self.precise = "double" if kind == "double" else "float"
        self.rng = np.random.default_rng(seed)

    def stored(self, values: Any, start: int = 0) -> Any:
        return array(values, self.storage, start)

    def wide(self, values: Any, start: int = 0) -> Any:
        return array(values, self.accumulate, start)

    def normal(self, *shape: int, start: int = 0) -> Any:
        return self.stored(self.rng.normal(size=shape), start)

    def blank(self, *shape: int) -> Any:
        return self.stored(np.full(shape, np.nan))

    def blank_sums(self, *shape: int) -> Any:
        return self.wide(np.full(shape, np.nan))

    def number(self, value: float) -> Any:
        return self.accumulate.type(value)

    def run(self, file: str, name: str, *arguments: Any, launch: Any = None) -> None:
        kernel(file, f"{name}_{self.kind}")(*(launch or self.launch), arguments)

    def close(self, found: Any, expected: Any, times: float = 1) -> None:
        self._close(found, expected, TOLERANCE[self.kind] * times)

    def close_sums(self, found: Any, expected: Any, times: float = 1) -> None:
        self._close(found, expected, TOLERANCE[self.precise] * times)

    def _close(self, found: Any, expected: Any, bound: float) -> None:
        scale = np.maximum(1, np.abs(exact(expected)))
        np.testing.assert_allclose(exact(found) / scale, exact(expected) / scale, rtol=0, atol=bound)


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(exact(found), exact(expected))


# flat vectors --------------------------------------------------------------------------------------------------------


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), size=SIZES)
def test_relu_keeps_nan(kind: str, launch: Any, start: int, size: int) -> None:
    case = Case(kind, launch)
    x = case.stored(case.rng.integers(-2, 3, size), start)
    x[::5] = np.nan
    dy = case.normal(size, start=start)
    y = case.stored(x, 1 - start)
    expected = np.maximum(exact(x), 0), np.where(exact(x) > 0, exact(dy), 0)
    case.run("activation", "relu", x, np.int64(size))
    equal(x, expected[0])
    case.run("activation", "relu_backward", dy, y, np.int64(size))
    equal(dy, expected[1])


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), size=SIZES)
def test_precisions_are_converted(kind: str, launch: Any, start: int, size: int) -> None:
    case = Case(kind, launch)
    values, small, back = case.wide(case.rng.normal(size=size) * 1000, start), case.blank(size), case.blank_sums(size)
    values[::7] = np.nan
    case.run("update", "narrow", values, small, np.int64(size))
    case.run("update", "widen", small, back, np.int64(size))
    equal(small, values.astype(case.storage))
    equal(back, values.astype(case.storage))


@pytest.mark.smoke
@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), count=(1, 3, 16), size=SIZES)
def test_sums_of_vectors_are_those_of_the_host(kind: str, launch: Any, start: int, count: int, size: int) -> None:
    """Sums are equal bit for bit if NumPy also rounds once. Null pointers are not read. A part may be the output."""
    case = Case(kind, launch)
    parts = [case.normal(size, start=start) for _ in range(count)]
    shares = [np.float64(share) for share in case.rng.random(count)]
    expected = sum((exact(part) * share for part, share in zip(parts, shares, strict=True)), np.zeros(size))
    padding = 16 - count
    given = *parts, *[NULL] * padding, *shares, *[np.float64(0)] * padding
    case.run("averages", "weighted_sum", parts[-1], *given, np.int32(count), np.int64(size))
    if kind == "bfloat16":
        case.close(parts[-1], expected)
    else:
        equal(parts[-1], expected.astype(case.storage))


# updates --------------------------------------------------------------------------------------------------------------


def controls_of(**values: float) -> Any:
    """Return a step's controls with these values and zeros otherwise."""
    return array([values.get(place.name, 0.0) for place in Control], np.float64)


class Update:
    """An update's vectors, its copy of the weights in storage precision, and its kernel launch."""

    def __init__(self, case: Case, rule: Rule, size: int, start: int) -> None:
        self.case, self.rule, self.size = case, rule, size
        rng = np.random.default_rng(size)
        self.vectors = {name: case.wide(rng.normal(size=size), start) for name in ("weight", "grad", *rule.states)}
        for name in set(rule.states) - {"velocity", "mean"}:
            np.abs(self.vectors[name], out=self.vectors[name])  # the rule takes their roots
        self.copy = case.stored(np.ones(size), start)

    def run(self, move: UpdateScalars, controls: Any = NULL, copied: bool = True) -> None:
        norm, largest = move.norm or (None, 0)
        numbers = [self.case.number(number) for number in (*move.in_order(), largest)]
        numbers.append(NULL if norm is None else self.case.wide([norm]))
        copy = self.copy if copied else NULL
        name = f"{self.rule.name}_update"
        self.case.run("update", name, *self.vectors.values(), copy, *numbers, controls, np.int64(self.size))


MOVES = {
    "plain": UpdateScalars(0.1, 0.25),
    "penalties": UpdateScalars(0.1, 0.5, l1=0.02, l2=0.01),
    "limits": UpdateScalars(0.1, 1.0, clip=0.3, decay=0.05),
    "clipped": UpdateScalars(0.1, 0.5, l2=0.01, norm=(25.0, 0.5)),
    "short": UpdateScalars(0.1, 0.5, norm=(25.0, 5.0)),
}


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), copied=(True, False), move=MOVES, rule=RULES, size=SIZES)
def test_updates_follow_the_rule(
    kind: str, launch: Any, start: int, copied: bool, move: UpdateScalars, rule: Rule, size: int
) -> None:
    case = Case(kind, launch)
    how, update = replace(move, numbers=(0.5, 0.25, 2.0), factors=(0.9, 0.8, 0.01)), Update(case, rule, size, start)
    expected = {name: exact(vector) for name, vector in update.vectors.items()}
    weight, grad, *states = expected.values()
    REFERENCE.move_weights(rule, weight, grad, states, how)
    update.run(how, copied=copied)
    for name, vector in update.vectors.items():
        case.close_sums(vector, expected[name], 4)
    if copied and rule.moves:
        equal(update.copy, update.vectors["weight"].astype(case.storage))


FACTORS = (0.5, 0.25, 0.125)
ON_DEVICE = {"RATE": 0.5, "FIRST": 0.5, "SECOND": 0.25, "THIRD": 2.0, "USED": 4.0, "SCALE": 77.0}


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), rule=RULES, size=SIZES)
def test_updates_take_their_numbers_from_the_device(kind: str, launch: Any, start: int, rule: Rule, size: int) -> None:
    """Results equal those with numbers in the launch, bit for bit."""
    expected, found = (Update(Case(kind, launch), rule, size, start) for _ in range(2))
    expected.run(UpdateScalars(0.25, 0.125, l2=0.5, decay=0.25, numbers=(0.5, 0.25, 2.0), factors=FACTORS))
    found.run(UpdateScalars(0.5, 0.5, l2=0.5, decay=0.25, factors=FACTORS), controls_of(**ON_DEVICE, GO=1))
    for name, vector in found.vectors.items():
        equal(vector, expected.vectors[name])
    equal(found.copy, expected.copy)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, rule=RULES)
def test_a_skipped_step_moves_nothing(kind: str, launch: Any, rule: Rule) -> None:
    update = Update(Case(kind, launch), rule, 17, 0)
    before = {name: np.array(vector) for name, vector in update.vectors.items()}
    update.run(UpdateScalars(0.5, 0.5, factors=FACTORS), controls_of(**ON_DEVICE, GO=0))
    for name, vector in update.vectors.items():
        equal(vector, 0 * vector if name == "grad" else before[name])
    assert (update.copy == 1).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_infinite_weight_without_decay_stays_infinite(rule: Rule) -> None:
    update = Update(Case("float"), rule, 1, 0)
    update.vectors["weight"][0] = np.inf
    update.run(UpdateScalars(0.5, factors=FACTORS))
    assert update.vectors["weight"][0] == np.inf and np.isfinite(update.vectors["grad"]).all()


@pairwise(kind=WIDE, launch=ONE_AXIS, start=(0, 1), go=(0, 1), size=SIZES)
def test_a_skipped_step_is_undone(kind: str, launch: Any, start: int, go: int, size: int) -> None:
    case = Case(kind, launch)
    vector, kept = case.normal(size, start=start), case.normal(size)
    expected = np.array(vector if go else kept)
    case.run("update", "undo", vector, kept, controls_of(GO=go), np.int64(size))
    equal(vector, expected)


@pytest.mark.parametrize("kind", WIDE)
def test_the_clipping_norm_follows_the_loss_scale(kind: str) -> None:
    """Updates and separate clipping both use it."""
    case, controls = Case(kind), controls_of(USED=4, SCALE=8, RATE=1, GO=1)
    grad, update = case.wide([3.0, 4.0]), Update(case, RULES["sgd"], 2, 0)
    case.run("update", "clip_norm", grad, case.wide([25.0]), case.number(0.5), controls, np.int64(2))
    case.close(grad, [1.2, 1.6])
    update.vectors["weight"][:], update.vectors["grad"][:] = 0, [3, 4]
    update.run(UpdateScalars(1.0, norm=(25.0, 0.5)), controls)
    case.close(update.vectors["weight"], [-0.3, -0.4])


def steps(kind: str, losses: list[float], squares: list[float], controls: Any, grow_after: int, most: float) -> Any:
    """Return the controls after steps of 8 samples, with sums of losses in three parts and of squares in two."""
    case = Case(kind)
    norm, how = case.wide([0]), (NULL, *ints(3, 2, 8, grow_after), np.float64(1.0), np.float64(most))
    for loss, square in zip(losses, squares, strict=True):
        sums = case.wide([loss, 1, -1]), case.wide([0, square]), norm, array([5], np.int64)
        case.run("update", "judge", controls, *sums, array([0, 0], np.float64), *how)
        equal(norm, [square])
    return {place.name: float(controls[place]) for place in Control}


@pytest.mark.parametrize("kind", WIDE)
def test_steps_are_judged_as_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results equal `LossScaler`'s on gradients of which a third overflow."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 4)
    rng, backend, made = np.random.default_rng(13), create_backend("numpy", "half"), 0
    scaler = scaling.LossScaler(backend, SerialCommunicator())
    backend.loss_scale = 2.0**6
    controls = controls_of(SCALE=backend.loss_scale)
    for _ in range(300):
        overflow, before = rng.random() < 0.3 and backend.loss_scale > 1, backend.loss_scale
        made += not scaler.skips(overflow=overflow, failed=False)
        scaler.grow()
        found = steps(kind, [2.0], [np.inf if overflow else 1.0], controls, 4, scaling.MAX_SCALE)
        assert (found["SCALE"], found["STEADY"]) == (backend.loss_scale, scaler.steady)
        assert (found["USED"], found["GO"], found["HALTED"]) == (before, float(not overflow), 0)
    assert (found["SKIPPED"], found["STEPS"]) == (300 - made, 300) and 0 < made < 300
    assert (found["LOSSES"], found["SAMPLES"], found["HITS"]) == (2.0 * made, 8.0 * made, 5.0 * made)


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize(
    ("losses", "squares", "scale", "grow_after", "halted"),
    [
        ([1, np.nan, 1], [1, 1, 1], 64, 4, 2),
        ([1, 1, 1], [1, np.inf, 1], 64, 0, 2),
        ([1, 1], [np.nan, 1], 1, 4, 1),
        ([np.inf, 1], [np.inf, 1], 64, 4, 1),
        ([1, 1, 1], [1, np.inf, np.nan], 2, 4, 3),
        ([1, 1], [np.inf, 1], 64, 4, 0),
    ],
)
def test_a_nonfinite_step_halts_the_stretch(
    kind: str, losses: list[float], squares: list[float], scale: float, grow_after: int, halted: int
) -> None:
    found = steps(kind, losses, squares, controls_of(SCALE=scale), grow_after, 2.0**24)
    fine = [i for i, square in enumerate(squares) if np.isfinite(square) and (not halted or i + 1 < halted)]
    assert (found["HALTED"], found["STEPS"]) == (halted, len(losses))
    assert (found["SAMPLES"], found["HITS"], found["LOSSES"]) == (8 * len(fine), 5 * len(fine), len(fine))
    assert found["GO"] == (0 if halted else np.isfinite(squares[-1]))


@pytest.mark.parametrize("kind", WIDE)
def test_the_loss_scale_stops_growing_at_the_most(kind: str) -> None:
    found = steps(kind, [1.0] * 8, [1.0] * 8, controls_of(SCALE=2.0**23), 2, 2.0**24)
    assert found["SCALE"] == 2.0**24


def test_scalars_stay_after_the_last_row_of_their_table() -> None:
    controls, table = controls_of(RATE=9, GO=1), array([0, 2, *range(1, 9), 7, 7, 7, 7], np.float64)
    for first in (1, 5, 5):
        kernel("update", "steer_double")((1,), (32,), (controls, table))
        equal(controls[:4], [first, first + 1, first + 2, first + 3])
        assert controls[Control.GO] == 1


# rows and columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("loss", [None, *TARGET_LOSSES])
def test_nan_and_invalid_labels_stay_in_their_rows(kind: str, loss: str | None) -> None:
    case = Case(kind, ((1,), (4, 2)))
    outputs = case.stored([[0, np.nan, 1], [0, 1, 2], [0, 1, 2], [3, 2, 1]])
    labels, losses, gradient = array([0, 3, -1, 0], np.int64), case.blank_sums(4), case.blank(4, 3)
    sizes = case.number(1), NULL, *ints(4, 3)
    if loss is None:
        outputs[3, 1] = -np.inf
        arguments = outputs, labels, case.wide(np.ones(3)), losses, gradient, case.number(0), *sizes
        case.run("reductions", "softmax_cross_entropy", *arguments)
    else:
        case.run(
            "reductions", f"{loss}_loss", outputs, labels, NULL, losses, gradient, case.number(1), *sizes, *ints(0)
        )
    assert np.isnan(losses).tolist() == [True, True, True, False]
    assert np.isnan(exact(gradient)).all(axis=1).tolist()[1:] == [True, True, False]


@pairwise(kind=EVERY_KIND, launch=IMAGES, columns=(0, 3, 40), channels=(1, 2), samples=(0, 1))
def test_the_next_batch_of_an_epoch(kind: str, launch: Any, columns: int, channels: int, samples: int) -> None:
    """Two of five samples have been taken, so the batch has the other three. Labels are class indices or targets."""
    case, taken = Case(kind, launch), [4, 3, 1]
    pixels, order = array(case.rng.integers(0, 256, (5, 34)), np.uint8), array([2, 0, 2, *taken], np.int64)
    labels = array(case.rng.integers(0, 9, (5, columns) if columns else 5), np.float32 if columns else np.int64)
    scale, shift = case.wide([0.5, 0.25][:channels]), case.wide([1, 2][:channels])
    batch, found = case.blank(3, 34), array(np.zeros((3, *labels.shape[1:])), labels.dtype)
    numbers = array(np.zeros(3), np.int64) if samples else NULL
    given, got = ((NULL, labels), (NULL, found)) if columns else ((labels, NULL), (found, NULL))
    sizes = ints(3, 34, channels, columns)
    case.run("images", "next_batch", pixels, order, *given, scale, shift, batch, *got, numbers, *sizes)
    case.close(batch, exact(pixels[taken]) * np.tile(exact(scale), 34 // channels) + np.tile(shift, 34 // channels))
    equal(found, labels[2:])
    equal(numbers, taken if samples else 0)


# images --------------------------------------------------------------------------------------------------------------


def geometry(window: Window, shape: tuple[int, ...]) -> tuple[np.int32, ...]:
    """Return the size arguments of a kernel over windows."""
    (top, _), (left, _) = window.padding
    return ints(*shape, *window.output(*shape[1:3]), *window.kernel, *window.stride, top, left)


def closed_by_relu(y: Any, won: Any, relu: int, index_dtype: str) -> tuple[Any, Any]:
    """Return outputs and indices after a ReLU, which closes windows without a positive output."""
    if not relu:
        return y, won
    return np.maximum(y, 0), np.where(y > 0, won.astype(int), {"uint8": 255, "int32": -1}[index_dtype])


def test_indices_of_windows_with_256_pixels() -> None:
    """The last pixel's index is 255, which means `closed` only after a ReLU."""
    x = array(np.zeros((1, 16, 16, 1)), np.float32)
    x[0, 15, 15, 0] = 1
    y, places, dx = array([1.0], np.float32), array([0], np.uint8), array(np.ones(256), np.float32)
    sizes = geometry(Window((16, 16)), x.shape)
    kernel("pool", "max_pool_float_uint8")((1, 1), (32,), (x, NULL, y, places, *sizes, np.int32(0)))
    kernel("pool", "max_pool_backward_float_uint8")((1, 1), (32,), (y, places, dx, *sizes))
    assert (y[0], places[0], dx[255], dx[:255].any()) == (1, 255, 1, False)


LARGE = {"inside": Window((7, 6)), "padded": Window((6, 7), (1, 1), ((3, 2), (2, 4)))}


@pairwise(kind=EVERY_KIND, channels=(1, 2, 4, 8), launch=IMAGES, window=LARGE)
def test_windows_of_more_pixels_than_are_loaded_together(kind: str, channels: int, launch: Any, window: Window) -> None:
    case, shape = Case(kind, launch), (2, 9, 8, channels)
    x = case.stored(case.rng.integers(-2, 3, shape))
    expected, sizes = REFERENCE.im2col(exact(x), window), (*geometry(window, shape), *ints(*window.dilation))
    columns, dx = case.blank(*expected.shape), case.blank(*shape)
    case.run("conv", "im2col", x, columns, *sizes)
    equal(columns, expected)
    case.run("conv", "col2im", columns, dx, *sizes)
    equal(dx, REFERENCE.col2im(expected, shape, window))


PAIRS = {
    "one pixel": (Window((1, 1)), Window((2, 2), (2, 2))),
    "rows that threads share evenly": (Window((2, 5)), Window((2, 2), (2, 2))),
    "rows longer than a thread takes": (Window((2, 4)), Window((2, 2), (1, 2))),
    "padded": (Window((3, 3), (2, 1), ((1, 2), (2, 0))), Window((2, 3), (2, 3))),
    "padded pool": (Window((3, 2)), Window((2, 2), (2, 1), ((1, 0), (0, 1)))),
}


@pairwise(kind=EVERY_KIND, relu=(0, 1), channels=(1, 2), filters=(3, 6, 8), launch=IMAGES, windows=PAIRS, parts=(1, 4))
def test_small_patches_are_convolved_and_pooled(
    kind: str, relu: int, channels: int, filters: int, launch: Any, windows: tuple[Window, Window], parts: int
) -> None:
    """All precisions add integers exactly, so ties are the same as in two separate operations."""
    (window, pool), case, shape = windows, Case(kind, launch), (3, 7, 8, channels)
    shapes = shape, (*window.kernel, channels, filters), (filters,)
    x, weight, bias = (case.stored(case.rng.integers(-2, 3, size)) for size in shapes)
    convolved, columns = REFERENCE.conv2d(exact(x), exact(weight), exact(bias), window)
    pooled, won = REFERENCE.max_pool2d(convolved, pool)
    y, indices = closed_by_relu(pooled, won, relu, "uint8")
    dy = case.stored(case.rng.integers(-3, 4, y.shape))
    through = np.where((pooled > 0) | (relu == 0), exact(dy), 0)
    through = REFERENCE.max_pool2d_backward(through, won, convolved.shape, pool)
    grads = np.zeros(weight.shape), np.zeros(filters)
    REFERENCE.conv2d_backward(through, columns, exact(x), exact(weight), *grads, window, need_dx=False)

    found, places = case.blank(*y.shape), array(np.ones(y.shape), np.uint8)
    (top, _), (left, _) = pool.padding
    sizes = *geometry(window, shape), *ints(*y.shape[1:3], *pool.kernel, *pool.stride, top, left, filters)
    case.run("conv_pool", "conv_pool", x, weight, bias, found, places, *sizes, np.int32(relu))
    equal(found, y)
    equal(places, indices)
    sums = [case.blank_sums(parts, *grad.shape) for grad in grads]
    case.run("conv_pool", "conv_pool_weight", x, dy, places, *sums, *sizes, np.int32(parts))
    for of_parts, grad in zip(sums, grads, strict=True):
        equal(of_parts.sum(axis=0), grad)
