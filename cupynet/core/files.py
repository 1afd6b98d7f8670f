"""Atomic files: JSON, and weights with a digest.

A file is written under another name, flushed to disk and renamed, so that it is never incomplete.

Weights are safetensors files, which have no checksum. A SHA-256 over the tensors, in order of name, is therefore the
only key of the metadata: safetensors writes several keys in no fixed order, and equal weights give equal files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO, TypeAlias

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from cupynet.core.checks import finite
from cupynet.core.errors import DataError, OutputError

DESCRIPTION = "cupynet"  # the key of the metadata in files with a description

_KERAS = "is a file of Keras. import_keras(model, path) loads its weights, if Keras 3 wrote it (.weights.h5, .keras)"
_TORCH = (
    "save them with safetensors.torch.save_file(net.state_dict(), path), and load them with import_torch(model, path)"
)
FOREIGN = {  # ending -> what such a file is, and how to load its weights
    ".onnx": f"is an ONNX file, which is written, but not read. Load its weights in PyTorch, {_TORCH}",
    ".pt": f"is a pickle of PyTorch, which could run code. Load its weights in PyTorch, {_TORCH}",
    ".pth": f"is a pickle of PyTorch, which could run code. Load its weights in PyTorch, {_TORCH}",
    ".h5": _KERAS,
    ".keras": _KERAS,
}

PathLike: TypeAlias = "str | os.PathLike[str]"


def write_whole(path: PathLike, content: bytes | Iterable[bytes]) -> None:
    """Write `content`, bytes or pieces of them, to `path`, whole or not at all. OutputError."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.unlink(missing_ok=True)  # of a killed process of this number, or a link
        with part.open("xb") as file:
            for piece in [content] if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):  # it was renamed, or never created
            part.unlink()


def write_output(path: PathLike, content: bytes) -> None:
    """Write `content` to a path from the user. OutputError.

    A regular file is written whole or not at all; a link to it is kept. Any other file, such as a device or a pipe with
    a reader, is written directly, and so is the file of this process's stdout or stderr.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        found = None
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    stream = None if found is None else _own_stream(found)
    if stream is None and (found is None or stat.S_ISREG(found.st_mode)):
        write_whole(os.path.realpath(path) if os.path.islink(path) else path, content)
        return
    try:
        if stream is None:
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails for a pipe without a reader, instead of waiting
            os.set_blocking(file, True)
        else:
            stream.flush()
            file = os.dup(stream.fileno())
        with os.fdopen(file, "wb") as target:
            target.write(content)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and stream is not None:
            raise
        why = "nothing reads it" if error.errno == errno.ENXIO else error.strerror
        raise OutputError(f"{path}: cannot be written ({why})") from error


def _own_stream(file: os.stat_result) -> TextIO | None:
    """Return stdout or stderr if it is this file, or None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed, or not a file
            if os.path.samestat(os.fstat(stream.fileno()), file):
                return stream
    return None


def for_json(value: Any) -> Any:
    """Return nested values with None instead of numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [for_json(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def write_json(path: PathLike, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all. OutputError."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_object(path: PathLike) -> dict[str, Any]:
    """Return the object in a JSON file. DataError."""
    require_plain(path)
    try:
        found = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def digest(weights: dict[str, Any]) -> str:
    """Return the SHA-256 over name, dtype, shape and bytes of each tensor, in order of name."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        tensor = np.ascontiguousarray(weights[name])
        hasher.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        hasher.update(tensor.tobytes())
    return hasher.hexdigest()


def save_weights(
    path: PathLike, weights: dict[str, Any], write: Callable[[PathLike, bytes], None] = write_output
) -> None:
    """Write `weights`, name -> array on the host, to `path` as safetensors with a digest, whole or not at all.

    Equal weights give equal bytes in any order. OutputError.

    write: `write_whole` to replace a link instead of following it, as in the folder of a run.
    """
    ordered = {name: np.asarray(weights[name], order="C") for name in sorted(weights)}
    write(path, save(ordered, metadata={"sha256": digest(ordered)}))


