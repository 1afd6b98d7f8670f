"""Stored settings of earlier versions: removed ones are dropped, renamed arguments and moved classes are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupynet import config
from cupynet.config import removed
from cupynet.config.removed import translated
from cupynet.config.stored import keep
from cupynet.core.errors import ConfigError
from tests.support.settings import settings_of


@pytest.fixture(autouse=True)
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removed, "DEFAULTS", {"data.pieces": None})


def test_removed_settings_are_dropped_if_default() -> None:
    assert translated({"data": {"pieces": None, "limit": 3}, "seed": 1}) == {"data": {"limit": 3}, "seed": 1}
    assert translated({"data": {"pieces": 3}}) == {"data": {"pieces": 3}}


def test_removed_settings_of_a_stored_run(in_folder: Path) -> None:
    keep(in_folder / "run", settings_of())
    path = in_folder / "run/.hydra/config.yaml"
    text = path.read_text()
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: null\n"))
    assert "pieces" not in config.load(in_folder / "run").data
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: 4\n"))
    settings = config.load(in_folder / "run")
    with pytest.raises(ConfigError) as refused:
        config.check_downloads(settings, in_folder / "run", ())
    assert refused.value.setting == "data.pieces"


@pytest.mark.parametrize("name", ["cupynet.parallel.ElasticAveraging", "cupynet.parallel.ParameterAveraging"])
def test_a_renamed_argument(name: str) -> None:
    schedule = {"_target_": "cupynet.parallel.PostLocal", "epochs": 2, "frequency": 10}
    stored: dict[str, Any] = {"parallel": {"synchronizer": {"_target_": name, "frequency": schedule}}}
    assert translated(stored)["parallel"]["synchronizer"] == {
        "_target_": name,
        "averaging_frequency": {"_target_": "cupynet.parallel.PostLocal", "epochs": 2, "averaging_frequency": 10},
    }


def test_an_argument_of_a_class_of_the_user_keeps_its_name() -> None:
    stored = {"_target_": "mine.ParameterAveraging", "frequency": 3}
    assert translated(stored) == stored


def test_a_moved_class() -> None:
    assert translated({"_target_": "cupynet.loggers.WandB"}) == {"_target_": "cupynet.training.WandB"}
