"""Read untrusted IDX files (http://yann.lecun.com/exdb/mnist/), gzip or plain.

No memory is allocated for the sizes that a header claims, and at most one byte too many is unpacked.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError

FilePath: TypeAlias = "str | os.PathLike[str]"

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08


class Damaged(Exception):
    """A file is not as expected. The message says what was expected and what was found."""


@dataclass(frozen=True)
class IdxFile:
    """A known gzip file of a data set: unsigned bytes of `shape`.

    `sha256` is the digest of the unpacked contents, so a recompressed file is accepted; `packed_sha256` is that of the
    gzip file. "" if unknown.
    """

    name: str
    shape: tuple[int, ...]
    sha256: str
    packed_sha256: str = ""

    @property
    def header(self) -> bytes:
        """Two zero bytes, the type, the number of axes, then each axis as 32 bits, big-endian."""
        return bytes([0, 0, _UNSIGNED_BYTE, len(self.shape)]) + b"".join(axis.to_bytes(4, "big") for axis in self.shape)

    @property
    def size(self) -> int:
        """The size of the unpacked file in bytes."""
        return len(self.header) + math.prod(self.shape)

    @property
    def most_packed(self) -> int:
        """An upper bound of the size of the gzip file in bytes."""
        return self.size + self.size // 500 + (1 << 16)

    def read(self, path: Path) -> bytes:
        """Return the unpacked contents of `path` if they are those of this file. Raises Damaged."""
        packed = read_bytes(path, self.most_packed)
        if packed[:2] != _GZIP:
            raise Damaged(f"expected gzip data, found {described(packed)}")
        if not self.sha256:
            _check_digest(self.packed_sha256, packed)
        raw = _inflate(packed, self.size + 1)
        header = raw[: len(self.header)]
        if not self.header.startswith(header):
            raise Damaged(f"expected an IDX header of unsigned bytes {self.shape}, found 0x{header.hex()}")
        if len(raw) != self.size:
            found = f"more than {self.size}" if len(raw) > self.size else str(len(raw))
            raise Damaged(f"expected {self.size} unpacked bytes, found {found}")
        _check_digest(self.sha256, raw)
        return raw


def read_idx_shape(path: Path, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in the header of an IDX file, gzip or plain, of one of these numbers of axes. Raises Damaged."""
    start = read_bytes(path, first=1 << 16)
    packed = start[:2] == _GZIP
    if packed:
        start = _inflate(start, 4 + 4 * max(axes), whole=False)
    if start[:2] != b"\0\0" or len(start) < 4:
        raise Damaged(f"expected an IDX file, plain or gzip, found {described(start)}")
    if start[2] != _UNSIGNED_BYTE:
        raise Damaged(f"expected IDX data of unsigned bytes (0x08), found data type 0x{start[2]:02x}")
    if start[3] not in axes or len(start) < 4 + 4 * start[3]:
        raise Damaged(f"expected IDX data of {' or '.join(map(str, axes))} axes, found {start[3]}")
    shape = tuple(int.from_bytes(start[4 + 4 * i : 8 + 4 * i], "big") for i in range(start[3]))
    if not packed:
        _check_size(IdxFile(path.name, shape, ""), path.stat().st_size)
    return shape


def read_idx(path: Path, axes: Sequence[int], sha256: str = "") -> Array:
    """Return the contents of an IDX file, gzip or plain, that has one of these numbers of axes. Raises Damaged.

    sha256: of the file or of its unpacked contents; "" if it is not known.
    """
    shape = read_idx_shape(path, axes)
    known, stored = IdxFile(path.name, shape, sha256), read_bytes(path)
    raw = _inflate(stored, known.size + 1) if stored[:2] == _GZIP else stored
    _check_size(known, len(raw))
    if hashlib.sha256(stored).hexdigest() != sha256:
        _check_digest(sha256, raw)
    return np.frombuffer(raw, np.uint8, offset=len(known.header)).reshape(shape)


def expanded(folder: FilePath) -> Path:
    """Expand `~` in a path. Raises DataError if there is no such user."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DataError(f"{folder}: {error}: name another folder") from error


def regular(path: Path) -> os.stat_result:
    """Return the status of a file. Raises OSError; Damaged if it is no regular file, since a pipe would block."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise Damaged("expected a file, found a folder, a pipe or a device")
    return found


def read_bytes(path: Path, most: int | None = None, first: int = -1) -> bytes:
    """Return the contents of a file of at most `most` bytes, or only the `first` bytes of it. Raises Damaged."""
    try:
        size = regular(path).st_size
        if most is not None and size > most:
            raise Damaged(f"expected at most {most} bytes, found {size}")
        with path.open("rb") as file:
            return file.read(first)
    except OSError as error:
        raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error


def described(start: bytes) -> str:
    """Describe a file by its first bytes."""
    if not start:
        return "an empty file"
    return "a web page" if start.lstrip()[:1] == b"<" else f"bytes 0x{start[:4].hex()}..."


def _inflate(packed: bytes, most: int, *, whole: bool = True) -> bytes:
    """Unpack gzip data of one member, but at most `most` bytes of it. Raises Damaged."""
    member = zlib.decompressobj(wbits=31)  # checks the CRC and the length
    try:
        raw = member.decompress(packed, most)
    except zlib.error as error:
        raise Damaged(f"expected gzip data, found damaged data ({error})") from error
    if whole and len(raw) < most and not member.eof:
        raise Damaged("expected complete gzip data, found truncated data (incomplete download?)")
    if member.unused_data.strip(b"\0"):
        raise Damaged("expected one gzip member, found more bytes after it")
    return raw


def _check_size(expected: IdxFile, found: int) -> None:
    """Compare the size of an unpacked file with its header. Raises Damaged."""
    if found != expected.size:
        raise Damaged(f"expected {expected.size} bytes, as its header says, found {found}")


def _check_digest(expected: str, content: bytes) -> None:
    """Compare a SHA-256, if it is known. Raises Damaged."""
    found = hashlib.sha256(content).hexdigest()
    if expected and found != expected:
        raise Damaged(f"expected SHA-256 {expected[:16]}..., found {found[:16]}...: wrong contents")
