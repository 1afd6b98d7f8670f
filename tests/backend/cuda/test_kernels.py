"""CUDA kernels on their own, compared with NumPy in double.

These tests cover cases that a backend's calls do not reach: vectors of any alignment and length, NaN, and step
controls. test_operations.py compares the rest. test_sanitized.py runs both under sanitizers, which end the process at
an out-of-bounds access, so every array ends where its memory ends.
"""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Control, Rule, UpdateScalars, create_backend
from cupynet.backend.cuda.launch import KINDS, OPTIONS, WIDE, source
from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.parallel.communicators.base import SerialCommunicator
from cupynet.training import loss_scaling as scaling
from tests.support.backends import NO_BFLOAT16
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("devices")
TOLERANCE = {"half": 1e-3, "bfloat16": 8e-3, "float": 1e-6, "double": 1e-14}
SIZES = [0, 1, 7, 8, 17, 101]
NULL = np.uint64(0)
EVERY_KIND = [kind for kind in KINDS if kind != "bfloat16" or not NO_BFLOAT16]
LAUNCHES = {"one thread": ((1,), (1,)), "3 blocks of 32": ((3,), (32,))}  # grids and blocks


def run_kernel(file: str, name: str, launch: Any, *arguments: Any) -> None:
    """Run a kernel on device copies of host arrays, each with all of its memory, and copy them back."""
    import cupy

    copies: dict[int, tuple[Any, Any]] = {}

    def sent(argument: Any) -> Any:
        if not isinstance(argument, np.ndarray):
            return argument
        memory = argument if argument.base is None else argument.base
        _, copy = copies.setdefault(id(memory), (memory, cupy.asarray(memory)))
        start = (argument.ctypes.data - memory.ctypes.data) // argument.itemsize
        return copy.reshape(-1)[start : start + argument.size].reshape(argument.shape)

    kernel = cupy.RawModule(code=source(file), options=OPTIONS).get_function(name)
    kernel(*launch, tuple(sent(argument) for argument in arguments))
    for memory, copy in copies.values():
        memory[...] = cupy.asnumpy(copy)


def array(values: Any, dtype: Any, start: int = 0) -> Any:
    """Return a copy that starts `start` elements after a multiple of 16 bytes and ends with its memory."""
    values = np.asarray(values)
    memory = np.empty(start + values.size, dtype)
    view = memory[start:].reshape(values.shape)
    view[...] = values.astype(dtype)
    return view


def exact(values: Any) -> Any:
    return np.array(values, np.float64)


class Case:
    """Arrays and kernels of one precision, and the grid and block of their launches."""

    def __init__(self, kind: str, launch: Any = ((1,), (32,))) -> None:
        self.kind, self.launch = kind, launch
        self.storage, self.accumulate = (stored_dtype(name) for name in KINDS[kind])
        self.rng = np.random.default_rng(1)

    def stored(self, values: Any, start: int = 0) -> Any:
        return array(values, self.storage, start)

    def wide(self, values: Any, start: int = 0) -> Any:
        return array(values, self.accumulate, start)

    def normal(self, *shape: int, start: int = 0) -> Any:
        return self.stored(self.rng.normal(size=shape), start)

    def number(self, value: float) -> Any:
        return self.accumulate.type(value)

    def run(self, file: str, name: str, *arguments: Any) -> None:
        run_kernel(file, f"{name}_{self.kind}", self.launch, *arguments)


