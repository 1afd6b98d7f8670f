"""Checkpoints on disk: a folder for each, which is written atomically and verified before it is used.

    checkpoints/
        step-00001234/
            state.json              numbers, and the names of each worker's arrays
            weights.safetensors     arrays; equal arrays of several workers are stored once
            state.safetensors
            manifest.json           size and SHA-256 of the other files, and of itself

A checkpoint is written into a folder with a temporary name. Its files and the folder are flushed to disk, the folder is
renamed, and its parent is flushed. A checkpoint is renamed before it is removed. Every folder called `step-...` is
therefore complete, even if the machine fails. Leftovers have other names, and the next save removes them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cupynet.core.errors import DataError, OutputError
from cupynet.core.files import load_weights, save_weights, write_json, write_whole

FORMAT = 1
STATE, MANIFEST, ARRAYS = "state.json", "manifest.json", ".safetensors"
MAX_JSON = 64 << 20  # bytes of a JSON file

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A verified checkpoint.

    Attributes:
        path: its folder.
        state: the content of state.json.
        arrays: arrays by file, without its suffix, and by name.
    """

    path: Path
    state: dict[str, Any]
    arrays: dict[str, dict[str, Any]]


class Checkpoints:
    """The checkpoints in a folder, which is created by the first save."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after iteration `step`."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the iterations of the checkpoints, in order."""
        return sorted(self._places())

    def _places(self) -> dict[int, Path]:
        """Return the folder of each step: `step-...`, or `.old-...` if a save was killed between two renames."""
        places: dict[int, Path] = {}
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(r"step-(\d{8,})(\.old-\d+)?", entry.name)
            if match and (not match[2] or (int(match[1]) not in places and _is_whole(entry))):
                places[int(match[1])] = entry
        return places

    def save(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write the checkpoint of iteration `step`, replacing an existing one; return its folder.

        Args:
            state: the content of state.json.
            arrays: arrays on the host by file, without its suffix, and by name.

        Raises:
            OutputError: it could not be written. Earlier checkpoints are unchanged.
        """
        path = self.path(step)
        part = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            self.clean()
            part.mkdir(parents=True)
            write_json(part / STATE, state)
            for name, tensors in arrays.items():
                save_weights(part / f"{name}{ARRAYS}", dict(tensors))
            _write_manifest(part)
            _flush(part)
            old = path.with_name(f"{path.name}.old-{os.getpid()}")
            if path.exists():
                os.rename(path, old)
            os.rename(part, path)
            _flush(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, OutputError) as error:
            why = getattr(error.__cause__ or error, "strerror", error)
            raise OutputError(f"{path}: the checkpoint cannot be written ({why})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return path

    def keep(self, steps: Collection[int]) -> None:
        """Remove the checkpoints of all other iterations. OutputError."""
        try:
            self.clean()
            for step in self.steps():
                if step not in steps:
                    path = self.path(step)
                    old = path.with_name(f"{path.name}.old-{os.getpid()}")
                    os.rename(path, old)
                    shutil.rmtree(old, ignore_errors=True)  # `clean` removes the rest, such as open files on NFS
        except OSError as error:
            raise OutputError(f"{self.folder}: an old checkpoint cannot be removed ({error.strerror})") from error

    def newest(self, *, warn: bool = True) -> Stored | None:
        """Return the newest undamaged checkpoint; None if there are no checkpoints.

        warn: log a warning for each damaged one.

        Raises:
            DataError: all are damaged.
        """
        first: DataError | None = None
        for _, place in sorted(self._places().items(), reverse=True):
            try:
                return read(place)
            except DataError as error:
                first = first or error
                if warn:
                    log.warning("%s; trying the previous checkpoint", error)
        if first is not None:
            raise DataError(f"{self.folder}: all checkpoints are damaged; the newest: {first}")
        return None

    def clean(self) -> None:
        """Remove leftovers of killed processes; restore a checkpoint that was about to be replaced. OSError."""
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                match = re.fullmatch(r"(step-\d{8,})\.(tmp|old)-\d+", entry.name)
                if match and match[2] == "old" and not (self.folder / match[1]).exists() and _is_whole(entry):
                    os.rename(entry, self.folder / match[1])
                elif match:
                    shutil.rmtree(entry, ignore_errors=True)


def read(path: str | Path) -> Stored:
    """Return a checkpoint after verifying the size and SHA-256 of its files.

    Raises:
        DataError: it is missing or damaged. The message names the file, and what was expected and found.
    """
    path = Path(path)
    try:
        names = _verified(path)
        state = _json(path / STATE)
    except OSError as error:
        raise DataError(f"{error.filename or path}: cannot be read as a checkpoint ({error.strerror})") from error
    if not isinstance(state, dict):
        raise DataError(f"{path / STATE}: damaged, expected an object, found {type(state).__name__}")
    arrays = {Path(name).stem: load_weights(path / name) for name in sorted(names) if name.endswith(ARRAYS)}
    return Stored(path, state, arrays)


def _is_whole(path: Path) -> bool:
    try:
        read(path)
    except DataError:
        return False
    return True


def _write_manifest(folder: Path) -> None:
    files = {entry.name: {"size": entry.stat().st_size, "sha256": _digest(entry)} for entry in folder.iterdir()}
    write_whole(folder / MANIFEST, _manifest({"format": FORMAT, "files": dict(sorted(files.items()))}))


def _manifest(content: dict[str, Any]) -> bytes:
    """Return the bytes of a manifest, including its own digest."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": own}, indent=2) + "\n").encode()


