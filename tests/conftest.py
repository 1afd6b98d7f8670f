"""What holds for all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.standin import installed

# under nohup SIGHUP is ignored, by whatever a test starts too: here it means what it means from a terminal
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def made_up_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that is marked `standin` runs on the stand-in of CuPy, and fails where CuPy is misused."""
    if request.node.get_closest_marker("standin") is None:
        yield
        return
    with installed():
        yield
