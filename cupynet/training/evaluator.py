"""Evaluation in parallel: each worker evaluates its own batches; all have the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cupynet.core.errors import annotate
from cupynet.data import Batches, BatchFeed
from cupynet.parallel import Groups
from cupynet.training.evaluation import Evaluation
from cupynet.training.replica import Replica


class Evaluator:
    """Evaluates one replica, with the other workers.

    Args:
        replica: of this worker.
        groups: the other workers.
        who: this worker's name in notes of errors.
        open_feed: creates the feed of a loader's batches for this worker.
    """

    def __init__(self, replica: Replica, groups: Groups, who: str, open_feed: Callable[[Batches], BatchFeed]) -> None:
        self._replica, self._groups, self._who, self._open_feed = replica, groups, who, open_feed
        self._held: dict[Batches, BatchFeed] = {}

    @contextmanager
    def hold(self, loader: Batches) -> Iterator[BatchFeed]:
        """Keep the feed of `loader`, and its memory, for all evaluations in this context."""
        if loader in self._held:
            yield self._held[loader]
            return
        with self._open_feed(loader) as feed:
            self._held[loader] = feed
            try:
                yield feed
            finally:
                del self._held[loader]

    def evaluate(self, loader: Batches) -> Evaluation:
        """Evaluate the batches of `loader`: the same result on all workers."""
        with self.hold(loader) as feed:  # until all are done: workers on a device share images
            own, whole = self._evaluate(feed), Evaluation(loader.dataset.classes)
            for packed in self._groups.world.all_gather(own.pack()):
                whole.merge(Evaluation.unpack(packed, loader.dataset.classes))
            return whole

    def _evaluate(self, feed: BatchFeed) -> Evaluation:
        replica, evaluation, where = self._replica, Evaluation(feed.loader.dataset.classes), "loading a batch"
        try:
            for batch in feed.epoch(0):
                if batch is None:
                    break
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
