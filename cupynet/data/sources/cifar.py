"""CIFAR-10 (Krizhevsky 2009): 50,000 + 10,000 colour photographs of 32 x 32, from its binary archive.

Nothing is unpacked to disk. Only the six files with images are read, each of a known size.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.idx_file import Damaged, described, read_bytes
from cupynet.data.sources.downloaded import Downloaded

_RECORD = 1 + 3 * 32 * 32  # a label, then the red, the green and the blue plane


@dataclass(frozen=True)
class Archive:
    """The archive: its name and MD5, the only published digest; the files with images, and the number in each."""

    name: str
    md5: str
    members: tuple[str, ...]
    images: int
    most_packed: int

    def read(self, path: Path) -> bytes:
        """Return the archive at `path`. Raises Damaged."""
        raw = read_bytes(path, self.most_packed)
        if hashlib.md5(raw, usedforsecurity=False).hexdigest() != self.md5:
            raise Damaged(f"expected MD5 {self.md5[:16]}..., found another digest, of {described(raw)}")
        return raw


class CIFAR10(Downloaded):
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

    def _read(self, folder: Path) -> tuple[Array, Array, Array, Array]:
        (archive,) = self.files
        raw, found = self.read(folder, archive), {}
        try:
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r|gz") as tar:
                for member in tar:  # each at most as large as it should be, whatever the archive says
                    if member.name in archive.members and (file := tar.extractfile(member)) is not None:
                        content = file.read(archive.images * _RECORD + 1)
                        found[member.name] = np.frombuffer(content, np.uint8).reshape(archive.images, _RECORD)
            records = np.concatenate([found[member] for member in archive.members])  # (S, 1 + 3 * H * W)
        except (OSError, EOFError, LookupError, ValueError, tarfile.TarError, zlib.error) as error:
            place = folder / archive.name
            raise DataError(f"{place}: is not CIFAR-10's archive ({error}); delete it to download it again") from error
        planes = records[:, 1:].reshape(-1, 3, 32, 32)
        images, labels = np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].astype(np.int64)
        train = self.samples[0]
        return images[:train], labels[:train], images[train:], labels[train:]
