"""The settings that files of conf/ and overrides compose."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, TypeVar

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from cupynet import config
from cupynet.config import composing
from cupynet.config.schema import Settings

CONF = config.conf_folder()

GROUPS = ("backend", "memory", "data", "model", "loss", "optimizer", "parallel", "callbacks", "experiment")

# the smallest configuration that a schema accepts
MINIMAL: dict[str, Any] = {
    **{"backend": {"priority": {}}, "memory": {}, "parallel": {"synchronizer": {}}, "callbacks": {}},
    **{"data": {}, "model": {}, "loss": {}, "optimizer": {}},
}

CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


S = TypeVar("S", bound=Settings)


@cache
def _composed(command: str, schema: type[Settings], *overrides: str) -> DictConfig:
    composing.register(schema)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose(command, list(overrides))
    finally:
        composing.register(Settings)


def needs_hydra(override: Override) -> bool:
    """Return True for an override that selects a file of a group or deletes a setting."""
    return override.is_delete() or (override.key_or_group in GROUPS and isinstance(override.value(), str | list))


@cache
def settings_of(*overrides: str) -> Settings:
    """Return what `config.compose` returns, in a tenth of the time; see `settings_of_command`."""
    return settings_of_command("config", Settings, *overrides)


def settings_of_command(command: str, schema: type[S], *overrides: str) -> S:
    """Return the settings of the command whose file in conf/ has this name.

    Hydra composes each selection of files once. Values are set in a copy, and interpolations are resolved last.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    config = deepcopy(_composed(command, schema, *(str(each.input_line) for each in parsed if needs_hydra(each))))
    for each in (each for each in parsed if not needs_hydra(each)):
        added = each.is_add() or each.is_force_add()
        OmegaConf.update(config, each.key_or_group, each.value(), merge=True, force_add=added)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU"):
            patch.delenv(name, raising=False)
        return composing.settings_of(config, overrides, schema)
