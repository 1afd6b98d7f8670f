"""Commands run in the tests' own process."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from cupynet import config
from cupynet.config.schema import Settings
from tests.support.commands import Called, Command, Line


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty working folder with the environment that a command expects; restore logging afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    loggers = [logging.getLogger(name) for name in (None, "cupynet", "hydra", "__main__")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield tmp_path
    for logger, handlers, level, propagate in before:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
    HydraConfig.instance().cfg = None


@pytest.fixture
def command(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Return command(*arguments, task=, check=) -> (exit code, settings of the jobs that ran)."""

    def call(*arguments: str, task: Any = None, check: Any = None) -> tuple[int, list[Settings]]:
        ran: list[Settings] = []

        def job(settings: Settings, folder: Path) -> float | None:
            ran.append(settings)
            return None if task is None else task(settings, folder)

        def prepare(settings: Settings) -> Settings:
            if check is not None:
                check(settings)
            return settings

        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            config.run(job, prepare, "config", Settings)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code, ran
        return 0, ran

    return call


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Line:
    """Return a function that returns the single line printed on stderr since its last call."""
    return lambda: Called(0, *capsys.readouterr()).error