def load_weights(path: PathLike) -> dict[str, Any]:
    """Read what `save_weights` wrote to `path`: name -> array.

    Raises:
        DataError: the file is missing, not safetensors, without a digest, or differs from its digest.
    """
    weights, metadata = _read(path)
    expected = metadata.get("sha256")
    if expected is None:
        raise DataError(f"{path}: has no SHA-256 of its weights in its metadata: it was not written by save_weights")
    found = digest(weights)
    if found != expected:
        raise DataError(f"{path}: damaged weights, expected SHA-256 {expected}, found {found}")
    return weights


def save_described(path: PathLike, weights: dict[str, Any], description: Mapping[str, Any]) -> None:
    """Write weights and their description, plain values, to one safetensors file, whole or not at all. OutputError."""
    ordered = {name: np.asarray(weights[name], order="C") for name in sorted(weights)}
    text = json.dumps(description)
    metadata = {DESCRIPTION: json.dumps({"sha256": _digest_of(ordered, text), "description": text})}
    write_output(path, save(ordered, metadata=metadata))


def load_described(path: PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what `save_described` wrote: name -> array, and the description.

    Raises:
        DataError: the file is missing, was not written by `save_described`, or is damaged.
    """
    weights, metadata = _read(path)
    try:
        found = json.loads(metadata[DESCRIPTION])
        text, expected = found["description"], found["sha256"]
        description = json.loads(text)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: does not describe a model. Write such files with Model.save") from error
    if _digest_of(weights, text) != expected or not isinstance(description, dict):
        raise DataError(f"{path}: damaged: its content differs from its SHA-256")
    return weights, description


def _digest_of(weights: dict[str, Any], text: str) -> str:
    return hashlib.sha256(f"{digest(weights)}\n{text}".encode()).hexdigest()


def load_tensors(path: PathLike) -> dict[str, Any]:
    """Read name -> array from any safetensors file, without a digest; bfloat16 becomes float32. DataError."""
    return _read(path)[0]


def read_weights(path: PathLike) -> dict[str, Any]:
    """Read name -> array from any safetensors file, and check the digest if it has one. DataError."""
    weights, metadata = _read(path)
    if DESCRIPTION in metadata:
        return load_described(path)[0]
    return load_weights(path) if "sha256" in metadata else weights


def widened(data: bytes, shape: Sequence[int]) -> Any:
    """Convert little-endian bytes of bfloat16 numbers, each the upper half of a float32, to a float32 array."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def require_plain(path: PathLike) -> None:
    """Refuse a path that is not a regular file: reading a pipe would wait for ever. A missing file is accepted."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: must be a plain file")


def require_folder(path: PathLike) -> None:
    """Create a folder if it is missing, and refuse one in which no file can be written. OutputError."""
    try:
        os.makedirs(path, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


def _read(path: PathLike) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors of a safetensors file and its metadata. DataError."""
    require_plain(path)
    try:
        with safe_open(os.fspath(path), framework="numpy") as file:
            metadata, tensors, narrow = file.metadata() or {}, {}, set()
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if file.get_slice(name).get_dtype() == "BF16":
                    narrow.add(name)
                else:
                    tensors[name] = file.get_tensor(name)
        if narrow:  # NumPy has no bfloat16
            stored = dict(deserialize(Path(path).read_bytes()))  # type: ignore[no-untyped-call]
            tensors |= {name: widened(stored[name]["data"], stored[name]["shape"]) for name in narrow}
        return tensors, metadata
    except (OSError, SafetensorError, AttributeError, TypeError, ValueError) as error:
        reason = FOREIGN.get(Path(path).suffix.lower()) if os.path.exists(path) else None
        raise DataError(f"{path}: {reason or f'cannot be read as weights ({error})'}") from error
