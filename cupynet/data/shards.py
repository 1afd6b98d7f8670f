"""A training set in shards, one for each worker, in plain .npy files that are mapped into memory.

    FOLDER/0/images.npy     (S, H, W) or (S, H, W, C) uint8   the shard of worker 0
             labels.npy     (S,) integers
             samples.npy    (S,) integers: the numbers of these samples in the whole training set, from 0
    FOLDER/1/...

Files are mapped, not read: a shard may be larger than memory, and the processes of a machine share its pages. A machine
needs the labels and samples of all shards, but images only of the shards that its own workers train on.
"""

from __future__ import annotations

import copy
import os
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import Dataset
from cupynet.data.idx_file import expanded, regular

PARSING = threading.Lock()  # CPython 3.11 fails if threads parse the headers of .npy files at the same time


class Shard(NamedTuple):
    """The shard of one worker: its images and labels, and their numbers (S,) int64 in the whole training set."""

    dataset: Dataset
    samples: Array


class Shards:
    """The shards of one training set. All workers may use the same object at the same time.

    Args:
        folder: holds the shards, in folders named 0, 1, 2, ...
        classes: the number of classes; None: the largest label + 1.
        pixels: how pixels are scaled.

    Attributes:
        name: of the folder, for messages and reports.
        image_shape: (H, W, C).
        counts: the number of samples of each shard.
        labels, samples: of each shard, (S,) int64.

    Raises:
        ConfigError: an argument is invalid.
        DataError: a file is missing or damaged, or the shards do not belong together.
    """

    def __init__(
        self, folder: str | os.PathLike[str], classes: int | None = None, pixels: PixelScale = FRACTIONS
    ) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"shards={checks.shown(folder)}: must be the folder of the shards")
        self.folder = expanded(folder)
        self.name, self.pixels = self.folder.resolve().name, pixels
        paths = [self.path(number) for number in range(self._count())]
        self.labels = [map_integers(path / "labels.npy") for path in paths]
        self.samples = [map_integers(path / "samples.npy") for path in paths]
        self.counts = self._in_files = tuple(map(len, self.labels))  # `head` uses fewer
        self._check_samples()
        self.classes = self._found_classes() if classes is None else classes
        here = [path / "images.npy" for path in paths if os.path.lexists(path / "images.npy")]
        if not here:
            raise DataError(f"{self.folder}: expected images.npy in at least one shard, found none")
        self.image_shape: tuple[int, ...] = map_images(here[0]).shape[1:]
        self._opened: dict[int, Shard] = {}

    def __len__(self) -> int:
        return sum(self.counts)

    def path(self, number: int) -> Path:
        """Return the folder of one shard."""
        return self.folder / str(number)

    def _count(self) -> int:
        try:
            found = {path.name for path in self.folder.iterdir() if path.name.isdecimal()}
        except OSError as error:
            raise DataError(f"{self.folder}: cannot be read ({error.strerror or error})") from error
        missing = [number for number in range(max(1, len(found))) if str(number) not in found]
        if missing:
            raise DataError(f"{self.folder}: expected folders 0, 1, ..., one for each worker, found no {missing[0]}")
        return len(found)

    def _check_samples(self) -> None:
        """Raise DataError unless the shards together have each sample exactly once."""
        seen = np.zeros(len(self), bool)
        for number, (labels, samples) in enumerate(zip(self.labels, self.samples, strict=True)):
            if len(samples) != len(labels):
                raise DataError(f"{self.path(number)}: has {len(samples)} samples and {len(labels)} labels")
            seen[samples[(samples >= 0) & (samples < len(seen))]] = True
        if not seen.all():
            raise DataError(
                f"{self.folder}: these shards do not belong together: they have {len(seen)} samples, and none of the "
                f"files samples.npy has the number {seen.argmin()}"
            )

    def _found_classes(self) -> int:
        least, most = min(int(each.min()) for each in self.labels), max(int(each.max()) for each in self.labels)
        if least < 0 or most >= len(self):
            raise DataError(
                f"{self.folder}: expected labels 0, 1, 2, ... of {len(self)} images, found {least} to {most}"
            )
        return most + 1

    def check_workers(self, workers: int) -> None:
        """Raise ConfigError unless there are as many workers as shards."""
        count = len(self.counts)
        if workers != count:
            raise ConfigError(
                f"{self.folder} has {count} {'shard' if count == 1 else 'shards'}, one for each worker, and "
                f"workers={workers}: set workers={count}, or write {workers} shards"
            )

    def head(self, most: int) -> Shards:
        """Return the first `most` samples of each shard, or all if it has fewer."""
        few = copy.copy(self)
        few._opened = {}
        few.labels = [labels[:most] for labels in self.labels]
        few.samples = [samples[:most] for samples in self.samples]
        few.counts = tuple(map(len, few.labels))
        return few

    def open(self, number: int) -> Shard:
        """Map one shard. Raises DataError."""
        if number not in self._opened:
            path, images = self.path(number), map_images(self.path(number) / "images.npy")
            if images.shape != (self._in_files[number], *self.image_shape):
                expected = f"{self._in_files[number]} images of {self.image_shape}"
                raise DataError(f"{path}: expected {expected}, found {len(images)} of {images.shape[1:]}")
            dataset = as_dataset(path, self.name, images[: self.counts[number]], self.labels[number], self)
            self._opened[number] = Shard(dataset, self.samples[number])
        return self._opened[number]


def as_dataset(folder: Path, name: str, images: Array, labels: Array, shards: Shards) -> Dataset:
    """Return images and labels from `folder` as a data set like `shards`. Raises DataError."""
    try:
        return Dataset(name, images, labels, shards.classes, shards.pixels)
    except ConfigError as error:
        raise DataError(f"{folder}: {error}") from error


def map_images(path: Path) -> Array:
    """Map images (S, H, W, C) uint8 from a .npy file. Raises DataError."""
    images = _map(path)
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not images.flags.c_contiguous:
        found = f"{images.shape} of {images.dtype}"
        raise DataError(f"{path}: expected images (S, H, W, C) of uint8 in C order, found {found}")
    return images if images.ndim == 4 else images[..., np.newaxis]


def map_integers(path: Path) -> Array:
    """Map integers (S,) int64 from a .npy file; those of another type are copied. Raises DataError."""
    array = _map(path)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise DataError(f"{path}: expected integers (S,), found {array.shape} of {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)


def _map(path: Path) -> Array:
    try:
        regular(path)
        with PARSING:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a header may be anything: OSError, ValueError, TokenError, OverflowError, ...
        reason = getattr(error, "strerror", None) or checks.one_line(error)
        raise DataError(f"{path}: cannot be read as a .npy file ({reason})") from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise DataError(f"{path}: expected a .npy file, found an archive")
    if not array.size:
        raise DataError(f"{path}: expected at least one sample, found none")
    return np.asarray(array)
