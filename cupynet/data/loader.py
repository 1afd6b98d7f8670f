"""Batches: which samples, in which order, for which worker.

The order follows from (seed, epoch) alone, and batch i of an epoch belongs to worker i mod W: what a worker trains on
never depends on how fast anybody is, and nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupynet.backend.array import Array
from cupynet.data.checks import seed_number, whole
from cupynet.data.dataset import Dataset, philox
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

    `index` counts the epoch's batches over all workers; `samples` (N,) int64, on the host, says which samples of the
    data set these are, so that a dropout mask or an augmentation can follow from the sample and not from the worker.
    """

    index: int
    images: Array  # (N, H, W, C), of the backend
    labels: Array  # (N,) int64, of the backend
    samples: Array  # (N,) int64, of the host

    def __len__(self) -> int:
        return len(self.samples)


class Loader:
    """Cuts `dataset` into batches of `batch_size`, the last of which may be short.

    Every worker may use the same loader at the same time: it holds no position. With `shuffle=False` the order is the
    file's: that of an evaluation.
    """

    def __init__(self, dataset: Dataset, batch_size: int, seed: int = 0, shuffle: bool = True) -> None:
        if not isinstance(shuffle, bool):
            raise ConfigError(f"shuffle must be true or false, got {shuffle!r}")
        self.dataset = dataset
        self.batch_size = whole("batch_size", batch_size, 1)
        self.seed = seed_number(seed)
        self.shuffle = shuffle

    @property
    def batches(self) -> int:
        """Batches per epoch, over all workers."""
        return -(-len(self.dataset) // self.batch_size)

    def order(self, epoch: int) -> Array:
        """The samples of `epoch` in the order they are trained on, (S,) int64."""
        epoch = whole("epoch", epoch, 0)
        samples = len(self.dataset)
        if not self.shuffle:
            return np.arange(samples, dtype=np.int64)
        return philox(self.seed, epoch).permutation(samples).astype(np.int64, copy=False)

    def epoch(self, epoch: int, backend: Device, rank: int = 0, size: int = 1) -> Iterator[Batch]:
        """The batches of `epoch` that belong to worker `rank` of `size`: those i with i % size == rank, in order."""
        size = whole("size", size, 1)
        if whole("rank", rank, 0) >= size:
            raise ConfigError(f"rank must be below size, the number of workers, got rank {rank} of {size}")
        return self._batches(self.order(epoch), backend, rank, size)

    def _batches(self, order: Array, backend: Device, rank: int, size: int) -> Iterator[Batch]:
        dataset = self.dataset
        for index in range(rank, self.batches, size):
            samples = order[index * self.batch_size : (index + 1) * self.batch_size]  # (N,)
            images = backend.load_images(dataset.images, samples)  # (N, H, W, C)
            labels = backend.asarray(dataset.labels[samples], dtype=np.int64)  # (N,)
            yield Batch(index, images, labels, samples)
