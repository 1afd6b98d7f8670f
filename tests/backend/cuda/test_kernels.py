"""Each CUDA kernel by itself, run on the CPU and compared with NumPy in double.

For what the calls of a backend do not reach: vectors of any alignment and length, grids of a few threads, NaN and ties.
test_sanitized.py runs the same tests under sanitizers, which end the process at an access beyond an array: so every
array ends where its memory ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import RULES, Control, Move, Rule, Window, create_backend, philox
from cupynet.backend.controls import GIVEN
from cupynet.backend.cuda.launch import FOLDER, KINDS, OPTIONS, WIDE, source
from cupynet.backend.policy import stored_dtype
from cupynet.backend.reference import activation as pointwise
from cupynet.backend.reference.loss import TARGET_LOSSES
from cupynet.core.errors import ConfigError
from cupynet.parallel.communicators.base import SerialCommunicator
from cupynet.training import loss_scaling as scaling
from tests.standin.host import host_library
from tests.support.backends import GPU, Reference
from tests.support.pairwise import pairwise

SANITIZED = "CUPYNET_TEST_SANITIZED" in os.environ
TOLERANCE = {"half": 1e-3, "bfloat16": 8e-3, "float": 1e-6, "double": 1e-14}
SIZES = [0, 1, 3, 7, 8, 16, 17, 101]
NULL = np.uint64(0)


def available(kind: str) -> bool:
    try:
        stored_dtype(KINDS[kind][0])
    except ConfigError:
        return False
    return True


def launches(*sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    """Grids and blocks, by a name such as `3x2 blocks of 16`."""
    text = "{} blocks of {}".format
    return {text(*("x".join(map(str, size)) for size in each)): each for each in sizes}


EVERY_KIND = [kind for kind in KINDS if available(kind)]
ONE_AXIS = launches(((1,), (1,)), ((3,), (32,)))
every_kind = pytest.mark.parametrize("kind", EVERY_KIND)


class DeviceKernel:
    """A kernel on the GPU that takes arrays of the host, as `HostKernel` does.

    The whole memory that an array is part of is copied to the GPU and back.
    """

    def __init__(self, file: str, name: str) -> None:
        import cupy

        self._cupy, self._kernel = cupy, cupy.RawModule(code=source(file), options=OPTIONS).get_function(name)

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        there: dict[int, tuple[Any, Any]] = {}
        given = [self._sent(argument, there) for argument in arguments]
        self._kernel(grid, block, tuple(given))
        for memory, copy in there.values():
            memory[...] = self._cupy.asnumpy(copy)

    def _sent(self, argument: Any, there: dict[int, tuple[Any, Any]]) -> Any:
        if not isinstance(argument, np.ndarray):
            return argument
        memory = argument if argument.base is None else argument.base
        while memory.base is not None:
            memory = memory.base
        if memory.dtype != argument.dtype or not argument.size:
            memory = argument
        _, copy = there.setdefault(id(memory), (memory, self._cupy.asarray(memory)))
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


def types(kind: str) -> tuple[Any, Any]:
    """The dtypes of storage and of accumulation."""
    stored, wide = (stored_dtype(name) for name in KINDS[kind])
    return stored, wide


def array(values: Any, dtype: Any, start: int = 0) -> Any:
    """A copy that begins `start` elements behind a multiple of 16 bytes, and ends with its memory."""
    values = np.asarray(values)
    memory = np.empty(start + values.size, dtype)
    assert memory.ctypes.data % 16 == 0 or not values.size
    view = memory[start:].reshape(values.shape)
    view[...] = values.astype(dtype)
    return view


def close(found: Any, expected: Any, kind: str, times: float = 1.0) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    scale = np.maximum(1, np.abs(expected))
    bound = TOLERANCE[kind] * times
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=bound)


# flat vectors --------------------------------------------------------------------------------------------------------


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1))
def test_activations_of_any_length(kind: str, launch: Any, start: int) -> None:
    (stored, _), rng = types(kind), np.random.default_rng(1)
    for size in SIZES:
        x = array(rng.integers(-2, 3, size), stored, start)
        x[::5] = np.nan
        before = np.array(x, np.float64)
        y = array(before, stored, 1 - start)
        kernel("activation", f"relu_{kind}")(*launch, (x, np.int64(size)))
        np.testing.assert_array_equal(np.array(x, np.float64), np.maximum(before, 0))
        dy = array(rng.normal(size=size), stored, start)
        dy[1::4] = np.nan
        expected = np.where(before > 0, np.array(dy, np.float64), 0)
        kernel("activation", f"relu_backward_{kind}")(*launch, (dy, y, np.int64(size)))
        np.testing.assert_array_equal(np.array(dy, np.float64), expected)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), name=pointwise.NAMES)
def test_activations_of_one_value_at_a_time(kind: str, launch: Any, start: int, name: str) -> None:
    """In place and not; NaN stays, and numbers far from zero give none."""
    (stored, wide), rng, which = types(kind), np.random.default_rng(6), np.int32(pointwise.NAMES.index(name))
    slope = wide.type(0.25)
    for size in SIZES:
        x = array(rng.normal(size=size) * np.resize([1, 3, 1e4], size), stored, start)
        x[::11] = np.nan
        exact = pointwise.POINTWISE[name].forward(np, np.array(x, np.float64), 0.25)
        out = array(np.ones(size), stored, start)
        kernel("activation", f"pointwise_{kind}")(*launch, (x, out, which, slope, np.int64(size)))
        close(out, exact, kind, 4)
        kept = array(np.array(x if name in pointwise.OF_INPUT else exact), stored, 1 - start)
        dy = array(rng.normal(size=size), stored, start)
        factor = pointwise.POINTWISE[name].derivative(np, np.array(kept, np.float64), 0.25)
        expected = np.array(dy, np.float64) * factor
        kernel("activation", f"pointwise_backward_{kind}")(*launch, (dy, kept, which, slope, np.int64(size)))
        close(dy, expected, kind, 4)
        kernel("activation", f"pointwise_{kind}")(*launch, (x, x, which, slope, np.int64(size)))
        np.testing.assert_array_equal(np.array(x, np.float64), np.array(out, np.float64))


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, columns=(1, 3, 8, 24), relu=(0, 1))
def test_a_bias_is_added_to_each_row(kind: str, launch: Any, columns: int, relu: int) -> None:
    (stored, _), rng = types(kind), np.random.default_rng(2)
    for start in (0, 1):
        y = array(rng.normal(size=(5, columns)), stored, start)
        y[2, 0] = np.nan
        bias = array(rng.normal(size=columns), stored)
        expected = np.array(y, np.float64) + np.array(bias, np.float64)
        arguments = y, bias, np.int64(5), np.int32(columns), np.int32(relu)
        kernel("activation", f"add_bias_{kind}")(*launch, arguments)
        close(y, np.maximum(expected, 0) if relu else expected, kind)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1))
def test_precisions_are_converted(kind: str, launch: Any, start: int) -> None:
    (stored, wide), rng = types(kind), np.random.default_rng(3)
    for size in SIZES:
        values = array(rng.normal(size=size) * 1000, wide, start)
        values[::7] = np.nan
        small, back = array(np.ones(size), stored), array(np.ones(size), wide, start)
        kernel("update", f"narrow_{kind}")(*launch, (values, small, np.int64(size)))
        kernel("update", f"widen_{kind}")(*launch, (small, back, np.int64(size)))
        expected = values.astype(stored).astype(wide)
        np.testing.assert_array_equal(small.astype(wide), expected)
        np.testing.assert_array_equal(back, expected)


def update(rule: Rule, kind: str, size: int, start: int, move: Move, controls: Any = NULL, copied: bool = True) -> Any:
    """The vectors of an update by name, the copy of the weights, and the arguments of the kernel."""
    (stored, wide), rng = types(kind), np.random.default_rng(size)
    vectors = {name: array(rng.normal(size=size), wide, start) for name in ("weight", "grad", *rule.states)}
    for name in set(rule.states) - {"velocity", "mean"}:
        np.abs(vectors[name], out=vectors[name])  # roots are taken of these
    copy = array(np.ones(size), stored, start) if copied else NULL
    numbers = [wide.type(number) for number in move.in_order()]
    return vectors, copy, (*vectors.values(), copy, *numbers, controls, np.int64(size))


MOVES = {
    "plain": Move(0.1, 0.25),
    "penalties": Move(0.1, 0.5, l1=0.02, l2=0.01),
    "limits": Move(0.1, 1.0, clip=0.3, decay=0.05),
}


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), copied=(True, False), move=tuple(MOVES), rule=tuple(RULES))
def test_updates_follow_the_rule(kind: str, launch: Any, start: int, copied: bool, move: str, rule: str) -> None:
    """As on arrays, in double."""
    (stored, wide), one = types(kind), RULES[rule]
    how = replace(MOVES[move], numbers=(0.5, 0.25, 2.0), factors=(0.9, 0.8, 0.01))
    for size in SIZES:
        vectors, copy, arguments = update(one, kind, size, start, how, copied=copied)
        exact = {name: vector.astype(np.float64) for name, vector in vectors.items()}
        Reference("double").move_weights(one, exact["weight"], exact["grad"], [exact[name] for name in one.states], how)
        kernel("update", f"{rule}_update_{kind}")(*launch, arguments)
        for name, vector in vectors.items():
            close(vector, exact[name], "double" if wide == np.float64 else "float", 4)
        assert one.moves == (not vectors["grad"].any()) or not size
        if copied and one.moves:
            np.testing.assert_array_equal(copy, vectors["weight"].astype(stored))


def controls_of(**values: float) -> Any:
    """The controls of a step with these values; the others are 0."""
    return array([values.get(place.name, 0.0) for place in Control], np.float64)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), rule=tuple(RULES))
def test_updates_take_their_numbers_from_the_device(kind: str, launch: Any, start: int, rule: str) -> None:
    """Bit for bit as with the numbers in the launch; a skipped step moves nothing."""
    one, factors = RULES[rule], (0.5, 0.25, 0.125)
    given = Move(0.25, 0.125, l2=0.5, decay=0.25, numbers=(0.5, 0.25, 2.0), factors=factors)
    move = Move(0.5, 0.5, l2=0.5, decay=0.25, factors=factors)
    there = {"RATE": 0.5, "FIRST": 0.5, "SECOND": 0.25, "THIRD": 2.0, "USED": 4.0, "SCALE": 77.0}
    run = kernel("update", f"{rule}_update_{kind}")
    for size in SIZES:
        expected, expected_copy, arguments = update(one, kind, size, start, given)
        run(*launch, arguments)
        found, copy, arguments = update(one, kind, size, start, move, controls_of(**there, GO=1))
        run(*launch, arguments)
        for name, vector in found.items():
            np.testing.assert_array_equal(vector, expected[name])
        np.testing.assert_array_equal(copy, expected_copy)
        found, copy, arguments = update(one, kind, size, start, move, controls_of(**there, GO=0))
        before = {name: np.array(vector) for name, vector in found.items()}
        run(*launch, arguments)
        for name, vector in found.items():
            np.testing.assert_array_equal(vector, 0 * vector if name == "grad" else before[name])
        assert (copy == 1).all()


def stretches(size: int) -> Any:
    """(3, 3): two layers; the second has two stretches, of which one may be empty."""
    third = size // 3
    return array([(0, third, 0), (third, third + third // 2, 1), (size - third, size, 1)], np.int64)


@pairwise(kind=WIDE, launch=launches(((1, 1), (1,)), ((3, 2), (32,)), ((2, 3), (8,))))
def test_layers_are_clipped_by_their_own_norms(kind: str, launch: Any) -> None:
    (_, wide), rng = types(kind), np.random.default_rng(8)
    for size in (0, 3, 17, 101):
        grad, table = array(rng.normal(size=size), wide), stretches(size)
        exact = grad.astype(np.float64)
        blocks = launch[0][0]
        sums, squares = array(np.ones((3, blocks)), wide), array(np.ones(2), wide)
        kernel("update", f"stretch_squares_{kind}")(*launch, (grad, table, sums, np.int32(3)))
        arguments = sums, table, squares, np.int32(3), np.int32(blocks), np.int32(2)
        kernel("update", f"layer_squares_{kind}")((1,), (32,), arguments)
        parts = [[exact[start:stop] for start, stop, of in table.tolist() if of == layer] for layer in (0, 1)]
        expected = [sum(float((part**2).sum()) for part in layer) for layer in parts]
        close(squares, expected, kind, 4)
        controls = controls_of(USED=2, SCALE=64)
        arguments = grad, squares, table, wide.type(0.5), controls, np.int32(3)
        kernel("update", f"clip_norms_{kind}")(*launch, arguments)
        for layer, square in zip(parts, expected, strict=True):
            for part in layer:
                part *= min(1.0, 1.0 / max(np.sqrt(square), 1e-30))
        close(grad, exact, kind, 4)


@pairwise(kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((3, 2), (32,))), go=(None, 1, 0))
def test_trust_ratios_scale_the_steps(kind: str, launch: Any, go: int | None) -> None:
    (stored, wide), rng = types(kind), np.random.default_rng(9)
    for size in (3, 17, 101):
        weight, grad, table = (*(array(rng.normal(size=size), wide) for _ in range(2)), stretches(size))
        copy, before = array(np.ones(size), stored), weight.astype(np.float64)
        squares, steps = array([4.0, 9.0], wide), array([1.0, 0.0], wide)
        controls = NULL if go is None else controls_of(RATE=0.5, GO=go)
        rate = wide.type(0.125 if go is None else 0.25)
        arguments = weight, grad, copy, squares, steps, table, rate, controls, np.int32(3)
        exact = before.copy()
        for start, stop, layer in table.tolist() if go != 0 else []:
            exact[start:stop] -= 0.125 * (2.0, 1.0)[layer] * grad[start:stop]
        kernel("update", f"trust_weights_{kind}")(*launch, arguments)
        close(weight, exact, "double" if wide == np.float64 else "float")
        for start, stop, _ in table.tolist() if go != 0 else []:
            assert not grad[start:stop].any()
            np.testing.assert_array_equal(copy[start:stop], weight[start:stop].astype(stored))
        assert go != 0 or (copy == 1).all()


@pytest.mark.parametrize("kind", WIDE)
def test_the_clipping_norm_follows_the_loss_scale(kind: str) -> None:
    _, wide = types(kind)
    grad = array([3.0, 4.0], wide)
    arguments = grad, array([25.0], wide), wide.type(0.5), controls_of(USED=4, SCALE=8), np.int64(2)
    kernel("update", f"clip_norm_{kind}")((1,), (32,), arguments)
    close(grad, [1.2, 1.6], kind)


def steps(kind: str, losses: list[float], squares: list[float], controls: Any, grow_after: int, most: float) -> Any:
    """The controls after steps with these sums of losses and squared norms, of 8 samples each."""
    _, wide = types(kind)
    for loss, square in zip(losses, squares, strict=True):
        how = np.int32(8), np.int32(grow_after), np.float64(1.0), np.float64(most)
        arguments = controls, array([loss], wide), array([square], wide), *how
        kernel("update", f"judge_{kind}")((2,), (32,), arguments)
    return {place.name: float(controls[place]) for place in Control}


@pytest.mark.parametrize("kind", WIDE)
def test_steps_are_judged_as_on_the_host(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `LossScaler`, on gradients of which a third overflows."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 4)
    rng = np.random.default_rng(13)
    for seed in range(5):
        backend = create_backend("numpy", "half")
        scaler, made = scaling.LossScaler(backend, SerialCommunicator()), 0
        backend.loss_scale = float(2 ** rng.integers(3, 24))
        controls = controls_of(SCALE=backend.loss_scale)
        for _ in range(60):
            overflow = rng.random() < 0.3 and backend.loss_scale > 1
            before = backend.loss_scale
            made += not scaler.skips(overflow=overflow, failed=False)
            scaler.grow()
            found = steps(kind, [2.0], [np.inf if overflow else 1.0], controls, 4, scaling.MOST)
            assert (found["SCALE"], found["STEADY"]) == (backend.loss_scale, scaler.steady), seed
            assert (found["USED"], found["GO"], found["HALTED"]) == (before, float(not overflow), 0)
        assert (found["SKIPPED"], found["STEPS"]) == (60 - made, 60) and 0 < made < 60
        assert (found["LOSSES"], found["SAMPLES"]) == (2.0 * made, 8.0 * made)


@pytest.mark.parametrize("kind", WIDE)
@pytest.mark.parametrize(("losses", "squares", "scale", "grow_after", "halted"), [
    ([1, np.nan, 1], [1, 1, 1], 64, 4, 2), ([1, 1, 1], [1, np.inf, 1], 64, 0, 2), ([1, 1], [np.nan, 1], 1, 4, 1),
    ([np.inf, 1], [np.inf, 1], 64, 4, 1), ([1, 1, 1], [1, np.inf, np.nan], 2, 4, 3), ([1, 1], [np.inf, 1], 64, 4, 0),
])  # fmt: skip
def test_a_nonfinite_step_halts_the_stretch(
    kind: str, losses: list[float], squares: list[float], scale: float, grow_after: int, halted: int
) -> None:
    found = steps(kind, losses, squares, controls_of(SCALE=scale), grow_after, 2.0**24)
    assert found["HALTED"] == halted and found["STEPS"] == len(losses)
    fine = [i for i, square in enumerate(squares) if np.isfinite(square) and (not halted or i + 1 < halted)]
    assert (found["SAMPLES"], found["LOSSES"]) == (8 * len(fine), float(len(fine)))
    assert found["GO"] == (0 if halted else np.isfinite(squares[-1]))


@pytest.mark.parametrize("kind", WIDE)
def test_the_loss_scale_stops_growing_at_the_most(kind: str) -> None:
    found = steps(kind, [1.0] * 8, [1.0] * 8, controls_of(SCALE=2.0**23), 2, 2.0**24)
    assert found["SCALE"] == 2.0**24


def test_numbers_are_passed_with_a_launch() -> None:
    controls = controls_of(RATE=1, SCALE=2)
    given = [np.float64(number) for number in (0.1, 0.2, 0.3, 0.4)]
    kernel("update", "steer_double")((2,), (32,), (controls, *given))
    assert [controls[place] for place in GIVEN] == given and controls[Control.SCALE] == 2


def test_a_new_stretch_keeps_what_was_given() -> None:
    controls = controls_of(**{place.name: 7 for place in Control})
    kernel("update", "begin_double")((2,), (32,), (controls, np.float64(64), np.float64(32), np.float64(5)))
    known = {Control.SCALE: 64, Control.USED: 32, Control.GO: 1, Control.STEADY: 5}
    assert [controls[place] for place in Control] == [7 if p in GIVEN else known.get(p, 0) for p in Control]


@pytest.mark.parametrize("rule", RULES)
def test_an_infinite_weight_without_decay_stays_infinite(rule: str) -> None:
    vectors, _, arguments = update(RULES[rule], "float", 1, 0, Move(0.5, factors=(0.5, 0.5, 0.5)), copied=False)
    vectors["weight"][0] = np.inf
    kernel("update", f"{rule}_update_float")((1,), (32,), arguments)
    assert vectors["weight"][0] == np.inf and np.isfinite(vectors["grad"]).all()


@pairwise(kind=WIDE, launch=ONE_AXIS, start=(0, 1))
def test_gradients_are_clipped(kind: str, launch: Any, start: int) -> None:
    (_, wide), rng = types(kind), np.random.default_rng(5)
    for size in SIZES:
        grad = array(rng.normal(size=size), wide, start)
        for squared, factor in ((4.0, 1.0), (16.0, 0.5), (np.nan, np.nan)):
            given = grad.astype(np.float64)
            arguments = grad, array([squared], wide), wide.type(2), NULL, np.int64(size)
            kernel("update", f"clip_norm_{kind}")(*launch, arguments)
            close(grad, given * factor, kind)


@pairwise(kind=WIDE, start=(0, 1))
def test_the_squares_of_a_vector_are_added_up(kind: str, start: int) -> None:
    (_, wide), rng = types(kind), np.random.default_rng(6)
    for size in SIZES:
        vector, sums, total = array(rng.normal(size=size), wide, start), array(np.ones(3), wide), array([1.0], wide)
        kernel("reductions", f"sum_vector_{kind}")((3,), (32,), (vector, sums, np.int64(size), np.int32(1)))
        kernel("reductions", f"sum_vector_{kind}")((1,), (8,), (sums, total, np.int64(3), np.int32(0)))
        close(total[0], (vector.astype(np.float64) ** 2).sum(), kind, 10)


# rows and columns ----------------------------------------------------------------------------------------------------


@pairwise(
    kind=EVERY_KIND, launch=launches(((1,), (1, 1)), ((2,), (4, 2)), ((1,), (32, 4))), shape=((1, 1), (3, 10), (5, 33))
)
def test_softmax_and_its_loss(kind: str, launch: Any, shape: tuple[int, int]) -> None:
    rows, columns = shape
    (stored, wide), rng = types(kind), np.random.default_rng(7)
    logits = array(rng.normal(0, 3, (rows, columns)), stored)
    labels = array(rng.integers(0, columns, rows), np.int64)
    exact = logits.astype(np.float64)
    shifted = exact - exact.max(axis=1, keepdims=True)
    p = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    losses, gradient = array(np.ones(rows), wide), array(np.ones((rows, columns)), stored)
    factor, controls = (wide.type(8 / rows), NULL) if rows == 3 else (wide.type(2 / rows), controls_of(SCALE=4))
    targets, sizes = np.eye(columns)[labels], (factor, controls, np.int32(rows), np.int32(columns))
    for smoothing in (0.0, 0.25):
        for weights in (NULL, array(rng.uniform(0, 2, columns), wide)):
            arguments = logits, labels, weights, losses, gradient, wide.type(smoothing), *sizes
            kernel("reductions", f"softmax_cross_entropy_{kind}")(*launch, arguments)
            own = np.ones(columns) if weights is NULL else weights.astype(np.float64)
            target = (1 - smoothing) * targets * own[labels][:, None] + smoothing / columns * own
            close(losses, -(target * np.log(p)).sum(axis=1), "double" if kind == "double" else "float", 10)
            expected = (target.sum(axis=1, keepdims=True) * p - target) * 8 / rows
            close(gradient, expected, kind, 20)
    size = np.int64(rows), np.int32(columns)
    kernel("reductions", f"softmax_{kind}")(*launch, (logits, *size))
    close(logits, p, kind, 10)
    dy = array(rng.normal(size=(rows, columns)), stored)
    y, dy_exact = logits.astype(np.float64), dy.astype(np.float64)
    kernel("reductions", f"softmax_backward_{kind}")(*launch, (dy, logits, *size))
    close(dy, y * (dy_exact - (dy_exact * y).sum(axis=1, keepdims=True)), kind, 10)


@pairwise(
    kind=EVERY_KIND,
    launch=launches(((1,), (1, 1)), ((2,), (4, 8)), ((3,), (32, 1))),
    shape=((1, 1), (5, 3), (9, 40)),
    loss=tuple(TARGET_LOSSES),
)
def test_losses_of_each_output(kind: str, launch: Any, shape: tuple[int, int], loss: str) -> None:
    """Far from their kinks, and where exponentials overflow."""
    rows, columns = shape
    (stored, wide), rng = types(kind), np.random.default_rng(7)
    prediction = array(rng.integers(-9, 10, (rows, columns)) + 0.3, stored)
    prediction[0, 0] = 1000 if columns > 1 else -1000
    labels = array(rng.integers(0, columns, rows), np.int64)
    values, slopes = TARGET_LOSSES[loss](np, prediction.astype(np.float64), np.eye(columns)[labels], 0.75)
    losses, gradient = array(np.ones(rows), wide), array(np.ones((rows, columns)), stored)
    factor, controls = (wide.type(8), NULL) if rows > 1 else (wide.type(2), controls_of(SCALE=4))
    sizes = factor, controls, np.int32(rows), np.int32(columns)
    arguments = prediction, labels, losses, gradient, wide.type(0.75), *sizes
    kernel("reductions", f"{loss}_loss_{kind}")(*launch, arguments)
    close(losses, values.mean(axis=1), "double" if kind == "double" else "float", 10)
    close(gradient, slopes * 8, kind, 10)


@every_kind
def test_nan_and_invalid_labels_stay_in_their_rows(kind: str) -> None:
    stored, wide = types(kind)
    logits = array([[0, np.nan, 1], [0, 1, 2], [0, 1, 2], [3, 2, 1]], stored)
    logits[3, 1] = -np.inf
    labels = array([0, 3, -1, 0], np.int64)
    losses, gradient = array(np.ones(4), wide), array(np.ones((4, 3)), stored)
    sizes = wide.type(1), NULL, np.int32(4), np.int32(3)
    for weights in (NULL, array(np.ones(3), wide)):
        arguments = logits, labels, weights, losses, gradient, wide.type(0), *sizes
        kernel("reductions", f"softmax_cross_entropy_{kind}")((1,), (4, 2), arguments)
        assert np.isnan(losses).tolist() == [True, True, True, False]
        assert np.isnan(gradient.astype(np.float64)).all(axis=1).tolist() == [True, True, True, False]
    outputs = array(np.where(np.isinf(logits.astype(np.float64)), 0, logits.astype(np.float64)), stored)
    for loss in TARGET_LOSSES:
        arguments = outputs, labels, losses, gradient, wide.type(1), *sizes
        kernel("reductions", f"{loss}_loss_{kind}")((1,), (4, 2), arguments)
        assert np.isnan(losses).tolist() == [True, True, True, False]
        assert np.isnan(gradient.astype(np.float64)).all(axis=1).tolist()[1:3] == [True, True]
    kernel("reductions", f"softmax_{kind}")((1,), (4, 2), (logits, np.int64(4), np.int32(3)))
    assert np.isnan(logits.astype(np.float64)).all(axis=1).tolist() == [True, False, False, False]


@pairwise(
    kind=EVERY_KIND,
    launch=launches(((1, 1), (1, 1)), ((2, 3), (4, 8)), ((1, 2), (32, 1))),
    sizes=((1, 1, 1), (7, 3, 2), (20, 40, 20)),
)
def test_columns_are_added_up_in_parts(kind: str, launch: Any, sizes: tuple[int, int, int]) -> None:
    rows, columns, length = sizes
    (stored, wide), rng = types(kind), np.random.default_rng(8)
    values, parts = array(rng.normal(size=(rows, columns)), stored), -(-rows // length)
    exact = np.array([values[i * length : (i + 1) * length].astype(np.float64).sum(axis=0) for i in range(parts)])
    for add in (0, 1):
        sums = array(np.full((parts, columns), 5.0), wide)
        counts = np.int64(rows), np.int32(columns), np.int64(length), np.int32(parts), np.int32(add)
        kernel("reductions", f"column_sums_{kind}")(*launch, (values, sums, *counts))
        close(sums, exact + 5 * add, "double" if kind == "double" else "float", 10)


# images --------------------------------------------------------------------------------------------------------------


@pairwise(kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((2, 2), (8,))), size=(1, 5, 16, 48))
def test_images_are_gathered_and_scaled(kind: str, launch: Any, size: int) -> None:
    (stored, wide), rng = types(kind), np.random.default_rng(9)
    for start in (0, 1):
        images = array(rng.integers(0, 256, (4, size)), np.uint8, start)
        samples = array([3, 0, 3], np.int64)
        for order, chosen in ((samples, images[samples]), (NULL, images[:3])):
            batch = array(np.ones((3, size)), stored)
            scale, shift = array(np.full(1, 1 / 255), wide), array(np.zeros(1), wide)
            arguments = images, order, scale, shift, batch, np.int32(3), np.int32(size), np.int32(1)
            kernel("images", f"load_images_{kind}")(*launch, arguments)
            np.testing.assert_array_equal(batch, (chosen * wide.type(1 / 255)).astype(stored))
        if size % 3:
            continue
        scale, shift = array(np.array([0.5, 1 / 255, 2]), wide), array(np.array([0, -1, 7]), wide)
        batch = array(np.ones((3, size)), stored)
        arguments = images, samples, scale, shift, batch, np.int32(3), np.int32(size), np.int32(3)
        kernel("images", f"load_images_{kind}")(*launch, arguments)
        exact = images[samples].reshape(3, -1, 3) * scale.astype(np.float64) + shift.astype(np.float64)
        close(batch, exact.reshape(3, size), kind)


WINDOWS = {
    "one pixel": (Window((1, 1)), (2, 1, 1, 1)),
    "overlapping": (Window((3, 2), (2, 1)), (2, 7, 5, 3)),
    "apart": (Window((2, 2), (3, 3)), (1, 8, 8, 8)),
    "four channels": (Window((2, 3)), (3, 5, 6, 4)),
    "padded": (Window((3, 3), (2, 2), ((1, 2), (2, 0))), (2, 6, 5, 8)),
    "gaps": (Window((3, 2), (1, 2), ((1, 2), (0, 3)), (2, 3)), (2, 6, 7, 3)),
    "gaps, four channels": (Window((2, 3), (2, 1), ((2, 2), (2, 2)), (3, 2)), (1, 5, 6, 4)),
    "more zeros than image": (Window((4, 4), (1, 2), ((3, 3), (3, 3))), (1, 2, 1, 2)),
}


POOLS = [name for name, (window, _) in WINDOWS.items() if not window.dilates]


def geometry(window: Window, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The sizes that a kernel over windows takes."""
    (top, _), (left, _) = window.padding
    sizes = (*shape, *window.output(*shape[1:3]), *window.kernel, *window.stride, top, left)
    return tuple(map(np.int32, sizes))


