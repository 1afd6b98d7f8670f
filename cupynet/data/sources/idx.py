"""The user's images and labels in IDX files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.data.augment import Augmentation
from cupynet.data.files import FilePath, checked_path, expanded, idx_shape, read_idx
from cupynet.data.normalize import Normalize
from cupynet.data.sources.user_files import UserArrays, classes_of, sha256_of

IDX_NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


class Idx(UserArrays):
    """Four IDX files of unsigned bytes, gzip or plain: images (S, H, W) or (S, H, W, C), and labels (S,).

    Args:
        folder: holds the files under MNIST's names, with or without .gz.
        train_images, train_labels, test_images, test_labels: other paths; relative ones are in `folder`, if given.
        classes: the number of classes; None: the largest training label + 1.
        sha256: name of one of these four arguments -> SHA-256 of the file or of its unpacked contents.
        seed, validation, limit, normalize, augment: see `Source`.
    """

    def __init__(
        self,
        folder: FilePath | None = None,
        train_images: FilePath | None = None,
        train_labels: FilePath | None = None,
        test_images: FilePath | None = None,
        test_labels: FilePath | None = None,
        classes: int | None = None,
        sha256: Mapping[str, str] | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(seed=seed, validation=validation, limit=limit, normalize=normalize, augment=augment)
        given = dict(zip(IDX_NAMES, (train_images, train_labels, test_images, test_labels), strict=True))
        self.folder = checked_path("folder", folder)
        self._given = {part: checked_path(part, path) for part, path in given.items()}
        self.place = self.folder or self._given["train_images"] or "idx"
        self.name = Path(self.place).resolve().name.partition(".")[0]
        self._asked_classes = classes_of(classes)
        if not isinstance(sha256, Mapping | None) or not {*(sha256 or ())} <= {*IDX_NAMES}:
            must = f"must map some of {', '.join(IDX_NAMES)} to digests, or be null"
            raise ConfigError(f"sha256={checks.shown(sha256, checks.written)}: {must}")
        self._sha256 = {part: sha256_of(f"sha256.{part}", value) for part, value in (sha256 or {}).items()}

    def _path(self, part: str) -> Path:
        """Return the path of one of the four files. ConfigError, DataError."""
        given = self._given[part]
        if self.folder is None and given is None:
            unnamed = checks.setting("data", "folder", None)
            raise ConfigError(f"{unnamed}: name the folder with the four IDX files, or the files one by one")
        folder = expanded(self.folder or ".")
        names = [expanded(given)] if given else [f"{IDX_NAMES[part]}.gz", IDX_NAMES[part]]
        return next((folder / name for name in names if os.path.lexists(folder / name)), folder / names[0])

    def _shape(self, part: str) -> tuple[int, ...]:
        return idx_shape(self._path(part))

    def _array(self, part: str) -> Array:
        return read_idx(self._path(part), self._sha256.get(part, ""))
