"""Hydra reads each file of conf/ once in a process: reading them again takes a third of a composition."""

from __future__ import annotations

import os
import pickle
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource

from tests.support.commands import ROOT

_CONF = os.path.join(os.path.realpath(ROOT / "conf"), "")
_read = FileConfigSource.load_config
_seen: dict[tuple[str, int, int], bytes] = {}


def _load_config(self: FileConfigSource, config_path: str) -> Any:
    file = os.path.realpath(os.path.join(self.path, self._normalize_file_name(config_path)))
    if not file.startswith(_CONF):  # a test may write it twice within the resolution of its time
        return _read(self, config_path)
    try:
        found = os.stat(file)
    except OSError:
        return _read(self, config_path)
    key = (file, found.st_mtime_ns, found.st_size)
    if key not in _seen:
        _seen[key] = pickle.dumps(_read(self, config_path))
    return pickle.loads(_seen[key])


def read_once() -> None:
    """Make Hydra keep what it has read of a file of conf/ until the file changes."""
    FileConfigSource.load_config = _load_config
