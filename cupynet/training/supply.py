"""The batches of one worker: those it trains on and those it is judged by, where it needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from cupynet.backend import Shared, check_on_device
from cupynet.checks import integer
from cupynet.data import Batch, Batches, Feeding, Prefetcher
from cupynet.errors import annotate
from cupynet.parallel import Communicator
from cupynet.training.metrics import Evaluation
from cupynet.training.replica import Replica


class Supply:
    """Opened for a fit or an evaluation; what a batch needs is allocated then, before others wait for this worker.

    Args:
        replica: for which batches are made.
        dealt: the workers among whom they are dealt out.
        who: the worker, for what is told of an error.
        prefetch_buffer, data_on_device, shared: see `Trainer`.

    Raises:
        ConfigError: an argument cannot work.
    """

    def __init__(
        self,
        replica: Replica,
        dealt: Communicator,
        who: str,
        prefetch_buffer: int,
        data_on_device: bool | str,
        shared: Shared | None,
    ) -> None:
        self._replica, self._dealt, self._who = replica, dealt, who
        self.prefetch_buffer = integer("prefetch_buffer", prefetch_buffer, 0)
        self._on_device = check_on_device(data_on_device, replica.backend.name)
        self._shared = Shared() if shared is None else shared
        self._feedings: dict[tuple[str, Batches], Feeding] = {}  # that are open, by what for

    @contextmanager
    def open(self, train: Batches | None, evaluate_on: Batches | None) -> Iterator[None]:
        """Batches of these loaders come to this worker in here; some may be evaluated in the middle of an epoch."""
        with ExitStack() as opened:
            for use, loader in (("train", train), ("evaluate", evaluate_on)):
                if loader is None or (use, loader) in self._feedings:
                    continue
                self._feedings[use, loader] = opened.enter_context(self._feeding(loader))
                opened.callback(self._feedings.pop, (use, loader))
            yield

    def _feeding(self, loader: Batches) -> Feeding:
        try:
            return Feeding(
                loader,
                self._replica.backend,
                self._dealt.rank,
                self._dealt.size,
                ahead=self.prefetch_buffer,
                images=self._replica.needs_images,
                on_device=self._on_device,
                shared=self._shared,
            )
        except Exception as error:
            annotate(error, f"{self._who}, making room for batches")
            raise

    def epoch(self, loader: Batches, epoch: int, start: int) -> Prefetcher[Batch]:
        """The batches of an epoch to train on, from round `start` on; each is valid until the next."""
        return self._feedings["train", loader].epoch(epoch, start)

    def again(self, loader: Batches, epoch: int, number: int) -> Batch:
        """The batch of that round once more, in memory of its own."""
        return next(loader.epoch(epoch, self._replica.backend, self._dealt.rank, self._dealt.size, start=number))

    def judged(self, loader: Batches) -> Evaluation:
        """What the replica makes of this worker's own batches."""
        replica, evaluation, where = self._replica, Evaluation(loader.dataset.classes), "loading a batch"
        try:
            with self._feedings["evaluate", loader].epoch(0) as batches:
                for batch in batches:
                    where = f"at batch {batch.index}"
                    found = replica.scores(batch)
                    if found is not None:
                        scores, losses = found
                        evaluation.add(scores, replica.backend.to_host(batch.labels), losses, batch.samples)
                    where = "loading a batch"
        except Exception as error:
            annotate(error, f"{self._who}, evaluating, {where}")
            raise
        return evaluation
