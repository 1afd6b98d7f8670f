"""Labeled images in memory: uint8, scaled later by the backend, or floats that are already scaled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array, Subset, looks_channels_first, on_host
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.files import FilePath

# Second words of Philox keys. The first word is the seed. A Loader uses the epoch, a far smaller number, as the second
# word, so that different uses of a seed never share random numbers.
SPLIT_STREAM = (1 << 63) + 1
TRAIN_STREAM = (1 << 63) + 2
TEST_STREAM = (1 << 63) + 3


def philox(seed: int, stream: int, block: int = 0) -> np.random.Generator:
    """Return a generator for the stream `(seed, stream)`. Blocks are 2**192 draws apart."""
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, block], dtype=np.uint64)))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled images, which must not be modified.

    Args:
        name: name for messages and reports.
        images: (S, H, W, C), or (S, H, W) for one channel: integers from 0 to 255, stored as uint8, or floating-point
            numbers that are already scaled, stored as float32. Copied only if converted.
        labels: class indices (S,) in 0 .. classes - 1, or one-hot labels (S, O), both stored as (S,) int64; or
            floating-point targets (S, T) or (S,), for regression or as class probabilities, stored as (S, T) float32.
        classes: number of classes, or of targets T.
        pixels: scaling of integer images; fractions of 255 by default.
        weights: (S,) loss factor of each sample, at least 0, stored as float32; None if all are 1.
        class_names: names of the classes in order, stored as a tuple; may be empty. `fit` copies them to the model.
    """

    name: str
    images: Array
    labels: Array
    classes: int
    pixels: PixelScale = FRACTIONS
    weights: Array | None = None
    class_names: Sequence[str] | Array = ()

    def __post_init__(self) -> None:
        where = f"data set {self.name!r}"
        checks.instance(f"{where}: pixels", self.pixels, PixelScale, "PixelScale.of([0.5], [0.25])")
        names = () if self.class_names is None else tuple(map(str, self.class_names))
        images, labels = image_array(where, self.images), label_array(where, self.labels)
        if images.dtype != np.uint8 and self.pixels != FRACTIONS:
            raise ConfigError(f"{where}: images of {images.dtype} are already scaled. Remove `pixels`")
        if len(self.pixels.scale) not in (1, images.shape[3]):
            count = f"{len(self.pixels.scale)} channels are normalized"
            raise ConfigError(
                f"{where}: {count}, but the images have {images.shape[3]}. Give a number for each channel"
            )
        classes = checks.integer(f"{where}: classes", self.classes, 1)
        width = labels.shape[1] if labels.ndim == 2 else one_hot_width(self.labels)
        if width not in (None, classes):
            hint = ". Class indices must be integers" * (width == 1)
            columns, found = f"(S, {classes}), one column per class or target", on_host(self.labels)
            raise ConfigError(
                f"{where}: one-hot labels and targets must be {columns}, got {found.shape} of {found.dtype}{hint}"
            )
        if len(labels) != len(images):
            raise ConfigError(f"{where}: labels must be ({len(images)},), one per image, got {labels.shape}")
        if labels.ndim == 1 and len(labels) and not 0 <= labels.min() <= labels.max() < classes:
            found = f"{labels.min()} .. {labels.max()}"
            raise ConfigError(
                f"{where}: labels must be in 0 .. {classes - 1} for {wording.counted(classes, 'class')}, got {found}. "
                "A network needs one output per class. Regression targets must be floating-point"
            )
        if len(names) not in (0, classes):
            raise ConfigError(f"{where}: class_names must have {classes} names, got {len(names)}")
        weights = None if self.weights is None else weight_array("Dataset weights", self.weights, len(labels))
        fields = {"images": images, "labels": labels, "classes": classes, "weights": weights, "class_names": names}
        for field, value in fields.items():
            object.__setattr__(self, field, value)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        size, kind = wording.counted(len(self), "image"), "class" if self.labels.ndim == 1 else "target"
        return f"<Dataset {self.name!r}: {size} of {self.image_shape}, {wording.counted(self.classes, kind)}>"

    @property
    def counts(self) -> tuple[int]:
        """The number of samples as a tuple, like `Shards.counts`."""
        return (len(self.labels),)

    def targets(self, rows: Array) -> Array:
        """Return the labels of some samples, or (N, T + 1) float32 with sample weights in the last column."""
        if self.weights is None:
            return self.labels[rows]
        return np.column_stack((dense(self.labels[rows], self.classes), self.weights[rows]))

    @property
    def scaled(self) -> bool:
        """True if the images are floating-point numbers, which are already scaled."""
        return bool(self.images.dtype != np.uint8)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        _, height, width, channels = self.images.shape
        return height, width, channels

    def parts(self) -> Iterator[Dataset]:
        yield self

    def take(self, indices: Array) -> Dataset:
        """Return the samples at `indices` (S,) or in a slice. Slices return views."""
        return self._chosen(indices, self.images[indices])

    def subset(self, indices: Array) -> Dataset:
        """Return the samples at `indices` (S,), which may be a mask or a slice, as a `Subset` of these images."""
        rows = np.arange(len(self))[indices]
        return self._chosen(rows, Subset(self.images, rows))

    def _chosen(self, indices: Array, images: Any) -> Dataset:
        weights = None if self.weights is None else self.weights[indices]
        return replace(self, images=images, labels=self.labels[indices], weights=weights)


