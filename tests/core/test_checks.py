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
from cupynet.core.wording import guess
from tests.support.refusals import refused

HUGE = 10**400  # beyond the range of floats


class Index:
    def __index__(self) -> int:
        return 7


def kind(value: Any) -> str:
    return value.__name__ if callable(value) else type(value).__name__


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        (checks.integer, Index(), 7),
        (checks.integer, 2**63 - 1, 2**63 - 1),
        (checks.integer, np.array(5), 5),
        (checks.integer, np.uint64(3), 3),
        (checks.number, 3, 3.0),
        (checks.number, Fraction(1, 4), 0.25),
        (checks.number, Decimal("0.5"), 0.5),
        (checks.number, np.float16(3), 3.0),
        (checks.flag, np.bool_(True), True),
        (checks.seed, 0, 0),
        (checks.seed, np.uint64(2**64 - 1), 2**64 - 1),
    ],
    ids=kind,
)
def test_numbers_and_flags_of_other_libraries_become_plain_python_values(
    check: Callable[[str, Any], Any], value: Any, expected: Any
) -> None:
    found = check("x", value)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    ("check", "values"),
    [
        (checks.integer, (1.0, "1", b"1", None, math.nan, True, np.bool_(True), [1], np.array([1, 2]), int)),
        (checks.number, (math.nan, math.inf, HUGE, -HUGE, "1", b"1", None, True, np.bool_(False), 1j, [1.0], float)),
        (checks.flag, (0, 1, np.int8(1), "true", "", None, 1.0, [], np.array([True]))),
        (checks.seed, (-1, 2**64, 1.0, None, True)),
    ],
)
def test_values_of_the_wrong_type_are_refused(check: Callable[[str, Any], Any], values: tuple[object, ...]) -> None:
    for value in values:
        with refused("x"):
            check("Conv2D x", value)


@pytest.mark.parametrize(
    ("check", "value", "bounds"),
    [
        (checks.integer, 0, {"minimum": 1}),
        (checks.integer, -HUGE, {"minimum": 0}),
        (checks.integer, 8, {"most": 7}),
        (checks.integer, 2**63, {}),
        (checks.integer, -HUGE, {}),
        (checks.number, 0, {"above": 0}),
        (checks.number, 0.5, {"minimum": 1}),
        (checks.number, 1, {"below": 1}),
        (checks.number, -math.inf, {}),
        (checks.number, math.nan, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value)[:20],
)
def test_numbers_out_of_bounds_are_refused(check: Callable[..., Any], value: Any, bounds: dict[str, Any]) -> None:
    with refused("x"):
        check("x", value, **bounds)


def test_the_outermost_values_within_bounds_are_accepted() -> None:
    assert checks.integer("n", 1, 1, most=1) == 1
    assert checks.number("x", 1, minimum=1, below=2) == 1
    assert checks.number("x", math.nextafter(0, 1), above=0) > 0
    assert checks.number("x", math.nextafter(1, 0), minimum=0, below=1) < 1


def test_one_of_accepts_only_the_given_names() -> None:
    assert checks.one_of("dtype", "half", iter(("half", "float"))) == "half"
    for wrong in ("int", None, 3, ["half"], 10**5000):
        with refused("dtype"):
            checks.one_of("dtype", wrong, ("half", "float"))


@pytest.mark.parametrize("wrong", ["x" * 9999, np.eye(90), 10**5000], ids=kind)
def test_the_message_about_an_enormous_value_is_one_short_line(wrong: object) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.integer("n", wrong)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "name"), [("lr", "learning_rate"), ("acc", "accuracy"), ("Auc", "auc"), ("ac", "auc")]
)
def test_a_mistyped_name_gets_a_suggestion_by_initials_beginning_or_likeness(text: str, name: str) -> None:
    assert repr(name) in guess(text, ["accuracy", "auc", "learning_rate"])
