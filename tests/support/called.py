"""`cupynet train` with other jobs, called in the tests' own process."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra.core.hydra_config import HydraConfig

from cupynet import config
from cupynet.commands import train
from cupynet.config.schema import Settings


@contextmanager
def entered(folder: Path) -> Iterator[None]:
    """Enter a folder, with the environment that a command expects; restore logging afterwards."""
    loggers = [logging.getLogger(name) for name in (None, "cupynet", "hydra", "__main__")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.chdir(folder)
            for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU", "HYDRA_FULL_ERROR"):
                environment.delenv(name, raising=False)
            yield
    finally:
        for logger, handlers, level, propagate in before:
            for handler in set(logger.handlers) - set(handlers):
                handler.close()
            logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
        HydraConfig.instance().cfg = None


def called(*arguments: str, task: Any = None, check: Any = None) -> tuple[int, list[Settings]]:
    """Call the command. Return its exit code, and the settings of the jobs that ran."""
    ran: list[Settings] = []

    def job(settings: Settings, folder: Path) -> float | None:
        ran.append(settings)
        return None if task is None else task(settings, folder)

    def prepare(settings: Settings) -> Settings:
        if check is not None:
            check(settings)
        return settings

    with patch.object(sys, "argv", ["train.py", *arguments]):
        try:
            config.run(job, prepare, "config", Settings)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code, ran
    return 0, ran


def train_job(settings: Settings, folder: Path) -> float | None:
    return train.train(train.prepare(settings), folder)
