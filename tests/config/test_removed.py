"""Stored settings of earlier versions: removed ones are dropped, renamed arguments and moved classes are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cupynet import config
from cupynet.config import removed
from cupynet.config.removed import translated
from cupynet.config.stored import keep
from tests.support.refusals import refused
from tests.support.settings import settings_of


def test_a_removed_setting_of_a_stored_run_is_dropped_if_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removed, "DEFAULTS", {"data.pieces": None})
    keep(tmp_path, settings_of())
    path = tmp_path / ".hydra/config.yaml"
    text = path.read_text()
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: null\n"))
    assert "pieces" not in config.load(tmp_path).data
    path.write_text(text.replace("\ndata:\n", "\ndata:\n  pieces: 4\n"))
    with refused("data.pieces"):
        config.check_downloads(config.load(tmp_path), tmp_path, ())


@pytest.mark.parametrize("name", ["cupynet.parallel.ElasticAveraging", "cupynet.parallel.ParameterAveraging"])
def test_a_renamed_argument_is_found_at_any_depth(name: str) -> None:
    schedule = {"_target_": "cupynet.parallel.PostLocal", "epochs": 2, "frequency": 10}
    stored: dict[str, Any] = {"parallel": {"synchronizer": {"_target_": name, "frequency": schedule}}}
    assert translated(stored)["parallel"]["synchronizer"] == {
        "_target_": name,
        "averaging_frequency": {"_target_": "cupynet.parallel.PostLocal", "epochs": 2, "averaging_frequency": 10},
    }


def test_an_argument_of_a_class_of_the_user_keeps_its_name() -> None:
    stored = {"_target_": "mine.ParameterAveraging", "frequency": 3}
    assert translated(stored) == stored


def test_a_moved_class_is_found() -> None:
    assert translated({"_target_": "cupynet.loggers.WandB"}) == {"_target_": "cupynet.training.WandB"}


def test_overrides_are_stored_under_their_present_keys(in_folder: Path) -> None:
    keep(in_folder / "run", settings_of(), ["accumulate=2", "+data.normalize.deviation=[0.4]", "~callbacks.progress"])
    assert config.overrides_of(in_folder / "run") == [
        *("accumulation_steps=2", "+data.normalize.std=[0.4]", "~callbacks.progress")
    ]
