"""The training loop: the same code on every worker.

A round is one iteration of every replica. Worker r of W trains on batches r, r + W, r + 2W ... of an epoch; in the last
round some may have none, and take part all the same. The trainer owns rounds, position, events and stopping; what a
replica computes is the replica's affair, and what keeps replicas together the synchronizer's.

The file is long (over 300 lines) because a fit is read from its first round to its last in one place.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from typing import Any

import numpy as np

from cupynet.backend import Backend, Shared, check_on_device
from cupynet.checks import integer, is_bool, one_of
from cupynet.data import Batch, Batches, BatchFeed
from cupynet.errors import ConfigError, DataError, DivergedError, annotate
from cupynet.nn import Model, Params
from cupynet.optim import Schedule
from cupynet.parallel import Average, Communicator, Groups, Moment, Synchronizer, is_finite
from cupynet.runs import Run
from cupynet.training.agreement import Agreed, Agreement
from cupynet.training.callbacks import Callback, check_validation
from cupynet.training.clock import Clock, Losses, Since
from cupynet.training.evaluator import Evaluator
from cupynet.training.metrics import Evaluation
from cupynet.training.nonfinite import NonFinite
from cupynet.training.recorded import RecordedReplica
from cupynet.training.records import SPENT, EpochRecord, Piece, Report, Spent, Stop, StopReason
from cupynet.training.replica import Replica, moved
from cupynet.training.scaling import LossScaler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """What one call of `Trainer.fit` is to do; `last` is the epoch it ends with, counted from 1."""

    train: Batches
    last: int
    evaluate_on: Batches | None
    evaluate_every: int
    split: str

    @staticmethod
    def check(epochs: int, evaluate_every: int, split: str, *, least: int = 1) -> tuple[int, int, str]:
        """The arguments of a fit, if they can work; ConfigError."""
        return (
            integer("epochs", epochs, least),
            integer("evaluate_every", evaluate_every, 1),
            one_of("split", split, ("test", "validation")),
        )


class Trainer:
    """Trains one replica, alone or with others.

    Args:
        replica: what is trained.
        groups: the other workers; alone by default.
        synchronizer: keeps the replicas together; not needed by one alone.
        callbacks: this worker's own, told of events, see `Callback`.
        prefetch_buffer: batches made ahead for this worker by a thread; 0 for none.
        data_on_device, shared: whether images stay on a GPU, and what the workers of this process share there, see
            `Backend.transfer`.
        report_every: iterations between reports; 0 for none.
        run: where callbacks write.

    Attributes:
        iteration: iterations so far, counted in rounds.
        total_iterations: what `iteration` will be at the end of this `fit`.
        epoch, round: complete epochs so far, and complete rounds of the one after them.
        total_epochs: what `epoch` will be at the end of this `fit`.
        evaluation: of the last complete epoch, or of the weights that a callback chose at the end; None where there
            was none.
        stopped: why the last fit ended early; None where it did not.
        clock: where this worker's time went.
        spent: what all workers had spent at the end of the last fit; None before.
        scaler: finds the factor on the loss where 16 bits are stored; None elsewhere.
        skipped_steps: of all replicas, left out as the gradient overflowed; known at the end of a fit.
        measured: the last average that measured the divergence, as `Report` tells it: of all stages, where a pipeline
            has several; None where none did.
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
        self.replica = replica
        self.groups = Groups.of() if groups is None else groups
        replica.replicas = self.groups.replicas
        self.synchronizer = Synchronizer() if synchronizer is None else synchronizer
        self.callbacks = list(callbacks)
        self._guard = next((each for each in callbacks if isinstance(each, NonFinite)), None) or NonFinite()
        self._prefetch_buffer = integer("prefetch_buffer", prefetch_buffer, 0)
        self._on_device = check_on_device(data_on_device, replica.backend.name)
        self._shared = Shared() if shared is None else shared
        self._evaluator = Evaluator(replica, self.groups, self._who, self._open_feed)
        self.report_every = integer("report_every", report_every, 0)
        self.iteration = self.epoch = self.round = self.total_iterations = self.total_epochs = 0
        self.clock = Clock()
        self.evaluation: Evaluation | None = None
        self.stopped: Stop | None = None
        self.spent: Spent | None = None
        self.measured: Average | None = None
        self.scaler = LossScaler.of(replica.backend, self.groups, shared=self.synchronizer.shares_gradients)
        if isinstance(replica, RecordedReplica):
            replica.scaler = self.scaler
        self.skipped_steps = self._bytes_sent = 0  # of all workers, when they last agreed
        self._agreement = Agreement(self.groups)
        self._ahead: RecordedReplica | None = None  # in a fit, where it runs ahead of the host
        self._feed: BatchFeed | None = None  # of the batches that this fit trains on
        self._finished = True  # whether the last average of the fit has been made
        self._span_start: int | None = None  # where the learning-rate schedule of an unfinished fit began
        self._deal: tuple[int, ...] = ()  # how the epoch that `round` counts in was dealt out
        self._since, self._epoch_start, self._losses = Since(Clock()), Clock(), Losses()
        self.synchronizer.start(replica, self.groups.replicas)
        self._closing = self._start_callbacks(run)

    def _start_callbacks(self, run: Run | None) -> ExitStack:
        """What closes them again."""
        with ExitStack() as started:
            for callback in self.callbacks:
                started.callback(callback.close)  # before it starts: one that fails there lets go of what it has
                callback.start(self, run)
            return started.pop_all()

    @property
    def loss(self) -> float:
        """The training loss of the last complete epoch, see `EpochRecord`; NaN where there was none."""
        return self._losses.mean

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.groups.world.rank

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.groups.world.size

    @property
    def _who(self) -> str:
        return f"worker {self.rank} ({self.replica.place})"

    @property
    def world(self) -> Communicator:
        """The way to all other workers."""
        return self.groups.world

    @property
    def replicas(self) -> Communicator:
        """The way to the workers that train the same layers."""
        return self.groups.replicas

    @property
    def model(self) -> Model:
        """This worker's replica of the network; in a pipeline its stage's layers."""
        return self.replica.model

    @property
    def whole(self) -> Model:
        """The whole network in this process; that of rank 0 is the user's own."""
        return self.replica.whole

    @property
    def params(self) -> Params:
        """This worker's weights: of the whole network, or of its stage of a pipeline."""
        return self.replica.params

    @property
    def backend(self) -> Backend:
        """Where these weights live."""
        return self.replica.backend

    @property
    def _schedule(self) -> Schedule:
        return self.replica.optimizer.learning_rate

    @property
    def unfinished(self) -> bool:
        """Whether a fit has begun that has not come to its end: one that runs, or whose state was restored."""
        return self._span_start is not None

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Let all workers end their fit after the same round, soon; from any thread, a callback or a signal handler."""
        wish = Stop(reason, text)
        self._agreement.asked = self._agreement.asked or wish

    def forget_stop(self) -> None:
        """Take back what was wished for by `stop`: it is of one fit."""
        self._agreement.asked = None

    def diverged(self, text: str) -> None:
        """A fit has ended because a number was not finite, of this worker's or of another's; text: what was told of it.

        From the thread that called the fit, when all workers have left it: nothing can be exchanged any more.
        """
        self.backend.activate()
        self._tell("on_diverged", text)
        self.backend.synchronize()
        self.backend.deactivate()

    def close(self) -> None:
        """Let callbacks let go of what they hold: all of them, also where one fails to, and once."""
        self._closing.close()

    # training -------------------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Batches,
        epochs: int,
        *,
        evaluate_on: Batches | None = None,
        evaluate_every: int = 1,
        split: str = "test",
    ) -> None:
        """Train until `epochs` more epochs are complete; afterwards all replicas are identical.

        An epoch that a stop broke off is continued where it was left, if `train` has as many samples in batches of the
        same size as then; else it begins anew. A learning-rate schedule stretches over this fit, and begins anew in the
        next.

        Args:
            train: the batches of all workers.
            epochs: how many more; 0 only where the state of an unfinished fit was restored, which is ended then.
            evaluate_on: what is evaluated, in parallel, every `evaluate_every` epochs and after the last.
            split: what to call it, `test` or `validation`.

        Raises:
            ConfigError: an argument cannot work, or the data do not fit the network.
            DivergedError: a loss or a gradient is not finite, found before anything of it is used, see `NonFinite`; or
                a weight, found in the next round or where replicas are averaged.
        """
        epochs, evaluate_every, split = Fit.check(epochs, evaluate_every, split, least=0 if self.unfinished else 1)
        evaluated = split if evaluate_on is not None else None
        each = self.synchronizer.evaluates or self.groups.replicas.size == 1
        check_validation([*self.callbacks, self._schedule], evaluated, each=each)
        fit = Fit(train, self.epoch + epochs, evaluate_on, evaluate_every, split)
        for loader in filter(None, (train, evaluate_on)):
            self.replica.check(loader.dataset)
            self._refuse_other_data(loader)
        self._begin(fit)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), ExitStack() as opened:
                self._feed = feed = opened.enter_context(self._open_feed(train))
                if evaluate_on is not None:
                    opened.enter_context(self._evaluator.hold(evaluate_on))
                self.replica.begin()
                self.synchronizer.begin(self.replica)
                self._run_ahead()
                self._tell("on_fit_start")
                self._agreed(self._agreement.meet(self.clock, begun=False))
                while self.epoch < fit.last and not self.stopped:
                    self._epoch(fit, feed)
                    self._agreed(self._agreement.meet(self.clock))
                if self.stopped and not self._finished:
                    self._tell("on_stop")
                self._finish()
            if self.epoch == fit.last:
                self.stopped = None  # somebody wished to stop when all was done
            self._choose(fit)
            if self.scaler is not None:
                self.skipped_steps = self.scaler.of_all(self.groups.replicas)
            self.spent = Spent.of(self.groups.world.gather_numbers(*self._figures()))
            self._tell("on_fit_end")
        finally:
            self._agreement.asked, self._span_start = None, None  # these are of one fit

    def rounds(self, loader: Batches) -> int:
        """Rounds of an epoch: iterations of the busiest worker."""
        return loader.rounds(self.groups.replicas.size)

    def _begin(self, fit: Fit) -> None:
        """Where this fit starts and where it will end."""
        rounds = self.rounds(fit.train)
        deal = fit.train.deal(self.groups.replicas.size)
        if deal != self._deal:
            self.round, self._deal = 0, deal
        self.round = min(self.round, rounds)  # fewer workers than it is of have passed what no epoch of theirs comes to
        start = self.iteration if self._span_start is None else self._span_start
        self.total_iterations = self.iteration + (fit.last - self.epoch) * rounds - self.round
        self.total_epochs = fit.last
        self._schedule.span(start, self.total_iterations, rounds, fit.last)
        if self.rank == 0 and self._schedule.doubt:
            log.warning("learning rate: %s", self._schedule.doubt)
        self._finished = (
            self._finished and self.unfinished and self.epoch == fit.last
        )  # restored after its last average
        self.stopped, self._span_start = None, start

    def _open_feed(self, loader: Batches) -> BatchFeed:
        dealt = self.groups.replicas
        try:
            return BatchFeed(
                loader,
                self.replica.backend,
                dealt.rank,
                dealt.size,
                prefetch=self._prefetch_buffer,
                images=self.replica.needs_images,
                on_device=self._on_device,
                shared=self._shared,
            )
        except Exception as error:
            annotate(error, f"{self._who}, making room for batches")
            raise

    def _epoch(self, fit: Fit, feed: BatchFeed) -> None:
        """One epoch, or what is left of it: its rounds, the average that ends it, its evaluation."""
        rounds, dealt = self.rounds(fit.train), self.groups.replicas
        self.evaluation = None  # the last one is of weights that are about to move
        if self.round == 0:
            self._agreement.count_bytes(self.clock)
            self._epoch_start = replace(self.clock)
            self._read_losses()  # of an epoch that was broken off, and is not gone on with
            self._losses.begin_epoch()
        where = "before the first batch"
        try:
            with closing(feed.epoch(self.epoch, self.round)) as batches:
                while self.round < rounds and not self.stopped:
                    began, where = time.perf_counter(), "loading a batch"
                    waited_s = feed.waited_s
                    batch = self._next(batches)
                    self.clock.data_s += feed.waited_s - waited_s
                    where = "without a batch" if batch is None else f"at batch {batch.index}"
                    images = fit.train.images_of_round(self.round, dealt.size)
                    average = self._round(batch)
                    self.clock.count(self.iteration, images, time.perf_counter() - began)
                    self._after_round(average)
                self._catch_up()
        except DivergedError:
            raise  # says itself whose replica it is; several workers may raise it together
        except Exception as error:
            annotate(error, f"{self._who}, epoch {self.epoch + 1}, {where}")
            raise
        if self.round == rounds:
            self.epoch, self.round = self.epoch + 1, 0
            self._guard.end_epoch(self, fit.train)
            self._end_epoch(fit)

    def _next(self, batches: Iterator[Batch | None]) -> Batch | None:
        """The next batch of this worker; None if it has none in this round."""
        return next(batches)

    def _round(self, batch: Batch | None) -> Average | None:
        """The same calls on every worker, with a batch or without one."""
        if self._ahead is not None:
            return self._round_ahead(self._ahead, batch)
        replica, synchronizer, began = self.replica, self.synchronizer, time.perf_counter()
        samples = self._guard.checked(self, batch, replica.gradient(batch))
        derived = time.perf_counter()
        update = synchronizer.before_update(replica, samples)
        if not is_bool(update):
            name = type(synchronizer).__name__
            raise ConfigError(f"{name}.before_update returned {update!r}: return True or False")
        seen = time.perf_counter()
        if update and not (self.scaler is not None and self.scaler.skipping):
            self.groups.world.check()  # the model of one that was left behind belongs to its user again
            replica.update(self.iteration)
        if self.scaler is not None:
            self.scaler.updated()
        updated = time.perf_counter()
        average = synchronizer.after_update(replica, self.iteration)
        self.iteration, self.round = self.iteration + 1, self.round + 1
        self.clock.worked(derived - began + updated - seen, replica.waited_s)
        self.clock.averaging_s += seen - derived + time.perf_counter() - updated
        self.clock.samples += samples
        self._losses.add(samples, replica.losses)
        return average

    def _run_ahead(self) -> None:
        """Let the replica's steps run ahead of the host in this fit, where nobody has to look between two of them."""
        alone = self._guard.action == "stop" and not self.synchronizer.shares_gradients
        self._ahead = self.replica if alone and isinstance(self.replica, RecordedReplica) else None

    def launch_singly(self, wanted: bool) -> None:
        """See `TrainerView`."""
        if isinstance(self.replica, RecordedReplica):
            self._catch_up()
            self.replica.launch_singly(wanted)
            self._ahead = None
            if not wanted:
                self._run_ahead()

    def pieces(self) -> list[Piece]:
        """See `TrainerView`."""
        synchronizer = self.synchronizer
        return [
            Piece(self, "_next", "batch", "data"),
            Piece(self, "_round", "round", "training"),
            *self.replica.pieces(),
            Piece(self._guard, "checked", "check of the gradient", "training"),
            Piece(synchronizer, "before_update", "averaging of gradients", "averaging"),
            Piece(synchronizer, "after_update", "averaging of weights", "averaging"),
            Piece(synchronizer, "finish", "averaging of weights", "averaging"),
            Piece(self._agreement, "after_round", "agreement", "waiting"),
            Piece(self, "evaluate", "evaluation", "evaluation"),
            Piece(self, "_tell", "callbacks", "training"),
        ]

    def _round_ahead(self, replica: RecordedReplica, batch: Batch | None) -> Average | None:
        """A round whose step is asked for and not waited for, unless somebody is to look at what came of it."""
        began = time.perf_counter()
        replica.step(batch, self.round, self.iteration)
        if self.synchronizer.looks(self.iteration):
            self._settle()
        asked = time.perf_counter()
        average = self.synchronizer.after_update(replica, self.iteration)
        self.iteration, self.round = self.iteration + 1, self.round + 1
        self.clock.worked(asked - began, 0.0)
        self.clock.averaging_s += time.perf_counter() - asked
        return average

    def _catch_up(self) -> None:
        """`_settle` between two rounds."""
        if self._ahead is not None:
            began = time.perf_counter()
            self._settle()
            self.clock.caught_up(time.perf_counter() - began)

    def _settle(self) -> None:
        """Wait for what runs ahead, and count it. DivergedError: the replica stands still."""
        found = None if self._ahead is None else self._ahead.settle()
        if found is None:
            return
        if found.halted is not None:
            assert self._feed is not None
            raise self._guard.halted(self, self._feed.reload(self.epoch, found.halted))
        replica, left, losses = self.replica, found.samples, found.losses
        for samples in found.rounds.values():  # which of them were left out is not known, nor whose losses these are
            counted = min(samples, left)
            replica.losses, left, losses = losses, left - counted, 0.0 if counted else losses
            self.synchronizer.before_update(replica, counted)
        self.clock.samples += found.samples
        self._losses.add(found.samples, found.losses)

    def _after_round(self, average: Average | None) -> None:
        """Callbacks, the report if one is due, and whether somebody wishes to stop or has failed."""
        if average is not None:
            self._averaged(average)
        self.groups.world.check()
        if self.report_every and self.iteration % self.report_every == 0:
            self._catch_up()
            self._tell("on_report", self._report())
        self._tell("on_iteration_end")  # last: a state taken here is that of a round with all that belongs to it
        began = time.perf_counter()
        agreed = self._agreement.after_round(self.clock, self.iteration, averaged=average is not None)
        if agreed is not None:
            self._agreed(agreed)
            self.clock.meeting(time.perf_counter() - began)  # workers wait for each other here too

    def _report(self) -> Report:
        rate = self._schedule(self.iteration - 1)
        sent, position = self._bytes_sent, {"iteration": self.iteration, "epoch": self.epoch}
        self._read_losses()
        report = self._since.report(self.clock, **position, learning_rate=rate, bytes_sent=sent)
        self._since = Since(replace(self.clock))
        return report

    def _read_losses(self) -> None:
        self._since.add(*self._losses.read())

    def _end_epoch(self, fit: Fit) -> None:
        """The average that the rules ask for here, then the evaluation of replicas that are identical."""
        last, rate = self.epoch == fit.last, self._schedule(self.iteration - 1)
        self._read_losses()
        due = fit.evaluate_on is not None and (last or self.epoch % fit.evaluate_every == 0)
        if last:
            self._finish()
        else:
            self._average("evaluation" if due else "epoch")
        if due and fit.evaluate_on is not None and self.synchronizer.identical:
            self.replica.assemble()
            self.evaluation = self.evaluate(fit.evaluate_on)
            if self._schedule.monitor is not None:
                self._schedule.learn(getattr(self.evaluation, self._schedule.monitor))
        start, now = self._epoch_start, self._figures()
        samples, seconds = self.clock.images - start.images, self.clock.rounds_s - start.rounds_s
        own = [mine - getattr(start, name) for name, mine in zip(SPENT, now, strict=True)]
        others = self._losses.epoch_samples, self._losses.epoch_losses, self.clock.bytes_sent
        table = self.groups.world.gather_numbers(*own, *others)  # (W, figures + 3)
        stages = self.groups.stages.size  # the last of them have the losses: the first are told, and would count twice
        counts, sums = (np.where(np.arange(len(table)) % stages == stages - 1, each, 0) for each in table.T[-3:-1])
        losses = [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
        self._losses.mean = float(sums.sum() / counts.sum()) if counts.any() else math.nan
        record = EpochRecord(
            self.epoch,
            self.iteration,
            samples,
            seconds,
            fit.split,
            self.evaluation,
            Spent.of(table[:, :-3]),
            int(table[:, -1].sum()),
            self._losses.mean,
            [float(loss) for loss in losses],
            rate,
        )
        self._tell("on_epoch_end", record)

    def _finish(self) -> None:
        """The end of a fit, once: from here on all replicas are identical."""
        if not self._finished:
            self._finished = True
            moved = self._moved_in("before_finish")
            began = time.perf_counter()
            if self.groups.replicas.gather_numbers(moved).any():
                self.synchronizer.changed(self.replica)
            self.clock.meeting(time.perf_counter() - began)
            self._average("fit")
            name = type(self.synchronizer).__name__
            self._refuse_different(
                f"{name}: the replicas differ at the end of a fit: average them in finish(replica, 'fit')"
            )
            self.replica.assemble()

    def _refuse_other_data(self, loader: Batches) -> None:
        """Workers in several processes load for themselves: refuse where one has found something else. DataError."""
        world = self.groups.world
        if world.size > 1:
            found = world.gather_numbers(loader.signature)[:, 0]  # (W,)
            others = np.flatnonzero(found != found[0]).tolist()
            if others:
                who = f"worker{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
                raise DataError(
                    f"{who} would train on other data than worker 0, or in another order: bring the same data to all "
                    "machines, and start them with the same settings"
                )

    def _refuse_different(self, message: str) -> None:
        """A fit promises identical replicas: refuse what leaves them different."""
        own = [float(self.backend.total(vector)) for vector in self.replica.params.vectors]
        if len({tuple(theirs) for theirs in self.groups.replicas.gather_numbers(*own).tolist()}) > 1:
            raise ConfigError(message)

    def _moved_in(self, event: str) -> bool:
        """Tell callbacks of an event in which they may change weights: whether they did, on this worker."""
        vectors = self.replica.params.vectors
        copies = [vector.copy() for vector in vectors]
        self._tell(event)
        return any(starmap(moved, zip(vectors, copies, strict=True)))

    def _choose(self, fit: Fit) -> None:
        """Callbacks may give the replicas other weights, which are evaluated then; not after a signal: it is urgent."""
        if not self.groups.world.gather_numbers(self._moved_in("after_finish")).any():
            return
        self._refuse_different(
            "a callback changed the weights of some replicas alone, in after_finish: let it run on every worker "
            "(every_rank = True) and do the same on each"
        )
        self.replica.assemble()
        self.evaluation = None
        if fit.evaluate_on is not None and (self.stopped is None or self.stopped.reason != StopReason.SIGNAL):
            self.evaluation = self.evaluate(fit.evaluate_on)

    def _average(self, moment: Moment) -> None:
        """Whatever average the synchronizer makes at this moment; where it makes none, a look at the weights."""
        began = time.perf_counter()
        average = self.synchronizer.finish(self.replica, moment)
        if average is not None:
            self.clock.meeting(time.perf_counter() - began)
            self._averaged(average)
        elif not is_finite(*self.replica.params.vectors):
            raise DivergedError(
                f"the replica of worker {self.rank} is not finite after iteration {self.iteration}: "
                "lower learning_rate, or train in a wider dtype"
            )

    def _agreed(self, agreed: Agreed) -> None:
        """All workers know the same: whether to stop, and how far the stages' replicas were apart."""
        self.stopped = agreed.stop
        if agreed.bytes_sent is not None:
            self._bytes_sent = agreed.bytes_sent
        if agreed.measured is not None:
            self._measured(agreed.measured)

    def _averaged(self, average: Average) -> None:
        """An average has been made: what it found goes into the next report."""
        if self.scaler is not None:
            self.scaler.meet(self.groups.replicas)
        if self.groups.stages.size > 1 and not math.isnan(average.divergence):
            self._agreement.own, average = (
                average,
                Average(average.score, math.nan),
            )  # told when workers agree the next time
        self._since.averaged(average)
        self._measured(average)

    def _measured(self, average: Average) -> None:
        """How far the replicas of the whole network were apart, if that was measured."""
        if not math.isnan(average.divergence):
            self.measured = average
            self._since.measured(average)

    def _figures(self) -> list[float]:
        """What this worker has spent so far, in the order of `SPENT`."""
        self._agreement.count_bytes(self.clock)
        return [getattr(self.clock, name) for name in SPENT]

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    # evaluation -----------------------------------------------------------------------------------------------------

    def evaluate(self, loader: Batches) -> Evaluation:
        """Evaluate a data set in parallel: each worker its own batches; the same result on all of them.

        Raises:
            ConfigError: the data do not fit the network.
        """
        began = time.perf_counter()
        self.replica.check(loader.dataset)
        self._refuse_other_data(loader)
        evaluation = self._evaluator.evaluate(loader)
        self.clock.evaluate_s += time.perf_counter() - began
        return evaluation

    # resuming -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Where training is, after any round: what a checkpoint of this worker must hold to go on exactly.

        Numbers, and arrays on the host, by name, in dictionaries. It causes no average.
        """
        self._catch_up()
        return {
            "trainer": {
                **{name: getattr(self, name) for name in ("iteration", "epoch", "round")},
                "fitting": int(self.unfinished),
                "finished": int(self._finished),
                "span_start": self._span_start or 0,
                "deal": np.array(self._deal, np.int64),
            },
            "clock": asdict(self.clock),
            "epoch_start": asdict(self._epoch_start),
            "since": asdict(self._since),
            "losses": self._losses.state(),
            "replica": self.replica.state(),
            "schedule": self._schedule.state(),
            "synchronizer": self.synchronizer.state(),
            "scaling": {} if self.scaler is None else self.scaler.state(),
            "own": {} if self._agreement.own is None else asdict(self._agreement.own),
            "callbacks": {name: callback.state() for name, callback in self._named_callbacks().items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; the next `fit` goes on there, its learning-rate schedule too.

        Raises:
            ConfigError: it is the state of another network, optimizer or synchronizer, or of too few workers.
        """
        self.synchronizer.check_state(state["synchronizer"])
        position = state["trainer"]
        self.iteration, self.epoch, self.round = (position[name] for name in ("iteration", "epoch", "round"))
        self._span_start = position["span_start"] if position["fitting"] else None
        self._finished = bool(position["finished"])
        self._deal = tuple(int(count) for count in position["deal"])
        self.clock, self._epoch_start = Clock(**state["clock"]), Clock(**state["epoch_start"])
        self._since = Since(**{**state["since"], "start": Clock(**state["since"]["start"])})
        self._losses = Losses(**state["losses"])
        self._agreement.own = Average(**state["own"]) if state["own"] else None
        self.replica.restore(state["replica"])
        self._schedule.restore(state["schedule"])
        self._restore_scale(state)
        self.synchronizer.restore(state["synchronizer"])
        for name, callback in self._named_callbacks().items():
            if name in state["callbacks"]:  # the others are new
                callback.restore(state["callbacks"][name])

    def _restore_scale(self, state: dict[str, Any]) -> None:
        if self.scaler is not None:
            self.scaler.restore(state["scaling"])

    def _named_callbacks(self) -> dict[str, Callback]:
        """This worker's callbacks by their kind, and a number where there are several of one."""
        named: dict[str, Callback] = {}
        for callback in self.callbacks:
            kind = type(callback).__name__
            number = sum(type(each).__name__ == kind for each in named.values()) + 1
            named[kind if number == 1 else f"{kind}{number}"] = callback
        return named