VECTORS = ". Pass vectors of F features as images (1, F, 1): np.asarray(x)[:, None, :, None]"
OBJECTS = ". Convert columns of numbers: x.astype('float32')"


def split_views(dataset: Dataset, fraction: float, seed: int) -> tuple[Dataset, Dataset]:
    """Hold out a random fraction as in `hold_out`. Return views of both parts, the held-out one without weights."""
    kept, held_out = hold_out(dataset.labels, fraction, seed, "validation_split")
    return dataset.subset(kept), replace(dataset.subset(held_out), name=f"{dataset.name}-validation", weights=None)


def hold_out(labels: Array, part: float, seed: int, name: str) -> tuple[Array, Array]:
    """Choose samples to hold out at random. Return the indices to keep and to hold out, each ascending.

    part: number of samples to hold out; or, below 1, a fraction of each class, which keeps at least one sample. For
        targets, the fraction is taken over all samples.
    name: the name of `part` in error messages.
    """
    count = held_out_count(part, len(labels), name)
    order = philox(seed, SPLIT_STREAM).permutation(len(labels))
    if part < 1 and labels.dtype.kind in "iu":
        by_class, turn, size = turns(labels[order])
        last = turn == size - 1
        order = order[by_class[np.lexsort((by_class, -(turn + 0.5) / size, ~last))]]  # equal fractions, in random order
        count = min(count, len(order) - int(last.sum()))
        if not count:
            raise ConfigError("leaves no validation images, because each class has one image", name, str(part))
    kept = len(order) - count
    return np.sort(order[:kept]), np.sort(order[kept:])


def held_out_count(part: float, samples: int, name: str) -> int:
    count = round(part * samples) if part < 1 else int(part)
    if not 0 < count < samples:
        images = wording.counted(samples, "image")
        raise ConfigError(f"leaves no training images or no validation images, out of {images}", name, str(part))
    return count


