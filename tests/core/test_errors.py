"""Errors and their causes."""

import copy
import pickle

from cupynet.core.errors import ConfigError, causes


def test_causes_of_an_error_are_listed_once_and_from_the_outermost_inwards() -> None:
    first, second, third = ValueError("first"), TypeError("second"), OSError("third")
    first.__cause__, first.__context__, second.__context__ = second, third, third
    assert list(causes(first)) == [first, second, third]
    third.__cause__ = second
    assert list(causes(first)) == [first, second, third]


def test_the_fields_of_a_config_error_survive_pickling() -> None:
    for text, *arguments in (("odd", "odd"), ("data.folder: odd", "odd", "data.folder")):
        assert str(ConfigError(*arguments)) == text
    error = ConfigError("is odd", "Conv2D kernel_size", "0")
    for each in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert str(each) == "Conv2D kernel_size=0: is odd"
        assert (each.owner, each.setting, each.value, each.reason) == ("Conv2D", "kernel_size", "0", "is odd")
