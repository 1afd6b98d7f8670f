"""Reading a gzipped IDX file (http://yann.lecun.com/exdb/mnist/) that may turn out to be anything.

What a file has to be is known beforehand (`IdxFile`), so it is checked from the outside in: a file of a size that can
be, gzip, magic, dimensions, length, SHA-256. Where the digest of the *unpacked* bytes is known it is that one: a file
that was packed again is as good as the official one; else it is that of the file as it is. Of files of one's own
(`opened`) the shape is what their header says, and the file must bear it out. Nothing is allocated for what a header
claims, no more is read than so many bytes can be packed into, and at most one byte more is unpacked than the file
should hold. (zlib unpacks: the gzip module reads a name in the header, or zeros after the data, byte by byte, however
many there are.)
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
from typing import BinaryIO

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 16  # packed bytes that are unpacked at a time
_MEMBERS = 10_000  # of one gzip file; bgzip, which makes many, has one for each 64 kB


@dataclass(frozen=True)
class IdxFile:
    """What one file of a data set has to be: unsigned bytes of `shape`.

    `sha256` is that of the unpacked file, `packed_sha256` that of the gzip file; one that is "" is not known.
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
        """Bytes of the unpacked file."""
        return len(self.header) + math.prod(self.shape)

    @property
    def digest(self) -> str:
        """What is known of its contents."""
        return self.sha256 or self.packed_sha256

    @property
    def most_packed(self) -> int:
        """Bytes that no gzip file of these needs: deflate adds less than one to a thousand, a member less than 40."""
        return self.size + self.size // 500 + (1 << 16)


class Damaged(Exception):
    """A file is not what it has to be: says what was expected and found, and leaves the way out to the caller."""


def expanded(folder: str | os.PathLike[str]) -> Path:
    """A path with `~` filled in. Raises DataError where nobody is called what follows it."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise DataError(f"{folder}: {error}: name another folder") from error


def regular(path: Path) -> os.stat_result:
    """What the system says of the file at `path`. Raises OSError; Damaged if it is none: a pipe would be waited for."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise Damaged(f"expected a file, found {kinds.get(stat.S_IFMT(found.st_mode), 'a device')}")
    return found


def unpack(path: Path, file: IdxFile, siblings: Sequence[IdxFile] = ()) -> bytes:
    """The unpacked bytes of `path`, which are those of `file`; `siblings` are the files it may have been mistaken for.

    Raises Damaged; never touches the file.
    """
    try:
        packed = regular(path).st_size
        with path.open("rb") as stream:
            _check_start(stream.read(64))
            if packed > file.most_packed:
                raise Damaged(f"expected at most {file.most_packed} bytes of gzip data, found {packed}")
            stream.seek(0)
            raw = _unpacked(stream, file, siblings)
            _check_packed(stream, file, siblings)
    except zlib.error as error:
        reason = str(error).rpartition(": ")[2]  # without zlib's "Error -3 while decompressing data"
        raise Damaged(f"expected gzip data, found damaged ones ({reason})") from error
    except OSError as error:
        raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error
    if len(raw) != file.size:
        found = f"more than {file.size}" if len(raw) > file.size else str(len(raw))
        raise Damaged(f"expected {file.size} unpacked bytes, found {found}")
    digest = hashlib.sha256(raw).hexdigest()
    if file.sha256 and digest != file.sha256:
        found = f"{digest[:16]}...{_named(digest, {sibling.sha256: sibling.name for sibling in siblings})}"
        raise Damaged(f"expected SHA-256 {file.sha256[:16]}... (unpacked), found {found}: right shape, wrong contents")
    return bytes(raw)


def _check_packed(stream: BinaryIO, file: IdxFile, siblings: Sequence[IdxFile]) -> None:
    """Compares the gzip file itself with its digest, where only that is known."""
    if file.sha256 or not file.packed_sha256:
        return
    stream.seek(0)
    hasher = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        hasher.update(chunk)
    digest = hasher.hexdigest()
    if digest != file.packed_sha256:
        found = f"{digest[:16]}...{_named(digest, {sibling.packed_sha256: sibling.name for sibling in siblings})}"
        raise Damaged(f"expected SHA-256 {file.packed_sha256[:16]}... (gzip), found {found}: wrong contents")


