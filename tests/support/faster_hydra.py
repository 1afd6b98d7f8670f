"""Hydra without work that it repeats: half of what a command in a test would take."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra._internal.hydra import Hydra
from hydra.core.plugins import Plugins

import cupynet.config.hydra_main  # noqa: F401  # which says where Hydra finds the plugin of the package
from tests.support.commands import ROOT

_CONF = os.path.join(os.path.realpath(ROOT / "conf"), "")
_seen: dict[tuple[str, int, int], bytes] = {}


def speed_up() -> None:
    """Make Hydra read each file of conf/ once until it changes, and compose the settings of a command once."""
    Plugins.instance()  # which runs the modules of its plugins again: the class that is used exists only after it
    source = file_config_source.FileConfigSource
    source.load_config = _kept(source.load_config)  # type: ignore[method-assign]
    Hydra.get_mode = _composed_if_asked(Hydra.get_mode)  # type: ignore[method-assign]


def _composed_if_asked(get_mode: Callable[..., Any]) -> Callable[..., Any]:
    """Hydra composes all settings to look at `hydra.mode`, which no file of conf/ sets, and then again."""

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        asked = any(each.lstrip("+").startswith("hydra.mode=") for each in overrides)
        return get_mode(self, config_name, overrides) if asked else None

    return mode


def _kept(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def load_config(self: Any, config_path: str) -> Any:
        file = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
        if not file.startswith(_CONF):  # a test may write it twice within the resolution of its time
            return read(self, config_path)
        try:
            found = os.stat(file)
        except OSError:
            return read(self, config_path)
        key = (file, found.st_mtime_ns, found.st_size)
        if key not in _seen:
            _seen[key] = pickle.dumps(read(self, config_path))
        return pickle.loads(_seen[key])

    return load_config
