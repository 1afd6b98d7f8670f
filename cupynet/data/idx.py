"""Reading a gzipped IDX file (http://yann.lecun.com/exdb/mnist/) that may turn out to be anything.

What a file has to be is known beforehand (`IdxFile`), so it is checked from the outside in: gzip, magic, dimensions,
length, SHA-256. The digest is that of the *unpacked* bytes: a file that was packed again is as good as the official
one. Nothing is allocated for what a header claims, and at most one byte more is unpacked than the file should hold.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import math
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cupynet.errors import DataError

_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 20


@dataclass(frozen=True)
class IdxFile:
    """What one file of a data set has to be: unsigned bytes of `shape`; `sha256` is that of the unpacked file."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """Two zero bytes, the type, the number of axes, then each axis as 32 bits, big-endian."""
        return bytes([0, 0, _UNSIGNED_BYTE, len(self.shape)]) + b"".join(axis.to_bytes(4, "big") for axis in self.shape)

    @property
    def size(self) -> int:
        """Bytes of the unpacked file."""
        return len(self.header) + math.prod(self.shape)


class Damaged(Exception):
    """A file is not what it has to be: says what was expected and found, and leaves the way out to the caller."""


def read_idx(path: Path, file: IdxFile, siblings: Sequence[IdxFile] = ()) -> bytes:
    """The unpacked bytes of `path`, which are those of `file`; `siblings` are the files it may have been mistaken for.

    Raises DataError, which names the file, what was expected and found, and the way out; never touches the file.
    """
    try:
        return unpack(path, file, siblings)
    except Damaged as error:
        good = f"{path.parent.name}/{file.name}"
        way_out = f"delete it to download it again, or name a folder with a good {good} in CUPYNET_DATA or folder='...'"
        raise DataError(f"{path}: {error}; {way_out}") from error.__cause__


def unpack(path: Path, file: IdxFile, siblings: Sequence[IdxFile] = ()) -> bytes:
    """As `read_idx`, but raises Damaged."""
    try:
        _check_gzip(path)
        with gzip.open(path, "rb") as stream:
            raw = bytearray(stream.read(len(file.header)))
            _check_header(bytes(raw), file, siblings)
            while len(raw) <= file.size and (chunk := stream.read(min(_CHUNK, file.size + 1 - len(raw)))):
                raw += chunk
    except EOFError as error:
        raise Damaged(f"expected {file.size} unpacked bytes, but the gzip data end early (a cut download?)") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        found = "other bytes after them" if "Not a gzipped file" in str(error) else f"damaged ones ({error})"
        raise Damaged(f"expected gzip data, found {found}") from error
    except OSError as error:
        raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error
    if len(raw) != file.size:
        found = f"more than {file.size}" if len(raw) > file.size else str(len(raw))
        raise Damaged(f"expected {file.size} unpacked bytes, found {found}")
    digest = hashlib.sha256(raw).hexdigest()
    if digest != file.sha256:
        found = f"{digest[:16]}...{_named(digest, {sibling.sha256: sibling.name for sibling in siblings})}"
        raise Damaged(f"expected SHA-256 {file.sha256[:16]}... (unpacked), found {found}: right shape, wrong contents")
    return bytes(raw)


def _check_gzip(path: Path) -> None:
    """Says what a file without gzip's magic really is: a web page saved under the name, an unpacked file, nothing."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    with path.open("rb") as stream:
        start = stream.read(64)
    if start[:2] == b"\x1f\x8b":
        return
    if not start:
        found = "an empty file"
    elif start.lstrip()[:1] == b"<":
        found = f"a web page ({start.lstrip()[:15].decode('ascii', 'replace').splitlines()[0]!r}...)"
    elif start[:3] == bytes([0, 0, _UNSIGNED_BYTE]):
        found = "an unpacked IDX file (gzip it, or take the .gz one)"
    else:
        found = f"bytes 0x{start[:4].hex()}..."
    raise Damaged(f"expected gzip data, found {found}")


def _check_header(start: bytes, file: IdxFile, siblings: Sequence[IdxFile]) -> None:
    """Compares the first bytes of the unpacked file, as many as its header should have, with that header."""
    if start == file.header:
        return
    if len(start) < len(file.header) and file.header.startswith(start):
        raise Damaged(f"expected {file.size} unpacked bytes, found {len(start)}")
    expected = f"an IDX header of unsigned bytes {_shape(file.shape)}"
    if len(start) < 4 or start[:2] != b"\0\0":
        raise Damaged(f"expected {expected}, found magic number 0x{start[:4].hex()}, which is not one of IDX")
    if start[2] != _UNSIGNED_BYTE:
        raise Damaged(f"expected {expected}, found data type 0x{start[2]:02x} (unsigned bytes are 0x08)")
    whole_axes = min(start[3], (len(start) - 4) // 4)  # no more was read than the header should have
    found = tuple(int.from_bytes(start[4 + 4 * i : 8 + 4 * i], "big") for i in range(whole_axes))
    if start[3] != len(file.shape):
        named = _named(
            (start[3], found), {(len(other.shape), other.shape[:whole_axes]): other.name for other in siblings}
        )
        raise Damaged(f"expected {expected}, found {start[3]} {'axis' if start[3] == 1 else 'axes'}{named}")
    named = _named(found, {other.shape: other.name for other in siblings})
    raise Damaged(f"expected {expected}, found {_shape(found)}{named}")


def _shape(axes: tuple[int, ...]) -> str:
    return " x ".join(map(str, axes))


def _named(found: object, names: dict[object, str]) -> str:
    """Names the file of the same set that looks like this one, so that two swapped files are recognised at once."""
    return f", as {names[found]} has" if found in names else ""
