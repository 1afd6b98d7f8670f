"""Values and names in messages."""

from __future__ import annotations

import pytest

from cupynet.core import wording


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((999, "999 bytes"), (1000, "1.0 kB"), (99_960_000, "100.0 MB"), (999_510_000, "1.0 GB")),
        (10**21, "1000.0 EB"),
    ],
)
def test_amounts_of_memory_have_units(size: int, text: str) -> None:
    assert wording.amount(size) == text


def test_the_nearest_name_is_suggested() -> None:
    assert "'adam'" in wording.guess("ADM", ["adam", "sgd"])
    assert wording.guess(3, ["adam", "sgd"]) == wording.guess("lbfgs", ["adam", "rmsprop"]) == ""
    assert "'filters'" in wording.nearest("filers", ["kernel", "filters"])
    assert wording.nearest("x", ["kernel", "filters"]).endswith("filters and kernel")
    assert wording.nearest("x", map(str, range(25))) == ""


def test_values_are_shown_as_they_are_written_on_the_command_line() -> None:
    value = {"a": [1, None, True], "b": {"c": "x"}, "d": (0.5,)}
    assert wording.written(value) == "{a:[1,null,true],b:{c:x},d:[0.5]}"
    assert wording.shown("x" * 200) == f"'{'x' * 79}..."
