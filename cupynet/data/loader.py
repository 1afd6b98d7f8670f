"""Batches: which samples, in which order, for which worker.

The order follows from (seed, epoch) alone, and batch i of an epoch belongs to worker i mod W; where each worker has a
shard of its own, the order follows from the shard too, and its batches belong to that worker. What a worker trains on
never depends on how fast anybody is, and nothing is dropped.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale, Transfer, TransferTarget
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation, augmentations, augmented
from cupynet.data.dataset import Dataset, Labelled, label_numbers, philox
from cupynet.data.shards import Shards
from cupynet.data.sources.source import Data, Source

_LOOKED_AT = 1 << 20  # bytes of images that a signature takes in


@dataclass(frozen=True, eq=False)
class Batch:
    """N examples of one epoch, ready on the device: images (N, H, W, C), labels (N,), samples (N,).

    `index` counts the batches of epoch `epoch` over all workers, both from 0; `samples` says which samples of the data
    set these are, so that a dropout mask or an augmentation can follow from the sample and not from the worker.

    A `BatchFeed` may reuse the memory: images and labels are valid until the next batch is taken.
    """

    index: int
    images: Array  # (N, H, W, C), of the backend; None where they were not asked for
    labels: Array  # (N,) int64, of the backend
    samples: Array  # (N,) int64, of the host; of the whole data set where this worker has a shard of it
    epoch: int = 0
    steady: bool = False  # whether the images of all batches of its feed share one address, which it alone writes to

    def __len__(self) -> int:
        return len(self.samples)


class Batches(ABC):
    """What is trained or evaluated on: labelled images, cut into batches that are dealt out to the workers in rounds.

    All workers may use the same object at the same time: it holds no position. In round b of an epoch each worker has
    its b-th batch; those that have run out have none.

    Attributes:
        dataset: what is known of the images.
        batch_size: samples of a batch; the last of a worker may be short.
        seed: from it and the epoch the order follows, and what augmentation draws.
        augment: what images go through before they are batches, in this order.
    """

    dataset: Labelled
    batch_size: int
    seed: int
    augment: tuple[Augmentation, ...] = ()

    @property
    @abstractmethod
    def batches(self) -> int:
        """Batches per epoch, over all workers."""

    @abstractmethod
    def rounds(self, size: int) -> int:
        """Rounds of an epoch: batches of the busiest of `size` workers. ConfigError where it cannot be so many."""

    @abstractmethod
    def images_of_round(self, number: int, size: int) -> int:
        """Images that all `size` workers together train on in round `number` of an epoch."""

    @abstractmethod
    def deal(self, size: int) -> tuple[int, ...]:
        """What an epoch that was broken off must have in common with this one to be continued in its middle."""

    @cached_property
    @abstractmethod
    def signature(self) -> int:
        """32 bits that are the same, as good as certainly, where the data, the batches and their order are."""

    @abstractmethod
    def part(self, rank: int, size: int) -> Dataset:
        """What worker `rank` of `size` reads in. DataError where it cannot be read."""

    @abstractmethod
    def _dealt(self, epoch: int, rank: int, size: int, start: int) -> Iterator[tuple[int, Array, Array]]:
        """Of each of a worker's batches the index, the rows in its part of the data, and the samples."""

    def assigned(self, epoch: int, rank: int, size: int, start: int = 0) -> list[tuple[int, Array, Array]]:
        """The batches of worker `rank` of `size` in `epoch` from round `start` on: index, rows in its part, samples."""
        epoch, size = checks.integer("epoch", epoch, 0), checks.integer("size", size, 1)
        start = checks.integer("start", start, 0)
        if checks.integer("rank", rank, 0) >= size:
            raise ConfigError(f"rank={rank}: must be below size={size}, the number of workers")
        with read_of(self.dataset):
            return list(self._dealt(epoch, rank, size, start))

    def epoch(
        self,
        epoch: int,
        backend: TransferTarget,
        rank: int = 0,
        size: int = 1,
        start: int = 0,
        *,
        images: bool = True,
    ) -> Iterator[Batch]:
        """The batches of `epoch` that belong to worker `rank` of `size`, in order, each in memory of its own.

        start: rounds to skip, each of one batch per worker. An epoch that was interrupted continues in its middle, and
            the batches before that are not even made.
        images: whether they are loaded; a stage of a pipeline that gets its input from another needs labels only.

        Raises DataError, here or when a batch is made, if a file cannot be read.
        """
        assigned = self.assigned(epoch, rank, size, start)
        with read_of(self.dataset):
            part = self.part(rank, size)
        transfer = Transfer(backend, part.images if images else None, part.labels, part.pixels)
        return self.load(assigned, int(epoch), transfer)

    def load(self, assigned: list[tuple[int, Array, Array]], epoch: int, transfer: Transfer) -> Iterator[Batch]:
        """Make the batches that `assigned` returned."""
        with read_of(self.dataset):
            for index, rows, samples in assigned:
                edit = None
                if self.augment:
                    edit = partial(augmented, self.augment, seed=self.seed, epoch=epoch, samples=samples)
                images, labels = transfer.make(rows, edit)  # (N, H, W, C), (N,)
                yield Batch(index, images, labels, samples, epoch, transfer.steady)

    def _about(self) -> tuple[object, ...]:
        """What of augmentation and normalisation belongs to the signature; nothing where there is none."""
        pixels = self.dataset.pixels
        return (() if pixels == FRACTIONS else (pixels,)) + (self.augment and (repr(self.augment),))


