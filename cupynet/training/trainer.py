"""The training loop: the same code on every worker.

A round is one iteration of every replica. Worker r of W trains on batches r, r + W, r + 2W ... of an epoch. In the last
round some workers may have no batch; they still make the same calls. The trainer owns rounds, position, events and
stopping. The replica computes gradients and updates. The synchronizer keeps replicas together; averages.py calls it at
the end of epochs and fits.

On a GPU a replica may run ahead: it launches the steps of several rounds before the host knows their losses. `settle`
waits for them, before an average, a report or the end of an epoch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.backend import Shared
from cupynet.core.errors import ConfigError, DivergedError, annotate
from cupynet.data import Batch, BatchFeed, Loader
from cupynet.optim import Schedule
from cupynet.parallel import Average, Groups, Synchronizer
from cupynet.parallel.synchronizers.replica_view import distance
from cupynet.runs.run import Run
from cupynet.training import averages
from cupynet.training.callbacks.base import Callback, by_class_name
from cupynet.training.callbacks.nonfinite import NonFinite
from cupynet.training.clock import Statistics
from cupynet.training.consensus import StopConsensus
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Piece, Spent, Stop, StopReason
from cupynet.training.fit import Fit, check_same_data
from cupynet.training.replica import Replica


@dataclass
class KeptFeed:
    """The evaluation batches of a fit, opened by its first evaluation.

    Attributes:
        loader: the evaluation data of the fit, if any.
        opened: closes the batches at the end of the fit.
        feed: the batches; None before the first evaluation.
    """

    loader: Loader | None
    opened: ExitStack
    feed: BatchFeed | None = None


class Trainer:
    """Trains one replica, alone or with others.

    Args:
        replica: the replica to train.
        groups: the communicators of this worker; by default that of a single worker.
        synchronizer: keeps the replicas together; optional for a single worker.
        callbacks: the callbacks of this worker, see `Callback`.
        prefetch_buffer: batches that a thread prepares ahead for this worker; 0 disables it.
        data_on_device, shared: keep images on the GPU, and the data that workers of this process share, see
            `Device.transfer`.
        report_every: iterations between reports, the same on every worker; 0 disables them.
        run: the run that callbacks write to.

    Attributes:
        rank, workers: the number of this worker, and of all.
        world: the communicator of all workers. Callbacks that run on every rank may use it if all make the same calls.
        replicas: that of the workers that train the same layers: all of them, unless there is a pipeline.
        model: this worker's replica of the network; in a pipeline its stage's layers.
        whole: the whole network in this process; on rank 0 the user's model. In a pipeline it is complete only
            there, in `on_epoch_end` of an evaluated epoch, and after the fit.
        params, backend: this worker's weights and its backend. In `after_finish` and `on_diverged` a callback may
            change the weights, identically on every rank; `params.publish` makes it visible to the layers.
        iteration, epoch, round: the position: completed rounds in total, completed epochs, and completed rounds of the
            current epoch.
        rounds: rounds of an epoch of this fit.
        fit_start: the iteration at which the learning-rate schedule of an unfinished fit began; None between fits.
        averaged: True after the last average of the fit.
        deal: how the batches of the current epoch are assigned to workers.
        data: `Loader.identity` of the last fit, or of the restored one; None if it is not known.
        statistics: counts and times of this worker.
        total_iterations, total_epochs: `iteration` and `epoch` at the end of this fit.
        evaluation: the evaluation of the last complete epoch, or of the weights that a callback chose at the end; None
            if there is none.
        stopped: why the last fit ended early; None if it did not.
        spent: the times of all workers at the end of the last fit; None before.
        skipped_steps: steps that any replica skipped because a gradient overflowed; set at the end of a fit.
    """

    def __init__(
        self,
        replica: Replica,
        *,
        groups: Groups | None = None,
        synchronizer: Synchronizer | None = None,
        callbacks: Sequence[Callback] = (),
        prefetch_buffer: int = 8,
        data_on_device: bool | str = "auto",
        shared: Shared | None = None,
        report_every: int = 50,
        run: Run | None = None,
    ) -> None:
        self.groups = Groups.of() if groups is None else groups
        self.world, self.replicas = self.groups.world, self.groups.replicas
        self.rank, self.workers = self.world.rank, self.world.size
        self.replica = replica
        self.model, self.whole = replica.model, replica.whole
        self.params, self.backend = replica.params, replica.backend
        self.synchronizer = Synchronizer() if synchronizer is None else synchronizer
        replica.join(self.groups, shares_gradients=self.synchronizer.shares_gradients)
        self.callbacks = list(callbacks)
        self.schedule: Schedule = replica.optimizer.learning_rate
        self._guard = next((each for each in callbacks if isinstance(each, NonFinite)), None) or NonFinite()
        self._who = f"worker {self.rank} ({replica.place})"
        self._prefetch_buffer = prefetch_buffer
        self._on_device = data_on_device
        self._shared = Shared() if shared is None else shared
        self._feed: BatchFeed | None = None  # the training batches of this fit
        self._held_out: KeptFeed | None = None  # those of its evaluations
        self.report_every = report_every
        self.iteration = self.epoch = self.round = self.rounds = 0
        self.total_iterations = self.total_epochs = 0
        self.fit_start: int | None = None
        self._resuming: list[Callback] = []  # callbacks restored for the current fit
        self.averaged = True
        self.deal: tuple[int, ...] = ()
        self.data: tuple[int, int] | None = None
        self.evaluation: Evaluation | None = None
        self.stopped: Stop | None = None
        self.spent: Spent | None = None
        self.skipped_steps = 0
        self.statistics = Statistics()
        self.consensus = StopConsensus(self.world)
        self.synchronizer.start(replica, self.replicas)
        with ExitStack() as started:
            for callback in self.callbacks:
                started.callback(callback.close)  # also if `start` fails
                callback.start(self, run)
            self._closing = started.pop_all()

    @property
    def unfinished(self) -> bool:
        """True while a fit is in progress, either running or restored from a checkpoint."""
        return self.fit_start is not None

    def resumes(self, callback: Callback) -> bool:
        """Return True if the fit continues a restored one and this callback's state was restored too."""
        return callback in self._resuming

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Request that all workers stop after the same round. Callable from any thread, callback or signal handler."""
        self.consensus.propose(Stop(StopReason(reason), text))

    def diverged(self, text: str) -> None:
        """Notify callbacks that the fit ended on a value that is not finite, on this or another worker.

        Call it from the thread that called `fit`, after all workers have left it; workers can no longer communicate.
        """
        self.stopped = Stop(StopReason.DIVERGED, text)
        self.backend.activate()
        self.emit("on_diverged", text)
        self.backend.synchronize()
        self.backend.deactivate()

    def warm_up(self, batch_size: int) -> float:
        """See `Replica.warm_up`; count the seconds. Every worker calls it."""
        seconds = self.replica.warm_up(batch_size, self._average_once)
        self.statistics.clock.compile_s += seconds
        return seconds

    def _average_once(self, scratch: Replica) -> None:
        """Average copies of the replicas and measure their distance, to load the kernels. No traffic is counted."""
        if self.replicas.size > 1:
            with self.world.traffic.uncounted():
                self.replicas.allreduce_mean([*self.synchronizer.shared(scratch), *scratch.params.running], 1.0)
            distance(self.backend, [(scratch.params.master, self.params.master)])

    def close(self) -> None:
        """Close all callbacks once, even if one of them fails."""
        self._closing.close()

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the method of this name of all callbacks."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    # training -------------------------------------------------------------------------------------------------------

    def fit(self, fit: Fit) -> None:
        """Train until `fit.epochs` more epochs are complete; afterwards all replicas are identical.

        An interrupted epoch resumes if `fit.train` has the same number of samples and batch size; otherwise it
        restarts. A learning-rate schedule spans this fit, and starts again in the next.

        Raises:
            DivergedError: a loss or a gradient is not finite, detected before use (see `NonFinite`); or a weight is
                not, detected in the next round or at the next average.
        """
        for loader in filter(None, (fit.train, fit.evaluate_on)):
            check_same_data(loader, self.world)
        self._begin(fit)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), ExitStack() as opened:
                self._feed = opened.enter_context(self._open_feed(fit.train))
                self._held_out = KeptFeed(fit.evaluate_on, opened)
                self.replica.begin(run_ahead=self._guard.action == "stop" and not self.synchronizer.shares_gradients)
                self.synchronizer.begin(self.replica)
                self.emit("on_fit_start")
                self.stopped = self.consensus.exchange()
                while self.epoch < self.total_epochs and not self.stopped:
                    self._epoch(fit, self._feed)
                    self.stopped = self.consensus.exchange()
                if self.stopped and not self.averaged:
                    self.emit("on_stop")
                averages.finish(self)
                if self.epoch == self.total_epochs:
                    self.stopped = None  # the request came after the last round
                averages.choose(self, fit.evaluate_on)
            if self.replica.scaler is not None:
                self.skipped_steps = self.replica.scaler.of_all(self.replicas)
            self._count_bytes()
            self.spent = Spent.of(self.world.gather_numbers(*self.statistics.clock.spent()))
            self.emit("on_fit_end")
        finally:
            # these belong to one fit
            self.consensus.request = self.fit_start = self._feed = self._held_out = None

    def _begin(self, fit: Fit) -> None:
        """Set where this fit starts and where it will end."""
        rounds, deal = fit.train.rounds(self.replicas.size), fit.train.deal(self.replicas.size)
        if deal != self.deal:
            self.round, self.deal = 0, deal
        self.data = fit.train.identity
        self.rounds = rounds
        self.round = min(self.round, rounds)  # with more workers an epoch may have fewer rounds than were done
        self.averaged = self.averaged and self.unfinished and not fit.epochs  # restored after its last average
        if self.fit_start is None:
            self.fit_start, self._resuming = self.iteration, []
        self.total_epochs = self.epoch + fit.epochs
        self.total_iterations = self.iteration + fit.epochs * rounds - self.round
        self.schedule.span(self.fit_start, self.total_iterations, rounds, self.total_epochs)
        self.stopped = None

    def _open_feed(self, loader: Loader) -> BatchFeed:
        return BatchFeed(
            loader,
            self.backend,
            self.replicas.rank,
            self.replicas.size,
            prefetch=self._prefetch_buffer,
            images=self.replica.needs_images,
            on_device=self._on_device,
            shared=self._shared,
        )

    def _evaluation_feed(self, loader: Loader, opened: ExitStack) -> BatchFeed:
        """Return the batches to evaluate on. Those of a fit stay open until its end, so images are uploaded once."""
        kept = self._held_out
        if kept is None or kept.loader is not loader:
            return opened.enter_context(self._open_feed(loader))
        if kept.feed is None:
            kept.feed = kept.opened.enter_context(self._open_feed(loader))
        return kept.feed

    def _epoch(self, fit: Fit, feed: BatchFeed) -> None:
        """Train one epoch, or the rest of it: its rounds, the average that ends it, its evaluation."""
        rounds, clock, where = fit.train.rounds(self.replicas.size), self.statistics.clock, "before the first batch"
        self.evaluation = None  # the last one belongs to weights that are about to change
        if self.round == 0:
            self._count_bytes()
            self.statistics.begin_epoch()
        try:
            with closing(feed.epoch(self.epoch, self.round)) as batches:
                while self.round < rounds and not self.stopped:
                    began, waited_s, where = time.perf_counter(), feed.waited_s, "loading a batch"
                    batch = self._next(batches)
                    clock.data_s += feed.waited_s - waited_s
                    where = "without a batch" if batch is None else f"at batch {batch.index}"
                    images = fit.train.images_of_round(self.round, self.replicas.size)
                    average = self._round(batch)
                    clock.count(self.iteration, images, time.perf_counter() - began)
                    self._after_round(average)
                self._catch_up()
        except DivergedError:
            raise  # the message names the replica; several workers may raise this together
        except Exception as error:
            annotate(error, f"{self._who}, epoch {self.epoch + 1}, {where}")
            raise
        if self.round == rounds:
            self.epoch, self.round = self.epoch + 1, 0
            self._end_epoch(fit)

    def _next(self, batches: Iterator[Batch | None]) -> Batch | None:
        """Return the next batch of this worker; None if it has none in this round."""
        return next(batches)

    def _round(self, batch: Batch | None) -> Average | None:
        """Train one round: the same calls on every worker, with a batch or without one."""
        replica, synchronizer, clock = self.replica, self.synchronizer, self.statistics.clock
        began = time.perf_counter()
        step = self._guard.checked(self, replica.gradient(batch))
        began = clock.lap("compute_s", began)
        wanted = step.ahead or synchronizer.before_update(replica, step.samples)
        if wanted is None:
            raise ConfigError(f"{type(synchronizer).__name__}.before_update returned None: return True or False")
        began = clock.lap("averaging_s", began)
        if wanted:
            self.world.check()  # a worker that timed out must not touch the user's model
            replica.update(self.iteration, None if synchronizer.shares_gradients else step.squared_norm)
        if step.ahead and synchronizer.looks(self.iteration):
            self._settle()
        began = clock.lap("compute_s", began)
        average = synchronizer.after_update(replica, self.iteration)
        clock.lap("averaging_s", began)
        clock.compute_s, clock.waiting_s = clock.compute_s - replica.waited_s, clock.waiting_s + replica.waited_s
        self.iteration, self.round = self.iteration + 1, self.round + 1
        self.statistics.count(step.samples, replica.losses)
        return average

    def _after_round(self, average: Average | None) -> None:
        """Call callbacks, report if one is due, and agree on whether to stop."""
        if average is not None:
            averages.record(self, average)
        self.world.check()
        if self.report_every and self.iteration % self.report_every == 0:
            self._catch_up()
            report = self.statistics.report(
                iteration=self.iteration,
                epoch=self.epoch,
                learning_rate=self.schedule(self.iteration - 1),
                bytes_sent=int(self.world.gather_numbers(self._count_bytes()).sum()),
            )
            self.emit("on_report", report)
        self.emit("on_iteration_end")  # last: a state taken here includes everything of this round
        if self.consensus.due(self.iteration, averaged=average is not None):
            began = time.perf_counter()
            self.stopped = self.consensus.exchange()
            self.statistics.clock.extend("averaging_s", began)

    def _count_bytes(self) -> int:
        """Write the bytes that this worker has sent into its clock, and return them."""
        sent = self.statistics.clock.bytes_sent = self.world.traffic.bytes_sent
        return sent

    def _catch_up(self) -> None:
        """Between two rounds: wait for the steps that run ahead of the host, and count them."""
        began = time.perf_counter()
        if self._settle():
            self.statistics.clock.extend("compute_s", began)

    def _settle(self) -> bool:
        """Wait for the steps that run ahead, and count them; False if there are none.

        Raises:
            DivergedError: the replica halted at one of those steps.
        """
        found = self.replica.settle()
        if found is None:
            return False
        if found.halted is not None:
            assert self._feed is not None
            batch = self._feed.reload(self.epoch, self.round - (self.iteration - found.halted))
            raise self._guard.halted(self, batch)
        self.replica.losses = found.losses
        for number in range(found.rounds):  # how the samples divide into rounds does not matter
            self.synchronizer.before_update(self.replica, 0 if number else found.samples)
        self.statistics.count(found.samples, found.losses)
        return True

    # the end of an epoch, and evaluation ------------------------------------------------------------------------------

    def _end_epoch(self, fit: Fit) -> None:
        """Make the average that the rules ask for here, then evaluate replicas that are identical."""
        last, rate = self.epoch == self.total_epochs, self.schedule(self.iteration - 1)
        self.statistics.read_losses()
        due = fit.evaluate_on is not None and (last or self.epoch % fit.evaluate_every == 0)
        if last:
            averages.finish(self)
        else:
            averages.average(self, "evaluation" if due else "epoch")
        if due and fit.evaluate_on is not None and self.synchronizer.identical:
            self.replica.assemble()
            self.evaluation = self.evaluate(fit.evaluate_on)
            if self.schedule.monitor is not None:
                self.schedule.learn(getattr(self.evaluation, self.schedule.monitor))
        self._count_bytes()
        table = self.world.gather_numbers(*self.statistics.epoch())
        record = self.statistics.epoch_record(
            table,
            self.groups.stages.size,
            epoch=self.epoch,
            iteration=self.iteration,
            split=fit.split,
            evaluation=self.evaluation,
            learning_rate=rate,
        )
        self.emit("on_epoch_end", record)

    def evaluate(self, loader: Loader) -> Evaluation:
        """Evaluate a data set in parallel: each worker its own batches; the same result on all of them."""
        began, classes, where = time.perf_counter(), loader.dataset.classes, "loading a batch"
        own, whole = Evaluation(classes), Evaluation(classes)
        quiet = np.errstate(over="ignore", invalid="ignore", divide="ignore")  # non-finite values appear in the loss
        with quiet, ExitStack() as opened:  # until all are done, because workers on a device share images
            feed = self._evaluation_feed(loader, opened)
            try:
                for batch in feed.epoch(0):
                    if batch is None:
                        break
                    self.world.check()
                    where = f"at batch {batch.index}"
                    found = self.replica.scores(batch)
                    if found is not None:
                        scores, losses = found
                        own.add(scores, self.backend.to_host(batch.labels), losses, batch.samples)
                    where = "loading a batch"
            except Exception as error:
                annotate(error, f"{self._who}, evaluating, {where}")
                raise
            for packed in self.world.all_gather(own.pack()):
                whole.merge(packed)
        self.statistics.clock.lap("evaluate_s", began)
        return whole

    # checkpoints ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state of this worker, from which training continues bit for bit. Call it after any round.

        Nested dictionaries of numbers and of arrays on the host. It does not cause an average. No random generator
        state is needed: the order of examples depends on seed and epoch, and random numbers of layers on seed, epoch,
        sample, layer and place.
        """
        self._catch_up()
        scaler = self.replica.scaler
        return {
            "trainer": {
                "iteration": self.iteration,
                "epoch": self.epoch,
                "round": self.round,
                "fitting": int(self.unfinished),
                "finished": int(self.averaged),
                "span_start": self.fit_start or 0,
                "deal": np.array(self.deal, np.int64),
            },
            **self.statistics.state(),
            "replica": self.replica.state(),
            "schedule": self.schedule.state(),
            "synchronizer": self.synchronizer.state(),
            "scaling": {} if scaler is None else scaler.state(),
            "callbacks": {name: callback.state() for name, callback in by_class_name(self.callbacks).items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a `state`. The next `fit` and its learning-rate schedule continue from there.

        Raises:
            ConfigError: the state is of another network, optimizer or synchronizer, or of too few workers.
        """
        position = state["trainer"]
        self.iteration, self.epoch, self.round = (position[name] for name in ("iteration", "epoch", "round"))
        self.fit_start = position["span_start"] if position["fitting"] else None
        self.averaged = bool(position["finished"])
        self.deal = tuple(int(count) for count in position["deal"])
        self.statistics.restore(state)
        self.world.traffic.bytes_sent = self.statistics.clock.bytes_sent
        self.replica.restore(state["replica"])
        self.schedule.restore(state["schedule"])
        if self.replica.scaler is not None:
            self.replica.scaler.restore(state["scaling"])
        try:
            self.synchronizer.restore(state["synchronizer"])
        except KeyError as missing:
            raise ConfigError(
                f"this state has no {missing} for a synchronizer that is {self.synchronizer}: it was saved by one with "
                "other settings, or by another number of workers"
            ) from None
        self._resuming = []
        for name, callback in by_class_name(self.callbacks).items():
            if name in state["callbacks"]:  # new callbacks have no state
                callback.restore(state["callbacks"][name])
                self._resuming.append(callback)

    # profile ----------------------------------------------------------------------------------------------------------

    def launch_singly(self, wanted: bool) -> None:
        """Switch a GPU to launching each operation separately from the next round on, or back to captured graphs.

        Call it between rounds. Results do not change.
        """
        self._catch_up()
        self.replica.launch_singly(wanted)

    def pieces(self) -> list[Piece]:
        """Return this worker's calls in a round and an evaluation, except those of the layers."""
        synchronizer = self.synchronizer
        return [
            (self, "_next", "batch", "data"),
            (self, "_round", "round", "training"),
            *self.replica.pieces(),
            (self._guard, "checked", "check of the gradient", "training"),
            (synchronizer, "before_update", "averaging of gradients", "averaging"),
            (synchronizer, "after_update", "averaging of weights", "averaging"),
            (synchronizer, "finish", "averaging of weights", "averaging"),
            (self.consensus, "exchange", "agreement", "waiting"),
            (self, "evaluate", "evaluation", "evaluation"),
            (self, "emit", "callbacks", "training"),
        ]
