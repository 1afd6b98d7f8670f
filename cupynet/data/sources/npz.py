"""The user's images and labels in a NumPy archive."""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.files import PARSING, FilePath, check_regular, checked_path, expanded, read_bytes
from cupynet.data.normalize import Normalize
from cupynet.data.sources.user_files import PARTS, Outline, UserArrays, classes_of, sha256_of


class Npz(UserArrays):
    """A .npz file, compressed or not: images (S, H, W) or (S, H, W, C) of bytes, labels (S,) or (S, 1) of integers.

    Args:
        file: its path.
        train_images, train_labels, test_images, test_labels: their keys in the file.
        classes: the number of classes; None: the largest training label + 1.
        sha256: of the file; None: not checked.
        seed, validation, limit, normalize, augment: see `Source`.
    """

    def __init__(
        self,
        file: FilePath | None = None,
        train_images: str = "x_train",
        train_labels: str = "y_train",
        test_images: str = "x_test",
        test_labels: str = "y_test",
        classes: int | None = None,
        sha256: str | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(seed=seed, validation=validation, limit=limit, normalize=normalize, augment=augment)
        self.file = checked_path("file", file)
        self.place = self.file or "npz"
        self.name = Path(self.place).name.partition(".")[0]
        self._keys = dict(zip(PARTS, (train_images, train_labels, test_images, test_labels), strict=True))
        for part, key in self._keys.items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{part}={key!r}: must be the name of an array in the file")
        self._asked_classes, self._sha256 = classes_of(classes), sha256_of("sha256", sha256)

    @property
    def _path(self) -> Path:
        if self.file is None:
            raise ConfigError(f"{checks.setting('data', 'file', None)}: name the .npz file")
        return expanded(self.file)

    def _look(self) -> Outline:
        if self._sha256 and hashlib.sha256(read_bytes(self._path)).hexdigest() != self._sha256:
            raise DataError(f"{self._path}: expected contents of SHA-256 {self._sha256}, found others")
        return super()._look()

    def _shape(self, part: str) -> tuple[int, ...]:
        with self._opened(part) as (file, size):
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize != size - file.tell():
                raise ValueError(f"{self._keys[part]}: claims {shape} of {dtype}, which it does not hold")
        return tuple(shape)

    def _array(self, part: str) -> Array:
        self._shape(part)  # do not allocate what a damaged header claims
        with self._opened(part) as (file, _):
            return np.lib.format.read_array(file, allow_pickle=False)

    @contextmanager
    def _opened(self, part: str) -> Iterator[tuple[IO[bytes], int]]:
        """Open an array in the archive; also returns its size in bytes. DataError, also if reading it fails."""
        path, key = self._path, self._keys[part]
        try:
            check_regular(path)
            with PARSING, zipfile.ZipFile(path) as archive:
                if f"{key}.npy" not in archive.namelist():
                    there = ", ".join(name.removesuffix(".npy") for name in archive.namelist()[:8])
                    way_out = f"name the key in {checks.setting('data', part)}"
                    raise DataError(f"{path}: expected an array {key!r}, found {there or 'nothing'}: {way_out}")
                with archive.open(f"{key}.npy") as file:
                    yield file, archive.getinfo(f"{key}.npy").file_size
        except (DataError, MemoryError):
            raise
        except Exception as error:  # a damaged archive or header may raise anything
            reason = checks.one_line(error)
            raise DataError(f"{path}: cannot be read as an .npz file ({reason}): write it with np.savez") from error
