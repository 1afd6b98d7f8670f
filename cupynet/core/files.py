"""Atomic file output: JSON, and weights with a digest.

Files are written under a temporary name, flushed to disk and renamed, so they are never incomplete.

Weights are stored as safetensors. The format has no checksum, so the metadata contains a SHA-256 of the tensors in
order of their names. There is only one metadata key, because safetensors writes keys in arbitrary order, and equal
weights should produce identical files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO, TypeAlias

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from cupynet.core.checks import finite
from cupynet.core.errors import ConfigError, DataError, OutputError

DESCRIPTION = "cupynet"  # metadata key in files with a description

_KERAS = "is a Keras file. Load its weights with import_keras(model, path), if Keras 3 wrote it (.weights.h5, .keras)"
_TORCH = (
    "save them with safetensors.torch.save_file(net.state_dict(), path), and load them with import_torch(model, path)"
)
FOREIGN = {  # suffix -> kind of file, and how to load its weights
    ".onnx": f"is an ONNX file, which cannot be imported. Load its weights in PyTorch, {_TORCH}",
    ".pt": f"is a PyTorch pickle, which could run code. Load its weights in PyTorch, {_TORCH}",
    ".pth": f"is a PyTorch pickle, which could run code. Load its weights in PyTorch, {_TORCH}",
    ".h5": _KERAS,
    ".keras": _KERAS,
}

PathLike: TypeAlias = "str | os.PathLike[str]"


def write_whole(path: PathLike, content: bytes) -> None:
    """Write bytes to a file atomically. Raise OutputError on failure."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.unlink(missing_ok=True)  # a leftover of a killed process with the same PID, or a link
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        with contextlib.suppress(OSError):  # the file was renamed, or never created
            temporary.unlink()


def write_output(path: PathLike, content: bytes) -> None:
    """Write `content` to a path given by the user. Raise OutputError on failure.

    Regular files are replaced atomically, also through a symbolic link. Devices, pipes that have a reader, and the
    files behind stdout and stderr are written directly.
    """
    if not os.fspath(path):
        raise ConfigError("must be the name of a file", "path", "''")
    try:
        status = os.stat(path)
    except FileNotFoundError:
        status = None
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
    stream = None if status is None else _own_stream(status)
    if stream is None and (status is None or stat.S_ISREG(status.st_mode)):
        write_whole(os.path.realpath(path) if os.path.islink(path) else path, content)
        return
    try:
        if stream is None:
            file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # fails instead of waiting if a pipe has no reader
            os.set_blocking(file, True)
        else:
            stream.flush()
            file = os.dup(stream.fileno())
        with os.fdopen(file, "wb") as target:
            target.write(content)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and stream is not None:
            raise
        reason = "nothing is reading from it" if error.errno == errno.ENXIO else error.strerror
        raise OutputError(f"{path}: cannot be written ({reason})") from error


def _own_stream(file: os.stat_result) -> TextIO | None:
    """Return stdout or stderr if it refers to this file, otherwise None."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream is closed, or not a file
            if os.path.samestat(os.fstat(stream.fileno()), file):
                return stream
    return None


def for_json(value: Any) -> Any:
    """Replace non-finite numbers in nested values with None, because JSON cannot represent them."""
    if isinstance(value, dict):
        return {key: for_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [for_json(item) for item in value]
    return finite(value) if isinstance(value, float) else value


def write_json(path: PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically. Raise OutputError on failure."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def read_object(path: PathLike) -> dict[str, Any]:
    """Read a JSON file that contains an object. Raise DataError on failure."""
    require_plain(path)
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected an object, found {type(content).__name__}")
    return content


def digest(weights: dict[str, Any]) -> str:
    """Return a SHA-256 of the names, dtypes, shapes and bytes of the tensors, in order of their names."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        tensor = np.ascontiguousarray(weights[name])
        tensor = tensor.astype(tensor.dtype.newbyteorder("<"), copy=False)  # as in the file
        hasher.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        hasher.update(tensor.tobytes())
    return hasher.hexdigest()


def save_weights(
    path: PathLike, weights: dict[str, Any], write: Callable[[PathLike, bytes], None] = write_output
) -> None:
    """Write named host arrays and their digest to a safetensors file, atomically. Raise OutputError on failure.

    write: the function that writes the file. `write_whole` replaces a link instead of following it.
    """
    ordered = _ordered(weights)
    write(path, save(ordered, metadata={"sha256": digest(ordered)}))


def _ordered(weights: dict[str, Any]) -> dict[str, Any]:
    """Return contiguous arrays, sorted by name. bfloat16 becomes float32, as in `_read`, so that the digest matches."""
    arrays = {name: np.asarray(weights[name], order="C") for name in sorted(weights)}
    return {name: each.astype("f4") if each.dtype.name == "bfloat16" else each for name, each in arrays.items()}


def load_weights(path: PathLike) -> dict[str, Any]:
    """Read the arrays in a file written by `save_weights`, by name.

    Raises:
        DataError: the file is missing, is not safetensors, has no digest, or does not match its digest.
    """
    weights, metadata = _read(path)
    expected = metadata.get("sha256")
    if expected is None:
        raise DataError(f"{path}: has no SHA-256 in its metadata, so it was not written by save_weights")
    actual = digest(weights)
    if actual != expected:
        raise DataError(f"{path}: the weights are damaged (expected SHA-256 {expected}, found {actual})")
    return weights


def save_described(path: PathLike, weights: dict[str, Any], description: Mapping[str, Any]) -> None:
    """Write weights and a description (plain values) to a safetensors file atomically. Raise OutputError on failure."""
    ordered = _ordered(weights)
    text = json.dumps(description)
    metadata = {DESCRIPTION: json.dumps({"sha256": _digest_of(ordered, text), "description": text})}
    write_output(path, save(ordered, metadata=metadata))


def load_described(path: PathLike) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays by name, and the description, from a `save_described` file. Raise DataError on failure."""
    weights, metadata = _read(path)
    try:
        content = json.loads(metadata[DESCRIPTION])
        text, expected = content["description"], content["sha256"]
        description = json.loads(text)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: contains no model description. Use a file written by Model.save") from error
    if _digest_of(weights, text) != expected or not isinstance(description, dict):
        raise DataError(f"{path}: is damaged (its content does not match its SHA-256)")
    return weights, description


def _digest_of(weights: dict[str, Any], text: str) -> str:
    return hashlib.sha256(f"{digest(weights)}\n{text}".encode()).hexdigest()


def load_tensors(path: PathLike) -> dict[str, Any]:
    """Read the arrays of any safetensors file, bfloat16 as float32. Ignore any digest. Raise DataError on failure."""
    return _read(path)[0]


def read_weights(path: PathLike) -> dict[str, Any]:
    """Read the arrays of any safetensors file, and verify its digest if there is one. Raise DataError on failure."""
    weights, metadata = _read(path)
    if DESCRIPTION in metadata:
        return load_described(path)[0]
    return load_weights(path) if "sha256" in metadata else weights


def widened(data: bytes, shape: Sequence[int]) -> Any:
    """Convert little-endian bfloat16 bytes to a float32 array. A bfloat16 is the upper half of a float32."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)


def require_plain(path: PathLike) -> None:
    """Raise DataError if a path exists but is not a regular file. Reading from a pipe could block forever."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise DataError(f"{path}: must be a regular file")


def require_folder(path: PathLike) -> None:
    """Create a folder if it does not exist. Raise OutputError if files cannot be written in it."""
    try:
        os.makedirs(path, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error


def _read(path: PathLike) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file. Raise DataError on failure."""
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
