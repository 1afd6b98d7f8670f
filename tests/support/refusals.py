"""What a test checks of an error: its type, and the setting or the file that it names, never its sentence."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupynet.core.errors import ConfigError, DataError


@contextmanager
def refused(setting: str, value: str | None = None) -> Iterator[None]:
    """Context whose code must raise a ConfigError about a setting.

    Args:
        setting: the argument, without the name of its class, or the dotted key; "" for an error about no single one.
        value: the refused value as text; None for any.
    """
    with pytest.raises(ConfigError) as caught:
        yield
    assert caught.value.setting == setting, caught.value
    assert value is None or caught.value.value == value, caught.value


@contextmanager
def data_error(*named: object) -> Iterator[None]:
    """Context whose code must raise a DataError of one line.

    Args:
        named: what the line must contain: the path of a file, the name of a weight, a number that was found.
    """
    with pytest.raises(DataError) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 65
    for each in named:
        assert str(each) in text, text
