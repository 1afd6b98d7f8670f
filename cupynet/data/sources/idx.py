"""The user's images and labels in IDX files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.data.augment import Augmentation
from cupynet.data.idx_file import FilePath, expanded, read_idx, read_idx_shape
from cupynet.data.normalize import Normalize
from cupynet.data.sources.user_files import Header, UserArrays, classes_of, path_of, reported_at, sha256_of

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
        super().__init__(seed, validation, limit, normalize, augment)
        given = dict(zip(IDX_NAMES, (train_images, train_labels, test_images, test_labels), strict=True))
        self.folder = path_of("folder", folder)
        self._given = {part: path_of(part, path) for part, path in given.items()}
        known = self.folder or self._given["train_images"]
        self.name = Path(known).resolve().name.partition(".")[0] if known else "idx"
        self._asked_classes = classes_of(classes)
        if not isinstance(sha256, Mapping | None):
            shown = checks.shown(sha256)
            raise ConfigError(f"sha256={shown}: must map files to digests, such as {{train_images: ...}}, or null")
        if unknown := [name for name in sha256 or {} if name not in IDX_NAMES]:
            raise ConfigError(f"sha256: {checks.shown(unknown[0], str)} is none of {', '.join(IDX_NAMES)}")
        self._sha256 = {part: sha256_of(f"sha256.{part}", value) or "" for part, value in (sha256 or {}).items()}

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The paths of the four files."""
        if self.folder is None and None in self._given.values():
            unnamed = checks.setting("data", "folder", None)
            raise ConfigError(f"{unnamed}: name the folder with the four IDX files, or the files one by one")
        folder, found = Path("." if self.folder is None else expanded(self.folder)), {}
        for part, given in self._given.items():
            names = [expanded(given)] if given else [f"{IDX_NAMES[part]}.gz", IDX_NAMES[part]]
            found[part] = next((folder / name for name in names if os.path.lexists(folder / name)), folder / names[0])
        return found

    def _place(self, part: str, what: str = "") -> str:
        return str(self._paths[f"{part}_{what or 'labels'}"])

    def _header(self, part: str) -> Header:
        with reported_at(self._paths[part]):
            return Header(read_idx_shape(self._paths[part], _axes(part)), np.dtype(np.uint8))

    def _array(self, part: str) -> Array:
        with reported_at(self._paths[part]):
            return read_idx(self._paths[part], _axes(part), self._sha256.get(part, ""))


def _axes(part: str) -> tuple[int, ...]:
    return (3, 4) if part.endswith("images") else (1,)