def equal(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(exact(found), exact(expected))


def close(found: Any, expected: Any, kind: str) -> None:
    scale = np.maximum(1, np.abs(expected))
    np.testing.assert_allclose(exact(found) / scale, expected / scale, rtol=0, atol=TOLERANCE[kind])


# flat vectors --------------------------------------------------------------------------------------------------------


@pairwise(kind=EVERY_KIND, launch=LAUNCHES, start=(0, 1), size=SIZES)
def test_kernels_over_vectors_take_any_alignment_length_and_nan(kind: str, launch: Any, start: int, size: int) -> None:
    case = Case(kind, launch)
    values, widened = case.wide(case.rng.normal(size=size) * 1000, start), case.wide(np.full(size, np.nan))
    values[::3], values[::7] = 0, np.nan
    x, y, dy = case.stored(np.ones(size)), case.stored(values, 1 - start), case.normal(size, start=start)
    closed = np.where(exact(y) > 0, exact(dy), 0)
    case.run("update", "narrow", values, x, np.int64(size))
    equal(x, values.astype(case.storage))
    case.run("update", "widen", x, widened, np.int64(size))
    equal(widened, x)
    case.run("activation", "relu_backward", dy, y, np.int64(size))
    equal(dy, closed)
    case.run("activation", "relu", y, np.int64(size))
    equal(y, np.maximum(exact(x), 0))


@pytest.mark.smoke
@pairwise(kind=EVERY_KIND, launch=LAUNCHES, start=(0, 1), count=(1, 3, 16), size=SIZES)
def test_weighted_sums_on_gpus_match_the_host(kind: str, launch: Any, start: int, count: int, size: int) -> None:
    """Sums are equal bit for bit if NumPy also rounds once. Null pointers are not read. A part may be the output."""
    case = Case(kind, launch)
    parts = [case.normal(size, start=start) for _ in range(count)]
    shares = [np.float64(share) for share in case.rng.random(count)]
    expected = sum((exact(part) * share for part, share in zip(parts, shares, strict=True)), np.zeros(size))
    padding = 16 - count
    given = *parts, *[NULL] * padding, *shares, *[np.float64(0)] * padding
    case.run("averages", "weighted_sum", parts[-1], *given, np.int32(count), np.int64(size))
    if kind == "bfloat16":
        close(parts[-1], expected, kind)
    else:
        equal(parts[-1], expected.astype(case.storage))


# updates --------------------------------------------------------------------------------------------------------------


def controls_of(**values: float) -> Any:
    """Return a step's controls with these values and zeros otherwise."""
    return array([values.get(place.name, 0.0) for place in Control], np.float64)


class Update:
    """An update's vectors, its copy of the weights in storage precision, and its kernel launch."""

    def __init__(self, case: Case, rule: Rule, size: int, start: int = 0) -> None:
        self.case, self.rule, self.size = case, rule, size
        rng = np.random.default_rng(size)
        self.vectors = {name: case.wide(rng.normal(size=size), start) for name in ("weight", "grad", *rule.states)}
        for name in set(rule.states) - {"velocity", "mean"}:
            np.abs(self.vectors[name], out=self.vectors[name])  # the rule takes their roots
        self.copy = case.stored(np.ones(size), start)

    def run(self, move: UpdateScalars, controls: Any = NULL) -> None:
        vectors, without_norm = (*self.vectors.values(), self.copy), (self.case.number(0), NULL)
        numbers = *map(self.case.number, move.in_order()), *without_norm
        self.case.run("update", f"{self.rule.name}_update", *vectors, *numbers, controls, np.int64(self.size))


FACTORS = (0.5, 0.25, 0.125)
ON_DEVICE = {"RATE": 0.5, "FIRST": 0.5, "SECOND": 0.25, "THIRD": 2.0, "USED": 4.0, "SCALE": 77.0}


@pairwise(kind=EVERY_KIND, launch=LAUNCHES, start=(0, 1), rule=RULES, size=SIZES)
def test_updates_take_their_numbers_from_the_device_or_from_the_launch(
    kind: str, launch: Any, start: int, rule: Rule, size: int
) -> None:
    """Results equal those with numbers in the launch and aligned vectors, bit for bit."""
    expected, found = (Update(Case(kind, launch), rule, size, first) for first in (0, start))
    expected.run(UpdateScalars(0.25, 0.125, l2=0.5, decay=0.25, numbers=(0.5, 0.25, 2.0), factors=FACTORS))
    found.run(UpdateScalars(0.5, 0.5, l2=0.5, decay=0.25, factors=FACTORS), controls_of(**ON_DEVICE, GO=1))
    for name, vector in found.vectors.items():
        equal(vector, expected.vectors[name])
    equal(found.copy, expected.copy)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_an_infinite_weight_without_decay_stays_infinite(rule: Rule) -> None:
    update = Update(Case("float"), rule, 1)
    update.vectors["weight"][0] = np.inf
    update.run(UpdateScalars(0.5, factors=FACTORS))
    assert update.vectors["weight"][0] == np.inf and np.isfinite(update.vectors["grad"]).all()


@pairwise(kind=WIDE, launch=LAUNCHES, start=(0, 1), go=(0, 1), size=SIZES)
def test_a_skipped_step_is_undone_on_the_device(kind: str, launch: Any, start: int, go: int, size: int) -> None:
    case = Case(kind, launch)
    vector, kept = case.normal(size, start=start), case.normal(size)
    expected = np.array(vector if go else kept)
    case.run("update", "undo", vector, kept, controls_of(GO=go), np.int64(size))
    equal(vector, expected)


def steps(kind: str, losses: list[float], squares: list[float], controls: Any, grow_after: int, most: float) -> Any:
    """Return the controls after steps of 8 samples, with sums of losses in three parts and of squares in two."""
    case, norm = Case(kind), array([0], KINDS[kind][1])
    sizes = (np.int32(size) for size in (3, 2, 8, grow_after))
    how = NULL, *sizes, np.float64(1.0), np.float64(most)
    for loss, square in zip(losses, squares, strict=True):
        sums = case.wide([loss, 1, -1]), case.wide([0, square]), norm, array([5], np.int64)
        case.run("update", "judge", controls, *sums, array([0, 0], np.float64), *how)
        equal(norm, [square])
    return {place.name: float(controls[place]) for place in Control}


@pytest.mark.parametrize("kind", WIDE)
def test_the_device_skips_steps_and_scales_losses_as_the_host_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_nonfinite_step_halts_the_steps_captured_after_it(
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


def test_the_numbers_of_steps_are_read_row_by_row_and_the_last_row_again() -> None:
    controls, table = controls_of(RATE=9, GO=1), array([0, 2, *range(1, 9), 7, 7, 7, 7], np.float64)
    for first in (1, 5, 5):
        run_kernel("update", "steer_double", ((1,), (32,)), controls, table)
        equal(controls[:4], [first, first + 1, first + 2, first + 3])
        assert controls[Control.GO] == 1


# losses --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("loss", [None, *TARGET_LOSSES])
def test_nan_and_invalid_labels_spoil_only_the_loss_of_their_row(kind: str, loss: str | None) -> None:
    case = Case(kind, ((1,), (4, 2)))
    outputs = case.stored([[0, np.nan, 1], [0, 1, 2], [0, 1, 2], [3, 2, 1]])
    labels, losses, gradient = array([0, 3, -1, 0], np.int64), case.wide(np.ones(4)), case.stored(np.ones((4, 3)))
    sizes = case.number(1), NULL, np.int32(4), np.int32(3)
    if loss is None:
        outputs[3, 1] = -np.inf
        weights, results = case.wide(np.ones(3)), (losses, gradient, case.number(0))
        case.run("reductions", "softmax_cross_entropy", outputs, labels, weights, *results, *sizes)
    else:
        results = losses, gradient, case.number(1)
        case.run("reductions", f"{loss}_loss", outputs, labels, NULL, *results, *sizes, np.int32(0))
    assert np.isnan(losses).tolist() == [True, True, True, False]
    assert np.isnan(exact(gradient)).all(axis=1).tolist()[1:] == [True, True, False]


# batches -------------------------------------------------------------------------------------------------------------


@pairwise(kind=EVERY_KIND, threads=(1, 16), columns=(0, 3, 40), channels=(1, 2), samples=(0, 1))
def test_the_next_batch_has_the_next_samples_of_the_epoch(
    kind: str, threads: int, columns: int, channels: int, samples: int
) -> None:
    """Two of five samples have been taken, so the batch has the other three. Labels are class indices or targets."""
    case, taken = Case(kind, ((3, 2), (threads,))), [4, 3, 1]
    pixels, order = array(case.rng.integers(0, 256, (5, 34)), np.uint8), array([2, 0, 2, *taken], np.int64)
    labels = array(case.rng.integers(0, 9, (5, columns) if columns else 5), np.float32 if columns else np.int64)
    scale, shift = case.wide([0.5, 0.25][:channels]), case.wide([1, 2][:channels])
    batch, found = case.stored(np.zeros((3, 34))), array(np.zeros((3, *labels.shape[1:])), labels.dtype)
    numbers = array(np.zeros(3), np.int64) if samples else NULL
    given, got = ((NULL, labels), (NULL, found)) if columns else ((labels, NULL), (found, NULL))
    sizes = (np.int32(size) for size in (3, 34, channels, columns))
    case.run("images", "next_batch", pixels, order, *given, scale, shift, batch, *got, numbers, *sizes)
    expected = exact(pixels[taken]) * np.tile(exact(scale), 34 // channels) + np.tile(shift, 34 // channels)
    close(batch, expected, kind)
    equal(found, labels[2:])
    equal(numbers, taken if samples else 0)
