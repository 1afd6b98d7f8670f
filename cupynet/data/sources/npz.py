"""The user's images and labels in a NumPy archive."""

from __future__ import annotations

import hashlib
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.idx_file import FilePath, expanded, regular
from cupynet.data.normalize import Normalize
from cupynet.data.shards import PARSING
from cupynet.data.sources.user_files import Header, Outline, UserArrays, classes_of, path_of, sha256_of

KEYS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}


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
        train_images: str = KEYS["train_images"],
        train_labels: str = KEYS["train_labels"],
        test_images: str = KEYS["test_images"],
        test_labels: str = KEYS["test_labels"],
        classes: int | None = None,
        sha256: str | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(seed, validation, limit, normalize, augment)
        self.file = path_of("file", file)
        self.name = Path(self.file).name.partition(".")[0] if self.file else "npz"
        self._keys = dict(zip(KEYS, (train_images, train_labels, test_images, test_labels), strict=True))
        for part, key in self._keys.items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{part}={key!r}: must be the name of an array in the file, such as {KEYS[part]}")
        self._asked_classes, self._sha256 = classes_of(classes), sha256_of("sha256", sha256)

    @property
    def _path(self) -> Path:
        if self.file is None:
            raise ConfigError(f"{checks.setting('data', 'file', None)}: name the .npz file")
        return expanded(self.file)

    def _place(self, part: str, what: str = "") -> str:
        return f"{self._path}: {self._keys[f'{part}_{what}']}" if what else str(self._path)

    def _look(self) -> Outline:
        if self._sha256:
            with self._opened(), self._path.open("rb") as file:
                digest = hashlib.sha256()
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            if digest.hexdigest() != self._sha256:
                raise DataError(f"{self._path}: expected SHA-256 {self._sha256}, found {digest.hexdigest()}")
        return super()._look()

    def _header(self, part: str) -> Header:
        key = self._keys[part]
        with self._opened() as archive:
            if f"{key}.npy" not in archive.namelist():
                there = ", ".join(name.removesuffix(".npy") for name in archive.namelist()[:8]) or "nothing"
                way_out = f"name the key in {checks.setting('data', part)}"
                raise DataError(f"{self._path}: expected an array {key!r}, found {there}: {way_out}")
            with archive.open(f"{key}.npy") as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                held = archive.getinfo(f"{key}.npy").file_size - file.tell()
        if dtype.hasobject:
            raise DataError(f"{self._path}: {key}: expected an array of numbers, found objects")
        if math.prod(shape) * dtype.itemsize != held:
            raise DataError(f"{self._path}: {key}: expected {shape} of {dtype}, found {held} bytes: damaged")
        return Header(shape, dtype)

    def _array(self, part: str) -> Array:
        self._header(part)  # do not allocate what a damaged header claims
        with self._opened() as archive, archive.open(f"{self._keys[part]}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        """Open the archive. DataError, also if reading in the context fails."""
        path = self._path
        try:
            regular(path)
            with PARSING, zipfile.ZipFile(path) as archive:
                yield archive
        except (DataError, MemoryError):
            raise
        except Exception as error:  # a damaged archive or header may raise anything
            reason = checks.one_line(error)
            raise DataError(f"{path}: cannot be read as an .npz file ({reason}): write it with np.savez") from error
