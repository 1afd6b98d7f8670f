"""The settings that files of conf/ and overrides compose."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from cupynet import config
from cupynet.config import composing
from cupynet.config.schema import Settings

CONF = config.conf_folder()

GROUPS = ("backend", "memory", "data", "model", "loss", "optimizer", "parallel", "callbacks", "experiment")

# the least that a schema can be read from
LEAST: dict[str, Any] = {
    **{"backend": {"priority": {}}, "memory": {}, "parallel": {"synchronizer": {}}, "callbacks": {}},
    **{"data": {}, "model": {}, "loss": {}, "optimizer": {}},
}

CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@cache
def settings_of(*overrides: str) -> Settings:
    with pytest.MonkeyPatch.context() as patch, initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU"):
            patch.delenv(name, raising=False)
        return composing.settings_of(compose("config", list(overrides)), overrides, Settings)