@pairwise(kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((3, 2), (16,))), case=tuple(WINDOWS))
def test_windows_become_rows_and_back(kind: str, launch: Any, case: str) -> None:
    (stored, _), rng = types(kind), np.random.default_rng(10)
    (window, shape), reference = WINDOWS[case], Reference("double")
    for start in (0, 1):
        x = array(rng.normal(size=shape), stored, start)
        expected = reference.im2col(x.astype(np.float64), window)
        columns = array(np.ones(expected.shape), stored)
        sizes = (*geometry(window, shape), *map(np.int32, window.dilation))
        kernel("conv", f"im2col_{kind}")(*launch, (x, columns, *sizes))
        np.testing.assert_array_equal(columns.astype(np.float64), expected)
        dx = array(np.ones(shape), stored)
        kernel("conv", f"col2im_{kind}")(*launch, (columns, dx, *sizes))
        close(dx, reference.col2im(expected, shape, window), kind, 4)


@pairwise(kind=EVERY_KIND, repeat=(1, 3), launch=launches(((1, 1), (1,)), ((3, 2), (16,))), case=tuple(WINDOWS))
def test_depthwise_convolutions(kind: str, launch: Any, case: str, repeat: int) -> None:
    (stored, wide), rng = types(kind), np.random.default_rng(15)
    (window, shape), reference = WINDOWS[case], Reference("double")
    channels = shape[3]
    x = array(rng.normal(size=shape), stored)
    weight = array(rng.normal(size=(*window.kernel, 1, channels * repeat)), stored)
    exact = [np.array(a, np.float64) for a in (x, weight)]
    filters = np.zeros((*window.kernel, channels, channels * repeat))  # as a convolution that sees all channels
    for o in range(channels * repeat):
        filters[:, :, o // repeat, o] = exact[1][:, :, 0, o]
    y, columns = reference.conv2d(exact[0], filters, None, window)
    sizes = (*geometry(window, shape), *map(np.int32, (*window.dilation, repeat)))
    found = array(np.ones(y.shape), stored)
    kernel("conv", f"depthwise_{kind}")(*launch, (x, weight, found, *sizes))
    close(found, y, kind, 10)
    dy, dx = array(rng.normal(size=y.shape), stored), array(np.ones(shape), stored)
    grad = np.zeros(filters.shape)
    expected = reference.conv2d_backward(
        np.array(dy, np.float64), columns, exact[0], filters, grad, None, window, need_dx=True
    )
    kernel("conv", f"depthwise_input_{kind}")(*launch, (dy, weight, dx, *sizes))
    close(dx, expected, kind, 10)
    own = np.stack([grad[:, :, o // repeat, o] for o in range(channels * repeat)], axis=-1)
    for parts in (1, 3):
        sums = array(np.ones((parts, *own.shape)), wide)
        kernel("conv", f"depthwise_weight_{kind}")(*launch, (x, dy, sums, *sizes, np.int32(parts)))
        close(sums.sum(axis=0), own, "double" if kind == "double" else "float", 20)


@pairwise(kind=EVERY_KIND, winners=("uint8", "int32"), launch=launches(((1, 1), (1,)), ((3, 2), (16,))), case=POOLS)
def test_pools_take_the_first_largest_and_the_first_nan(kind: str, winners: str, launch: Any, case: str) -> None:
    (stored, _), rng = types(kind), np.random.default_rng(11)
    (window, shape), reference = WINDOWS[case], Reference("double")
    x = array(rng.integers(-1, 2, shape), stored)
    x[rng.random(shape) < 0.1] = np.nan
    y, won = reference.max_pool2d(x.astype(np.float64), window)
    found, places = array(np.ones(y.shape), stored), array(np.ones(y.shape), np.dtype(winners))
    sizes = geometry(window, shape)
    kernel("pool", f"max_pool_{kind}_{winners}")(*launch, (x, NULL, found, places, *sizes, np.int32(0)))
    np.testing.assert_array_equal(found.astype(np.float64), y)
    np.testing.assert_array_equal(places, won)
    dy = array(rng.integers(-3, 4, y.shape), stored)
    dy[rng.random(y.shape) < 0.1] = np.nan
    dx = array(np.ones(shape), stored)
    kernel("pool", f"max_pool_backward_{kind}_{winners}")(*launch, (dy, places, dx, *sizes))
    expected = reference.max_pool2d_backward(dy.astype(np.float64), won, shape, window)
    np.testing.assert_array_equal(dx.astype(np.float64), expected)


@pairwise(kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((3, 2), (16,))), case=POOLS)
def test_pools_of_means(kind: str, launch: Any, case: str) -> None:
    (stored, _), rng = types(kind), np.random.default_rng(14)
    (window, shape), reference = WINDOWS[case], Reference("double")
    x = array(rng.normal(size=shape), stored)
    y = reference.avg_pool2d(x.astype(np.float64), window)
    found, sizes = array(np.ones(y.shape), stored), geometry(window, shape)
    kernel("pool", f"avg_pool_{kind}")(*launch, (x, found, *sizes))
    close(found, y, kind, 4)
    dy, dx = array(rng.normal(size=y.shape), stored), array(np.ones(shape), stored)
    kernel("pool", f"avg_pool_backward_{kind}")(*launch, (dy, dx, *sizes))
    close(dx, reference.avg_pool2d_backward(dy.astype(np.float64), shape, window), kind, 4)


@pairwise(kind=EVERY_KIND, relu=(0, 1), winners=("uint8", "int32"))
def test_max_pools_with_bias_and_relu(kind: str, relu: int, winners: str) -> None:
    (stored, wide), rng = types(kind), np.random.default_rng(12)
    window, shape = Window((2, 2), (2, 2)), (2, 5, 4, 3)
    x, bias = array(rng.normal(size=shape) - 1, stored), array(rng.normal(size=3), stored)
    x[0, 0, 0, 0] = np.nan
    biased = (x.astype(wide) + bias.astype(wide)).astype(stored)
    y, won = Reference("double").max_pool2d(biased.astype(np.float64), window)
    found, places = array(np.ones(y.shape), stored), array(np.ones(y.shape), np.dtype(winners))
    arguments = x, bias, found, places, *geometry(window, shape), np.int32(relu)
    kernel("pool", f"max_pool_{kind}_{winners}")((2, 1), (8,), arguments)
    np.testing.assert_array_equal(found.astype(np.float64), np.maximum(y, 0) if relu else y)
    shut = ~(y > 0) if relu else np.zeros(y.shape, bool)
    np.testing.assert_array_equal(places, np.where(shut, {"uint8": 255, "int32": -1}[winners], won.astype(int)))
    assert not relu or (shut.any() and not shut.all())


PAIRS = {
    "one pixel": (Window((1, 1)), Window((2, 2), (2, 2))),
    "rows longer than a thread takes": (Window((2, 4)), Window((2, 2), (1, 2))),
    "padded": (Window((3, 3), (2, 1), ((1, 2), (2, 0))), Window((2, 3), (2, 3))),
    "padded pool": (Window((3, 2)), Window((2, 2), (2, 1), ((1, 0), (0, 1)))),
}


@pairwise(
    kind=EVERY_KIND, relu=(0, 1), filters=(3, 8), launch=launches(((1, 1), (1,)), ((3, 2), (16,))), case=tuple(PAIRS)
)
def test_small_patches_are_convolved_and_pooled(kind: str, relu: int, filters: int, launch: Any, case: str) -> None:
    """Integers, which all precisions add exactly, so ties are the same as in two separate operations."""
    (stored, wide), rng, reference = types(kind), np.random.default_rng(13), Reference("double")
    (window, pool), shape = PAIRS[case], (3, 7, 8, 2)
    x, weight, bias = (
        array(rng.integers(-2, 3, size), stored) for size in (shape, (*window.kernel, 2, filters), (filters,))
    )
    exact = [np.array(each, np.float64) for each in (x, weight, bias)]
    convolved, columns = reference.conv2d(*exact, window)
    y, won = reference.max_pool2d(convolved, pool)
    found, winners = array(np.ones(y.shape), stored), array(np.ones(y.shape), np.uint8)
    of_pool = np.array([*y.shape[1:3], *pool.kernel, *pool.stride, pool.padding[0][0], pool.padding[1][0], filters])
    sizes = (*geometry(window, shape), *of_pool.astype(np.int32))
    arguments = x, weight, bias, found, winners, *sizes, np.int32(relu)
    kernel("conv_pool", f"conv_pool_{kind}")(*launch, arguments)
    np.testing.assert_array_equal(found.astype(np.float64), np.maximum(y, 0) if relu else y)
    blocked = ~(y > 0) if relu else np.zeros(y.shape, bool)
    np.testing.assert_array_equal(winners, np.where(blocked, 255, won.astype(int)))
    dy = array(rng.integers(-3, 4, y.shape), stored)
    through = reference.max_pool2d_backward(np.where(blocked, 0, dy.astype(np.float64)), won, convolved.shape, pool)
    grads = np.zeros(weight.shape), np.zeros(filters)
    reference.conv2d_backward(through, columns, exact[0], exact[1], *grads, window, need_dx=False)
    for parts in (1, 4):
        sums = [array(np.ones((parts, *grad.shape)), wide) for grad in grads]
        arguments = x, dy, winners, *sums, *sizes, np.int32(parts)
        kernel("conv_pool", f"conv_pool_weight_{kind}")(*launch, arguments)
        for found, grad in zip(sums, grads, strict=True):
            np.testing.assert_array_equal(found.sum(axis=0), grad)


def test_winners_of_windows_with_256_places() -> None:
    """The number of the last place is 255, which means `closed` only after a ReLU."""
    x = array(np.zeros((1, 16, 16, 1)), np.float32)
    x[0, 15, 15, 0] = 1
    y, places, dx = array([1.0], np.float32), array([0], np.uint8), array(np.ones(256), np.float32)
    sizes = geometry(Window((16, 16)), x.shape)
    kernel("pool", "max_pool_float_uint8")((1, 1), (32,), (x, NULL, y, places, *sizes, np.int32(0)))
    kernel("pool", "max_pool_backward_float_uint8")((1, 1), (32,), (y, places, dx, *sizes))
    assert (y[0], places[0], dx[255], dx[:255].any()) == (1, 255, 1, False)


@pytest.mark.smoke
@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), count=(1, 3, 16))
def test_sums_of_vectors_are_those_of_the_host(kind: str, launch: Any, start: int, count: int) -> None:
    """Bit for bit if NumPy rounds once, too. Null pointers are not read; the sum may go into one of its parts."""
    (stored, _), rng = types(kind), np.random.default_rng(2)
    for size in SIZES:
        parts = [array(rng.normal(size=size), stored, start) for _ in range(count)]
        shares = [np.float64(share) for share in rng.random(count)]
        total = np.zeros(size)
        for part, share in zip(parts, shares, strict=True):
            total += part.astype(np.float64) * share
        rest = 16 - count
        given = (*parts, *[NULL] * rest, *shares, *[np.float64(0)] * rest, np.int32(count), np.int64(size))
        kernel("averages", f"weighted_sum_{kind}")(*launch, (parts[-1], *given))
        expected = total.astype(stored)
        if kind == "bfloat16":
            close(parts[-1], expected, kind)
        else:
            np.testing.assert_array_equal(parts[-1], expected)


# normalisation and random numbers -------------------------------------------------------------------------------------

SHAPES = [(1, 1), (7, 8), (40, 3), (5, 24)]
TWO_AXES = launches(((1, 1), (1, 1)), ((2, 2), (4, 2)))


def precise(kind: str) -> str:
    return "double" if kind == "double" else "float"


def normalised(kind: str, shape: tuple[int, int], start: int = 0) -> tuple[Any, ...]:
    """x, dy, mean, variance and scale as arguments of kernels; and in double, with x̂ in place of x."""
    rows, columns = shape
    (stored, wide), rng = types(kind), np.random.default_rng(rows * 50 + columns)
    x, dy = (array(rng.normal(size=(rows, columns)) + 2, stored, start) for _ in range(2))
    mean, variance = array(rng.normal(size=columns), wide, start), array(rng.random(columns) + 0.5, wide, start)
    scale = array(rng.normal(size=columns), stored, start)
    exact = [np.array(each, np.float64) for each in (x, dy, mean, variance, scale)]
    exact[0] = (exact[0] - exact[2]) / np.sqrt(exact[3] + 0.25)
    return x, dy, mean, variance, scale, exact


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES, length=(3, 100))
def test_moments_of_parts_are_those_of_all(kind: str, launch: Any, shape: tuple[int, int], length: int) -> None:
    rows, columns = shape
    (stored, wide), rng = types(kind), np.random.default_rng(rows)
    x = array(rng.normal(size=(rows, columns)) + 30, stored)
    chunks = -(-rows // length)
    parts, moments = array(np.full((chunks, 2, columns), np.nan), wide), array(np.full((2, columns), np.nan), wide)
    sizes = np.int64(rows), np.int32(columns), np.int64(length), np.int32(chunks)
    kernel("reductions", f"moment_parts_{kind}")(*launch, (x, parts, *sizes))
    kernel("reductions", f"moment_merge_{precise(kind)}")(launch[0][:1], launch[1], (parts, moments, *sizes))
    exact = np.array(x, np.float64)
    close(moments[0], exact.mean(axis=0), precise(kind), 4)
    close(moments[1], exact.var(axis=0), precise(kind), 60)


@pairwise(kind=WIDE, launch=ONE_AXIS)
def test_running_estimates_follow_the_batch(kind: str, launch: Any) -> None:
    (_, wide), rng = types(kind), np.random.default_rng(4)
    mean, variance, moments = (array(rng.random(size), wide) for size in (37, 37, (2, 37)))
    expected = 0.75 * mean.astype(np.float64) + 0.25 * moments[0], 0.75 * variance + 0.25 * 1.5 * moments[1]
    arguments = mean, variance, moments, wide.type(0.75), wide.type(1.5), np.int64(37)
    kernel("norm", f"track_moments_{kind}")(*launch, arguments)
    close(mean, expected[0], kind)
    close(variance, expected[1], kind)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), shape=SHAPES, relu=(0, 1))
