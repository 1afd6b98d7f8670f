"""Settings composed from files of conf/ and overrides."""

from functools import cache
from typing import Any, TypeVar

import pytest
from hydra import compose, initialize_config_dir

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
def settings_of(*overrides: str) -> Settings:
    """Return the settings of `cupynet train`."""
    return settings_of_command("config", Settings, *overrides)


def settings_of_command(command: str, schema: type[S], *overrides: str) -> S:
    """Return the settings of a command, named after its file in conf/."""
    composing.register(schema)
    try:
        with pytest.MonkeyPatch.context() as patch, initialize_config_dir(str(CONF), version_base="1.3"):
            for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU"):
                patch.delenv(name, raising=False)
            composed = compose(command, composing.opened(overrides))
            return composing.settings_of(composed, overrides, schema)
    finally:
        composing.register(Settings)
