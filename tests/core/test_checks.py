"""Checks of arguments: accepted values, the types returned, and rejected values."""

import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cupynet.core import checks
from cupynet.core.errors import ConfigError
from tests.support.refusals import refused

HUGE = 10**400  # beyond the range of floats


class Index:
    def __index__(self) -> int:
        return 7


def kind(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("value", [-3, 2**63 - 1, Index(), np.array(5), np.uint64(3)], ids=kind)
def test_an_integer_of_any_kind_becomes_an_int(value: Any) -> None:
    found = checks.integer("n", value)
    assert (type(found), found) == (int, value.__index__())


@pytest.mark.parametrize("value", [3, -2.5, Fraction(1, 4), Decimal("0.5"), np.float16(3), np.int64(3)], ids=kind)
def test_a_number_of_any_kind_becomes_a_float(value: Any) -> None:
    found = checks.number("x", value)
    assert (type(found), found) == (float, float(value))


def test_a_flag_of_numpy_becomes_a_bool() -> None:
    assert checks.flag("f", np.bool_(True)) is True


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (checks.integer, (1.0, "1", b"1", None, math.nan, True, np.bool_(True), [1], np.array([1, 2]), int)),
        (checks.number, (math.nan, math.inf, HUGE, -HUGE, "1", b"1", None, True, np.bool_(False), 1j, [1.0], float)),
        (checks.flag, (0, 1, np.int8(1), "true", "", None, 1.0, [], np.array([True]))),
        (checks.seed, (-1, 2**64, 1.0, None, True)),
    ],
)
def test_other_values_are_refused(check: Callable[[str, Any], Any], values: tuple[object, ...]) -> None:
    for value in values:
        with refused("x"):
            check("Conv2D x", value)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [(0, {"minimum": 1}), (-HUGE, {"minimum": 0}), (8, {"most": 7}), (2**63, {}), (-HUGE, {})],
    ids=str,
)
def test_integers_have_bounds(value: int, bounds: dict[str, Any]) -> None:
    with refused("n"):
        checks.integer("n", value, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds"),
    [
        (0, {"above": 0}),
        (0.5, {"minimum": 1}),
        (1, {"below": 1}),
        (-math.inf, {"infinite": True, "above": 0}),
        (math.nan, {"infinite": True}),
    ],
    ids=str,
)
def test_numbers_have_bounds(value: float, bounds: dict[str, Any]) -> None:
    with refused("x"):
        checks.number("x", value, **bounds)


def test_bounds_are_exact() -> None:
    assert checks.integer("n", 1, 1, most=1) == 1
    assert checks.number("x", 1, minimum=1, below=2) == 1
    assert checks.number("x", math.nextafter(0, 1), above=0) > 0
    assert checks.number("x", math.nextafter(1, 0), minimum=0, below=1) < 1
    assert checks.number("x", np.float32("inf"), above=0, infinite=True) == math.inf


def test_a_seed_has_64_bits() -> None:
    for value in (0, 2**64 - 1, np.uint64(2**64 - 1)):
        assert checks.seed("seed", value) == int(value)


def test_one_of_accepts_only_the_given_names() -> None:
    assert checks.one_of("dtype", "half", iter(("half", "float"))) == "half"
    for wrong in ("int", None, 3, ["half"], 10**5000):
        with refused("dtype"):
            checks.one_of("dtype", wrong, ("half", "float"))


@pytest.mark.parametrize("wrong", ["x" * 9999, np.eye(90), 10**5000], ids=kind)
def test_a_message_is_one_short_line(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.integer("n", wrong)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