def _verified(folder: Path) -> list[str]:
    """Compare the files with the manifest, and return their names. DataError, OSError."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise DataError(f"{folder}: is not a checkpoint: it is not a folder")
    manifest = folder / MANIFEST
    _check_size(manifest, None)
    content = _json(manifest)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), dict):
        found = content.get("format") if isinstance(content, dict) else content
        raise DataError(f"{manifest}: damaged, or of another version: expected format {FORMAT}, found {found!r:.80}")
    whole = _manifest({key: value for key, value in content.items() if key != "sha256"})
    if whole != manifest.read_bytes():
        raise DataError(
            f"{manifest}: damaged, expected a manifest with a matching SHA-256, found {content.get('sha256')!r:.80}"
        )
    names, present = content["files"], {entry.name for entry in folder.iterdir()} - {MANIFEST}
    for name in sorted(names.keys() ^ present):
        what = "is missing, expected it, found nothing" if name in names else "does not belong to this checkpoint"
        raise DataError(f"{folder / name}: {what}")
    if STATE not in names or not all(name == STATE or name.endswith(ARRAYS) for name in names):
        raise DataError(f"{manifest}: expected {STATE} and files of arrays, found {', '.join(sorted(names))}")
    for name, expected in names.items():
        if not isinstance(expected, dict) or [type(expected.get(key)) for key in ("size", "sha256")] != [int, str]:
            raise DataError(f"{manifest}: expected size and sha256 of {name}, found {expected!r:.80}")
        _check_size(folder / name, expected["size"])
        found = _digest(folder / name)
        if found != expected["sha256"]:
            raise DataError(f"{folder / name}: damaged, expected SHA-256 {expected['sha256']}, found {found}")
    return list(names)


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a checkpoint, expected JSON, found {error}") from error


def _check_size(path: Path, expected: int | None) -> None:
    """Refuse a file that is a link, or has another size. DataError, OSError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: must be a plain file")
    if expected is not None and found.st_size != expected:
        raise DataError(f"{path}: damaged, expected {expected} bytes, found {found.st_size}")
    if not path.name.endswith(ARRAYS) and found.st_size > MAX_JSON:
        raise DataError(f"{path}: expected at most {MAX_JSON} bytes, found {found.st_size}")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _flush(folder: Path) -> None:
    """Flush changes of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems do not support it
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
