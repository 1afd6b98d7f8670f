"""Commands called in the process of the tests."""

import sys
from collections.abc import Callable

import pytest

from tests.support.commands import Call, Called


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """call(main, *arguments): run the `main` of a command as its process would, and return how it ended."""

    def run(main: Callable[[], object], *arguments: object) -> Called:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out, err = capsys.readouterr()
        assert left.value.code is None or isinstance(left.value.code, int)
        return Called(left.value.code or 0, out, err)

    return run