@contextmanager
def read_of(dataset: Labelled) -> Iterator[None]:
    """What the system says of a file that cannot be read, as a DataError: nobody shall take it for output."""
    try:
        yield
    except OSError as error:
        raise DataError(f"data set {dataset.name!r}: cannot be read ({error})") from error


class Loader(Batches):
    """Cuts `dataset` into batches of `batch_size`, the last of which may be short; an empty data set has none.

    Batch i of an epoch belongs to worker i mod size. With `shuffle=False` the samples come in the data set's own order,
    as evaluation wants them. `augment` is for training alone.

    Raises:
        ConfigError: an argument cannot work.
    """

    dataset: Dataset

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.dataset = checks.instance("dataset", dataset, Dataset, "Synthetic().load().train")
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.seed = checks.seed("seed", seed)
        self.shuffle = checks.flag("shuffle", shuffle)
        self.augment = augmentations(augment)

    @property
    def batches(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def rounds(self, size: int) -> int:
        return -(-self.batches // size)

    def images_of_round(self, number: int, size: int) -> int:
        per_round = self.batch_size * size
        return min(per_round, len(self.dataset) - number * per_round)

    def deal(self, size: int) -> tuple[int, ...]:
        return len(self.dataset), self.batch_size, size

    @cached_property
    def signature(self) -> int:
        dataset = self.dataset
        about: tuple[object, ...] = (dataset.name, dataset.images.shape, dataset.classes, self.batch_size, self.seed)
        about = (*about, self.shuffle, *self._about())
        step = max(1, dataset.images.nbytes // _LOOKED_AT)
        return zlib.crc32(
            dataset.images[::step].tobytes(), zlib.crc32(dataset.labels, zlib.crc32(repr(about).encode()))
        )

    def order(self, epoch: int) -> Array:
        """The samples of `epoch` in the order they are trained on, (S,) int64."""
        epoch = checks.integer("epoch", epoch, 0)
        samples = len(self.dataset)
        if not self.shuffle:
            return np.arange(samples, dtype=np.int64)
        return philox(self.seed, epoch).permutation(samples).astype(np.int64, copy=False)

    def part(self, rank: int, size: int) -> Dataset:
        return self.dataset

    def _dealt(self, epoch: int, rank: int, size: int, start: int) -> Iterator[tuple[int, Array, Array]]:
        order, many = self.order(epoch), self.batch_size
        for index in range(start * size + rank, self.batches, size):
            some = order[index * many : (index + 1) * many]
            yield index, some, some


class ShardedLoader(Batches):
    """Batches of `shards`: worker r reads shard r and no other, in an order that follows from seed, epoch and shard.

    There are as many workers as shards. An epoch has as many rounds as the largest shard has batches; each shard may
    end with a short batch. With one shard this is the order of a `Loader` over its samples. With `shuffle=False` the
    samples of a shard come in their own order.

    Raises:
        ConfigError: an argument cannot work.
    """

    dataset: Shards

    def __init__(
        self,
        shards: Shards,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        self.dataset = checks.instance("shards", shards, Shards, "Shards('folder')")
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.seed = checks.seed("seed", seed)
        self.shuffle = checks.flag("shuffle", shuffle)
        self.augment = augmentations(augment)

    @property
    def batches(self) -> int:
        return sum(-(-count // self.batch_size) for count in self.dataset.counts)

    def rounds(self, size: int) -> int:
        self.dataset.check_workers(size)
        return -(-max(self.dataset.counts) // self.batch_size)

    def images_of_round(self, number: int, size: int) -> int:
        before = number * self.batch_size
        return sum(min(self.batch_size, max(0, count - before)) for count in self.dataset.counts)

    def deal(self, size: int) -> tuple[int, ...]:
        return *self.dataset.counts, self.batch_size, size

    @cached_property
    def signature(self) -> int:
        dataset = self.dataset
        about: tuple[object, ...] = (dataset.image_shape, dataset.classes, dataset.counts, self.batch_size, self.seed)
        about = (*about, self.shuffle, *self._about())
        found = zlib.crc32(repr(about).encode())
        for array in (*dataset.labels, *dataset.samples):
            found = zlib.crc32(array, found)
        return found

    def order(self, epoch: int, number: int) -> Array:
        """The samples (S,) of shard `number` in the order they are trained on in `epoch`, counted within the shard."""
        epoch, count = checks.integer("epoch", epoch, 0), self.dataset.counts[number]
        if not self.shuffle:
            return np.arange(count, dtype=np.int64)
        return philox(self.seed, epoch, number).permutation(count).astype(np.int64, copy=False)

    def part(self, rank: int, size: int) -> Dataset:
        self.dataset.check_workers(size)
        return self.dataset.open(rank).dataset

    def _dealt(self, epoch: int, rank: int, size: int, start: int) -> Iterator[tuple[int, Array, Array]]:
        self.dataset.check_workers(size)
        samples, order, many = self.dataset.open(rank).samples, self.order(epoch, rank), self.batch_size
        for number in range(start, -(-len(order) // many)):
            some = order[number * many : (number + 1) * many]
            yield number * size + rank, some, samples[some]


def as_loader(
    data: Batches | Dataset | Shards | tuple[Any, Any],
    batch_size: int = 128,
    seed: int = 12345,
    shuffle: bool = True,
    *,
    classes: int | None = None,
    pixels: PixelScale = FRACTIONS,
    augment: Sequence[Augmentation] = (),
) -> Batches:
    """The batches of whatever there is to train or evaluate on.

    Args:
        data: a `Loader` or `ShardedLoader`, which is taken as it is, whatever the other arguments say; a `Dataset`;
            `Shards`; or a pair (images, labels) of arrays as `Dataset` takes them.
        batch_size, seed, shuffle, augment: see `Loader`.
        classes: of a pair; the largest label + 1 by default.
        pixels: of a pair: what becomes of its pixels.

    Raises:
        ConfigError: `data` is none of these, or an argument cannot work.
    """
    if isinstance(data, Batches):
        return data
    if isinstance(data, Shards):
        return ShardedLoader(data, batch_size, seed, shuffle, augment)
    if isinstance(data, (tuple, list)) and len(data) == 2:
        images, labels = data
        labels = label_numbers("data set 'arrays'", labels)
        largest = int(labels.max(initial=0))
        data = Dataset("arrays", images, labels, largest + 1 if classes is None else classes, pixels)
    if not isinstance(data, Dataset):
        kind = f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__
        part = {Data: "; take one of its parts: train, validation or test", Source: "; take a part of what it loads"}
        hint = next((text for known, text in part.items() if isinstance(data, known)), "")
        raise ConfigError(f"data must be a Loader, a Dataset or a pair (images, labels), got {kind}{hint}")
    return Loader(data, batch_size, seed, shuffle, augment)
