"""Data sets kept in a folder as NumPy files that are mapped into memory, not read.

Each array is a .npy file (NumPy's NEP 1); manifest.json says what belongs to it, with a SHA-256 of every file and one
of its own. It is written last: where it is, the rest is. Equal data sets give equal bytes. Processes of one machine
that map a file share its pages; a data set may be larger than memory.

What a file holds is compared with its digest before it is used. What is done to it afterwards cannot be undone here:
who cuts short a file that is mapped, or takes away the disk below it, ends the process by SIGBUS where it next touches
what is gone, and nothing in Python can catch that. `check_mapped` finds such a file before. One that is removed or
replaced as a whole is still there for whoever has mapped it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array
from cupynet.data.dataset import Dataset
from cupynet.data.idx import Damaged, regular
from cupynet.errors import ConfigError
from cupynet.files import write_json, write_whole

MANIFEST = "manifest.json"
_BLOCK = 1 << 22  # bytes that are written and checked at a time
_parsing = threading.Lock()  # of headers: CPython 3.11 miscounts, and fails, where threads parse at the same time
_MOST = 1 << 24  # bytes of a manifest: that of a million shards has half of it

Manifest: TypeAlias = dict[str, Any]


def write_array(path: Path, array: Array, rows: Array | None = None) -> Manifest:
    """Write `array`, or its `rows`, as a .npy file; what a manifest says of it. Raises OutputError.

    Only a few megabytes of the array are copied at a time.
    """
    shape = (len(array) if rows is None else len(rows), *array.shape[1:])
    hasher, written = hashlib.sha256(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal written
        for piece in _pieces(array, rows, shape):
            hasher.update(piece)
            written += len(piece)
            yield piece

    write_whole(path, pieces())
    return {"file": path.name, "shape": list(shape), "bytes": written, "sha256": hasher.hexdigest()}


def _pieces(array: Array, rows: Array | None, shape: tuple[int, ...]) -> Iterator[bytes]:
    """The bytes of the file: its header, then some rows at a time."""
    header = io.BytesIO()
    described = {"descr": np.lib.format.dtype_to_descr(array.dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, described)
    yield header.getvalue()
    step = max(1, _BLOCK // max(1, array.dtype.itemsize * math.prod(shape[1:])))
    for start in range(0, shape[0], step):
        some = slice(start, start + step)
        yield array[some if rows is None else rows[some]].tobytes()


def map_array(folder: Path, entry: Manifest) -> Array:
    """The array that `write_array` wrote, mapped read-only, after all of its file was compared with its SHA-256.

    Raises Damaged.
    """
    path = folder / _name(folder, entry)
    try:
        size = regular(path).st_size
        if size != entry["bytes"]:
            raise Damaged(f"expected {entry['bytes']} bytes, found {size}")
        hasher = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                hasher.update(block)
            if hasher.hexdigest() != entry["sha256"]:
                found = f"expected SHA-256 {entry['sha256'][:16]}..., found {hasher.hexdigest()[:16]}..."
                raise Damaged(f"{found}: right size, wrong contents")
            with _parsing:
                file.seek(0)
                np.lib.format.read_magic(file)
                shape = list(np.lib.format.read_array_header_1_0(file)[0])
        if shape != entry["shape"]:
            raise Damaged(f"expected {entry['shape']}, found {shape}")
        mode: Literal["r"] | None = "r" if math.prod(shape) else None  # nothing is mapped where there is nothing
        with _parsing:
            return np.asarray(np.load(path, mmap_mode=mode, allow_pickle=False))
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None
    except FileNotFoundError as error:
        raise Damaged(f"{path}: is missing") from error
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise Damaged(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error


def check_mapped(path: Path, then: os.stat_result) -> None:
    """Raises Damaged where a file that was mapped `then` was cut short since: to read what it lost ends the process."""
    with contextlib.suppress(OSError):  # removed, and still there for us
        now = path.stat()
        if (now.st_dev, now.st_ino) == (then.st_dev, then.st_ino) and now.st_size < then.st_size:
            raise Damaged(f"{path}: had {then.st_size} bytes when it was opened, and now {now.st_size}")


def _name(folder: Path, entry: Manifest) -> str:
    """The name of a file that lies in the folder, nowhere else."""
    try:
        name, described = entry["file"], {"shape", "bytes", "sha256"} <= entry.keys()
    except (KeyError, TypeError, AttributeError):
        name, described = "", False
    if not described or not isinstance(name, str) or not re.fullmatch(r"[\w-]+\.npy", name, re.ASCII):
        raise Damaged(f"{folder / MANIFEST}: does not describe the files of a data set")
    return name


def write_dataset(folder: Path, part: str, dataset: Dataset, rows: Array | None = None) -> Manifest:
    """Write a data set, or its samples `rows`, as part `part` of what is in `folder`; what a manifest says of it."""
    before, pixels = "" if part == "train" else f"{part}-", dataset.pixels
    return {
        "name": dataset.name,
        "classes": dataset.classes,
        "images": write_array(folder / f"{before}images.npy", dataset.images, rows),
        "labels": write_array(folder / f"{before}labels.npy", dataset.labels, rows),
        **({} if pixels == FRACTIONS else {"normalize": pixels.normalization()}),
    }


def pixels_of(entry: Manifest) -> PixelScale:
    """What becomes of the pixels of a data set, as `write_dataset` has noted it.

    Raises TypeError, ValueError, KeyError or ArithmeticError.
    """
    if "normalize" not in entry:
        return FRACTIONS
    pixels = PixelScale.of(entry["normalize"]["mean"], entry["normalize"]["deviation"])
    if len(pixels.mean) != len(pixels.deviation) or not all(map(math.isfinite, pixels.scale + pixels.shift)):
        raise ValueError("a mean and a deviation for each channel")
    return pixels


def map_dataset(folder: Path, entry: Manifest) -> Dataset:
    """What `write_dataset` wrote, mapped read-only. Raises Damaged."""
    try:
        images, labels = map_array(folder, entry["images"]), map_array(folder, entry["labels"])
        return Dataset(entry["name"], images, labels, entry["classes"], pixels_of(entry))
    except ConfigError as error:
        raise Damaged(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise Damaged(f"{folder / MANIFEST}: does not describe the files of a data set") from error


def write_manifest(folder: Path, about: Manifest) -> None:
    """Write the manifest, and with it a SHA-256 of what it says. Raises OutputError."""
    write_json(folder / MANIFEST, {**about, "sha256": digest(about)})


def read_manifest(folder: Path, form: str) -> Manifest:
    """What `write_manifest` wrote, whose `format` must be `form`. Raises Damaged."""
    path = folder / MANIFEST
    try:
        size = regular(path).st_size
        if size > _MOST:
            raise Damaged(f"expected a manifest of at most {_MOST} bytes, found {size}")
        found = json.loads(path.read_bytes())
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None
    except FileNotFoundError as error:
        raise Damaged(f"{path}: is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not isinstance(found, dict) or found.get("format") != form:
        what = f"format {found.get('format')!r}" if isinstance(found, dict) else f"a {type(found).__name__}"
        raise Damaged(f"{path}: expected a manifest of format {form!r}, found {what}")
    if found.pop("sha256", None) != digest(found):
        raise Damaged(f"{path}: does not have the SHA-256 that it says: it was changed, or is damaged")
    return found


def digest(about: Any) -> str:
    """SHA-256 of plain values, whatever the order of names."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
