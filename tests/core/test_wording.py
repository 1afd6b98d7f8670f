"""The wording of messages."""

from __future__ import annotations

import numpy as np

from cupynet.core import wording


def test_amounts_of_memory_have_units() -> None:
    for size, text in (
        (0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (25_300_000_000, "25.3 GB"), (99_960_000, "100.0 MB"),
        (999_510_000, "1.0 GB"), (5_210 * 10**9, "5.2 TB"), (10**21, "1000.0 EB"),
    ):  # fmt: skip
        assert wording.amount(size) == text


def test_values_in_messages() -> None:
    assert wording.shown("a") == "'a'" and wording.shown("a", str) == "a"
    assert wording.shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert wording.shown("x" * 200) == f"'{'x' * 79}..."


def test_the_nearest_name_is_suggested() -> None:
    assert wording.guess("adm", ["adam", "sgd"]) == "; did you mean 'adam'?"
    assert wording.guess("ADAM", ["adam", "sgd"]) == "; did you mean 'adam'?"
    assert wording.guess(3, ["adam", "sgd"]) == wording.guess("lbfgs", ["adam", "rmsprop"]) == ""
    assert wording.nearest("filers", ["kernel", "filters"]) == "; did you mean 'filters'?"
    assert wording.nearest("KERNEL", ["kernel", "filters"]) == "; did you mean 'kernel'?"
    assert wording.nearest("x", ["kernel", "filters"]) == "; the names are filters and kernel"
    assert wording.nearest("x", ["kernel"]) == wording.nearest("x", map(str, range(25))) == ""


def test_values_as_they_are_written_on_the_command_line() -> None:
    value = {"a": [1, None, True], "b": {"c": "x"}, "d": (0.5,)}
    assert wording.written(value) == "{a:[1,null,true],b:{c:x},d:[0.5]}"
