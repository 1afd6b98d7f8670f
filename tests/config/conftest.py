"""Commands run in the tests' own process."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cupynet.config import hydra_main
from tests.support.called import called, entered
from tests.support.commands import Called, Command, Line
from tests.support.settings import CONF, MINIMAL


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


@pytest.fixture(scope="session")
def minimal_conf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conf")
    settings = yaml.safe_load((CONF / "config.yaml").read_text())
    of_hydra = [each for each in settings["defaults"] if "hydra/" in str(each)]
    settings |= {"defaults": ["spine", "_self_", *of_hydra], **MINIMAL}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    shutil.copytree(CONF / "hydra", folder / "hydra")
    return folder


@pytest.fixture
def minimal_conf(minimal_conf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands compose conf/config.yaml without the groups, for tests that need none. It takes 60 % of the time."""
    monkeypatch.setattr(hydra_main, "conf_folder", lambda: minimal_conf_folder)
