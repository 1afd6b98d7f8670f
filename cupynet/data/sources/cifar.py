"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour photographs of 32 x 32, from its binary archive.

Nothing is unpacked to disk: of the archive the six files that hold images are read, each of a size that is known, and
whatever else it may hold is not touched.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.idx_file import Damaged, regular
from cupynet.data.sources.downloaded import Irreplaceable, KnownFile

_CHUNK = 1 << 20
_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane


@dataclass(frozen=True)
class Archive:
    """The archive: its name and MD5, the only digest that its makers tell; which of its files hold how many images."""

    name: str
    md5: str
    members: tuple[str, ...]
    images: int
    most_packed: int

    @property
    def digest(self) -> str:
        """What is known of its contents."""
        return self.md5


class CIFAR10(Irreplaceable):
    """`<folder>/cifar10/cifar-10-binary.tar.gz`, see `Downloaded`."""

    name = "cifar10"
    image_shape = (32, 32, 3)
    classes = 10
    class_names = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    files = (
        Archive(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            (
                *(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
                "cifar-10-batches-bin/test_batch.bin",
            ),
            10_000,
            200_000_000,
        ),
    )
    mirrors: tuple[str, ...] = ("https://www.cs.toronto.edu/~kriz/",)

    @property
    def samples(self) -> tuple[int, int]:
        (archive,) = self.files
        return archive.images * (len(archive.members) - 1), archive.images

    def verify(self, path: Path, file: KnownFile) -> None:
        assert isinstance(file, Archive)
        try:
            size = regular(path).st_size
            with path.open("rb") as stream:
                if size > file.most_packed:
                    raise Damaged(f"expected at most {file.most_packed} bytes, found {size}")
                _check(stream, file)
        except OSError as error:
            raise Damaged(f"expected a file, but it cannot be read ({error.strerror or error})") from error

    def _read(self, folder: Path) -> tuple[Array, Array, Array, Array]:
        (archive,) = self.files
        self.check_file(folder, archive)
        try:
            with (folder / archive.name).open("rb") as stream, tarfile.open(fileobj=stream, mode="r|gz") as tar:
                found = dict(_batches(tar, archive))
        except (OSError, EOFError, tarfile.TarError, zlib.error, Damaged) as error:
            raise DataError(f"{folder / archive.name}: {error}; delete it to download it again") from error
        absent = [member for member in archive.members if member not in found]
        if absent:
            raise DataError(f"{folder / archive.name}: lacks {absent[0]}; delete it to download it again")
        records = np.concatenate([found[member] for member in archive.members])  # (S, 1 + 3 * H * W)
        planes = records[:, 1:].reshape(-1, 3, 32, 32)
        images, labels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)
        train = self.samples[0]
        return images[:train], labels[:train], images[train:], labels[train:]


def _check(stream: BinaryIO, file: Archive) -> None:
    """Raises Damaged unless the archive has its MD5."""
    start, hasher = stream.read(15), hashlib.md5(usedforsecurity=False)
    stream.seek(0)
    while chunk := stream.read(_CHUNK):
        hasher.update(chunk)
    if hasher.hexdigest() != file.md5:
        page = " a web page," if start.lstrip()[:1] == b"<" else ""
        raise Damaged(f"expected MD5 {file.md5[:16]}..., found{page} {hasher.hexdigest()[:16]}...")


def _batches(tar: tarfile.TarFile, archive: Archive) -> list[tuple[str, Array]]:
    """The records of each file that holds images, (S, 1 + 3 * H * W) uint8. Raises Damaged."""
    found, expected = [], archive.images * _RECORD
    for member in tar:
        if member.name not in archive.members:
            continue
        inside = tar.extractfile(member) if member.isfile() and member.size == expected else None
        raw = b"" if inside is None else inside.read(expected)
        if len(raw) != expected:
            raise Damaged(f"{member.name}: expected a file of {expected} bytes, found {member.size}")
        found.append((member.name, np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)))
    return found
