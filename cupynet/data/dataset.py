"""Labelled images in memory.

Images are (S, H, W, C) bytes as they came from their file, S samples; a backend scales them when it makes a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array, looks_channels_first
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.files import FilePath

# The second words of Philox keys; the first is the seed. A Loader's second word is its epoch, which stays far below
# these, so no two uses of one seed share random numbers.
SPLIT_STREAM = (1 << 63) + 1
TRAIN_STREAM = (1 << 63) + 2
TEST_STREAM = (1 << 63) + 3


def philox(seed: int, stream: int, block: int = 0) -> np.random.Generator:
    """Return random numbers of the stream `(seed, stream)`; blocks are 2**192 draws apart."""
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, block], dtype=np.uint64)))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images. Treated as read-only.

    Args:
        name: for messages and reports.
        images: (S, H, W, C) uint8, or (S, H, W) of one channel. Integers of another type from 0 to 255 and lists are
            converted; a view that is not contiguous is copied once.
        labels: (S,) integers of any type in 0 .. classes - 1; kept as int64.
        classes: the number of classes.
        pixels: how pixels are scaled in a batch: fractions of 255 by default.

    Raises:
        ConfigError: an argument is anything else, such as images of floating-point numbers.
    """

    name: str
    images: Array
    labels: Array
    classes: int
    pixels: PixelScale = FRACTIONS

    def __post_init__(self) -> None:
        where = f"data set {self.name!r}"
        images = image_bytes(where, self.images)
        labels = np.ascontiguousarray(integers(f"{where}: labels", self.labels), dtype=np.int64)
        if len(self.pixels.scale) not in (1, images.shape[3]):
            count = f"{len(self.pixels.scale)} channels are normalised"
            raise ConfigError(f"{where}: {count}, but the images have {images.shape[3]}: give a number for each")
        classes = checks.integer(f"{where}: classes", self.classes, 1)
        if labels.shape != images.shape[:1]:
            raise ConfigError(f"{where}: labels must be ({len(images)},), one per image, got {labels.shape}")
        if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            found = f"{labels.min()} .. {labels.max()}"
            raise ConfigError(
                f"{where}: labels must be in 0 .. {classes - 1} for {wording.counted(classes, 'class')}, got {found}"
            )
        for field, value in (("images", images), ("labels", labels), ("classes", classes)):
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def counts(self) -> tuple[int]:
        """The number of samples, in a tuple like `Shards.counts`."""
        return (len(self.labels),)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of one image."""
        _, height, width, channels = self.images.shape
        return height, width, channels

    def parts(self) -> Iterator[Dataset]:
        """Yield this data set, as `Shards.parts` yields its shards."""
        yield self

    def take(self, indices: Array) -> Dataset:
        """Return the samples at `indices` (S,), in that order: a copy, or views if `indices` is a slice."""
        return Dataset(self.name, self.images[indices], self.labels[indices], self.classes, self.pixels)


def image_bytes(where: str, images: Any) -> Array:
    """Return `images` as contiguous (S, H, W, C) uint8. ConfigError with `where` at the beginning."""
    way_out = ": multiply by 255 if they are in 0 to 1, then .round().astype('uint8')"
    array = integers(f"{where}: images", images, way_out)
    levels = (array.min(), array.max()) if array.dtype != np.uint8 and array.size else (0, 255)
    if array.ndim not in (3, 4) or levels[0] < 0 or levels[1] > 255:
        found = f"{array.shape} of {array.dtype}"
        raise ConfigError(f"{where}: images must be (S, H, W, C) or (S, H, W), from 0 to 255, got {found}")
    check_layout(where, array.shape)
    pixels = np.ascontiguousarray(array, dtype=np.uint8)
    return pixels if pixels.ndim == 4 else pixels[..., np.newaxis]


def check_layout(where: str, shape: Sequence[int]) -> None:
    """Raise ConfigError, beginning with `where`, if a shape looks like (S, C, H, W)."""
    if len(shape) == 4 and looks_channels_first(shape[1:]):
        raise ConfigError(
            f"{where}: images must be (S, H, W, C), but {tuple(shape)} is channels first: use x.transpose(0, 2, 3, 1). "
            f"If the images do have {wording.counted(shape[1], 'row')}, swap rows and columns: x.transpose(0, 2, 1, 3)"
        )


def integers(what: str, value: Any, way_out: str = "") -> Array:
    """Convert `value` to a NumPy array of integers. ConfigError with `what` at the beginning."""
    array = np.asarray(value)
    if array.dtype.kind not in "iu" or array.ndim == 0:
        found = f"{array.shape} of {array.dtype}"
        raise ConfigError(f"{what} must be a NumPy array of integers, got {found}{way_out}")
    return array


def in_turns(labels: Array, count: int | None) -> Array | slice:
    """Return `count` samples, taken from the classes in turn, as ascending indices; or a slice of all samples."""
    if count is None or count >= len(labels):
        return slice(None)
    order = np.argsort(labels, kind="stable")  # by class, then by position
    ordered = labels[order]
    turn = np.arange(len(labels)) - np.searchsorted(ordered, ordered)  # position of each sample within its class
    return np.sort(order[np.lexsort((ordered, turn))[:count]])


def read_dataset(
    place: FilePath, name: str, images: Array, labels: Array, classes: int, pixels: PixelScale = FRACTIONS
) -> Dataset:
    """Return images and labels that were read from `place` as a data set. DataError."""
    with read_from(place):
        return Dataset(name, images, labels, classes, pixels)


@contextmanager
def read_from(place: FilePath) -> Iterator[None]:
    """Turn a ConfigError about arrays that were read from `place` into a DataError."""
    try:
        yield
    except ConfigError as error:
        raise DataError(f"{place}: {error}") from error


def count_classes(place: FilePath, labels: Sequence[Array], classes: int | None) -> int:
    """Return `classes`, or the largest label + 1 for None. DataError unless `labels`, from `place`, count from 0."""
    if classes is not None:
        return checks.integer("classes", classes, 1, ", or null for the largest label + 1")
    with read_from(place):
        labels = [integers("labels", each) for each in labels]
    least, most = min(int(each.min(initial=0)) for each in labels), max(int(each.max(initial=0)) for each in labels)
    count = sum(map(len, labels))
    if least < 0 or most >= count:
        raise DataError(
            f"{place}: expected labels 0, 1, 2, ..., found {least} .. {most} of {count} images: renumber them, or set "
            f"{wording.setting('data', 'classes')}"
        )
    return most + 1
