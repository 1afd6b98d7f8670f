"""Batches: which samples, in which order, for which worker.

The order follows from (seed, epoch) alone, and batch i of an epoch belongs to worker i mod W: what a worker trains on
never depends on how fast anybody is, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupynet import checks
from cupynet.backend.array import Array
from cupynet.data.dataset import Data, Dataset, Source, label_numbers, philox
from cupynet.errors import ConfigError


class Device(Protocol):
    """What a loader needs of a backend."""

    def load_images(self, images: Array, samples: Array, /) -> Array:
        """`images` (S, H, W, C) uint8 at `samples` (N,) as (N, H, W, C) in the storage dtype, pixels / 255."""

    def asarray(self, a: Array, dtype: Any = None) -> Array:
        """`a` as an array of the backend."""


@dataclass(frozen=True, eq=False)
class Batch:
    """N examples of one epoch, ready on the device.

    `index` counts the batches of epoch `epoch` over all workers, both from 0; `samples` says which samples of the data
    set these are, so that a dropout mask or an augmentation can follow from the sample and not from the worker.
    """

    index: int
    images: Array  # (N, H, W, C), of the backend; None where nobody needs them
    labels: Array  # (N,) int64, of the backend
    samples: Array  # (N,) int64, of the host
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.samples)


class Loader:
    """Cuts `dataset` into batches of `batch_size`, the last of which may be short; an empty data set has none.

    All workers may use the same loader at the same time: it holds no position. With `shuffle=False` the samples come in
    the data set's own order, as evaluation wants them.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        self.dataset = checks.instance("dataset", dataset, Dataset, "Synthetic().load().train")
        self.batch_size = checks.integer("batch_size", batch_size, 1)
        self.seed = checks.seed("seed", seed)
        self.shuffle = checks.flag("shuffle", shuffle)

    @property
    def batches(self) -> int:
        """Batches per epoch, over all workers."""
        return -(-len(self.dataset) // self.batch_size)

    def order(self, epoch: int) -> Array:
        """The samples of `epoch` in the order they are trained on, (S,) int64."""
        epoch = checks.integer("epoch", epoch, 0)
        samples = len(self.dataset)
        if not self.shuffle:
            return np.arange(samples, dtype=np.int64)
        return philox(self.seed, epoch).permutation(samples).astype(np.int64, copy=False)

    def epoch(
        self, epoch: int, backend: Device, rank: int = 0, size: int = 1, start: int = 0, *, images: bool = True
    ) -> Iterator[Batch]:
        """The batches of `epoch` that belong to worker `rank` of `size`: those i with i % size == rank, in order.

        Args:
            start: rounds to skip, each of one batch per worker. An epoch that was broken off continues in its middle,
                and the batches before that are not even made.
            images: whether they are needed; without them `Batch.images` is None.
        """
        epoch, size = checks.integer("epoch", epoch, 0), checks.integer("size", size, 1)
        start = checks.integer("start", start, 0)
        if checks.integer("rank", rank, 0) >= size:
            raise ConfigError(f"rank={rank}: must be below size={size}, the number of workers")
        mine = range(start * size + rank, self.batches, size)
        return self._batches(self.order(epoch), backend, epoch, mine, needed=images)

    def _batches(self, order: Array, backend: Device, epoch: int, indices: range, *, needed: bool) -> Iterator[Batch]:
        dataset = self.dataset
        for index in indices:
            samples = order[index * self.batch_size : (index + 1) * self.batch_size]  # (N,)
            images = backend.load_images(dataset.images, samples) if needed else None  # (N, H, W, C)
            labels = backend.asarray(dataset.labels[samples], dtype=np.int64)  # (N,)
            yield Batch(index, images, labels, samples, epoch)


def as_loader(
    data: Loader | Dataset | tuple[Any, Any],
    batch_size: int = 128,
    seed: int = 12345,
    shuffle: bool = True,
    *,
    classes: int | None = None,
) -> Loader:
    """The batches of whatever there is to train or evaluate on.

    Args:
        data: a `Loader`, which is taken as it is, whatever the other arguments say; a `Dataset`; or a pair (images,
            labels) of arrays as `Dataset` takes them.
        batch_size, seed, shuffle: see `Loader`.
        classes: of a pair; the largest label + 1 by default.

    Raises:
        ConfigError: `data` is none of these, or an argument cannot work.
    """
    if isinstance(data, Loader):
        return data
    if isinstance(data, (tuple, list)) and len(data) == 2:
        images, labels = data
        labels = label_numbers("data set 'arrays'", labels)
        largest = int(labels.max(initial=0))
        data = Dataset("arrays", images, labels, largest + 1 if classes is None else classes)
    if not isinstance(data, Dataset):
        kind = f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__
        part = {Data: "; take one of its parts: train, validation or test", Source: "; take a part of what it loads"}
        hint = next((text for known, text in part.items() if isinstance(data, known)), "")
        raise ConfigError(f"data must be a Loader, a Dataset or a pair (images, labels), got {kind}{hint}")
    return Loader(data, batch_size, seed, shuffle)
