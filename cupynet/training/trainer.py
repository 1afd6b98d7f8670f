"""The training loop: the same code on every worker.

A round is one iteration of every replica. Worker r of W trains on batches r, r + W, r + 2W ... of an epoch; in the last
round some may have none, and only take part in the average.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.checks import instance
from cupynet.data import Batch, Loader, Prefetcher
from cupynet.errors import DivergedError, annotate
from cupynet.nn import INFERENCE, Context, Model
from cupynet.optim import Optimizer
from cupynet.parallel import Average, Communicator, Moment, Replica, SerialCommunicator, Synchronizer, is_finite
from cupynet.training.callbacks import Callback, EpochRecord, Report
from cupynet.training.clock import Clock, Window
from cupynet.training.metrics import Evaluation

AGREE_EVERY = 50  # iterations between two looks at each other's stop signals where no average brings one


class Trainer:
    """Trains one replica, alone or with others.

    Args:
        model: the replica.
        optimizer: moves its weights.
        communicator: the way to the other workers; alone unless told.
        synchronizer: when replicas are averaged; never unless told.
        callbacks: told of events, see `Callback`.
        prefetch_buffer: batches made ahead for this worker by a thread; 0 for none.
        report_every: iterations between reports; 0 for none.

    Attributes:
        iteration: updates of this replica so far, counted in rounds.
        total_iterations: what `iteration` will be at the end of this `fit`.
        epoch: complete epochs so far.
        evaluation: of the last complete epoch; None where it was not evaluated.
        stopped_by: number of the signal that ended training early, else 0.
        clock: where the time went.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        communicator: Communicator | None = None,
        synchronizer: Synchronizer | None = None,
        callbacks: Sequence[Callback] = (),
        prefetch_buffer: int = 8,
        report_every: int = 50,
    ) -> None:
        self.model, self.optimizer = model, instance("optimizer", optimizer, Optimizer, "Nesterov(0.01)")
        self.communicator = SerialCommunicator() if communicator is None else communicator
        self.synchronizer = Synchronizer() if synchronizer is None else synchronizer
        self.callbacks = [c for c in callbacks if c.every_rank or self.communicator.rank == 0]
        self.prefetch_buffer, self.report_every = prefetch_buffer, report_every
        self.iteration = self.epoch = self.epochs = self.stopped_by = self.total_iterations = 0
        self.clock = Clock()
        self.evaluation: Evaluation | None = None
        self._window = Window(Clock())
        optimizer.init(model.params, model.backend)
        self.replica = Replica(model.backend, model.params, optimizer.state)

    # training -------------------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Loader,
        epochs: int,
        *,
        evaluate_on: Loader | None = None,
        evaluate_every: int = 1,
        split: str = "test",
    ) -> None:
        """Train until `epochs` epochs are complete, counted from the trainer's first.

        Args:
            train: the batches of all workers.
            epochs: complete epochs to reach.
            evaluate_on: evaluated, in parallel, every `evaluate_every` epochs and after the last.
            split: what to call it, `test` or `validation`.

        Raises:
            DivergedError: a replica is no longer finite; looked for at averages, reports and the ends of epochs.
        """
        self.epochs = epochs
        self.total_iterations = self.iteration + (epochs - self.epoch) * self.rounds(train)
        self.optimizer.learning_rate.span(self.iteration, self.total_iterations)
        self._tell("on_fit_start")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # divergence is looked for, not warned of
            self.synchronizer.start(self.replica)
            while self.epoch < epochs and not self.stopped_by:
                due = evaluate_on is not None and ((self.epoch + 1) % evaluate_every == 0 or self.epoch + 1 == epochs)
                self._epoch(train, evaluate_on if due else None, split)
        self._tell("on_fit_end")

    def rounds(self, loader: Loader) -> int:
        """Rounds of an epoch: iterations of the busiest worker."""
        return -(-loader.batches // self.communicator.size)

    def step(self, batch: Batch) -> Array:
        """One update of this replica; the losses of the batch (N,), on the device."""
        context = Context(True, self.epoch, self.iteration, batch.samples)
        model = self.model
        logits, backward = model.forward(batch.images, context)
        losses, gradient = model.loss(model.backend, logits, batch.labels)
        model.backend.give_back(backward(gradient))
        self.synchronizer.before_update(self.replica)
        self.optimizer.step(model.params, self.iteration)
        return losses

    def _epoch(self, train: Loader, evaluate_on: Loader | None, split: str) -> None:
        """One epoch: its rounds, the average that ends it, its evaluation."""
        before, first, rounds = replace(self.clock), self.iteration, self.rounds(train)
        rank, size, backend = self.communicator.rank, self.communicator.size, self.model.backend
        batches = Prefetcher(train.epoch(self.epoch, backend, rank, size), self.prefetch_buffer)
        batch: Batch | None = None
        try:
            with batches:
                for number in range(rounds):
                    began, waited = time.perf_counter(), batches.waited_s
                    batch = next(batches, None)
                    self.clock.data_s += batches.waited_s - waited
                    self._round(batch)
                    seconds = time.perf_counter() - began
                    self.clock.count(self.iteration, _images_of_round(train, number, size), seconds)
                    self._after_round()
                    if self.stopped_by:
                        break
        except DivergedError:
            raise  # says itself whose replica it is; several workers may raise it together
        except Exception as error:
            where = "without a batch" if batch is None else f"at batch {batch.index}"
            annotate(error, f"worker {rank} ({backend.name}, device {backend.device}), epoch {self.epoch + 1}, {where}")
            raise
        complete = self.iteration - first == rounds
        self.epoch += complete
        self._end_epoch(evaluate_on, split, before, complete)

    def _round(self, batch: Batch | None) -> None:
        """This replica's update, if it has a batch, and the average, if one is due."""
        window, began = self._window, time.perf_counter()
        if batch is not None:
            losses = self.step(batch)
            total = losses.sum()
            self.replica.losses = self.replica.losses + total
            self.replica.samples += len(batch)
            window.add(len(batch), total)
        stepped = time.perf_counter()
        measure = bool(self.report_every) and not window.measured
        average = self.synchronizer.after_update(self.replica, self.iteration, measure=measure)
        self.iteration += 1
        self.clock.compute_s += stepped - began
        self._averaged(average)

    def _averaged(self, average: Average | None) -> None:
        """Take note of what an average found; without one, look from time to time whether a signal asked to stop."""
        if average is None:
            if self.communicator.size == 1:
                self.stopped_by = self.communicator.stop_signal
            elif self.iteration % AGREE_EVERY == 0:
                self.stopped_by = max(self.communicator.all_gather(self.communicator.stop_signal))
            return
        self.clock.averaging_s += average.seconds
        self.stopped_by = average.stop_signal
        self._window.averaged(average)

    def _after_round(self) -> None:
        """Callbacks, and the report if one is due."""
        self._tell("on_iteration_end")
        if self.report_every and self.iteration % self.report_every == 0:
            report = self._report()
            self._tell("on_report", report)

    def _report(self) -> Report:
        rate = self.optimizer.learning_rate(self.iteration - 1)
        report = self._window.report(self.clock, iteration=self.iteration, epoch=self.epoch, learning_rate=rate)
        if self._window.samples and not math.isfinite(report.loss):
            raise DivergedError(
                f"the loss of worker {self.communicator.rank} is {report.loss} before iteration {self.iteration}: "
                "lower optimizer.learning_rate, or train in a wider dtype"
            )
        self._window = Window(replace(self.clock))
        return report

    def _end_epoch(self, evaluate_on: Loader | None, split: str, before: Clock, complete: bool) -> None:
        """The average that the rules ask for here, then the evaluation of replicas that are identical. An epoch that a
        signal broke off is averaged and not reported.
        """
        last = self.epoch == self.epochs or bool(self.stopped_by)
        moment: Moment = "fit" if last else "evaluation" if evaluate_on is not None else "epoch"
        began = time.perf_counter()
        average = self.synchronizer.finish(self.replica, moment)
        if average is None:
            self._refuse_divergence()
        else:
            self.clock.finish(time.perf_counter() - began, average.seconds)
            self._window.averaged(average)
            self.stopped_by = self.stopped_by or average.stop_signal
        self.evaluation = None
        if evaluate_on is not None and self.synchronizer.identical and not self.stopped_by:
            self.evaluation = self.evaluate(evaluate_on)
        if complete:
            samples, seconds = self.clock.images - before.images, self.clock.rounds_s - before.rounds_s
            self._tell(
                "on_epoch_end", EpochRecord(self.epoch, self.iteration, samples, seconds, split, self.evaluation)
            )

    def _refuse_divergence(self) -> None:
        """Where no average looks at the weights, an epoch's end does."""
        if not is_finite(self.model.params.master):
            raise DivergedError(
                f"the replica of worker {self.communicator.rank} is not finite after iteration {self.iteration}: "
                "lower optimizer.learning_rate, or train in a wider dtype"
            )

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    # evaluation -----------------------------------------------------------------------------------------------------

    def evaluate(self, loader: Loader) -> Evaluation:
        """Evaluate a data set in parallel: each worker its own batches; the same result on all of them."""
        began = time.perf_counter()
        model, backend = self.model, self.model.backend
        evaluation = Evaluation(loader.dataset.classes)
        rank, size = self.communicator.rank, self.communicator.size
        with Prefetcher(loader.epoch(0, backend, rank, size), self.prefetch_buffer) as batches:
            for batch in batches:
                logits, _ = model.forward(batch.images, INFERENCE)
                losses, gradient = model.loss(backend, logits, batch.labels)
                scores = backend.to_host(model.loss.scores(backend, logits))
                evaluation.add(scores, loader.dataset.labels[batch.samples], backend.to_host(losses))
                backend.give_back(gradient, logits)
        whole = Evaluation(loader.dataset.classes)
        for part in self.communicator.all_gather(evaluation):
            whole.merge(part)
        self.clock.evaluate_s += time.perf_counter() - began
        return whole


def _images_of_round(loader: Loader, number: int, workers: int) -> int:
    """Images all workers together train on in round `number` of an epoch."""
    per_round = loader.batch_size * workers
    return min(per_round, len(loader.dataset) - number * per_round)


def warm_up(model: Model, optimizer: Optimizer, batch_size: int) -> float:
    """Compile or load every kernel that training `model` needs, on a replica that is thrown away; the seconds it took.

    Args:
        optimizer: one that is not used for anything else.
    """
    began = time.perf_counter()
    scratch = Trainer(model.replicate(model.backend), optimizer, prefetch_buffer=0, report_every=0)
    optimizer.learning_rate.span(0, 1)
    samples = np.zeros(batch_size, np.int64)
    images = model.backend.load_images(np.zeros((1, *model.input.shape), np.uint8), samples)
    scratch.step(Batch(0, images, model.backend.asarray(samples), samples))
    model.backend.synchronize()
    return time.perf_counter() - began
