"""Settings composed from files of conf/ and overrides."""

from copy import deepcopy
from functools import cache
from typing import Any, TypeVar

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from cupynet import config
from cupynet.config import composing
from cupynet.config.overrides import PARSER
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
def settings_of(*overrides: str) -> Settings:
    """Return the settings of `cupynet train`."""
    return settings_of_command("config", Settings, *overrides)


def settings_of_command(command: str, schema: type[S], *overrides: str) -> S:
    """Return the settings of a command, named after its file in conf/.

    Hydra composes each choice of files, with the settings that are added (+) or deleted (~), once. Other values are set
    in a copy, which is what Hydra does last.
    """
    parsed = PARSER.parse_overrides(composing.opened(overrides))
    values = [each for each in parsed if not (each.is_add() or each.is_delete() or each.key_or_group in GROUPS)]
    files = [str(each.input_line) for each in parsed if each not in values]
    key = (schema.__name__, command, *files)
    if key not in _composed:
        _composed[key] = _compose(schema, command, *files)
    composed = deepcopy(_composed[key])
    for each in values:
        OmegaConf.update(composed, each.key_or_group, each.value(), force_add=each.is_force_add())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU"):
            patch.delenv(name, raising=False)
        return composing.settings_of(composed, overrides, schema)


_composed: dict[tuple[str, ...], DictConfig] = {}


def _compose(schema: type[Settings], command: str, *files: str) -> DictConfig:
    composing.register(schema)
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            found = compose(command, [*files])
            return OmegaConf.masked_copy(found, [str(key) for key in found if key != "hydra"])
    finally:
        composing.register(Settings)
