from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cupynet.backend import Shared
from cupynet.data import Batch, BatchFeed, Loader
from cupynet.parallel import Communicator
from cupynet.training.replica import Replica


class Feeds:
    """Opens batch feeds for one worker. `replicas` are the workers that share the data; see `BatchFeed`."""

    def __init__(
        self, replica: Replica, replicas: Communicator, *, prefetch: int, on_device: bool | str, shared: Shared
    ) -> None:
        self._replica, self._replicas = replica, replicas
        self._prefetch, self._on_device, self._shared = prefetch, on_device, shared
        self._training: BatchFeed | None = None  # during a fit
        self._evaluated: Loader | None = None
        self._evaluation: BatchFeed | None = None  # during a fit; opened on first use
        self._closing = ExitStack()

    @contextmanager
    def of_fit(self, train: Loader, evaluated: Loader | None) -> Iterator[BatchFeed]:
        """Context manager that keeps both feeds open during a fit, so that each data set is copied to a GPU once."""
        with ExitStack() as self._closing:
            self._training, self._evaluated = self._closing.enter_context(self._new(train)), evaluated
            try:
                yield self._training
            finally:
                self._training = self._evaluated = self._evaluation = None

    def reload(self, epoch: int, number: int) -> Batch:
        assert self._training is not None
        return self._training.reload(epoch, number)

    @contextmanager
    def of_evaluation(self, loader: Loader) -> Iterator[BatchFeed]:
        if loader is not self._evaluated:
            with self._new(loader) as feed:
                yield feed
            return
        if self._evaluation is None:
            self._evaluation = self._closing.enter_context(self._new(loader))
        yield self._evaluation

    def _new(self, loader: Loader) -> BatchFeed:
        return BatchFeed(
            loader,
            self._replica.backend,
            self._replicas.rank,
            self._replicas.size,
            prefetch=self._prefetch,
            images=self._replica.needs_images,
            on_device=self._on_device,
            shared=self._shared,
        )
