"""The user's images and labels in a NumPy archive."""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core.checks import setting
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.idx_file import Damaged, expanded, regular
from cupynet.data.shards import PARSING
from cupynet.data.sources.user_files import Outline, UserFiles, path_of, sha256_of

KEYS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}


class Npz(UserFiles):
    """A .npz file, compressed or not: images (S, H, W) or (S, H, W, C) of bytes, labels (S,) or (S, 1) of integers.

    Args:
        file: its path.
        train_images, train_labels, test_images, test_labels: their keys in the file.
        classes: the number of classes; None: the largest training label + 1.
        sha256: of the file; None: not checked.
        The others: see `Source`.
    """

    def __init__(
        self,
        file: str | os.PathLike[str] | None = None,
        train_images: str = KEYS["train_images"],
        train_labels: str = KEYS["train_labels"],
        test_images: str = KEYS["test_images"],
        test_labels: str = KEYS["test_labels"],
        classes: int | None = None,
        sha256: str | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: str | Mapping[str, Sequence[float]] | None = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.file = path_of("file", file)
        name = Path(self.file).name.partition(".")[0] if self.file else "npz"
        super().__init__(name, classes, seed, validation, limit, normalize, augment)
        self._keys = dict(zip(KEYS, (train_images, train_labels, test_images, test_labels), strict=True))
        for part, key in self._keys.items():
            if not isinstance(key, str) or not key:
                raise ConfigError(f"{part}={key!r}: must be the name of an array in the file, such as {KEYS[part]}")
        self._sha256 = sha256_of("sha256", sha256)

    @property
    def _path(self) -> Path:
        if self.file is None:
            raise ConfigError(f"{setting('data', 'file', None)}: name the .npz file")
        return expanded(self.file)

    def _place(self, part: str, what: str = "") -> str:
        key = self._keys[f"{part}_{what}"] if what else ""
        return f"{self._path}{key and f': {key}'}"

    def _look(self) -> Outline:
        with self._opened() as archive:
            shapes = {part: self._shape(archive, part) for part in KEYS}
            self._check_shapes(shapes)
            labels = self._labels(archive, "train_labels")
        train, test = shapes["train_images"], shapes["test_images"]
        shape = (train[1], train[2], train[3] if len(train) == 4 else 1)
        return Outline(shape, self._classes_of(labels), train[0], test[0])

    def _read(self) -> tuple[Array, Array, Array, Array]:
        with self._opened() as archive:
            images, test_images = (self._array(archive, f"{part}_images") for part in ("train", "test"))
            return images, self._labels(archive, "train_labels"), test_images, self._labels(archive, "test_labels")

    @contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        """Open the archive after comparing its digest. Raises DataError, also if reading in the context fails."""
        path = self._path
        try:
            regular(path)
            found = hashlib.sha256(path.read_bytes()).hexdigest() if self._sha256 else None
            if found != self._sha256:
                raise Damaged(f"expected SHA-256 {self._sha256}, found {found}")
            with zipfile.ZipFile(path) as archive:
                yield archive
        except Damaged as error:
            raise DataError(f"{path}: {error}") from error
        except DataError:
            raise
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
            raise DataError(f"{path}: cannot be read as an .npz file ({error}): write it with np.savez") from error

    def _shape(self, archive: zipfile.ZipFile, part: str) -> tuple[int, ...]:
        """Return the shape of an array of numbers after checking that the file is long enough for it. DataError."""
        key, names = self._keys[part], archive.namelist()
        if f"{key}.npy" not in names:
            found = ", ".join(name.removesuffix(".npy") for name in names[:8]) or "nothing"
            way_out = f"name the key in {setting('data', part)}"
            raise DataError(f"{archive.filename}: expected an array {key!r}, found {found}: {way_out}")
        with PARSING, archive.open(f"{key}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
            held = archive.getinfo(f"{key}.npy").file_size - file.tell()
        if dtype.kind not in "iufb":
            raise DataError(f"{archive.filename}: {key}: expected an array of integers, found {dtype}")
        if math.prod(shape) * dtype.itemsize != held:
            raise DataError(f"{archive.filename}: {key}: expected {shape} of {dtype}, found {held} bytes: damaged")
        return tuple(shape)

    def _array(self, archive: zipfile.ZipFile, part: str) -> Array:
        self._shape(archive, part)
        with PARSING, archive.open(f"{self._keys[part]}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    def _labels(self, archive: zipfile.ZipFile, part: str) -> Array:
        labels = self._array(archive, part)
        if labels.dtype.kind not in "iu":
            raise DataError(f"{archive.filename}: {self._keys[part]}: expected integers, found {labels.dtype}")
        return labels.reshape(-1) if labels.shape[1:] == (1,) else labels
