"""Checks of arguments: what is taken, as what it comes back, and how the rest is refused."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError

HUGE = 10**400  # which no float holds


class Index:
    def __index__(self) -> int:
        return 7


def refusal(check: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# integers -------------------------------------------------------------------------------------------------------------


def test_integers_are_taken() -> None:
    of_numpy = (kind(3) for kind in (np.int8, np.uint8, np.int32, np.int64, np.uint64))
    for value in (3, -3, 0, 2**63 - 1, Index(), np.array(5), *of_numpy):
        taken = checks.integer("n", value)
        assert (type(taken), taken) == (int, value.__index__())


def test_values_that_are_not_integers_are_refused() -> None:
    for value in (
        1.0,
        np.float64(1),
        "1",
        b"1",
        None,
        math.nan,
        True,
        False,
        np.bool_(True),
        [1],
        np.array([1, 2]),
        int,
    ):
        assert refusal(checks.integer, "n", value) == f"n={value!r}: must be an integer"


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"minimum": 1}, "n=0: must be an integer of at least 1"),
        (np.int64(-1), {"minimum": 0}, f"n={np.int64(-1)!r}: must be an integer of at least 0"),
        (-HUGE, {"minimum": 0}, f"n=-1{'0' * 78}...: must be an integer of at least 0"),
        (8, {"most": 7}, "n=8: must be at most 7"),
        (0, {"minimum": 1, "also": ", or null"}, "n=0: must be an integer of at least 1, or null"),
    ],
)
def test_integers_have_bounds(value: Any, bounds: dict[str, Any], message: str) -> None:
    assert refusal(checks.integer, "n", value, **bounds) == message


def test_integers_too_large_for_a_count_are_refused() -> None:
    for value in (2**63, 10**30, HUGE):
        shown = f"n={wording.shown(value)}: must be"
        assert refusal(checks.integer, "n", value, 1) == f"{shown} at most {2**63 - 1}"
        negative = f"n={wording.shown(-value)}: must be an integer"
        assert value == 2**63 or refusal(checks.integer, "n", -value) == negative
        assert refusal(checks.integer, "n", value, most=8, why="so") == f"{shown} at most 8: so"


def test_the_bounds_of_integers_are_exact() -> None:
    assert checks.integer("n", 1, 1, most=1) == 1


def test_a_seed_has_64_bits() -> None:
    for value in (0, 2**64 - 1, np.uint64(2**64 - 1)):
        assert checks.seed("seed", value) == int(value) and type(checks.seed("seed", value)) is int
    for value in (-1, 2**64, HUGE, 1.0, None, True, "1"):
        assert refusal(checks.seed, "data seed", value).startswith(f"data seed={wording.shown(value)}: must be ")


# numbers --------------------------------------------------------------------------------------------------------------


def test_numbers_are_taken() -> None:
    of_numpy = (kind(3) for kind in (np.float16, np.float32, np.int64, np.uint8))
    for value in (0, 3, -2.5, 1e300, Fraction(1, 4), Decimal("0.5"), *of_numpy):
        taken = checks.number("x", value)
        assert (type(taken), taken) == (float, float(value))


def test_values_that_are_not_numbers_are_refused() -> None:
    strange = ("1", b"1", None, True, np.bool_(False), 1j, [1.0], float)
    for value in (math.nan, np.float32("nan"), math.inf, HUGE, -HUGE, *strange):
        shown = f"x={wording.shown(value)}: must be a number"
        assert refusal(checks.number, "x", value, minimum=0) == f"{shown} of at least 0"
        assert refusal(checks.number, "x", value) == shown


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"above": 0}, "x=0: must be a number above 0"),
        (0, {"above": 0, "unit": "seconds"}, "x=0: must be a number of seconds above 0"),
        (0.5, {"minimum": 1}, "x=0.5: must be a number of at least 1"),
        (1, {"minimum": 0, "below": 1}, "x=1: must be a number of at least 0 and below 1"),
        (1, {"below": 1}, "x=1: must be a number below 1"),
        (-1, {"above": 0, "below": 0.5, "also": ", or null"}, "x=-1: must be a number above 0 and below 0.5, or null"),
        ("a", {"also": ", or null"}, "x='a': must be a number, or null"),
        (-math.inf, {"infinite": True, "above": 0}, "x=-inf: must be a number above 0"),
        (math.nan, {"infinite": True, "above": 0}, "x=nan: must be a number above 0"),
    ],
)
def test_numbers_have_bounds(value: Any, bounds: dict[str, Any], message: str) -> None:
    assert refusal(checks.number, "x", value, **bounds) == message


def test_the_bounds_of_numbers_are_exact() -> None:
    assert checks.number("x", 1, minimum=1, below=2) == 1
    assert checks.number("x", math.nextafter(0, 1), above=0) > 0
    assert checks.number("x", math.nextafter(1, 0), minimum=0, below=1) < 1


def test_infinity_is_taken_where_it_is_allowed() -> None:
    assert checks.number("x", math.inf, above=0, infinite=True) == math.inf
    assert checks.number("x", np.float32("inf"), above=0, infinite=True) == math.inf


# flags, names, objects ------------------------------------------------------------------------------------------------


def test_flags_are_taken() -> None:
    for value in (True, False, np.bool_(True), np.bool_(False)):
        assert checks.flag("f", value) is bool(value)


def test_values_that_are_not_flags_are_refused() -> None:
    for value in (0, 1, np.int8(1), "true", "", None, 1.0, [], np.array([True])):
        assert refusal(checks.flag, "f", value) == f"f={value!r}: must be true or false"


def test_long_values_are_cut() -> None:
    assert refusal(checks.one_of, "dtype", "x" * 9999, ["half"]) == f"dtype={'x' * 80}...: must be one of half"


def test_integers_of_thousands_of_digits_are_refused_by_name() -> None:
    assert (
        refusal(checks.integer, "n", 10**5000) == "n=<an int, too long to print>: must be at most 9223372036854775807"
    )
    assert refusal(checks.one_of, "dtype", 10**5000, ["half"]).endswith(": must be one of half")


def test_one_of_accepts_only_the_given_names() -> None:
    names = ("half", "float", "double")
    assert checks.one_of("dtype", "half", names) == "half"
    assert checks.one_of("dtype", "half", iter(names)) == "half"
    assert refusal(checks.one_of, "dtype", "int", names) == "dtype=int: must be one of half, float, double"
    expected = "dtype=Flaot: must be one of half, float, double; did you mean 'float'?"
    assert refusal(checks.one_of, "dtype", "Flaot", names) == expected
    for value in (None, True, 3, math.nan, ["half"], np.float32):
        assert refusal(checks.one_of, "dtype", value, names).startswith(
            f"dtype={value}: must be one of half, float, double"
        )


def test_an_object_of_a_class() -> None:
    assert checks.instance("n", True, int, "1") is True
    assert refusal(checks.instance, "rate", "x", float, "0.1") == "rate=<a str>: must be a float, such as 0.1"
    assert refusal(checks.instance, "rate", 3, float, "0.1") == "rate=<an int>: must be a float, such as 0.1"
    assert refusal(checks.instance, "n", None, int, "1") == "n=<a NoneType>: must be an int, such as 1"
    expected = "opt=<the class Decimal>: must be a Decimal, such as Decimal(1)"
    assert refusal(checks.instance, "opt", Decimal, Decimal, "Decimal(1)") == expected


def test_which_values_are_booleans() -> None:
    assert all(map(checks.is_bool, (True, np.bool_(0))))
    assert not any(map(checks.is_bool, (1, np.int8(1), "true", None, bool)))


def test_finite_numbers_become_floats() -> None:
    assert [checks.finite(value) for value in (3, 0.5, -1e300)] == [3.0, 0.5, -1e300]
    assert not any(map(checks.finite, (math.nan, math.inf, -math.inf, HUGE, True, "1", None, [1])))
