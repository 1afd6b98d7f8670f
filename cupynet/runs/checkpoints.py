"""Checkpoints on disk. Each is a folder that is written atomically and verified before use.

    checkpoints/
        step-00001234/
            state.json              numbers, and the names of each worker's arrays
            weights.safetensors     weights; equal arrays of several workers are stored once
            state.safetensors       all other arrays
            manifest.json           size and SHA-256 of the other files, and its own SHA-256
        run.json                    the run that owns this folder; only in a folder outside the run folder

A checkpoint is written to a temporary folder, flushed to disk and renamed. Before it is deleted, it is renamed again.
Every folder named `step-<number>` is therefore complete, even after a machine crash. The next save deletes leftovers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupynet.core.errors import DataError, OutputError
from cupynet.core.files import load_tensors, read_object, save_weights, write_json, write_whole
from cupynet.core.wording import shown
from cupynet.runs.layout import STEP, checkpoints, step_name

FORMAT = 1
STATE, MANIFEST, ARRAYS = "state.json", "manifest.json", ".safetensors"
OWNER = "run.json"  # identifies the run that owns a checkpoint folder outside its run folder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A verified checkpoint, with the content of state.json and the arrays by file (without suffix) and name."""

    path: Path
    state: dict[str, Any]
    arrays: dict[str, dict[str, Any]]


class Checkpoints:
    """The checkpoints in a folder. The first save creates the folder, but not its parents."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint for iteration `step`."""
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Return the iterations of all checkpoints, sorted."""
        return sorted(checkpoints(self.folder))

    def save(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write or replace the checkpoint for iteration `step`, with the content of a `Stored`, and return its folder.

        Raises:
            OutputError: the checkpoint cannot be written. Earlier checkpoints are unchanged.
        """
        path = self.path(step)
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            self.clean()
            self.folder.mkdir(exist_ok=True)  # without its parents: if they are gone, the run folder was moved
            temporary.mkdir()
            write_json(temporary / STATE, state)
            for name, tensors in arrays.items():
                save_weights(temporary / f"{name}{ARRAYS}", dict(tensors), write_whole)
            _write_manifest(temporary)
            _flush(temporary)
            old = path.with_name(f"{path.name}.old-{os.getpid()}")
            if path.exists():
                os.rename(path, old)
            os.rename(temporary, path)
            _flush(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, OutputError) as error:
            reason = getattr(error.__cause__ or error, "strerror", error)
            raise OutputError(f"{path}: cannot write the checkpoint ({reason})") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return path

    def keep(self, steps: Collection[int]) -> None:
        """Delete the checkpoints of all iterations that are not in `steps`. Raise OutputError if this fails."""
        try:
            self.clean()
            for step in set(self.steps()).difference(steps):
                path = self.path(step)
                trash = path.with_name(f"{path.name}.tmp-{os.getpid()}")
                os.rename(path, trash)
                shutil.rmtree(trash, ignore_errors=True)  # `clean` deletes anything left, such as open files on NFS
        except OSError as error:
            raise OutputError(f"{self.folder}: cannot delete an old checkpoint ({error.strerror})") from error

    def newest(self, *, warn: bool = True) -> Stored | None:
        """Return the newest undamaged checkpoint, or None without checkpoints. Raise DataError if all are damaged.

        warn: True to log a warning for each damaged checkpoint.
        """
        first: DataError | None = None
        for _, path in sorted(checkpoints(self.folder).items(), reverse=True):
            try:
                return read(path)
            except DataError as error:
                first = first or error
                if warn:
                    log.warning("%s; trying the previous checkpoint", error)
        if first is not None:
            raise DataError(f"{self.folder}: all checkpoints are damaged. The newest: {first}")
        return None

    def owner(self) -> str:
        """Return the identity of the run that has claimed this folder, or "". Raise DataError if it cannot be read."""
        path = self.folder / OWNER
        return str(read_object(path).get("run")) if os.path.lexists(path) else ""

    def claim(self, run: str) -> None:
        """Store the identity of the run that owns this folder. Raise OutputError if this fails."""
        write_json(self.folder / OWNER, {"run": run})

    def clean(self) -> None:
        """Delete leftovers of killed processes, and restore a checkpoint if replacing it failed. May raise OSError."""
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                match = STEP.fullmatch(entry.name)
                if match and match[2] == "old" and not self.path(int(match[1])).exists():
                    os.rename(entry, self.path(int(match[1])))
                elif match and match[2]:
                    shutil.rmtree(entry, ignore_errors=True)


def read(path: str | Path) -> Stored:
    """Read a checkpoint and verify its files against its manifest. Raise DataError if it is missing or damaged."""
    path = Path(path)
    manifest = path / MANIFEST
    try:
        if path.is_symlink():
            raise DataError(f"{path}: is a symbolic link, not a checkpoint")
        digests, files = _digests(path), read_object(manifest).get("files")
        if not isinstance(files, dict) or manifest.read_bytes() != _manifest({"format": FORMAT, "files": files}):
            raise DataError(
                f"{manifest}: is damaged or from another version; expected format {FORMAT} and a matching SHA-256"
            )
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot read the checkpoint ({error.strerror})") from error
    for name in sorted(files.keys() | digests.keys()):
        expected, actual = files.get(name, "no file"), digests.get(name, "no file")
        if expected != actual:
            raise DataError(f"{path / name}: is damaged (expected {shown(expected)}, found {shown(actual)})")
    arrays = {Path(name).stem: load_tensors(path / name) for name in sorted(files) if name.endswith(ARRAYS)}
    return Stored(path, read_object(path / STATE), arrays)


def _write_manifest(folder: Path) -> None:
    write_whole(folder / MANIFEST, _manifest({"format": FORMAT, "files": _digests(folder)}))


def _manifest(content: dict[str, Any]) -> bytes:
    """Encode a manifest with its own digest."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": digest}, indent=2) + "\n").encode()


def _digests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the size and SHA-256 of all files but the manifest. Raise DataError for links and pipes, or OSError."""
    digests = {}
    for path in sorted(folder.iterdir()):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise DataError(f"{path}: must be a regular file")
        if path.name != MANIFEST:
            content = path.read_bytes()
            digests[path.name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    return digests


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot flush folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