def opened(path: Path, axes: Sequence[int]) -> IdxFile:
    """What the file at `path`, gzip or plain, says that it is: unsigned bytes of one of so many `axes`. Damaged."""
    try:
        regular(path)
        with path.open("rb") as stream:
            start = stream.read(_CHUNK)
        if start[:2] == _GZIP:
            start = zlib.decompressobj(wbits=31).decompress(start, 4 + 4 * max(axes))
    except zlib.error as error:
        raise Damaged(f"expected IDX or gzip data, found damaged ones ({error})") from error
    except OSError as error:
        raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error
    if start[:2] != b"\0\0" or len(start) < 4:
        raise Damaged(f"expected an IDX file, plain or gzip, found {_described(start)}")
    if start[2] != _UNSIGNED_BYTE:
        raise Damaged(f"expected IDX data of unsigned bytes (0x08), found data type 0x{start[2]:02x}")
    wanted = " or ".join(map(str, axes))
    if start[3] not in axes or len(start) < 4 + 4 * start[3]:
        raise Damaged(f"expected IDX data of {wanted} {'axis' if wanted == '1' else 'axes'}, found {start[3]}")
    shape = tuple(int.from_bytes(start[4 + 4 * i : 8 + 4 * i], "big") for i in range(start[3]))
    return IdxFile(path.name, shape, "")


def read_opened(path: Path, file: IdxFile, sha256: str = "") -> Array:
    """The bytes of `path`, of which `opened` has said what they are, as an array of that shape. Damaged.

    sha256: of the file as it is, or of what is unpacked; either will do.
    """
    try:
        size = regular(path).st_size
        with path.open("rb") as stream:
            packed = stream.read(2) == _GZIP
        if packed:
            raw = unpack(path, file)
        elif size != file.size:
            raise Damaged(f"expected {file.size} bytes, as its header says, found {size}")
        else:
            raw = path.read_bytes()
            if len(raw) != size or raw[: len(file.header)] != file.header:
                raise Damaged("it was changed while it was read")
        if sha256 and sha256 not in (hashlib.sha256(raw).hexdigest(), hashlib.sha256(path.read_bytes()).hexdigest()):
            raise Damaged(f"expected SHA-256 {sha256[:16]}..., found {hashlib.sha256(raw).hexdigest()[:16]}...")
    except OSError as error:
        raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error
    return np.frombuffer(raw, np.uint8, offset=len(file.header)).reshape(file.shape)


def _check_start(start: bytes) -> None:
    """Says what a file without gzip's magic really is: a web page saved under the name, an unpacked file, nothing."""
    if start[:2] == _GZIP:
        return
    plain = start[:3] == bytes([0, 0, _UNSIGNED_BYTE])
    found = "an unpacked IDX file (gzip it, or take the .gz one)" if plain else _described(start)
    raise Damaged(f"expected gzip data, found {found}")


def _described(start: bytes) -> str:
    """What a file with such a beginning may be."""
    if not start:
        return "an empty file"
    if start.lstrip()[:1] == b"<":
        return f"a web page ({start.lstrip()[:15].decode('ascii', 'replace').splitlines()[0]!r}...)"
    return f"bytes 0x{start[:4].hex()}..."


def _unpacked(stream: BinaryIO, file: IdxFile, siblings: Sequence[IdxFile]) -> bytearray:
    """What the gzip members in `stream` hold, one after the other, but at most a byte more than `file` should.

    Raises Damaged, OSError and zlib.error; also as soon as the first bytes are not the header they should be.
    """
    raw, header, members, packed = bytearray(), len(file.header), 0, stream.read(_CHUNK)
    while packed and len(raw) <= file.size:
        members, member = members + 1, zlib.decompressobj(wbits=31)  # checks its CRC and length, too
        if packed[:2] != _GZIP[: len(packed)] or members > _MEMBERS:
            found = "other bytes after them" if members <= _MEMBERS else f"more than {_MEMBERS} members of them"
            raise Damaged(f"expected gzip data, found {found}")
        while not member.eof and len(raw) <= file.size:
            checked = len(raw) >= header
            raw += member.decompress(packed, file.size + 1 - len(raw) if checked else header - len(raw))
            if not checked and len(raw) >= header:
                _check_header(bytes(raw), file, siblings)
            packed = member.unconsumed_tail or (b"" if member.eof else stream.read(_CHUNK))
            if not packed and not member.eof and len(raw) <= file.size:
                raise Damaged(f"expected {file.size} unpacked bytes, but the gzip data end early (a cut download?)")
        packed = member.unused_data.lstrip(b"\0")  # zeros fill up a tape
        while not packed and (more := stream.read(_CHUNK)):
            packed = more.lstrip(b"\0")
    if len(raw) < header:
        _check_header(bytes(raw), file, siblings)
    return raw


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
