"""Removed settings: refused with their replacement, and ignored in stored runs that hold the former default."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupynet import config
from cupynet.config import removed
from cupynet.config.removed import refuse_removed, without_removed
from cupynet.config.stored import keep
from cupynet.core.errors import ConfigError
from tests.support.commands import Command
from tests.support.settings import settings_of

OLD = {
    "data.pieces": "use data.folder",
    "optimizer.speed": "use optimizer.learning_rate",
    "callbacks.nonfinite.action=rewind": "use stop or skip",
}


@pytest.fixture(autouse=True)
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "REMOVED", OLD)
    monkeypatch.setattr(removed, "DEFAULTS", {"data.pieces": None})


@pytest.mark.parametrize("override", ["data.pieces=3", "+optimizer.speed=1", "callbacks.nonfinite.action=rewind"])
def test_a_command_line_is_refused(
    override: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(override) == (2, [])
    err = capsys.readouterr().err
    assert override in err and next(use for key, use in OLD.items() if key in override) in err
    assert list(in_folder.iterdir()) == []
    refuse_removed(["callbacks.nonfinite.action=stop", "data.limit=3"])


def test_stored_settings() -> None:
    assert without_removed({"data": {"pieces": None, "limit": 3}, "seed": 1}) == {"data": {"limit": 3}, "seed": 1}
    for stored in (
        {"data": {"pieces": 3}},
        {"optimizer": {"speed": None}},
        {"callbacks": {"nonfinite": {"action": "rewind"}}},
    ):
        with pytest.raises(ConfigError, match="; use "):
            without_removed(stored)


def test_removed_settings_of_a_stored_run_are_dropped_if_default(in_folder: Path) -> None:
    keep(in_folder / "run", settings_of())
    path = in_folder / "run/.hydra/config.yaml"
    text = path.read_text()
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: null\n"))
    assert "pieces" not in config.load(in_folder / "run").data
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: 4\n"))
    with pytest.raises(ConfigError, match=r"data\.pieces=4: .*data\.folder"):
        config.load(in_folder / "run")
