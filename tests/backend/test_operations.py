"""Every backend computes what the reference computes: every operation, every precision, odd shapes.

The reference is the base class on NumPy: in double, on the same numbers, for values; in the same precision, for shapes
and dtypes. tests/backend/reference/test_reference.py compares it with loops that anybody can read.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cupynet.backend import Backend, Convolution, DtypePolicy, FusedPair, MaxPool, Window, create_backend
from cupynet.backend.cpu.numba_backend import FUSED
from cupynet.backend.update_rules import RULES, Move
from tests.support.backends import CLASSES, Reference, every_backend, every_dtype
from tests.support.comparisons import COMPARISONS, ELSEWHERE, EXACT, Call, Shape

TOLERANCES = {"half": 4e-3, "bfloat16": 3e-2, "float": 1e-5, "double": 1e-12}

NONE = ((0, 0), (0, 0))

shapes = st.builds(
    Shape,
    batch=st.integers(1, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 5),
    outputs=st.integers(1, 6),
    window=st.builds(
        Window,
        kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
        padding=st.sampled_from([NONE] * 2 + [((1, 1), (1, 1)), ((2, 2), (2, 2)), ((0, 1), (1, 2)), ((1, 0), (0, 0))]),
        dilation=st.sampled_from([(1, 1)] * 3 + [(2, 2), (1, 3), (3, 1)]),
    ),
    flag=st.booleans(),
    need_dx=st.booleans(),
)


def close(found: Any, expected: Any, tolerance: float) -> None:
    expected = np.asarray(expected, np.float64)
    scale = max(1.0, float(np.nanmax(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=tolerance * scale)


def computed(operation: str, backend: Backend, policy: DtypePolicy, shape: Shape, seed: int) -> dict[str, Any]:
    """What one call gives, on the host; the arguments are numbers of `policy`."""
    call = Call(seed, policy, backend)
    found = COMPARISONS[operation](backend, call, shape)
    call.check_arguments()
    results = {name: None if a is None else np.array(backend.to_host(a)) for name, a in found.items()}
    on_host = backend.xp is not np  # what is computed on the host was borrowed by nobody
    borrowed = [a for a in found.values() if a is not None and not (on_host and isinstance(a, np.ndarray))]
    backend.give_back(*borrowed)
    assert backend.workspace.on_loan == 0, "borrowed, and neither returned nor given back"
    return results


@functools.lru_cache(maxsize=64)  # each backend gets the same calls
def expected(operation: str, policy: DtypePolicy, shape: Shape, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the reference gives, in that precision and in double."""
    same, exact = (computed(operation, Reference(kind), policy, shape, seed) for kind in (policy, "double"))
    return same, exact


def compare(operation: str, tested: Backend, shape: Shape, seed: int) -> None:
    """One call on the tested backend and on the reference in its precision and in double."""
    policy = tested.policy
    results = computed(operation, tested, policy, shape, seed)
    alike, exactly = expected(operation, policy, shape, seed)
    tolerance = 0.0 if operation in EXACT else TOLERANCES[policy.name]
    for name, found in results.items():
        same, exact = alike[name], exactly[name]
        assert (found is None) == (same is None), f"{name} is missing, or too many"
        if found is None:
            continue
        assert (found.shape, found.dtype) == (same.shape, same.dtype), name
        unscaled = found / policy.loss_scale if name.startswith("scaled") else found
        close(unscaled, exact, tolerance)


