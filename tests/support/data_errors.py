"""What a test checks of a DataError: the file or data set that it names, in one line, never its sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cupynet.core.errors import DataError


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
