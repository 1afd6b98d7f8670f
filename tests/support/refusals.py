"""Check errors: their type and the setting or file that they name, but not the wording."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupynet.core.errors import ConfigError, DataError


@contextmanager
def refused(setting: str, value: str | None = None) -> Iterator[None]:
    """Expect the code in a `with` block to raise a ConfigError about a setting, and about that value unless it is None.

    The setting is an argument without its class, a dotted key, or "" if the error is not about a single setting.
    """
    with pytest.raises(ConfigError) as caught:
        yield
    assert caught.value.setting == setting, caught.value
    assert value is None or caught.value.value == value, caught.value


@contextmanager
def data_error(*named: object) -> Iterator[None]:
    """Expect a DataError whose message has one line and names a file's path, a weight's name, a number ..."""
    with pytest.raises(DataError) as caught:
        yield
    text = str(caught.value)
    assert "\n" not in text and caught.value.exit_code == 65
    for each in named:
        assert str(each) in text, text
