"""Weights on disk: safetensors files with a digest, written aside and renamed.

safetensors has no checksum of its own: a flipped bit in a weight would load silently, so the file carries a SHA-256
over its tensors, in order of name, in its metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cupynet.errors import DataError, OutputError


def digest(weights: dict[str, Any]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor, in order of name."""
    hasher = hashlib.sha256()
    for name in sorted(weights):
        tensor = np.ascontiguousarray(weights[name])
        hasher.update(f"{name} {tensor.dtype.str} {tensor.shape}\n".encode())
        hasher.update(tensor.tobytes())
    return hasher.hexdigest()


def save_weights(path: Path, weights: dict[str, Any]) -> None:
    """Write name -> array as safetensors with a digest; the file appears whole or not at all. Raises OutputError."""
    write_whole(path, save(weights, metadata={"format": "cupynet", "sha256": digest(weights)}))


def load_weights(path: Path) -> dict[str, Any]:
    """Read what `save_weights` wrote.

    Raises:
        DataError: the file is missing, not safetensors, without a digest, or differs from its digest.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            expected = (file.metadata() or {}).get("sha256")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read as weights ({error})") from error
    found = digest(weights)
    if found != expected:
        raise DataError(f"{path}: damaged weights, expected SHA-256 {expected}, found {found}")
    return weights


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all. Raises OutputError."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, flush it to disk, and rename it into its place. Raises OutputError."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise OutputError(f"{path}: cannot be written ({error.strerror})") from error
