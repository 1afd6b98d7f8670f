"""Commands called in the tests' own process."""

import sys
from collections.abc import Callable

import pytest

from tests.support.commands import Call, Called


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return call(main, *arguments), which runs a command's `main` like its process and returns the outcome."""

    def run(main: Callable[[], object], *arguments: object) -> Called:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert left.value.code is None or isinstance(left.value.code, int)
        return Called(left.value.code or 0, out, err)

    return run
