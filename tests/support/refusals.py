"""What a test checks of an error: its type and the setting that it names, never its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupynet.core.errors import ConfigError


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
