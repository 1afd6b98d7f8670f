"""Training sets in shards, one for each worker, in memory-mapped .npy files.

    FOLDER/0/images.npy     (S, H, W) or (S, H, W, C) uint8, for worker 0
             labels.npy     (S,) integers
             samples.npy    (S,) integers, the indices of these samples in the whole training set, from 0
    FOLDER/1/...

Shards may be larger than memory. Each machine needs labels.npy and samples.npy for all shards, but images.npy only
for the shards of its workers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array
from cupynet.core import wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import Dataset, count_classes, read_dataset
from cupynet.data.files import expanded, map_npy


class Shards:
    """The shards of a training set. Workers may share the object.

    Args:
        folder: a folder that contains the folders 0, 1, 2, ...
        classes: number of classes; by default the largest label + 1.
        pixels: scaling of the pixels, which by default are divided by 255.

    Attributes:
        image_shape: (H, W, C).
        counts: number of samples in each shard.
        labels, samples: lists with one (S,) int64 array per shard.

    Raises:
        DataError: a file is missing or damaged, or the shards are inconsistent.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        classes: int | None = None,
        pixels: PixelScale = FRACTIONS,
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError("must be the folder of the shards", "shards", wording.shown(folder))
        self.folder = expanded(folder).absolute()  # workers open images.npy later, also after os.chdir
        self.name, self.pixels = self.folder.resolve().name, pixels
        paths = self._paths()
        labels = [_map_integers(path / "labels.npy") for path in paths]
        samples = [_map_integers(path / "samples.npy") for path in paths]
        self._check_samples(labels, samples)
        self.classes = count_classes(self.folder, labels, classes)
        here = [number for number, path in enumerate(paths) if os.path.lexists(path / "images.npy")]
        if not here:
            raise DataError(f"{self.folder}: expected images.npy in at least one shard, found none")
        self.labels, self.samples = labels, samples
        self.counts = tuple(map(len, self.labels))
        first = self.dataset(str(here[0]))
        self.image_shape, self.scaled = first.image_shape, first.scaled

    def __len__(self) -> int:
        return sum(self.counts)

    def _paths(self) -> list[Path]:
        try:
            found = {path.name for path in self.folder.iterdir() if path.name.isdecimal()}
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be read ({error.strerror or error})") from error
        expected = [str(number) for number in range(max(1, len(found)))]
        if found != {*expected}:
            there = ", ".join(sorted(found)) or "none"
            raise DataError(f"{self.folder}: expected folders 0, 1, ..., one for each worker, found {there}")
        return [self.folder / name for name in expected]

    def _check_samples(self, labels: list[Array], samples: list[Array]) -> None:
        """Raise DataError unless the shards contain each sample exactly once."""
        seen = np.zeros(sum(map(len, labels)), bool)
        for numbers in samples:
            seen[numbers[(numbers >= 0) & (numbers < len(seen))]] = True
        if [*map(len, labels)] != [*map(len, samples)] or not seen.all():
            raise DataError(
                f"{self.folder}: the shards are inconsistent. Each samples.npy must be as long as labels.npy, and "
                f"together they must contain each number from 0 to {len(seen) - 1} once"
            )

    def check_workers(self, workers: int) -> None:
        count = len(self.counts)
        if workers != count:
            raise ConfigError(
                f"{self.folder} has {wording.counted(count, 'shard')}, one for each worker, but workers={workers}. Set "
                f"workers={count}, or write {wording.counted(workers, 'shard')}"
            )

    def open(self, number: int) -> Dataset:
        dataset = self.dataset(str(number))
        if dataset.image_shape != self.image_shape:
            found = f"found {dataset.image_shape}"
            raise DataError(f"{self.folder / str(number)}: expected images of shape {self.image_shape}, {found}")
        return dataset

    def parts(self) -> Iterator[Dataset]:
        """Yield the shards with images on this machine, memory-mapped."""
        for number in range(len(self.counts)):
            if os.path.lexists(self.folder / str(number) / "images.npy"):
                yield self.open(number)

    def dataset(self, part: str) -> Dataset:
        """Memory-map images.npy and labels.npy in the folder `part`."""
        place = self.folder / part
        images, labels = map_npy(place / "images.npy"), _map_integers(place / "labels.npy")
        if images.dtype != np.uint8 or not images.flags.c_contiguous:  # otherwise they would be copied to memory
            raise DataError(
                f"{place / 'images.npy'}: expected a contiguous array of uint8, found {images.dtype}. Store it with "
                "np.save(path, np.ascontiguousarray(images))"
            )
        return read_dataset(place, f"{self.name}-{part}", images, labels, self.classes, self.pixels)


def _map_integers(path: Path) -> Array:
    """Memory-map an array (S,) of int64 from a .npy file. Other integer types are converted."""
    array = map_npy(path)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path}: expected a one-dimensional array of integers, found {array.shape} of {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)
