"""Hydra reads each file of conf/ once in a process: reading them again takes a third of a composition."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

from hydra._internal.core_plugins import file_config_source
from hydra.core.plugins import Plugins

from tests.support.commands import ROOT

_CONF = os.path.join(os.path.realpath(ROOT / "conf"), "")
_seen: dict[tuple[str, int, int], bytes] = {}


def read_once() -> None:
    """Make Hydra keep what it has read of a file of conf/ until the file changes."""
    Plugins.instance()  # which runs the modules of its plugins again: the class that is used exists only after it
    source = file_config_source.FileConfigSource
    source.load_config = _kept(source.load_config)  # type: ignore[method-assign]


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