def test_channels_are_normalised(kind: str, launch: Any, start: int, shape: tuple[int, int], relu: int) -> None:
    rows, columns = shape
    stored, wide = types(kind)
    x, shift, mean, variance, scale, exact = normalised(kind, shape, start)
    shift, y = array(shift[0], stored), array(np.zeros((rows, columns)), stored, 1 - start)
    arguments = x, mean, variance, scale, shift, y, wide.type(0.25), np.int64(rows), np.int32(columns), np.int32(relu)
    kernel("norm", f"normalize_{kind}")(*launch, arguments)
    expected = exact[0] * exact[4] + np.array(shift, np.float64)
    close(y, np.maximum(expected, 0) if relu else expected, kind, 4)


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES, relu=(False, True))
def test_derivatives_of_channels_are_added_up(kind: str, launch: Any, shape: tuple[int, int], relu: bool) -> None:
    rows, columns = shape
    stored, wide = types(kind)
    x, dy, mean, variance, _, exact = normalised(kind, shape)
    output: Any = NULL
    if relu:
        output = array(np.random.default_rng(9).integers(-1, 2, x.shape), stored)
        output[::3, 0] = np.nan
        exact[1][~(np.array(output, np.float64) > 0)] = 0
    length, chunks = 16, -(-rows // 16)
    sums = array(np.full((chunks, 2, columns), np.nan), wide)
    sizes = np.int64(rows), np.int32(columns), np.int64(length), np.int32(chunks)
    arguments = dy, x, output, mean, variance, sums, wide.type(0.25), *sizes
    kernel("reductions", f"normalize_sums_{kind}")(*launch, arguments)
    np.testing.assert_array_equal(np.array(dy, np.float64), exact[1])
    close(sums.sum(axis=0)[0], exact[1].sum(axis=0), precise(kind), 20)
    close(sums.sum(axis=0)[1], (exact[1] * exact[0]).sum(axis=0), precise(kind), 60)


@pairwise(kind=EVERY_KIND, launch=ONE_AXIS, start=(0, 1), shape=SHAPES)
def test_channels_are_differentiated(kind: str, launch: Any, start: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    _, wide = types(kind)
    x, dy, mean, variance, scale, exact = normalised(kind, shape, start)
    sums = array(np.random.default_rng(2).normal(size=(2, columns)), wide)
    arguments = dy, x, mean, variance, scale, sums, wide.type(0.5), wide.type(0.25), np.int64(rows), np.int32(columns)
    kernel("norm", f"normalize_backward_{kind}")(*launch, arguments)
    rest = exact[1] - sums[0].astype(np.float64) / 2 - exact[0] * sums[1] / 2
    close(dy, exact[4] / np.sqrt(exact[3] + 0.25) * rest, kind, 8)


@pairwise(kind=EVERY_KIND, launch=TWO_AXES, shape=SHAPES)
def test_rows_are_normalised_and_differentiated(kind: str, launch: Any, shape: tuple[int, int]) -> None:
    """Forwards, the sums for scale and shift, and dx; the second axis of the grid is for the sums."""
    rows, columns = shape
    (stored, wide), rng = types(kind), np.random.default_rng(rows + columns)
    x, dy = (array(rng.normal(size=(rows, columns)) + 1, stored) for _ in range(2))
    scale, shift = (array(rng.normal(size=columns), stored) for _ in range(2))
    y, moments = array(np.zeros((rows, columns)), stored), array(np.zeros((rows, 2)), wide)
    lines: Any = (launch[0][:1], launch[1])
    sizes = np.int64(rows), np.int32(columns)
    arguments: Any = x, scale, shift, y, moments, wide.type(0.25), *sizes
    kernel("reductions", f"normalize_rows_{kind}")(*lines, arguments)
    exact, slope = np.array(x, np.float64), np.array(dy, np.float64)
    mean = exact.mean(axis=1, keepdims=True)
    inverse = 1 / np.sqrt(exact.var(axis=1, keepdims=True) + 0.25)
    normal = (exact - mean) * inverse
    close(y, normal * np.array(scale, np.float64) + np.array(shift, np.float64), kind, 4)
    close(moments, np.concatenate([mean, inverse], axis=1), precise(kind), 4)
    length, chunks = 16, -(-rows // 16)
    sums = array(np.full((chunks, 2, columns), np.nan), wide)
    arguments = dy, x, moments, sums, *sizes, np.int64(length), np.int32(chunks)
    kernel("reductions", f"normalize_rows_sums_{kind}")(*launch, arguments)
    close(sums.sum(axis=0)[0], (slope * normal).sum(axis=0), precise(kind), 60)
    close(sums.sum(axis=0)[1], slope.sum(axis=0), precise(kind), 20)
    kernel("reductions", f"normalize_rows_backward_{kind}")(*lines, (dy, x, moments, scale, *sizes))
    g = slope * np.array(scale, np.float64)
    expected = inverse * (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True))
    close(dy, expected, kind, 8)


@pairwise(
    kind=EVERY_KIND, launch=launches(((1, 1), (1,)), ((2, 2), (32,))), size=(1, 3, 4, 5, 130), in_place=(False, True)
)
def test_dropout_equals_the_reference(kind: str, launch: Any, size: int, in_place: bool) -> None:
    """The integers of backend/philox.py, for samples and epochs of any size."""
    (stored, wide), rng = types(kind), np.random.default_rng(size)
    samples, epoch, key = np.array([3, (1 << 40) + 5, 0]), np.array([7]), 0xFEDCBA9876543210
    x = array(rng.normal(size=(3, size)), stored)
    expected = np.array(x, np.float64) * 2
    expected[philox.of_examples(np, samples, epoch, key, size) < philox.dropped_below(0.3)] = 0
    out = x if in_place else array(np.full((3, size), np.nan), stored)
    draw = np.uint32(key & philox.MASK), np.uint32(key >> 32), np.uint32(philox.dropped_below(0.3)), wide.type(2)
    arguments = x, out, samples, epoch, *draw, np.int32(3), np.int32(size)
    kernel("dropout", f"dropout_{kind}")(*launch, arguments)
    np.testing.assert_array_equal(np.array(out, np.float64), expected)


@pairwise(kind=WIDE, launch=ONE_AXIS, start=(0, 1), go=(0, 1))
def test_a_skipped_step_is_undone(kind: str, launch: Any, start: int, go: int) -> None:
    (_, wide), rng = types(kind), np.random.default_rng(3)
    for size in SIZES:
        vector, kept = array(rng.normal(size=size), wide, start), array(rng.normal(size=size), wide)
        expected = np.array(vector if go else kept)
        kernel("update", f"undo_{kind}")(*launch, (vector, kept, controls_of(GO=go), np.int64(size)))
        np.testing.assert_array_equal(vector, expected)
