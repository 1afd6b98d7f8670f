"""The way of batches to one worker: made ahead by a thread, or by the worker from what lies on its device."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from cupynet.backend import Backend, Shared
from cupynet.data.loader import Batch, Batches, read_of
from cupynet.data.prefetch import Prefetcher


class Feeding:
    """The batches of one loader for one worker, epoch after epoch.

    Made in the worker's own thread, before others wait for this worker: all memory that its batches need is allocated
    here, and none later. A context manager: leaving it gives the memory back.

    Args:
        loader: whose batches.
        backend: the worker's own.
        rank, size: which of how many workers it is.
        ahead: batches made ahead, at most.
        images: whether batches come with them.
        on_device: whether images stay on the device, see `Backend.feed`.
        shared: of all workers of the process; of this one alone by default.

    Raises:
        ConfigError: the images are to stay on the device, and do not fit.
        DataError: a file cannot be read.
    """

    def __init__(
        self,
        loader: Batches,
        backend: Backend,
        rank: int = 0,
        size: int = 1,
        *,
        ahead: int = 0,
        images: bool = True,
        on_device: bool | str = "auto",
        shared: Shared | None = None,
    ) -> None:
        self._loader, self._backend, self._rank, self._size, self._images = loader, backend, rank, size, images
        ahead = min(ahead, loader.rounds(size))
        with read_of(loader.dataset):
            part = loader.part(rank, size)
            self._feed = backend.feed(
                part.images if images else None,
                part.labels,
                batch_size=min(loader.batch_size, len(part)),
                ahead=ahead,
                on_device=on_device,
                shared=Shared() if shared is None else shared,
                pixels=part.pixels,
                edited=bool(loader.augment),
            )
        self._ahead = ahead if self._feed.ahead else 0

    def epoch(self, epoch: int, start: int = 0) -> Prefetcher[Batch]:
        """The batches of an epoch, from round `start` on. One epoch at a time; a batch is valid until the next."""
        made = self._loader.epoch(
            epoch, self._backend, self._rank, self._size, start=start, images=self._images, feed=self._feed
        )
        return Prefetcher(made, self._ahead, self._feed.take)

    def close(self) -> None:
        """Give back the memory; no batch may be used any more."""
        self._feed.close()

    def __enter__(self) -> Feeding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(Exception):  # a device that has failed refuses this too: what it failed of is to be told
            self.close()
