"""Loaders split data sets into batches. The order of samples depends only on seed, epoch and shard."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, TypeAlias

import numpy as np

from cupynet.backend import FRACTIONS, Backend, HostData, PixelScale, Transfer
from cupynet.backend.array import Array, on_host
from cupynet.core import checks, wording
from cupynet.core.described import stable
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augment, Mixing, SampleRNG, augmentations, augmented, check_augmentations
from cupynet.data.dataset import Dataset, dense, label_array, one_hot_width, philox
from cupynet.data.shards import Shards

LabeledData: TypeAlias = Dataset | Shards

_SAMPLED_BYTES = 1 << 20  # approximate size of the images included in a signature


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of N samples on the device. A `BatchFeed` may reuse its memory for the next batch.

    Attributes:
        index: number of the batch in its epoch over all workers, from 0.
        images: (N, H, W, C); None if not requested.
        labels: (N,) int64, or (N, T) float32, or (N, T + 1) with sample weights (see `Dataset.targets`).
        samples: (N,) int64, indices into the whole data set, on the host. Dropout and augmentation depend on them.
        epoch: number of the epoch, from 0.
        steady: True if the images of all batches of the feed have the same address.
        source: the `CudaTransfer` from which a captured step may take the batch (see `QueuedBatch`), or None.
    """

    source: ClassVar[Any] = None

    index: int
    images: Array
    labels: Array
    samples: Array
    epoch: int = 0
    steady: bool = False

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def label_shape(self) -> tuple[int, ...]:
        return tuple(self.labels.shape)


Assigned: TypeAlias = "list[tuple[int, Array, Array]]"  # (batch index, rows in the worker's data, samples)
Made: TypeAlias = "tuple[int, tuple[Array | None, Array], Array]"  # (batch index, result of `Transfer.make`, samples)


