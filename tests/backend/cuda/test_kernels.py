"""Each CUDA kernel by itself, run on the CPU and compared with NumPy in double.

For what the calls of a backend do not reach: vectors of any alignment and length, grids of a few threads, NaN and ties.
test_sanitized.py runs these tests under sanitizers, which end the process at an access beyond an array: so every array
ends where its memory ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Control, Rule, UpdateScalars, Window, create_backend, philox
from cupynet.backend.cuda.launch import FOLDER, KINDS, OPTIONS, WIDE, source
from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference import activation as pointwise
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.parallel.communicators.base import SerialCommunicator
from cupynet.training import loss_scaling as scaling
from tests.standin.host import host_library
from tests.support.backends import GPU, NO_BFLOAT16, Reference
from tests.support.pairwise import pairwise

SANITIZED = "CUPYNET_TEST_SANITIZED" in os.environ
TOLERANCE = {"half": 1e-3, "bfloat16": 8e-3, "float": 1e-6, "double": 1e-14}
SIZES = [0, 1, 7, 8, 17, 101]
NULL = np.uint64(0)
REFERENCE = Reference("double")


def launches(*sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    """Grids and blocks, by a name such as `3x2 blocks of 16`."""
    text = "{} blocks of {}".format
    return {text(*("x".join(map(str, size)) for size in each)): each for each in sizes}


EVERY_KIND = [kind for kind in KINDS if kind != "bfloat16" or not NO_BFLOAT16]
ONE_AXIS = launches(((1,), (1,)), ((3,), (32,)))
TWO_AXES = launches(((1, 1), (1, 1)), ((2, 2), (4, 2)))
IMAGES = launches(((1, 1), (1,)), ((3, 2), (16,)))


class DeviceKernel:
    """A kernel on the GPU that takes arrays of the host, as `HostKernel` does."""

    def __init__(self, file: str, name: str) -> None:
        import cupy

        self._cupy, self._kernel = cupy, cupy.RawModule(code=source(file), options=OPTIONS).get_function(name)

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        copies: dict[int, tuple[Any, Any]] = {}
        self._kernel(grid, block, tuple(self._sent(argument, copies) for argument in arguments))
        for memory, copy in copies.values():
            memory[...] = self._cupy.asnumpy(copy)

    def _sent(self, argument: Any, copies: dict[int, tuple[Any, Any]]) -> Any:
        """The argument in a copy of the whole memory that it is part of."""
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
    """Where kernels run."""
    global _kernel
    _kernel = request.param
    yield
    _kernel = None


def kernel(file: str, name: str) -> Any:
    if _kernel is not None:
        return _kernel(file, name)
    if SANITIZED:  # from the file itself, so that the sanitizer names it
        return host_library(FOLDER / f"{file}.cu", True)[name]
    return host_library(source(file), options=OPTIONS)[name]  # as the stand-in of CuPy compiles it


def array(values: Any, dtype: Any, start: int = 0) -> Any:
    """A copy that begins `start` elements behind a multiple of 16 bytes, and ends with its memory."""
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
    """Arrays and kernels of one precision, with the grid and block of its launches."""

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
        """Compare in the precision of storage."""
        self._close(found, expected, TOLERANCE[self.kind] * times)

    def close_sums(self, found: Any, expected: Any, times: float = 1) -> None:
        """Compare in the precision of sums."""
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


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), name=pointwise.NAMES, size=SIZES)
def test_activations_of_one_value_at_a_time(kind: str, launch: Any, start: int, name: str, size: int) -> None:
    """NaN stays, and numbers far from zero give none."""
    case, one = Case(kind, launch), pointwise.POINTWISE[name]
    how = np.int32(pointwise.NAMES.index(name)), case.number(0.25), np.int64(size)
    x = case.stored(case.rng.normal(size=size) * np.resize([1, 3, 1e4], size), start)
    x[::11] = np.nan
    y = one.forward(np, exact(x), 0.25)
    kept = case.stored(x if name in pointwise.OF_INPUT else y, 1 - start)
    dy = case.normal(size, start=start)
    expected = exact(dy) * one.derivative(np, exact(kept), 0.25)
    case.run("activation", "pointwise", x, x, *how)
    case.close(x, y, 4)
    case.run("activation", "pointwise_backward", dy, kept, *how)
    case.close(dy, expected, 4)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), columns=(1, 3, 8, 24), relu=(0, 1))
def test_a_bias_is_added_to_each_row(kind: str, launch: Any, start: int, columns: int, relu: int) -> None:
    case = Case(kind, launch)
    y, bias = case.normal(5, columns, start=start), case.normal(columns)
    y[2, 0] = np.nan
    expected = exact(y) + exact(bias)
    case.run("activation", "add_bias", y, bias, np.int64(5), *ints(columns, relu))
    case.close(y, np.maximum(expected, 0) if relu else expected)


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
    """Bit for bit if NumPy rounds once, too. Null pointers are not read; the sum may go into one of its parts."""
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


@pairwise(kind=WIDE, start=(0, 1), size=SIZES)
def test_the_squares_of_a_vector_are_added_up(kind: str, start: int, size: int) -> None:
    case = Case(kind)
    vector, sums, total = case.normal(size, start=start), case.blank_sums(3), case.blank_sums(1)
    case.run("reductions", "sum_vector", vector, sums, np.int64(size), np.int32(1), launch=((3,), (32,)))
    case.run("reductions", "sum_vector", sums, total, np.int64(3), np.int32(0), launch=((1,), (8,)))
    case.close(total[0], (exact(vector) ** 2).sum(), 10)


# updates --------------------------------------------------------------------------------------------------------------


def controls_of(**values: float) -> Any:
    """The controls of a step with these values; the others are 0."""
    return array([values.get(place.name, 0.0) for place in Control], np.float64)


class Update:
    """The vectors of an update, the copy of the weights in storage, and the launch of its kernel."""

    def __init__(self, case: Case, rule: Rule, size: int, start: int) -> None:
        self.case, self.rule, self.size = case, rule, size
        rng = np.random.default_rng(size)
        self.vectors = {name: case.wide(rng.normal(size=size), start) for name in ("weight", "grad", *rule.states)}
        for name in set(rule.states) - {"velocity", "mean"}:
            np.abs(self.vectors[name], out=self.vectors[name])  # roots are taken of these
        self.copy = case.stored(np.ones(size), start)

    def run(self, move: UpdateScalars, controls: Any = NULL, copied: bool = True) -> None:
        numbers = [self.case.number(number) for number in move.in_order()]
        copy = self.copy if copied else NULL
        name = f"{self.rule.name}_update"
        self.case.run("update", name, *self.vectors.values(), copy, *numbers, controls, np.int64(self.size))


MOVES = {
    "plain": UpdateScalars(0.1, 0.25),
    "penalties": UpdateScalars(0.1, 0.5, l1=0.02, l2=0.01),
    "limits": UpdateScalars(0.1, 1.0, clip=0.3, decay=0.05),
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
    """Bit for bit as with the numbers in the launch."""
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


@pairwise(kind=WIDE, launch=ONE_AXIS, start=(0, 1), size=SIZES)
def test_gradients_are_clipped(kind: str, launch: Any, start: int, size: int) -> None:
    case = Case(kind, launch)
    for squared, factor in ((4.0, 1.0), (16.0, 0.5), (np.nan, np.nan)):
        grad = case.normal(size, start=start)
        expected = exact(grad) * factor
        case.run("update", "clip_norm", grad, case.wide([squared]), case.number(2), NULL, np.int64(size))
        case.close(grad, expected)


@pytest.mark.parametrize("kind", WIDE)
def test_the_clipping_norm_follows_the_loss_scale(kind: str) -> None:
    case = Case(kind)
    grad, controls = case.wide([3.0, 4.0]), controls_of(USED=4, SCALE=8)
    case.run("update", "clip_norm", grad, case.wide([25.0]), case.number(0.5), controls, np.int64(2))
    case.close(grad, [1.2, 1.6])


def stretches(size: int) -> Any:
    """(3, 3): two layers; the second has two stretches, of which one may be empty."""
    third = size // 3
    return array([(0, third, 0), (third, third + third // 2, 1), (size - third, size, 1)], np.int64)


@pairwise(kind=WIDE, launch=launches(((1, 1), (1,)), ((3, 2), (32,)), ((2, 3), (8,))), size=(0, 3, 17, 101))
def test_layers_are_clipped_by_their_own_norms(kind: str, launch: Any, size: int) -> None:
    case, table = Case(kind, launch), stretches(size)
    grad, blocks = case.normal(size), launch[0][0]
    expected, norms = exact(grad), np.zeros(2)
    for start, stop, layer in table.tolist():
        norms[layer] += (expected[start:stop] ** 2).sum()
    for start, stop, layer in table.tolist():
        expected[start:stop] *= min(1.0, 1.0 / max(np.sqrt(norms[layer]), 1e-30))
    sums, squares = case.blank_sums(3, blocks), case.blank_sums(2)
    case.run("update", "stretch_squares", grad, table, sums, np.int32(3))
    case.run("update", "layer_squares", sums, table, squares, *ints(3, blocks, 2), launch=((1,), (32,)))
    case.close(squares, norms, 4)
    controls = controls_of(USED=2, SCALE=64)
    case.run("update", "clip_norms", grad, squares, table, case.number(0.5), controls, np.int32(3))
    case.close(grad, expected, 4)


@pairwise(kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((3, 2), (32,))), go=(None, 1, 0), size=(3, 17, 101))
def test_trust_ratios_scale_the_steps(kind: str, launch: Any, go: int | None, size: int) -> None:
    case, table = Case(kind, launch), stretches(size)
    weight, grad, copy = case.wide(case.rng.normal(size=size)), case.wide(np.ones(size)), case.stored(np.ones(size))
    expected, expected_copy = exact(weight), np.array(copy)
    for start, stop, layer in table.tolist() if go != 0 else []:
        expected[start:stop] -= 0.125 * (2.0, 1.0)[layer]
        expected_copy[start:stop] = expected[start:stop].astype(case.storage)
    controls, rate = (NULL, 0.125) if go is None else (controls_of(RATE=0.5, GO=go), 0.25)
    ratios = case.wide([4.0, 9.0]), case.wide([1.0, 0.0])
    case.run("update", "trust_weights", weight, grad, copy, *ratios, table, case.number(rate), controls, np.int32(3))
    case.close_sums(weight, expected)
    case.close(copy, expected_copy)


def steps(kind: str, losses: list[float], squares: list[float], controls: Any, grow_after: int, most: float) -> Any:
    """The controls after steps with these sums of losses and squared norms, of 8 samples each."""
    case = Case(kind, ((2,), (32,)))
    how = array([5], np.int64), *ints(8, grow_after), np.float64(1.0), np.float64(most)
    for loss, square in zip(losses, squares, strict=True):
        case.run("update", "judge", controls, case.wide([loss]), case.wide([square]), *how)
    return {place.name: float(controls[place]) for place in Control}


@pytest.mark.parametrize("kind", WIDE)
def test_steps_are_judged_as_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `LossScaler`, on gradients of which a third overflows."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 4)
    rng, backend, made = np.random.default_rng(13), create_backend("numpy", "half"), 0
    scaler = scaling.LossScaler(backend, SerialCommunicator())
    backend.loss_scale = 2.0**6
    controls = controls_of(SCALE=backend.loss_scale)
    for _ in range(300):
        overflow, before = rng.random() < 0.3 and backend.loss_scale > 1, backend.loss_scale
        made += not scaler.skips(overflow=overflow, failed=False)
        scaler.grow()
        found = steps(kind, [2.0], [np.inf if overflow else 1.0], controls, 4, scaling.MOST)
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


# rows and columns ----------------------------------------------------------------------------------------------------


def softmax(logits: Any) -> Any:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


ROWS = launches(((1,), (1, 1)), ((2,), (4, 2)), ((1,), (32, 4)))
OUTPUTS = ((1, 1), (3, 10), (5, 33))


@pairwise(kind=EVERY_KIND, launch=ROWS, shape=OUTPUTS)
def test_softmax_and_its_derivative(kind: str, launch: Any, shape: tuple[int, int]) -> None:
    case = Case(kind, launch)
    y, dy, sizes = case.stored(case.rng.normal(0, 3, shape)), case.normal(*shape), (np.int64(shape[0]), *ints(shape[1]))
    expected = softmax(exact(y))
    case.run("reductions", "softmax", y, *sizes)
    case.close(y, expected, 10)
    expected = exact(y) * (exact(dy) - (exact(dy) * exact(y)).sum(axis=1, keepdims=True))
    case.run("reductions", "softmax_backward", dy, y, *sizes)
    case.close(dy, expected, 10)


@pairwise(kind=EVERY_KIND, launch=ROWS, shape=OUTPUTS, smoothing=(0.0, 0.25), weighted=(False, True), scaled=(0, 1))
def test_cross_entropy_and_its_gradient(
    kind: str, launch: Any, shape: tuple[int, int], smoothing: float, weighted: bool, scaled: int
) -> None:
    (rows, columns), case = shape, Case(kind, launch)
    logits, labels = case.stored(case.rng.normal(0, 3, shape)), array(case.rng.integers(0, columns, rows), np.int64)
    weights = case.wide(case.rng.uniform(0, 2, columns)) if weighted else NULL
    own = exact(weights) if weighted else np.ones(columns)
    target = (1 - smoothing) * np.eye(columns)[labels] * own[labels][:, None] + smoothing / columns * own
    p, losses, gradient = softmax(exact(logits)), case.blank_sums(rows), case.blank(*shape)
    factor = (case.number(2 / rows), controls_of(SCALE=4)) if scaled else (case.number(8 / rows), NULL)
    arguments = logits, labels, weights, losses, gradient, case.number(smoothing), *factor, *ints(*shape)
    case.run("reductions", "softmax_cross_entropy", *arguments)
    case.close_sums(losses, -(target * np.log(p)).sum(axis=1), 10)
    case.close(gradient, (target.sum(axis=1, keepdims=True) * p - target) * 8 / rows, 20)


@pairwise(kind=EVERY_KIND, launch=launches(((1,), (1,)), ((1,), (32,))), shape=((0, 3), *OUTPUTS), levels=(2, 9))
def test_hits_are_rows_whose_first_largest_value_is_at_the_label(
    kind: str, launch: Any, shape: tuple[int, int], levels: int
) -> None:
    (rows, columns), case = shape, Case(kind, launch)
    scores, hits = case.stored(case.rng.integers(-levels, 0, shape)), array([-1], np.int64)
    labels = array(case.rng.integers(0, columns, rows), np.int64)
    case.run("reductions", "count_hits", scores, labels, NULL, hits, *ints(rows, columns, 0))
    assert hits[0] == (exact(scores).argmax(axis=1) == labels).sum()
    targets = array(case.rng.integers(0, 3, (rows, columns + 1)), np.float32)
    case.run("reductions", "count_hits", scores, NULL, targets, hits, *ints(rows, columns, columns + 1))
    assert hits[0] == (exact(scores).argmax(axis=1) == targets[:, :columns].argmax(axis=1)).sum()


@pairwise(kind=EVERY_KIND, launch=ROWS, shape=OUTPUTS, smoothing=(0.0, 0.25), weighted=(0, 1, 2, 3), scaled=(0, 1))
def test_cross_entropy_of_probabilities_and_its_gradient(
    kind: str, launch: Any, shape: tuple[int, int], smoothing: float, weighted: int, scaled: int
) -> None:
    """Weights of classes, of rows, both or none."""
    (rows, columns), case, of_rows = shape, Case(kind, launch), weighted % 2
    logits, weights = case.stored(case.rng.normal(0, 3, shape)), NULL
    targets = array(case.rng.uniform(0, 1, (rows, columns + of_rows)), np.float32)
    target = (1 - smoothing) * targets[:, :columns].astype(float) + smoothing / columns
    if weighted > 1:
        weights = case.wide(case.rng.uniform(0, 2, columns))
        target *= exact(weights)
    target *= targets[:, columns:] if of_rows else 1
    p, losses, gradient = softmax(exact(logits)), case.blank_sums(rows), case.blank(*shape)
    factor = (case.number(2 / rows), controls_of(SCALE=4)) if scaled else (case.number(8 / rows), NULL)
    sizes = ints(*shape, columns + of_rows)
    case.run(
        "reductions", "soft_cross_entropy", logits, targets, weights, losses, gradient, case.number(smoothing),
        *factor, *sizes,
    )  # fmt: skip
    case.close_sums(losses, -(target * np.log(p)).sum(axis=1), 10)
    case.close(gradient, (target.sum(axis=1, keepdims=True) * p - target) * 8 / rows, 20)


@pairwise(kind=EVERY_KIND, launch=ROWS, shape=OUTPUTS, loss=tuple(TARGET_LOSSES), scaled=(0, 1), more=(None, 0, 1))
def test_losses_of_each_output(
    kind: str, launch: Any, shape: tuple[int, int], loss: str, scaled: int, more: int | None
) -> None:
    """Far from their kinks, and where exponentials overflow; more: columns of targets for weights, None for labels."""
    (rows, columns), case = shape, Case(kind, launch)
    prediction = case.stored(case.rng.integers(-9, 10, shape) + 0.3)
    prediction[0, 0] = 1000 if columns > 1 else -1000
    labels, stride = array(case.rng.integers(0, columns, rows), np.int64), columns + (more or 0)
    targets = array(case.rng.integers(0, 2, (rows, stride)) / 2, np.float32)
    target = np.eye(columns)[labels] if more is None else exact(targets[:, :columns])
    values, slopes = TARGET_LOSSES[loss](np, exact(prediction), target, 0.75)
    times = exact(targets[:, columns:]) if more else 1
    given = (labels, NULL) if more is None else (NULL, targets)
    losses, gradient = case.blank_sums(rows), case.blank(*shape)
    factor = (case.number(2), controls_of(SCALE=4)) if scaled else (case.number(8), NULL)
    arguments = prediction, *given, losses, gradient, case.number(0.75), *factor, *ints(*shape, stride)
    case.run("reductions", f"{loss}_loss", *arguments)
    case.close_sums(losses, (values * times).mean(axis=1), 10)
    case.close(gradient, slopes * times * 8, 10)


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


@pairwise(
    kind=EVERY_KIND,
    launch=launches(((1, 1), (1, 1)), ((2, 3), (4, 8)), ((1, 2), (32, 1))),
    sizes=((1, 1, 1), (7, 3, 2), (20, 40, 20)),
    add=(0, 1),
)
def test_columns_are_added_up_in_parts(kind: str, launch: Any, sizes: tuple[int, int, int], add: int) -> None:
    (rows, columns, length), case = sizes, Case(kind, launch)
    values, parts = case.normal(rows, columns), -(-rows // length)
    expected = [exact(values[i * length : (i + 1) * length]).sum(axis=0) + 5 * add for i in range(parts)]
    sums = case.wide(np.full((parts, columns), 5.0))
    counts = np.int64(rows), np.int32(columns), np.int64(length), *ints(parts, add)
    case.run("reductions", "column_sums", values, sums, *counts)
    case.close_sums(sums, expected, 10)


# images --------------------------------------------------------------------------------------------------------------


@pairwise(
    kind=EVERY_KIND,
    launch=launches(((1, 1), (1,)), ((2, 2), (8,))),
    size=(3, 15, 48),
    start=(0, 1),
    channels=(1, 3),
    in_order=(False, True),
)
def test_images_are_gathered_and_scaled(
    kind: str, launch: Any, size: int, start: int, channels: int, in_order: bool
) -> None:
    case = Case(kind, launch)
    images, samples = array(case.rng.integers(0, 256, (4, size)), np.uint8, start), array([3, 0, 3], np.int64)
    scale, shift = case.wide([1 / 255, 0.5, 2][:channels]), case.wide([0, -1, 7][:channels])
    chosen = images[:3] if in_order else images[samples]
    expected = chosen.reshape(3, -1, channels) * exact(scale) + exact(shift)
    batch, order = case.blank(3, size), NULL if in_order else samples
    case.run("images", "load_images", images, order, scale, shift, batch, *ints(3, size, channels))
    case.close(batch, expected.reshape(3, size))


WINDOWS: dict[str, tuple[Window, tuple[int, int, int, int]]] = {
    "one pixel": (Window((1, 1)), (2, 1, 1, 1)),
    "overlapping": (Window((3, 2), (2, 1)), (2, 7, 5, 3)),
    "apart": (Window((2, 2), (3, 3)), (1, 8, 8, 8)),
    "four channels": (Window((2, 3)), (3, 5, 6, 4)),
    "padded": (Window((3, 3), (2, 2), ((1, 2), (2, 0))), (2, 6, 5, 8)),
    "gaps": (Window((3, 2), (1, 2), ((1, 2), (0, 3)), (2, 3)), (2, 6, 7, 3)),
    "gaps, four channels": (Window((2, 3), (2, 1), ((2, 2), (2, 2)), (3, 2)), (1, 5, 6, 4)),
    "more zeros than image": (Window((4, 4), (1, 2), ((3, 3), (3, 3))), (1, 2, 1, 2)),
}
POOLS = {name: case for name, case in WINDOWS.items() if not case[0].dilates}
Shaped = tuple[Window, tuple[int, int, int, int]]


def geometry(window: Window, shape: tuple[int, ...]) -> tuple[np.int32, ...]:
    """The sizes that a kernel over windows takes."""
    (top, _), (left, _) = window.padding
    return ints(*shape, *window.output(*shape[1:3]), *window.kernel, *window.stride, top, left)


@pairwise(kind=EVERY_KIND, launch=IMAGES, start=(0, 1), shaped=WINDOWS)
def test_windows_become_rows_and_back(kind: str, launch: Any, start: int, shaped: Shaped) -> None:
    (window, shape), case = shaped, Case(kind, launch)
    x, dx, sizes = case.normal(*shape, start=start), case.blank(*shape), geometry(window, shape)
    expected = REFERENCE.im2col(exact(x), window)
    columns = case.blank(*expected.shape)
    case.run("conv", "im2col", x, columns, *sizes, *ints(*window.dilation))
    equal(columns, expected)
    case.run("conv", "col2im", columns, dx, *sizes, *ints(*window.dilation))
    case.close(dx, REFERENCE.col2im(expected, shape, window), 4)


@pairwise(kind=EVERY_KIND, repeat=(1, 3), launch=IMAGES, shaped=WINDOWS, parts=(1, 3))
def test_depthwise_convolutions(kind: str, repeat: int, launch: Any, shaped: Shaped, parts: int) -> None:
    """As a convolution whose filters see all channels, with zeros for the others."""
    (window, shape), case = shaped, Case(kind, launch)
    channels, filters = shape[3], shape[3] * repeat
    x, weight = case.normal(*shape), case.normal(*window.kernel, 1, filters)
    mask = np.arange(channels)[:, None] == np.arange(filters) // repeat
    whole, grad = exact(weight) * mask, np.zeros((*window.kernel, channels, filters))
    y, columns = REFERENCE.conv2d(exact(x), whole, None, window)
    dy = case.normal(*y.shape)
    expected = REFERENCE.conv2d_backward(exact(dy), columns, exact(x), whole, grad, None, window, need_dx=True)
    sizes = *geometry(window, shape), *ints(*window.dilation, repeat)
    found, dx, sums = case.blank(*y.shape), case.blank(*shape), case.blank_sums(parts, *weight.shape)
    case.run("conv", "depthwise", x, weight, found, *sizes)
    case.close(found, y, 10)
    case.run("conv", "depthwise_input", dy, weight, dx, *sizes)
    case.close(dx, expected, 10)
    case.run("conv", "depthwise_weight", x, dy, sums, *sizes, np.int32(parts))
    case.close_sums(sums.sum(axis=0), (grad * mask).sum(axis=2, keepdims=True), 20)


@pairwise(kind=EVERY_KIND, winners=("uint8", "int32"), launch=IMAGES, shaped=POOLS)
def test_pools_take_the_first_largest_and_the_first_nan(kind: str, winners: str, launch: Any, shaped: Shaped) -> None:
    (window, shape), case = shaped, Case(kind, launch)
    x, sizes = case.stored(case.rng.integers(-1, 2, shape)), geometry(window, shape)
    x[case.rng.random(shape) < 0.1] = np.nan
    y, won = REFERENCE.max_pool2d(exact(x), window)
    found, places, dx = case.blank(*y.shape), array(np.ones(y.shape), np.dtype(winners)), case.blank(*shape)
    kernel("pool", f"max_pool_{kind}_{winners}")(*launch, (x, NULL, found, places, *sizes, np.int32(0)))
    equal(found, y)
    equal(places, won)
    dy = case.stored(case.rng.integers(-3, 4, y.shape))
    kernel("pool", f"max_pool_backward_{kind}_{winners}")(*launch, (dy, places, dx, *sizes))
    equal(dx, REFERENCE.max_pool2d_backward(exact(dy), won, shape, window))


@pairwise(kind=EVERY_KIND, launch=IMAGES, shaped=POOLS)
def test_pools_of_means(kind: str, launch: Any, shaped: Shaped) -> None:
    (window, shape), case = shaped, Case(kind, launch)
    x, dx, sizes = case.normal(*shape), case.blank(*shape), geometry(window, shape)
    y = REFERENCE.avg_pool2d(exact(x), window)
    found, dy = case.blank(*y.shape), case.normal(*y.shape)
    case.run("pool", "avg_pool", x, found, *sizes)
    case.close(found, y, 4)
    case.run("pool", "avg_pool_backward", dy, dx, *sizes)
    case.close(dx, REFERENCE.avg_pool2d_backward(exact(dy), shape, window), 4)


def closed_by_relu(y: Any, won: Any, relu: int, winners: str) -> tuple[Any, Any]:
    """Outputs and winners after a ReLU, which closes windows without a positive output."""
    if not relu:
        return y, won
    return np.maximum(y, 0), np.where(y > 0, won.astype(int), {"uint8": 255, "int32": -1}[winners])


@pairwise(kind=EVERY_KIND, relu=(0, 1), winners=("uint8", "int32"))
def test_max_pools_with_bias_and_relu(kind: str, relu: int, winners: str) -> None:
    case, window, shape = Case(kind), Window((2, 2), (2, 2)), (2, 5, 4, 3)
    x, bias = case.stored(case.rng.normal(size=shape) - 1), case.normal(3)
    x[0, 0, 0, 0] = np.nan
    biased = (x.astype(case.accumulate) + bias.astype(case.accumulate)).astype(case.storage)
    y, won = closed_by_relu(*REFERENCE.max_pool2d(exact(biased), window), relu, winners)
    found, places = case.blank(*y.shape), array(np.ones(y.shape), np.dtype(winners))
    arguments = x, bias, found, places, *geometry(window, shape), np.int32(relu)
    kernel("pool", f"max_pool_{kind}_{winners}")((2, 1), (8,), arguments)
    equal(found, y)
    equal(places, won)


def test_winners_of_windows_with_256_places() -> None:
    """The number of the last place is 255, which means `closed` only after a ReLU."""
    x = array(np.zeros((1, 16, 16, 1)), np.float32)
    x[0, 15, 15, 0] = 1
    y, places, dx = array([1.0], np.float32), array([0], np.uint8), array(np.ones(256), np.float32)
    sizes = geometry(Window((16, 16)), x.shape)
    kernel("pool", "max_pool_float_uint8")((1, 1), (32,), (x, NULL, y, places, *sizes, np.int32(0)))
    kernel("pool", "max_pool_backward_float_uint8")((1, 1), (32,), (y, places, dx, *sizes))
    assert (y[0], places[0], dx[255], dx[:255].any()) == (1, 255, 1, False)


PAIRS = {
    "one pixel": (Window((1, 1)), Window((2, 2), (2, 2))),
    "rows longer than a thread takes": (Window((2, 4)), Window((2, 2), (1, 2))),
    "padded": (Window((3, 3), (2, 1), ((1, 2), (2, 0))), Window((2, 3), (2, 3))),
    "padded pool": (Window((3, 2)), Window((2, 2), (2, 1), ((1, 0), (0, 1)))),
}


@pairwise(kind=EVERY_KIND, relu=(0, 1), filters=(3, 8), launch=IMAGES, windows=PAIRS, parts=(1, 4))
def test_small_patches_are_convolved_and_pooled(
    kind: str, relu: int, filters: int, launch: Any, windows: tuple[Window, Window], parts: int
) -> None:
    """Integers, which all precisions add exactly, so ties are the same as in two separate operations."""
    (window, pool), case, shape = windows, Case(kind, launch), (3, 7, 8, 2)
    shapes = shape, (*window.kernel, 2, filters), (filters,)
    x, weight, bias = (case.stored(case.rng.integers(-2, 3, size)) for size in shapes)
    convolved, columns = REFERENCE.conv2d(exact(x), exact(weight), exact(bias), window)
    pooled, won = REFERENCE.max_pool2d(convolved, pool)
    y, winners = closed_by_relu(pooled, won, relu, "uint8")
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
    equal(places, winners)
    sums = [case.blank_sums(parts, *grad.shape) for grad in grads]
    case.run("conv_pool", "conv_pool_weight", x, dy, places, *sums, *sizes, np.int32(parts))
    for of_parts, grad in zip(sums, grads, strict=True):
        equal(of_parts.sum(axis=0), grad)


# normalization and random numbers -------------------------------------------------------------------------------------

SHAPES = [(1, 1), (7, 8), (40, 3), (5, 24)]
EPSILON = 0.25


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES, length=(3, 100))
def test_moments_of_parts_are_those_of_all(kind: str, launch: Any, shape: tuple[int, int], length: int) -> None:
    (rows, columns), case = shape, Case(kind, launch)
    x, chunks = case.stored(case.rng.normal(size=shape) + 30), -(-rows // length)
    parts, moments = case.blank_sums(chunks, 2, columns), case.blank_sums(2, columns)
    sizes = np.int64(rows), np.int32(columns), np.int64(length), np.int32(chunks)
    case.run("reductions", "moment_parts", x, parts, *sizes)
    merge = kernel("reductions", f"moment_merge_{case.precise}")
    merge(launch[0][:1], launch[1], (parts, moments, *sizes))
    case.close_sums(moments[0], exact(x).mean(axis=0), 4)
    case.close_sums(moments[1], exact(x).var(axis=0), 60)


class Normalized(Case):
    """Rows and their derivatives, moments and scale of each channel, and x̂ in double."""

    def __init__(self, kind: str, launch: Any, shape: tuple[int, int], start: int = 0) -> None:
        super().__init__(kind, launch)
        self.sizes = np.int64(shape[0]), np.int32(shape[1])
        self.x = self.stored(self.rng.normal(size=shape) + 2, start)
        self.dy = self.normal(*shape, start=start)
        self.mean = self.wide(self.rng.normal(size=shape[1]), start)
        self.variance = self.wide(self.rng.random(shape[1]) + 0.5, start)
        self.scale, self.shift = (self.normal(shape[1], start=start) for _ in range(2))
        self.inverse = 1 / np.sqrt(exact(self.variance) + EPSILON)
        self.normal_x = (exact(self.x) - exact(self.mean)) * self.inverse


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), shape=SHAPES, relu=(0, 1))
def test_channels_are_normalized(kind: str, launch: Any, start: int, shape: tuple[int, int], relu: int) -> None:
    case = Normalized(kind, launch, shape, start)
    y = case.stored(np.zeros(shape), 1 - start)
    arguments = case.x, case.mean, case.variance, case.scale, case.shift, y, case.number(EPSILON), *case.sizes
    case.run("norm", "normalize", *arguments, np.int32(relu))
    expected = case.normal_x * exact(case.scale) + exact(case.shift)
    case.close(y, np.maximum(expected, 0) if relu else expected, 4)


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES, relu=(False, True))
def test_derivatives_of_channels_are_added_up(kind: str, launch: Any, shape: tuple[int, int], relu: bool) -> None:
    case, output, slope = Normalized(kind, launch, shape), NULL, 1.0
    if relu:
        output = case.stored(case.rng.integers(-1, 2, shape))
        output[::3, 0] = np.nan
        slope = exact(output) > 0
    expected, chunks = exact(case.dy) * slope, -(-shape[0] // 16)
    sums = case.blank_sums(chunks, 2, shape[1])
    arguments = case.dy, case.x, output, case.mean, case.variance, sums, case.number(EPSILON), *case.sizes
    case.run("reductions", "normalize_sums", *arguments, np.int64(16), np.int32(chunks))
    equal(case.dy, expected)
    case.close_sums(sums.sum(axis=0)[0], expected.sum(axis=0), 20)
    case.close_sums(sums.sum(axis=0)[1], (expected * case.normal_x).sum(axis=0), 60)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), shape=SHAPES)
def test_channels_are_differentiated(kind: str, launch: Any, start: int, shape: tuple[int, int]) -> None:
    case = Normalized(kind, launch, shape, start)
    sums = case.wide(case.rng.normal(size=(2, shape[1])))
    expected = exact(case.dy) - exact(sums[0]) / 2 - case.normal_x * sums[1] / 2
    arguments = case.dy, case.x, case.mean, case.variance, case.scale, sums, case.number(0.5), case.number(EPSILON)
    case.run("norm", "normalize_backward", *arguments, *case.sizes)
    case.close(case.dy, exact(case.scale) * case.inverse * expected, 8)


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES)
def test_rows_are_normalized_and_differentiated(kind: str, launch: Any, shape: tuple[int, int]) -> None:
    """The second axis of the grid is for the sums."""
    case, lines = Normalized(kind, launch, shape), (launch[0][:1], launch[1])
    y, moments = case.blank(*shape), case.blank_sums(shape[0], 2)
    mean, inverse = exact(case.x).mean(axis=1), 1 / np.sqrt(exact(case.x).var(axis=1) + EPSILON)
    x = (exact(case.x) - mean[:, None]) * inverse[:, None]
    epsilon = case.number(EPSILON), *case.sizes
    case.run("reductions", "normalize_rows", case.x, case.scale, case.shift, y, moments, *epsilon, launch=lines)
    case.close(y, x * exact(case.scale) + exact(case.shift), 4)
    case.close_sums(moments, np.stack([mean, inverse], axis=1), 4)

    chunks, slope = -(-shape[0] // 16), exact(case.dy)
    sums = case.blank_sums(chunks, 2, shape[1])
    how = *case.sizes, np.int64(16), np.int32(chunks)
    case.run("reductions", "normalize_rows_sums", case.dy, case.x, moments, sums, *how)
    case.close_sums(sums.sum(axis=0)[0], (slope * x).sum(axis=0), 60)
    case.close_sums(sums.sum(axis=0)[1], slope.sum(axis=0), 20)

    scaled = slope * exact(case.scale)
    expected = scaled - scaled.mean(axis=1, keepdims=True) - x * (scaled * x).mean(axis=1, keepdims=True)
    case.run("reductions", "normalize_rows_backward", case.dy, case.x, moments, case.scale, *case.sizes, launch=lines)
    case.close(case.dy, inverse[:, None] * expected, 8)


@pairwise(
    kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((2, 2), (32,))), size=(1, 3, 4, 5, 130), in_place=(False, True)
)
def test_dropout_equals_the_reference(kind: str, launch: Any, size: int, in_place: bool) -> None:
    """The integers of backend/philox.py, for samples and epochs of any size."""
    case, below, key = Case(kind, launch), philox.dropped_below(0.3), 0xFEDCBA9876543210
    samples, epoch = np.array([3, (1 << 40) + 5, 0]), np.array([7])
    x = case.normal(3, size)
    expected = np.where(philox.of_examples(np, samples, epoch, key, size) < below, 0, exact(x) * 2)
    out = x if in_place else case.blank(3, size)
    draw = np.uint32(key & philox.MASK), np.uint32(key >> 32), np.uint32(below), case.number(2)
    case.run("dropout", "dropout", x, out, samples, epoch, *draw, *ints(3, size))
    equal(out, expected)