@every_backend
@every_dtype
@pytest.mark.parametrize("operation", COMPARISONS)
def test_a_backend_equals_the_reference(name: str, dtype: str, operation: str) -> None:
    backend = create_backend(name, dtype)

    @settings(
        max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(shape=shapes, seed=st.integers(0, 10**6))
    def compared(shape: Shape, seed: int) -> None:
        compare(operation, backend, shape, seed)

    compared()


LENET = {
    "conv1": Shape(3, 28, 28, 1, 20, Window((5, 5)), True, True),
    "conv2": Shape(2, 12, 12, 20, 50, Window((5, 5)), True, True),
    "colour": Shape(2, 32, 32, 3, 16, Window((3, 3), (2, 2), ((0, 1), (0, 1))), True, True),
    # several blocks of values and of filters, and a rest
    "blocks": Shape(1, 11, 10, 33, 161, Window((3, 3), (1, 1), ((1, 1), (1, 1))), True, True),
    "flat window": Shape(2, 12, 14, 20, 50, Window((3, 5), (1, 2), ((1, 1), (0, 2))), True, True),
    "tall window": Shape(2, 28, 20, 1, 20, Window((7, 2), (2, 1)), True, True),
}


@every_backend
@every_dtype
@pytest.mark.parametrize("shape", LENET.values(), ids=LENET)
@pytest.mark.parametrize("operation", ["conv2d", "conv2d_backward", "max_pool2d", "max_pool2d_backward", "fused_pair"])
def test_a_backend_equals_the_reference_at_real_sizes(name: str, dtype: str, operation: str, shape: Shape) -> None:
    compare(operation, create_backend(name, dtype), shape, seed=5)


class WrongPair(FusedPair):
    """Whatever it is given, it answers with a number and changes nothing."""

    def forward(self, x: Any, weights: Any) -> Any:
        return np.zeros((1, 1)), ()

    def backward(self, dy: Any, saved: Any, x: Any, weights: Any, grads: Any, *, need_dx: bool) -> Any:
        return dy


@pytest.mark.parametrize("operation", COMPARISONS)
def test_a_comparison_sees_an_operation_that_is_wrong(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so it calls what it is named after."""
    backend = create_backend("numpy", "float")
    original = getattr(backend, operation)

    def wrong(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        if operation == "winner_dtype":
            return np.dtype(np.int8)
        if operation == "fused_pair":
            return WrongPair()
        if operation in ("squared_norm", "total"):
            return result + 1
        changed = arguments[1 if operation == "move_weights" else 0]
        first = result[0] if isinstance(result, tuple) else changed if result is None else result
        first = first[0] if isinstance(first, list) else first
        first += np.asarray(np.arange(first.size).reshape(first.shape) % 2, first.dtype)
        return result

    monkeypatch.setattr(backend, operation, wrong)
    shape = Shape(2, 6, 5, 3, 4, Window((2, 2)), True, True)
    with pytest.raises(AssertionError):
        compare(operation, backend, shape, seed=1)


# by reflection --------------------------------------------------------------------------------------------------------

PUBLIC = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}


@every_backend
@pytest.mark.parametrize("dtype", ["half", "float"])
def test_of_nothing_nothing_is_made(name: str, dtype: str) -> None:
    """A stage of a pipeline may have no weights, and a worker nothing to send."""
    backend = create_backend(name, dtype)
    stored, wide = backend.policy.storage, backend.policy.accumulate

    def none(dtype: Any, *shape: int) -> Any:
        return backend.allocate((0, *shape), dtype)

    backend.convert(none(wide), none(stored))
    backend.relu_backward(none(stored, 3), backend.relu(none(stored, 3)))
    backend.pointwise("tanh", none(stored, 3), none(stored, 3))
    backend.pointwise_backward("tanh", none(stored, 3), none(stored, 3))
    for kind in (stored, wide):
        backend.weighted_sum(none(kind), [none(kind), none(kind)], [0.5, 0.5])
    assert float(backend.to_host(backend.total(none(wide)))) == 0
    norm = backend.squared_norm(none(wide))
    assert float(backend.to_host(norm)) == 0
    backend.clip_norm(none(wide), norm, 1.0)
    for rule in RULES.values():
        backend.move_weights(rule, none(wide), none(wide), [none(wide) for _ in rule.states], Move(rate=0.5))


def own_methods(backend: type[Backend]) -> dict[str, Any]:
    """What a backend defines beside the base class, name -> method; what is private is its own affair."""
    return {
        name: value
        for ancestor in backend.__mro__[::-1]
        if ancestor not in Backend.__mro__
        for name, value in vars(ancestor).items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, (property, staticmethod, classmethod)))
        and not inspect.ismodule(value)
    }


def broken_contracts(backend: type[Backend]) -> list[str]:
    """Public methods that the base class does not have, or has with another signature, or that nothing compares."""
    broken = []
    for name, method in own_methods(backend).items():
        if name not in PUBLIC:
            broken.append(f"{name}: added")
        elif parameters(method) != parameters(getattr(Backend, name)):
            broken.append(f"{name}: another signature")
        if name not in COMPARISONS and name not in ELSEWHERE:
            broken.append(f"{name}: not compared")
    return broken


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("backend", CLASSES.values(), ids=CLASSES)
def test_a_backend_keeps_the_contract(backend: type[Backend]) -> None:
    assert broken_contracts(backend) == []


def test_every_operation_is_compared_or_tested_elsewhere() -> None:
    assert COMPARISONS.keys() | ELSEWHERE == PUBLIC
    assert not COMPARISONS.keys() & ELSEWHERE and COMPARISONS.keys() >= EXACT


def test_a_broken_contract_is_seen() -> None:
    class Broken(Reference):
        def relu(self, x: Any, slope: float = 0.0) -> Any: ...

        def gelu(self, x: Any) -> Any: ...

        def activate(self) -> None: ...

        def _private(self) -> None: ...

    assert broken_contracts(Broken) == ["relu: another signature", "gelu: added", "gelu: not compared"]


def test_every_fused_pair_is_compared() -> None:
    """comparisons.fused_pair goes through all of them: whoever adds one adds it there."""
    assert FUSED.keys() == {(Convolution, MaxPool)}


def test_the_policies_differ_where_they_should() -> None:
    names = {dtype: DtypePolicy.of(dtype) for dtype in ("half", "float", "double")}
    assert [p.storage.itemsize for p in names.values()] == [2, 4, 8]
    assert [p.accumulate.itemsize for p in names.values()] == [4, 4, 8]
