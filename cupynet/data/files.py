"""Parsers for untrusted data files: IDX (http://yann.lecun.com/exdb/mnist/) and .npy."""

from __future__ import annotations

import hashlib
import io
import math
import os
import stat
import sys
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import ConfigError, DataError

FilePath: TypeAlias = "str | os.PathLike[str]"

PARSING = threading.Lock()  # CPython 3.11 fails if threads parse .npy headers concurrently
_GZIP = b"\x1f\x8b"
_RATIO = 1032  # highest compression ratio of gzip


@dataclass(frozen=True)
class KnownFile:
    """A published file. For `digest` and `limit`, see `read_unpacked`."""

    name: str
    digest: str
    limit: int

    def read(self, path: Path) -> bytes:
        return read_unpacked(path, self.limit, self.digest)


def read_unpacked(path: Path, limit: int, digest: str = "") -> bytes:
    """Read a gzip or plain file.

    Args:
        limit: maximum size in bytes, both as stored and decompressed.
        digest: MD5 or SHA-256 of the stored or decompressed file; "" to accept any.
    """
    stored = read_bytes(path, limit)
    raw = _inflate(path, stored, limit + 1) if stored[:2] == _GZIP else stored
    if len(raw) > limit:
        raise DataError(f"{path}: expected at most {limit} bytes after decompression, found more")
    algorithm = "md5" if len(digest) == 32 else "sha256"
    if digest and digest not in (hashlib.new(algorithm, each).hexdigest() for each in (stored, raw)):
        raise DataError(
            f"{path}: expected contents with {algorithm} {digest[:16]}..., found contents that begin with "
            f"{stored[:16]!r}"
        )
    return raw


def idx_path(folder: Path, name: str) -> Path:
    """Return the first of `name`.gz, `name` and variants with `.idx` that exists; `name`.gz if none does."""
    names = [f"{each}{ending}" for each in (name, name.replace("-idx", ".idx")) for ending in (".gz", "")]
    return folder / next((each for each in names if os.path.lexists(folder / each)), names[0])


def idx_shape(path: Path) -> tuple[int, ...]:
    """Read the shape from the header of an IDX file. Raise DataError if the file is too small for it."""
    start, ratio = read_bytes(path, first=1 << 16), 1
    if start[:2] == _GZIP:
        ratio = _RATIO
        start = _inflate(path, start, 4 + 4 * 255, whole=False)
    axes = start[3] if len(start) > 3 else 0
    if start[:3] != b"\0\0\x08" or not axes or len(start) < 4 + 4 * axes:
        raise DataError(f"{path}: expected an IDX file of unsigned bytes, plain or gzip, found {start[:16]!r}")
    shape = tuple(np.frombuffer(start, ">u4", axes, offset=4).tolist())
    size, stored = 4 + 4 * axes + math.prod(shape), path.stat().st_size
    if size > ratio * stored:
        raise DataError(f"{path}: expected {size} bytes for the shape in the IDX header, found {stored} bytes")
    return shape


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes, gzip or plain."""
    shape = idx_shape(path)
    size = 4 + 4 * len(shape) + math.prod(shape)
    limit = min(size + size // 500 + (1 << 16), sys.maxsize - 1)  # gzip may enlarge a file
    return parse_idx(path, read_unpacked(path, limit))


def parse_idx(path: Path, raw: bytes) -> Array:
    import mnist

    try:
        array: Array = mnist.parse_idx(io.BytesIO(raw))
    except Exception as error:  # the parser raises exceptions of many types
        raise DataError(f"{path}: the IDX file is damaged ({error})") from error
    return array


def map_npy(path: Path) -> Array:
    try:
        check_regular(path)
        with PARSING:
            array = np.lib.format.open_memmap(path, mode="r")
        if not array.size:
            raise ValueError("it is empty")
    except Exception as error:  # damaged headers raise exceptions of many types
        raise DataError(f"{path}: cannot be read as a .npy file ({wording.one_line(error)})") from error
    return np.asarray(array)


def checked_path(name: str, value: FilePath | None) -> FilePath | None:
    if value is not None and (not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value)):
        raise ConfigError("must be a path, or null", name, wording.shown(value))
    return value


def expanded(folder: FilePath) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DataError(f"{folder}: the home folder cannot be determined. Choose another folder") from error


def check_regular(path: Path) -> int:
    """Return the size of a regular file. Raise OSError for anything else, such as a pipe, which could block forever."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError("not a regular file")
    return found.st_size


def read_bytes(path: Path, limit: int | None = None, first: int = -1) -> bytes:
    """Read a file of at most `limit` bytes. If `first` is given, read only that many bytes."""
    try:
        size = check_regular(path)
        if limit is not None and size > limit:
            raise DataError(f"{path}: expected at most {limit} bytes, found {size}")
        with path.open("rb") as file:
            return file.read(first)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _inflate(path: Path, packed: bytes, limit: int, *, whole: bool = True) -> bytes:
    """Decompress gzip data with a single member to at most `limit` bytes."""
    member = zlib.decompressobj(wbits=31)  # verifies CRC and length
    try:
        raw = member.decompress(packed, limit)
    except zlib.error as error:
        raise DataError(f"{path}: expected gzip data, found damaged data ({error})") from error
    if whole and len(raw) < limit and not member.eof:
        raise DataError(f"{path}: expected complete gzip data, found truncated data (incomplete download?)")
    if member.unused_data.strip(b"\0"):
        raise DataError(f"{path}: expected one gzip member, found trailing data")
    return raw
