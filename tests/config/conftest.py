"""Commands run in the tests' own process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.called import called, entered
from tests.support.commands import Called, Command, Line


@pytest.fixture
def in_folder(tmp_path: Path) -> Iterator[Path]:
    """Yield an empty working folder with the environment that a command expects; restore logging afterwards."""
    with entered(tmp_path):
        yield tmp_path


@pytest.fixture
def command(in_folder: Path) -> Command:
    """Return command(*arguments, task=, check=) -> (exit code, settings of the jobs that ran)."""
    return called


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Line:
    """Return a function that returns the single line printed on stderr since its last call."""
    return lambda: Called(0, *capsys.readouterr()).error
