"""CIFAR-10 (Krizhevsky 2009): 50,000 training and 10,000 test images, 32 x 32 pixels in color."""

from __future__ import annotations

import io
import tarfile

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.errors import DataError
from cupynet.data.files import KnownFile
from cupynet.data.sources.downloaded import Downloaded

_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes
MEMBERS = (
    *(f"cifar-10-batches-bin/data_batch_{number}.bin" for number in range(1, 6)),
    "cifar-10-batches-bin/test_batch.bin",
)


class CIFAR10(Downloaded):
    """CIFAR-10, in `<folder>/cifar10/cifar-10-binary.tar.gz`. See `Downloaded`."""

    name = "cifar10"
    image_shape = (32, 32, 3)
    classes = 10
    class_names = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    samples = (50_000, 10_000)
    files = (KnownFile("cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", 200_000_000),)
    mirrors = ("https://www.cs.toronto.edu/~kriz/",)

    def _read(self) -> tuple[Array, Array, Array, Array]:
        (archive,) = self.files
        train, test = self.samples
        raw, found = self.read(archive), {}
        try:
            with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
                for member in tar:  # do not trust sizes in the archive
                    if member.name in MEMBERS and (file := tar.extractfile(member)) is not None:
                        content = file.read(test * _RECORD + 1)
                        found[member.name] = np.frombuffer(content, np.uint8).reshape(test, _RECORD)
            records = np.concatenate([found[member] for member in MEMBERS])  # (S, 1 + 3 * H * W)
        except (OSError, EOFError, LookupError, ValueError, tarfile.TarError) as error:  # MD5 can be forged
            place = self.path(archive)
            raise DataError(f"{place}: not the CIFAR-10 archive ({error}). Delete it to download it again") from error
        images = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        labels = records[:, 0].astype(np.int64)
        return images[:train], labels[:train], images[train:], labels[train:]
