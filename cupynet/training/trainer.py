"""The training loop of a worker.

Worker r of W trains on batches r, r + W, r + 2W ... of an epoch. A worker without a batch in the last iteration makes
the same calls as the others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend import Shared
from cupynet.backend.array import Subset
from cupynet.core.errors import ConfigError, DivergedError, annotate
from cupynet.core.wording import counted
from cupynet.data import Batch, BatchFeed, Loader
from cupynet.optim import Schedule
from cupynet.parallel import Average, Groups, Moment, Synchronizer, is_finite
from cupynet.runs.run import Run
from cupynet.training.callback_list import CallbackList
from cupynet.training.clock import Statistics, figures
from cupynet.training.consensus import StopConsensus
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Spent, Stop, StopReason
from cupynet.training.feeds import Feeds
from cupynet.training.finite_check import check_finite
from cupynet.training.fit import Fit, check_same_data, classifies
from cupynet.training.metrics import Metric
from cupynet.training.regression import evaluation_of
from cupynet.training.replica import Replica


@dataclass
class Plan:
    """The range of the current or last fit."""

    start: int | None = None  # first iteration of the learning-rate schedule of an unfinished fit; None between fits
    iterations_per_epoch: int = 0
    iterations: int = 0  # `Trainer.iteration` at the planned end of the fit
    epochs: int = 0  # `Trainer.epoch` at the planned end of the fit
    deal: tuple[int, ...] = ()  # assignment of an epoch's batches to workers (see `Loader.deal`)
    averaged: bool = True  # True after the last averaging step of the fit

    @property
    def unfinished(self) -> bool:
        """True during a fit, and after restoring one from a checkpoint."""
        return self.start is not None


class Trainer:
    """Trains one replica, alone or with others.

    Args:
        groups: the communicators of this worker; by default, it trains alone.
        synchronizer: the synchronization method; optional for a single worker.
        callbacks: the callbacks of this worker, in the order in which they are called.
        prefetch_buffer: number of batches to prepare in advance in a thread; 0 disables prefetching.
        data_on_device, shared: see `BatchOps.transfer`.
        log_every: iterations between `on_log` events, the same on every worker; 0 disables them.
        metrics: see `TrainingOptions`.

    Attributes:
        world: the communicator of all workers. Callbacks that run on every rank may use it if all make the same calls.
        model: this worker's model; in a pipeline, the layers of its stage. `replica.whole` is the whole network, which
            on rank 0 is the user's model. In a pipeline, the whole network has the trained weights only on rank 0, in
            `on_epoch_end` of an evaluated epoch and after the fit.
        params, backend: weights and backend of this worker. In `after_finish` and `on_diverged` a callback may change
            the weights, identically on every rank, and must then call `params.publish` to copy them to the layers.
        iteration, epoch, epoch_iteration: completed iterations, epochs, and iterations of the current epoch.
        data: the `Loader.identity` of the training data of the last or restored fit; None if unknown.
        evaluation: the evaluation of the last epoch, or of the final weights if a callback replaced them, or None.
        stopped: the request that ended the last fit early, or None.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        groups: Groups | None = None,
        synchronizer: Synchronizer | None = None,
        callbacks: Sequence[Any] = (),
        prefetch_buffer: int = 8,
        data_on_device: bool | str = "auto",
        shared: Shared | None = None,
        log_every: int = 50,
        run: Run | None = None,
        metrics: Sequence[Metric] = (),
    ) -> None:
        self.groups = Groups.of() if groups is None else groups
        self.world, self.rank = self.groups.world, self.groups.world.rank
        self.replica, self.model, self.params, self.backend = replica, replica.model, replica.params, replica.backend
        self.synchronizer = Synchronizer() if synchronizer is None else synchronizer
        self.log_every, self.metrics = log_every, metrics
        self.iteration = self.epoch = self.epoch_iteration = 0
        self.plan = Plan()
        self.data: tuple[int, int] | None = None
        self.evaluation: Evaluation | None = None
        self.stopped: Stop | None = None
        self.statistics = Statistics(replica.tally(), self.world.traffic)
        self.consensus = StopConsensus(self.world)
        shared = Shared() if shared is None else shared
        self.feeds = Feeds(
            replica, self.groups.replicas, prefetch=prefetch_buffer, on_device=data_on_device, shared=shared
        )
        replica.join(self.groups, self.synchronizer, self.statistics.clock)
        self.synchronizer.start(replica, self.groups.replicas)
        self.callbacks = CallbackList(callbacks)
        self.callbacks.start(self, run)

    @property
    def schedule(self) -> Schedule:
        schedule: Schedule = self.replica.optimizer.learning_rate
        return schedule

    @schedule.setter
    def schedule(self, schedule: Schedule) -> None:
        self.replica.optimizer.learning_rate = copy.deepcopy(schedule)

    @property
    def progress(self) -> str:
        """The number of complete epochs as text, and the iteration at which the last fit was stopped."""
        complete = f"{counted(self.epoch, 'epoch')} complete"
        if not self.epoch_iteration or self.plan.unfinished:
            return complete
        return f"{complete}, stopped after iteration {self.epoch_iteration} of epoch {self.epoch + 1}"

    def resumes(self, callback: object) -> bool:
        """Return True if the fit continues a restored fit and the callback's state was restored too."""
        return callback in self.callbacks.resuming

    def emit(self, event: str, *arguments: Any) -> list[Any]:
        with self.statistics.clock.measure("callbacks", "callbacks"):
            return self.callbacks.emit(event, self, *arguments)

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Stop all workers after the same iteration. Any thread, callback or signal handler may call this."""
        self.consensus.propose(Stop(StopReason(reason), text))

    # training -------------------------------------------------------------------------------------------------------

    def fit(self, fit: Fit) -> None:
        """Train for `fit.epochs` more epochs. Afterwards all replicas are identical.

        An interrupted epoch continues if `fit.train` has the same number of samples and batch size; otherwise it
        restarts. Most learning-rate schedules span one fit.

        Raises:
            DivergedError: a loss or gradient is not finite, detected before it is used; or a weight
                is not finite, detected in the next iteration or averaging step.
        """
        for loader in filter(None, (fit.train, fit.evaluate_on)):
            check_same_data(loader, self.world)
        try:
            self._begin(fit)
            with (
                np.errstate(over="ignore", invalid="ignore", divide="ignore"),
                self.feeds.of_fit(fit.train, fit.evaluate_on) as feed,
            ):
                self.replica.begin(  # to reload the batch of a non-finite step that is detected late
                    lambda iteration: self.feeds.reload(self.epoch, self.epoch_iteration + iteration - self.iteration),
                    self.plan.iterations,
                )
                self.synchronizer.begin(self.replica)
                self.emit("on_fit_start")
                self.stopped = self.consensus.exchange()
                while self.epoch < self.plan.epochs and not self.stopped:
                    self._epoch(fit, feed)
                    self.stopped = self.consensus.exchange()
                self._finish(fit)
            self.emit("on_fit_end")
        finally:
            self.consensus.request = self.plan.start = None

    def _begin(self, fit: Fit) -> None:
        plan, replicas = self.plan, self.groups.replicas.size
        per_epoch, deal = fit.train.iterations(replicas), fit.train.deal(replicas)
        if deal != plan.deal:
            self.epoch_iteration, plan.deal = 0, deal
        self.data = fit.train.identity
        self.expect(fit.train)
        # after a resume with fewer workers, because some of the former workers had no batch in the last iteration
        self.epoch_iteration = min(self.epoch_iteration, per_epoch)
        plan.averaged = plan.averaged and plan.unfinished and not fit.epochs  # only if restored after averaging
        if plan.start is None:
            plan.start, self.callbacks.resuming = self.iteration, []
        plan.iterations_per_epoch, plan.epochs = per_epoch, self.epoch + fit.epochs
        plan.iterations = self.iteration + fit.epochs * per_epoch - self.epoch_iteration
        self.schedule.begin_fit(plan.start, plan.iterations, per_epoch, plan.epochs)
        self.stopped = None

    def expect(self, loader: Loader) -> None:
        """Set the kind of labels in the next batches, and the origin of their samples."""
        self.replica.classifies = classifies(loader.dataset, self.replica.whole.loss)
        self.replica.label_columns = loader.label_columns
        images = getattr(loader.dataset, "images", None)
        self.replica.origin = images.origin() if isinstance(images, Subset) else None

    def _epoch(self, fit: Fit, feed: BatchFeed) -> None:
        clock, replicas, where = self.statistics.clock, self.groups.replicas.size, "before the first batch"
        self.evaluation = None
        if self.epoch_iteration == 0:
            self.statistics.begin_epoch()
        try:
            with closing(feed.epoch(self.epoch, self.epoch_iteration)) as batches:
                while self.epoch_iteration < self.plan.iterations_per_epoch and not self.stopped:
                    where, images = "loading a batch", fit.train.images_of_iteration(self.epoch_iteration, replicas)
                    with clock.measure("data", "batch"):
                        batch = next(batches)
                    where = "without a batch" if batch is None else f"at batch {batch.index}"
                    with clock.measure("compute", "round"):
                        average = self._iterate(batch)
                    clock.count(self.iteration, images)
                    self._after_iteration(average)
                if self.epoch_iteration == self.plan.iterations_per_epoch:
                    self.replica.complete()
                    self.statistics.read_losses()
        except DivergedError:
            raise  # the message already names the worker, and several workers may raise it together
        except Exception as error:
            annotate(error, f"worker {self.rank} ({self.replica.place}), epoch {self.epoch + 1}, {where}")
            raise
        if self.epoch_iteration == self.plan.iterations_per_epoch:
            self.epoch, self.epoch_iteration = self.epoch + 1, 0
            self._end_epoch(fit)

    def _iterate(self, batch: Batch | None) -> Average | None:
        replica, synchronizer, measure = self.replica, self.synchronizer, self.statistics.clock.measure
        self.world.check()  # an abandoned worker must not touch the user's model
        with measure("compute", "forward and backward"):
            step = replica.gradient(batch)
            check_finite(replica, step)
        with measure("averaging", "averaging of gradients"):
            synchronizer.before_update(replica, step.samples)
        self.world.check()  # again, because the synchronizer may have waited
        with measure("compute", "update"):
            replica.update(self.iteration, step)
        with measure("averaging", "averaging of weights"):
            average = synchronizer.after_update(replica, self.iteration)
        self.iteration, self.epoch_iteration = self.iteration + 1, self.epoch_iteration + 1
        return average

    def _after_iteration(self, average: Average | None) -> None:
        if average is not None:
            self._averaged(average)
        self.world.check()
        reported = self.log_every > 0 and self.iteration % self.log_every == 0
        if reported:
            self.replica.complete()
            self.statistics.count()
            with self.statistics.clock.measure("averaging", "synchronization of workers"):
                sent = self.world.gather_numbers(self.statistics.clock.bytes_sent).sum()
            report = self.statistics.report(
                iteration=self.iteration,
                epoch=self.epoch,
                learning_rate=self.replica.optimizer.rate(self.iteration - 1),
                bytes_sent=int(sent),
            )
            self.emit("on_log", report)
        self.emit("on_iteration_end")  # last, so that a checkpoint saved here includes everything
        if self.consensus.due(self.iteration, reported=reported):
            with self.statistics.clock.measure("averaging", "synchronization of workers"):
                self.stopped = self.consensus.exchange()

    # averaging, and the ends of epochs and fits ----------------------------------------------------------------------

    def _average(self, moment: Moment) -> None:
        """Run the synchronizer's averaging step. If that does not average, check that the weights are finite."""
        if moment == "fit":
            self.plan.averaged = True
        with self.statistics.clock.measure("averaging", "averaging of weights"):
            average = self.synchronizer.finish(self.replica, moment)
        if average is not None:
            self._averaged(average, additional=True)
        elif not is_finite(*self.params.vectors):
            raise DivergedError(
                f"weights or running statistics of worker {self.rank} are not finite after iteration {self.iteration}. "
                "Lower learning_rate, or train in a wider dtype"
            )
        if moment == "fit":
            self.replica.assemble()

    def _averaged(self, average: Average, *, additional: bool = False) -> None:
        with self.statistics.clock.measure("averaging", "synchronization of workers"):
            average = average.over(self.groups.stages)
        self.statistics.averaged(average, additional=additional)

    def _end_epoch(self, fit: Fit) -> None:
        last, rate = self.epoch == self.plan.epochs, self.replica.optimizer.rate(self.iteration - 1)
        due = fit.evaluate_on is not None and (last or self.epoch % fit.evaluate_every == 0)
        self._average("fit" if last else "evaluation" if due else "epoch")
        if due and fit.evaluate_on is not None and self.synchronizer.identical:
            self.replica.assemble()
            self.evaluation = self.evaluate(fit.evaluate_on)
            if self.schedule.monitor is not None:
                self.schedule.on_evaluation(self.evaluation.figure(self.schedule.monitor))
        with self.statistics.clock.measure("averaging", "synchronization of workers"):
            self.world.barrier()  # the epoch's time includes waiting for the last worker
        record = self.statistics.epoch_record(
            self.world,
            self.groups.stages.size,
            epoch=self.epoch,
            iteration=self.iteration,
            split=fit.split,
            evaluation=self.evaluation,
            learning_rate=rate,
        )
        self.emit("on_epoch_end", record)

    def _finish(self, fit: Fit) -> None:
        """Average, let callbacks replace the weights, evaluate these unless a signal arrived, and gather statistics."""
        if self.stopped and not self.plan.averaged:
            self.emit("on_stop")
        if not self.plan.averaged:
            self._average("fit")
        if self.epoch == self.plan.epochs:
            self.stopped = None  # the stop was requested after the last iteration
        replaced = any(answer is not False for answer in self.emit("after_finish"))
        if self.world.gather_numbers(replaced).any():
            self.replica.assemble()
            urgent = self.stopped is not None and self.stopped.urgent
            self.evaluation = None if fit.evaluate_on is None or urgent else self.evaluate(fit.evaluate_on)
        if self.replica.scaler is not None:
            self.statistics.skipped_steps = self.replica.scaler.of_all(self.groups.replicas)
        self.replica.complete()
        self.statistics.count()
        self.statistics.spent = Spent.of(self.world.gather_numbers(*figures(self.statistics.clock)))

    def diverged(self, text: str) -> None:
        """Notify callbacks that the fit diverged on this or another worker.

        Call this from the thread that called `fit`, after all workers have left it. Workers can no longer communicate.
        """
        self.stopped = Stop(StopReason.DIVERGED, text)
        self.backend.activate()
        self.emit("on_diverged", text)
        self.backend.synchronize()
        self.backend.deactivate()

    # evaluation -------------------------------------------------------------------------------------------------------

    def begin_pass(self, loader: Loader) -> bool:
        """Prepare a pass over a data set between fits. Return False if the replicas are not identical."""
        if not self.synchronizer.identical:
            return False
        check_same_data(loader, self.world)
        self.replica.begin()
        self.synchronizer.begin(self.replica)
        return True

    def evaluate(self, loader: Loader, interrupted: Sequence[int] = ()) -> Evaluation:
        """Evaluate a data set in parallel. The result is the same on all workers.

        interrupted: a sequence that ends the evaluation when it becomes non-empty, except in a pipeline.
        """
        classes, clock, where = loader.dataset.classes, self.statistics.clock, "loading a batch"
        loss = self.replica.whole.loss
        kind, binary = classifies(loader.dataset, loss), loss.applies == "sigmoid"
        local, merged = (evaluation_of(classes, self.metrics, classifies=kind, binary=binary) for _ in range(2))
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")  # the loss shows non-finite values
        with quiet, clock.measure("evaluate", "evaluation"), self.feeds.of_evaluation(loader) as feed:
            try:
                for batch in feed.epoch(0):
                    if batch is None or (interrupted and self.groups.stages.size == 1):
                        break
                    self.world.check()
                    where = f"at batch {batch.index}"
                    with clock.measure("evaluate", "evaluation of a batch"):
                        result = self.replica.scores(batch)
                    if result is not None:
                        scores, losses = result
                        labels = self.backend.to_host(batch.labels)
                        samples = batch.samples if loader.split is None else loader.split[batch.samples]
                        local.add(scores, labels[..., :classes] if labels.ndim == 2 else labels, losses, samples)
                    where = "loading a batch"
            except Exception as error:
                annotate(error, f"worker {self.rank} ({self.replica.place}), evaluating, {where}")
                raise
            for packed in self.world.all_gather(local.pack()):  # also a barrier, as workers on a device share images
                merged.merge(packed)
        return merged

    # checkpoints ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return everything needed to resume bit for bit: nested dictionaries of numbers and host arrays.

        This can be called after any iteration and does not average. There is no RNG state: the order of samples depends
        only on seed and epoch, and random numbers in layers only on seed, epoch, sample, layer and position.
        """
        self.replica.complete()
        scaler = self.replica.scaler
        return {
            "trainer": {
                "iteration": self.iteration,
                "epoch": self.epoch,
                "round": self.epoch_iteration,
                "fitting": int(self.plan.unfinished),
                "finished": int(self.plan.averaged),
                "span_start": self.plan.start or 0,
                "deal": np.array(self.plan.deal, np.int64),
            },
            **self.statistics.state(),
            "replica": self.replica.state(),
            "schedule": self.schedule.state(),
            "synchronizer": self.synchronizer.state(),
            "scaling": {} if scaler is None else scaler.state(),
            "callbacks": self.callbacks.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state, from which the next `fit` continues. Raise ConfigError on a mismatch."""
        position = state["trainer"]
        self.iteration, self.epoch, self.epoch_iteration = (position[name] for name in ("iteration", "epoch", "round"))
        self.plan.start = position["span_start"] if position["fitting"] else None
        self.plan.averaged = bool(position["finished"])
        self.plan.deal = tuple(int(count) for count in position["deal"])
        self.statistics.restore(state)
        self.replica.restore(state["replica"])
        if self.replica.scaler is not None:
            self.replica.scaler.restore(state["scaling"])
        for name, part in (("schedule", self.schedule), ("synchronizer", self.synchronizer)):
            try:
                part.restore(state[name])
            except KeyError as missing:
                raise ConfigError(
                    f"this state has no {missing}, which the {name} ({part}) needs. It was saved with other settings "
                    "or by a different number of workers"
                ) from None
        self.callbacks.restore(state["callbacks"])
