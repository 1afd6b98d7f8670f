from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError
from cupynet.data.files import FilePath, checked_path, expanded, idx_path, idx_shape, read_idx
from cupynet.data.sources.user_files import UserArrays

IDX_NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(eq=False)
class IdxFiles(UserArrays):
    """IDX files of unsigned bytes, gzip or plain: images (S, H, W) or (S, H, W, C), and labels (S,).

    Args:
        folder: a folder with files named as in MNIST (see `idx_path`).
        train_images, train_labels, test_images, test_labels: other paths, relative to `folder` if it is given.
        classes: number of classes; by default the largest training label + 1.
        seed and others: see `Source`.
    """

    folder: FilePath | None = None
    train_images: FilePath | None = None
    train_labels: FilePath | None = None
    test_images: FilePath | None = None
    test_labels: FilePath | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("folder", *IDX_NAMES):
            checked_path(name, getattr(self, name))
        self.place = expanded(self.folder or self.train_images or self.test_images or "idx")
        self.name = self.place.resolve().name.partition(".")[0]
        self._inspect()

    def _path(self, name: str) -> Path:
        given = getattr(self, name)
        if self.folder is None and given is None:
            raise ConfigError("set the folder with the IDX files, or the path of each file", "folder", "null")
        folder = expanded(self.folder or ".")
        return folder / expanded(given) if given else idx_path(folder, IDX_NAMES[name])

    def _has(self, name: str) -> bool:
        return bool(getattr(self, name) or (self.folder is not None and os.path.lexists(self._path(name))))

    def _shape(self, name: str) -> tuple[int, ...]:
        return idx_shape(self._path(name))

    def _array(self, name: str) -> Array:
        return read_idx(self._path(name))
