"""The user's images and labels in a NumPy archive."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.idx_file import expanded, regular
from cupynet.data.shards import PARSING
from cupynet.data.sources.user_files import UserArrays, classes_of, path_of, sha256_of

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

    def _arrays(self) -> dict[str, Array]:
        path = self._path
        try:
            regular(path)
            found = hashlib.sha256(path.read_bytes()).hexdigest() if self._sha256 else None
            if found != self._sha256:
                raise DataError(f"{path}: expected SHA-256 {self._sha256}, found {found}")
            with PARSING, path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                for part, key in self._keys.items():
                    if key not in archive:
                        there = ", ".join(archive.files[:8]) or "nothing"
                        way_out = f"name the key in {checks.setting('data', part)}"
                        raise DataError(f"{path}: expected an array {key!r}, found {there}: {way_out}")
                return {part: archive[key] for part, key in self._keys.items()}
        except DataError:
            raise
        except Exception as error:  # a damaged archive or header may raise anything
            reason = checks.one_line(error)
            raise DataError(f"{path}: cannot be read as an .npz file ({reason}): write it with np.savez") from error
