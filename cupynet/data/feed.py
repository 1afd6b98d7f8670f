from __future__ import annotations

from collections.abc import Generator
from contextlib import nullcontext, suppress
from typing import Any

from cupynet.backend import Backend, HostData, Shared
from cupynet.backend.array import Array
from cupynet.data.loader import Batch, Loader, Made, read_of
from cupynet.data.prefetch import Prefetcher
from cupynet.data.shards import Shards


class QueuedBatch(Batch):
    """A batch that is gathered when `images` or `labels` is first read, unless a captured step gathers it."""

    def __init__(self, index: int, source: Any, part: slice, samples: Array, epoch: int) -> None:
        vars(self).update(index=index, source=source, part=part, samples=samples, epoch=epoch, steady=True)

    def __getattr__(self, name: str) -> Any:
        if name not in ("images", "labels"):
            raise AttributeError(name)
        images, labels = self.source.gather(self.part)
        vars(self).update(images=images, labels=labels)
        return vars(self)[name]

    @property
    def label_shape(self) -> tuple[int, ...]:
        return len(self), *self.source.label_shape


class BatchFeed:
    """The batches of one worker, prepared in advance by a thread or gathered from images on its device.

    Create it in the worker's thread, but not during communication, because the constructor allocates device memory. Use
    it as a context manager, or call `close`.

    Args:
        prefetch: number of batches to prepare in advance; 0 disables prefetching.
        images: False to load only labels, for a pipeline stage.
        on_device: True to keep images on the device (see `Backend.transfer`).
        shared: the device images that this process's workers share.

    Raises:
        ConfigError: the images do not fit on the device.
        DataError: a file cannot be read.
    """

    def __init__(
        self,
        loader: Loader,
        backend: Backend,
        rank: int = 0,
        size: int = 1,
        *,
        prefetch: int = 0,
        images: bool = True,
        on_device: bool | str = "auto",
        shared: Shared | None = None,
    ) -> None:
        self.loader = loader
        self._backend, self._rank, self._size = backend, rank, size
        self._iterations = loader.iterations(size)
        self._made: Prefetcher[Made] = Prefetcher((), 0)  # batches of the current epoch
        with read_of(loader.dataset):
            self._part = part = loader.part(rank, size)
            data = HostData(part.images if images else None, part.labels, part.pixels, edited=bool(loader.augment))
            size_of_batch = min(loader.batch_size, len(part))
            self._transfer = backend.transfer(data, size_of_batch, on_device, shared or Shared())
        self._ahead = min(prefetch, self._iterations) if self._transfer.ahead else 0
        self._queues = self._transfer.queues and not isinstance(loader.dataset, Shards)  # rows count per shard

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch | None, None, None]:
        """Yield this worker's batch, or None if it has none, for each iteration of an epoch from iteration `start`.

        A batch is valid until the next one is requested. Only one epoch can be open.
        """
        self._made.close()
        assigned = self.loader.assigned(epoch, self._rank, self._size, start)
        self._transfer.begin([rows for _, rows, _ in assigned], self.loader.labels(assigned, epoch, self._part))
        made = self.loader.load(assigned, epoch, self._transfer, self._part, self._rank)
        self._made = Prefetcher(made, self._ahead)
        return self._rest(self._made, epoch, self._iterations - start)

    def _rest(self, made: Prefetcher[Made], epoch: int, iterations: int) -> Generator[Batch | None, None, None]:
        with made:
            for _ in range(iterations):
                batch = None
                found = next(made, None)
                if found is not None:
                    batch = self._batch(*found, epoch)
                yield batch

    def _batch(self, index: int, content: tuple[Array | None, Array], samples: Array, epoch: int) -> Batch:
        if self._queues:
            transfer: Any = self._transfer
            return QueuedBatch(index, transfer, transfer.assign(len(samples)), samples, epoch)
        return Batch(index, *self._transfer.send(*content), samples, epoch, self._transfer.steady)

    def reload(self, epoch: int, number: int) -> Batch:
        """Load the batch of iteration `number` again, into new memory."""
        return next(self.loader.epoch(epoch, self._backend, self._rank, self._size, start=number))

    def close(self) -> None:
        """Stop loading and release the memory, including all batches."""
        self._made.close()
        self._transfer.close()

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with nullcontext() if kind is None else suppress(Exception):  # closing also fails if the device has failed
            self.close()
