"""Checkpoints on disk: a folder for each, whole or not there, and proved to be whole before anything of it is used.

    checkpoints/
        step-00001234/
            state.json              numbers, and where each worker's arrays are
            weights.safetensors     arrays; what several workers have in common is there once
            state.safetensors
            manifest.json           size and SHA-256 of the others, and of itself

A checkpoint is written into a folder with a temporary name; its files and the folder are flushed to the disk, the
folder is renamed, and the folder above is flushed. One that is no longer wanted is renamed before it is removed. So
whatever moment a machine dies at, every folder called `step-...` is whole; what was left half-done has another name and
is removed by the next that comes. Which is the newest is read off the names: there is no pointer that could be wrong.
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
from cupynet.core.signals import undisturbed

FORMAT = 1
STATE, MANIFEST, ARRAYS = "state.json", "manifest.json", (".safetensors",)
MOST_TEXT = 64 << 20  # bytes of a file of text: a longer one is not ours
CHUNK = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A checkpoint that was read and found whole.

    Attributes:
        path: its folder.
        state: the content of state.json.
        arrays: by file, without its ending, and name.
    """

    path: Path
    state: dict[str, Any]
    arrays: dict[str, dict[str, Any]]


class Checkpoints:
    """The checkpoints in a folder, which is made when the first is written.

    Attributes:
        folder: where they are.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after iteration `step`."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Of which iterations there are checkpoints, in order."""
        return sorted(self._places())

    def _places(self) -> dict[int, Path]:
        """Where each is: under its name, or where it was moved to by who was killed before the next had that name."""
        places: dict[int, Path] = {}
        for entry in self.folder.iterdir() if self.folder.is_dir() else ():
            match = re.fullmatch(r"step-(\d{8,})(\.old-\d+)?", entry.name)
            if match and (not match[2] or (int(match[1]) not in places and _is_whole(entry))):
                places[int(match[1])] = entry
        return places

    @undisturbed()
    def save(self, step: int, state: Mapping[str, Any], arrays: Mapping[str, Mapping[str, Any]]) -> Path:
        """Write the checkpoint of iteration `step`, in place of one that is there; its folder.

        Args:
            state: what JSON can hold.
            arrays: by file, without its ending, and name; on the host.

        Raises:
            OutputError: it could not be written; those that were there before still are.
        """
        path = self.path(step)
        part = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        try:
            self.clean()
            part.mkdir(parents=True)
            write_json(part / STATE, state)
            for name, tensors in arrays.items():
                save_weights(part / f"{name}{ARRAYS[0]}", dict(tensors))
            _write_manifest(part)
            _flush(part)
            old = path.with_name(f"{path.name}.old-{os.getpid()}")
            if path.exists():
                os.rename(path, old)
            os.rename(part, path)
            _flush(self.folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, OutputError) as error:
            cause = error.__cause__ if isinstance(error, OutputError) else error
            why = getattr(cause, "strerror", None) or error
            raise OutputError(f"{path}: the checkpoint cannot be written ({why})") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return path

    @undisturbed()
    def keep(self, steps: Collection[int]) -> None:
        """Remove the checkpoints of all other iterations. OutputError."""
        try:
            self.clean()
            for step in self.steps():
                if step not in steps:
                    self._remove(self.path(step))
        except OSError as error:
            raise OutputError(f"{self.folder}: an old checkpoint cannot be removed ({error.strerror})") from error

    def newest(self, *, warn: bool = True) -> Stored | None:
        """The newest that is whole; None where there is none at all.

        One that is damaged is told of in a warning, if it is to be, and the one before it is tried.

        Raises:
            DataError: there are some, and none is whole.
        """
        first: DataError | None = None
        for _, place in sorted(self._places().items(), reverse=True):
            try:
                return read(place)
            except DataError as error:
                first = first or error
                if warn:
                    log.warning("%s; the checkpoint before it is tried", error)
        if first is not None:
            raise DataError(f"{self.folder}: no checkpoint is whole; of the newest: {first}")
        return None

    def clean(self) -> None:
        """Remove what a process that was killed left half-done; what it was about to replace is put back. OSError."""
        if self.folder.is_dir():
            for entry in self.folder.iterdir():
                match = re.fullmatch(r"(step-\d{8,})\.(tmp|old)-\d+", entry.name)
                if match and match[2] == "old" and not (self.folder / match[1]).exists() and _is_whole(entry):
                    os.rename(entry, self.folder / match[1])
                elif match:
                    shutil.rmtree(entry, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Under its own name it is whole as long as it is there."""
        old = path.with_name(f"{path.name}.old-{os.getpid()}")
        os.rename(path, old)
        shutil.rmtree(old, ignore_errors=True)  # what is left, as NFS leaves files that are open, `clean` removes


def read(path: str | Path) -> Stored:
    """A checkpoint, proved to be whole: all files have the size and the SHA-256 that they should, or nothing is used.

    Raises:
        DataError: it is not there, or not whole; names the file, what was expected and what was found.
    """
    path = Path(path)
    try:
        names = _verified(path)
        state = _json(path / STATE)
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read as a checkpoint ({error.strerror or error})"
        ) from error
    if not isinstance(state, dict):
        raise DataError(f"{path / STATE}: is no checkpoint's, expected an object, found {type(state).__name__}")
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
    """The manifest's bytes, with a digest of its own: there is one way only to write a content down."""
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": own}, indent=2) + "\n").encode()


def _verified(folder: Path) -> list[str]:
    """The names of a checkpoint's files but for the manifest, all as that says. DataError, OSError."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise DataError(f"{folder}: is not a checkpoint: it is no folder")
    manifest = folder / MANIFEST
    _check_size(manifest, None)
    content = _json(manifest)
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("files"), dict):
        found = content.get("format") if isinstance(content, dict) else content
        raise DataError(f"{manifest}: damaged, or of another version: expected format {FORMAT}, found {found!r:.80}")
    whole = _manifest({key: value for key, value in content.items() if key != "sha256"})
    if whole != manifest.read_bytes():
        own, found = json.loads(whole)["sha256"], content.get("sha256")
        what = (
            f"SHA-256 {own}, found {found!r:.80}"
            if own != found
            else "it as it was written, found it written otherwise"
        )
        raise DataError(f"{manifest}: damaged, expected {what}")
    names, there = content["files"], {entry.name for entry in folder.iterdir()} - {MANIFEST}
    for name in sorted(names.keys() ^ there):
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
    """What a file of JSON says. DataError, also where it names something twice; OSError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r:.80} twice")
        return found

    try:
        return json.loads(path.read_bytes(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: cannot be read as a checkpoint's, expected JSON, found otherwise ({error})"
        ) from error


def _check_size(path: Path, expected: int | None) -> None:
    """A plain file of that size, and no link to one elsewhere. DataError, OSError."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError(f"{path}: must be a plain file")
    if expected is not None and found.st_size != expected:
        raise DataError(f"{path}: damaged, expected {expected} bytes, found {found.st_size}")
    if not path.name.endswith(ARRAYS) and found.st_size > MOST_TEXT:
        raise DataError(f"{path}: expected at most {MOST_TEXT} bytes, found {found.st_size}")


def _digest(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _flush(folder: Path) -> None:
    """Make what was created, renamed or removed in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems know no such thing
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