def turns(labels: Array) -> tuple[Array, Array, Array]:
    """Return sample indices ordered by class, their positions in the class, and the class sizes, each (S,)."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    first, end = (np.searchsorted(ordered, ordered, side) for side in ("left", "right"))
    return order, np.arange(len(labels)) - first, end - first


def image_array(where: str, images: Any) -> Array:
    """Convert `images` to contiguous (S, H, W, C) uint8 or float32. `where` is the prefix of error messages."""
    if isinstance(images, Subset):  # its base has already been checked
        return images
    array = on_host(images)
    found, floating = f"{array.shape} of {array.dtype}", array.dtype.kind == "f"
    if array.ndim not in (3, 4) or not (floating or array.dtype.kind in "iu"):
        raise ConfigError(
            f"{where}: images must be (S, H, W, C) or (S, H, W), integers from 0 to 255 or floating-point numbers that "
            f"are already scaled, got {found}{OBJECTS * (array.dtype == object)}{VECTORS * (array.ndim == 2)}"
        )
    if not floating and array.dtype != np.uint8 and array.size and not 0 <= array.min() <= array.max() <= 255:
        found = f"got {array.min()} .. {array.max()}. Rescale them, or in Python pass floating-point numbers"
        raise ConfigError(f"{where}: integer images must be from 0 to 255, {found}")
    check_layout(where, array.shape)
    pixels = _as_float32(f"{where}: image", array) if floating else np.ascontiguousarray(array, np.uint8)
    return pixels if pixels.ndim == 4 else pixels[..., np.newaxis]


def one_hot_width(labels: Any) -> int | None:
    """Return the number of columns of one-hot labels (S, O), or None for class indices."""
    shape = on_host(labels).shape
    return shape[1] if len(shape) == 2 and shape[1] > 1 else None


def label_array(where: str, labels: Any) -> Array:
    """Convert integers (S,), (S, 1) or one-hot (S, O) to class indices (S,) int64, and floats to (S, T) float32."""
    array = on_host(labels)
    if array.dtype.kind == "f" and array.ndim in (1, 2):
        return _as_float32(f"{where}: target", array if array.ndim == 2 else array[:, np.newaxis])
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1 and array.dtype.kind in "biu":
        return np.ascontiguousarray(array, dtype=np.int64)
    if is_one_hot(array):
        return array.argmax(axis=1)
    names = ". Convert names to indices: names, y = np.unique(y, return_inverse=True)" * (array.dtype.kind in "OSU")
    raise ConfigError(
        f"{where}: labels must be class indices (S,) from 0, one-hot labels (S, O), or floating-point targets "
        f"(S, T), got {array.shape} of {array.dtype}{names}"
    )


def _as_float32(what: str, array: Array) -> Array:
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, dtype=np.float32)
    finite = np.isfinite(array).all(axis=tuple(range(1, array.ndim)))  # (S,)
    if not finite.all():
        raise ConfigError(f"{what} {finite.argmin()} is not finite in float32 ({(~finite).sum():,} in total)")
    return array


def is_one_hot(array: Array) -> bool:
    """Return True for (S, O), O > 1, with a single 1 in each row and 0 elsewhere."""
    if array.ndim != 2 or array.shape[1] < 2 or array.dtype.kind not in "biuf" or not len(array):
        return False
    ones = array == 1
    return bool((ones | (array == 0)).all() and (ones.sum(axis=1) == 1).all())


def dense(labels: Array, classes: int) -> Array:
    """Convert labels (S,) to one-hot (S, classes) float32. Return targets (S, T) unchanged."""
    return labels if labels.ndim == 2 else (labels[:, np.newaxis] == np.arange(classes)).astype(np.float32)


def weight_array(name: str, weights: Any, count: int) -> Array:
    array = on_host(weights)
    if array.shape != (count,) or array.dtype.kind not in "biuf":
        reason = f"must be ({count},) numbers, one per image, got {array.shape} of {array.dtype}"
        raise ConfigError(reason, name)
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array, dtype=np.float32)
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ConfigError(f"must be finite and at least 0, got {array.min()} .. {array.max()}", name)
    return array


def balanced_weights(name: str, labels: Array, classes: int) -> Array:
    """Return class weights (O,) that give all classes the same total weight: S / (O · count), as in scikit-learn."""
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        reason = f"class {counts.argmin()} has no samples. Set a weight for each class"
        raise ConfigError(reason, name, "balanced")
    return len(labels) / (classes * counts)


def check_layout(where: str, shape: Sequence[int]) -> None:
    if len(shape) == 4 and looks_channels_first(shape[1:]):
        raise ConfigError(
            f"{where}: images must be (S, H, W, C), but {tuple(shape)} is channels first. Use x.transpose(0, 2, 3, 1). "
            f"If the images do have {wording.counted(shape[1], 'row')}, swap rows and columns: x.transpose(0, 2, 1, 3)"
        )


def in_turns(labels: Array, count: int | None) -> Array | slice:
    """Return ascending indices of `count` samples, taken from the classes in turn, or a slice of all samples."""
    if count is None or count >= len(labels):
        return slice(None)
    order, turn, _ = turns(labels)
    return np.sort(order[np.lexsort((labels[order], turn))[:count]])


def read_dataset(
    place: FilePath, name: str, images: Array, labels: Array, classes: int, pixels: PixelScale = FRACTIONS
) -> Dataset:
    with read_from(place):
        if np.asarray(images).dtype.kind not in "iu":
            remedy = "If they are from 0 to 1, multiply by 255, then .round().astype('uint8')"
            raise ConfigError(f"images must be integers from 0 to 255. {remedy}")
        return Dataset(name, images, labels, classes, pixels)


@contextmanager
def read_from(place: FilePath) -> Iterator[None]:
    """Convert a ConfigError about arrays read from `place` to a DataError."""
    try:
        yield
    except ConfigError as error:
        raise DataError(f"{place}: {error}") from error


def count_classes(place: FilePath, labels: Sequence[Array], classes: int | None) -> int:
    """Return `classes` or, if None, the largest label + 1. Raise DataError if labels are negative or too large."""
    if classes is not None:
        return checks.integer("classes", classes, 1, ", or null for the largest label + 1")
    least, most = min(int(each.min(initial=0)) for each in labels), max(int(each.max(initial=0)) for each in labels)
    count = sum(map(len, labels))
    if not count:
        raise DataError(f"{place}: expected images, found none")
    if least < 0 or most >= count:
        raise DataError(
            f"{place}: expected labels 0, 1, 2, ..., found {least} .. {most} in {count} images. Renumber them, or set "
            f"{wording.setting('data', 'classes')}"
        )
    return most + 1
