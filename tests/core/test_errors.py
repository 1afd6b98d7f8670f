"""Errors and their causes."""

import copy
import pickle

import pytest

from cupynet.core.errors import ConfigError, causes


def test_causes_are_yielded_once_and_from_the_outermost_error_inwards() -> None:
    first, second, third = ValueError("first"), TypeError("second"), OSError("third")
    first.__cause__, first.__context__, second.__context__ = second, third, third
    assert list(causes(first)) == [first, second, third]
    third.__cause__ = second
    assert list(causes(first)) == [first, second, third]


@pytest.mark.parametrize(
    ("arguments", "text", "fields"),
    [
        (("is odd",), "is odd", ("", "", None)),
        (("is missing", "data.folder"), "data.folder: is missing", ("", "data.folder", None)),
        (("is odd", "Conv2D kernel_size", "0"), "Conv2D kernel_size=0: is odd", ("Conv2D", "kernel_size", "0")),
    ],
)
def test_the_fields_of_a_config_error_survive_pickling(
    arguments: tuple[str, ...], text: str, fields: tuple[str, str, str | None]
) -> None:
    error = ConfigError(*arguments)
    for each in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (str(each), each.owner, each.setting, each.value, each.reason) == (text, *fields, arguments[0])
