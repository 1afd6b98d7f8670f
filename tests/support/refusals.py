"""Check errors: their type and the setting or file that they name, but not the wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupynet.core.errors import ConfigError, DataError


@contextmanager
def refused(setting: str, value: str | None = None) -> Iterator[None]:
    """Expect the code in a `with` block to raise a ConfigError about a setting.

    Args:
        setting: the argument without its class, or the dotted key; "" if the error is not about a single setting.
        value: the rejected value as text; None for any.
    """
    with pytest.raises(ConfigError) as caught:
        yield
    assert caught.value.setting == setting, caught.value
    assert value is None or caught.value.value == value, caught.value


@contextmanager
def data_error(*named: object) -> Iterator[None]:
    """Expect the code in a `with` block to raise a DataError with a one-line message.

    Args:
        named: text that the line must contain, such as a file's path, a weight's name, or a number.
    """
    with pytest.raises(DataError) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 65
    for each in named:
        assert str(each) in text, text