class Loader:
    """Splits a data set into batches and assigns them to workers.

    With W workers, batch i of an epoch belongs to worker i mod W. The last batch may be smaller. With `Shards`, worker
    r reads only shard r, and the last batch of each shard may be smaller. Some workers may have no batch in the last
    iterations. Loaders have no state, so all workers may share one.

    Args:
        dataset: a `Dataset`, `Shards`, or a pair of arrays (images, labels). The number of classes of a pair is the
            largest label + 1, or the number of columns of two-dimensional labels; to set it, use `Dataset("mine",
            images, labels, classes=10)`.
        seed: seed of the order and of augmentation, combined with the epoch.
        shuffle: False to keep the order of the data set, as in evaluation.
        augment: augmentations in order (see `augmentations`); only for training.
    """

    def __init__(
        self,
        dataset: LabeledData | tuple[Any, Any],
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Augment = (),
    ) -> None:
        self.dataset = dataset = _dataset_of(dataset)
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.seed = checks.seed("seed", seed)
        self.shuffle = checks.flag("shuffle", shuffle)
        self.augment = augmentations(augment)
        self.split: Array | None = None  # rows of a held-out part in the data set that `validation_split` divided
        self.mixing = [(place, part) for place, part in enumerate(self.augment) if isinstance(part, Mixing)]
        check_augmentations(self.augment, dataset.image_shape)
        if self.augment and dataset.scaled:
            raise ConfigError("needs uint8 images, not floating-point images", "augment")

    def __repr__(self) -> str:
        return f"<Loader of {self.dataset!r} in {wording.counted(self.batches, 'batch')} of {self.batch_size}>"

    @property
    def batches(self) -> int:
        """The number of batches per epoch over all workers."""
        return sum(-(-count // self.batch_size) for count in self.dataset.counts)

    @property
    def label_columns(self) -> int | None:
        """The number of columns of the labels of batches, or None if they are class indices (see `Batch`)."""
        data = self.dataset
        weighted = isinstance(data, Dataset) and data.weights is not None
        wide = self.mixing or (isinstance(data, Dataset) and data.labels.ndim == 2)
        return data.classes + weighted if wide or weighted else None

    def iterations(self, size: int) -> int:
        """Return the number of iterations per epoch: the maximum number of batches of any of the `size` workers."""
        if isinstance(self.dataset, Shards):
            self.dataset.check_workers(size)
            return -(-max(self.dataset.counts) // self.batch_size)
        return -(-self.batches // size)

    def images_of_iteration(self, number: int, size: int) -> int:
        """Return the number of images in iteration `number` of an epoch, over all workers."""
        per_iteration = self.batch_size * (1 if isinstance(self.dataset, Shards) else size)
        return sum(min(per_iteration, max(0, count - number * per_iteration)) for count in self.dataset.counts)

    def deal(self, size: int) -> tuple[int, ...]:
        """Return a key that identifies the assignment of batches. An epoch can only be resumed with the same key."""
        return *self.dataset.counts, self.batch_size, size

    @cached_property
    def signature(self) -> int:
        """A checksum of the labels, some images (none of shards), and the settings that determine the batches."""
        data = self.dataset
        about = (data.image_shape, data.classes, data.counts, data.pixels)
        found = zlib.crc32(stable((*about, self.batch_size, self.seed, self.shuffle, self.augment)).encode())
        if isinstance(data, Shards):
            arrays = [*data.labels, *data.samples]
        else:
            arrays = [data.labels, data.images[:: max(1, data.images.nbytes // _SAMPLED_BYTES)]]
            arrays += [] if data.weights is None else [data.weights]
        for array in arrays:
            found = zlib.crc32(np.ascontiguousarray(array).data, found)
        return found

    @cached_property
    def identity(self) -> tuple[int, int]:
        """The number of samples and a checksum of their labels, regardless of shards."""
        data = self.dataset
        if isinstance(data, Shards):
            labels = np.concatenate(data.labels)[np.argsort(np.concatenate(data.samples), kind="stable")]
        else:
            labels = data.labels
        return len(labels), zlib.crc32(np.ascontiguousarray(labels, labels.dtype.newbyteorder("<")).data)

    def part(self, rank: int, size: int) -> Dataset:
        if isinstance(self.dataset, Shards):
            return self.dataset.open(rank)
        return self.dataset

    def order(self, epoch: int, shard: int = 0) -> Array:
        """Return the rows of the data in the order of an epoch, (S,) int64; with `Shards`, the rows of one shard."""
        count = self.dataset.counts[shard]
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        return philox(self.seed, epoch, shard).permutation(count).astype(np.int64, copy=False)

    def assigned(self, epoch: int, rank: int, size: int, start: int = 0) -> Assigned:
        """Return the batches of worker `rank` of `size`, beginning with iteration `start`."""
        if not 0 <= rank < size:
            raise ConfigError(f"must be at least 0 and below size={size}, the number of workers", "rank", str(rank))
        batch_size, samples = self.batch_size, None
        if isinstance(self.dataset, Shards):
            self.dataset.check_workers(size)
            order, samples = self.order(epoch, rank), self.dataset.samples[rank]
            numbers = range(start, -(-len(order) // batch_size))
        else:
            order = self.order(epoch)
            numbers = range(start * size + rank, self.batches, size)
        found = []
        for number in numbers:
            rows = order[number * batch_size : (number + 1) * batch_size]
            index = number if samples is None else number * size + rank
            found.append((index, rows, rows if samples is None else samples[rows]))
        return found

    def epoch(self, epoch: int, backend: Backend, rank: int = 0, size: int = 1, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of worker `rank` of `size`, beginning with iteration `start`, each in new memory."""
        assigned = self.assigned(epoch, rank, size, start)
        part = self.part(rank, size)
        transfer = Transfer(backend, HostData(part.images, part.labels, part.pixels))
        transfer.begin([], self.labels(assigned, epoch, part))
        made = self.load(assigned, epoch, transfer, part, rank)
        return (Batch(index, *transfer.send(*content), samples, epoch) for index, content, samples in made)

    def labels(self, assigned: Assigned, epoch: int, part: Dataset) -> Iterator[Array]:
        """Yield the labels of the assigned batches (see `Batch`)."""
        classes = part.classes
        for _, rows, samples in assigned:
            found = part.targets(rows)
            for place, mixing in self.mixing:
                draws = SampleRNG(self.seed, epoch, samples, place)
                others, share = mixing.drawn(draws, len(part), part.image_shape)
                share = share.mean(axis=(1, 2))[:, np.newaxis]  # (N, 1)
                mixed = dense(found, classes), dense(part.targets(others), classes)
                found = _mixture(*mixed, share, weighted=part.weights is not None)
            yield found

    def load(self, assigned: Assigned, epoch: int, transfer: Transfer, part: Dataset, rank: int = 0) -> Iterator[Made]:
        """Load the assigned batches of worker `rank`, for `transfer` to send."""
        numbers = self.dataset.samples[rank] if isinstance(self.dataset, Shards) else None
        how = {"seed": self.seed, "epoch": epoch, "data": part.images, "numbers": numbers}
        with read_of(self.dataset):
            for index, rows, samples in assigned:
                edit = partial(augmented, self.augment, samples=samples, **how) if self.augment else None
                yield index, transfer.make(rows, edit), samples


def _mixture(own: Array, others: Array, share: Array, weighted: bool) -> Array:
    """Mix targets (N, T). If `weighted`, they are (N, T + 1), and the weights in the last column scale the shares."""
    if not weighted:
        return share * own + (1 - share) * others
    parts = share * own[:, -1:], (1 - share) * others[:, -1:]
    total = parts[0] + parts[1]  # (N, 1)
    sums = parts[0] * own[:, :-1] + parts[1] * others[:, :-1]
    return np.column_stack((sums / np.where(total > 0, total, 1), total))


@contextmanager
def read_of(dataset: LabeledData) -> Iterator[None]:
    """Convert an OSError to DataError; otherwise it would be reported as an output error."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data set {dataset.name!r}: cannot be read ({error})") from error


def as_loader(
    data: Loader | Dataset | Shards | tuple[Any, Any],
    batch_size: int = 128,
    seed: int = 12345,
    shuffle: bool = True,
    *,
    classes: int | None = None,
    pixels: PixelScale = FRACTIONS,
    augment: Augment = (),
) -> Loader:
    """Return `data` if it is a `Loader`; otherwise create one for a `Dataset`, `Shards`, or pair (images, labels).

    Args:
        batch_size, seed, shuffle, augment: see `Loader`.
        classes: number of classes or targets of a pair; by default the largest label + 1, or the number of columns.
        pixels: pixel scale of a pair.
    """
    if isinstance(data, Loader):
        return data
    return Loader(_dataset_of(data, classes, pixels), batch_size, seed, shuffle, augment)


def _dataset_of(data: Any, classes: int | None = None, pixels: PixelScale = FRACTIONS) -> LabeledData:
    """Return `data` if it is a data set, or convert a pair (images, labels) to one (see `as_loader`)."""
    if isinstance(data, Dataset | Shards):
        return data
    if not isinstance(data, tuple | list) or len(data) != 2:
        kinds = "a Dataset (such as Synthetic().load().train), Shards, or a pair (images, labels)"
        raise ConfigError(f"data must be {kinds}, got {wording.one(type(data).__name__)}")
    images, labels = on_host(data[0]), on_host(data[1])
    if classes is None:
        found = label_array("data set 'arrays'", labels)
        columns = found.shape[1] if found.ndim == 2 else one_hot_width(labels)
        classes = int(found.max(initial=0)) + 1 if columns is None else columns
    return Dataset("arrays", images, labels, classes, FRACTIONS if images.dtype.kind == "f" else pixels)
