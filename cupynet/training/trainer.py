"""The training loop: the same code on every worker.

A round is one iteration of every replica. Worker r of W trains on batches r, r + W, r + 2W ... of an epoch; in the last
round some may have none, and make the same calls all the same. The trainer owns rounds, position, events and stopping;
the replica computes, and the synchronizer keeps replicas together.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import numpy as np

from cupynet.backend import Shared
from cupynet.checks import integer, is_bool, one_of
from cupynet.data import Batch, Batches, BatchFeed
from cupynet.errors import ConfigError, DataError, DivergedError, annotate
from cupynet.optim import Schedule
from cupynet.parallel import Average, Communicator, Groups, Moment, Synchronizer, is_finite
from cupynet.runs import Run
from cupynet.training.callbacks import Callback, Chooser, check_validation
from cupynet.training.clock import Clock, Statistics
from cupynet.training.consensus import Agreed, StopConsensus
from cupynet.training.evaluator import Evaluator
from cupynet.training.metrics import Evaluation
from cupynet.training.nonfinite import NonFinite
from cupynet.training.records import Piece, Spent, Stop, StopReason
from cupynet.training.replica import Replica, moved
from cupynet.training.trainer_state import TrainerState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """The arguments of `Trainer.fit`.

    Attributes:
        unfinished: the fit continues a restored one, which may have no epoch left to train.

    Raises:
        ConfigError: an argument is not valid.
    """

    train: Batches
    epochs: int
    evaluate_on: Batches | None
    evaluate_every: int
    split: str
    unfinished: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "epochs", integer("epochs", self.epochs, 0 if self.unfinished else 1))
        object.__setattr__(self, "evaluate_every", integer("evaluate_every", self.evaluate_every, 1))
        one_of("split", self.split, ("test", "validation"))

    def check_choosers(self, choosers: Sequence[Chooser], synchronizer: Synchronizer, workers: int) -> None:
        """Refuse a fit without the evaluations that something chooses by. ConfigError."""
        evaluated = None if self.evaluate_on is None else self.split
        check_validation(choosers, evaluated, each=synchronizer.evaluates or workers == 1)


class Trainer:
    """Trains one replica, alone or with others.

    Args:
        replica: what is trained.
        groups: the other workers; alone by default.
        synchronizer: keeps the replicas together; not needed by one alone.
        callbacks: this worker's own, see `Callback`.
        prefetch_buffer: batches made ahead for this worker by a thread; 0 for none.
        data_on_device, shared: whether images stay on a GPU, and what the workers of this process share there, see
            `Backend.transfer`.
        report_every: iterations between reports; 0 for none.
        run: where callbacks write.

    Attributes:
        at: where training is; `iteration`: iterations so far, counted in rounds; `epoch`, `round`: complete epochs so
            far, and complete rounds of the one after them.
        total_iterations: what `iteration` will be at the end of this `fit`.
        total_epochs: what `epoch` will be at the end of this `fit`.
        evaluation: of the last complete epoch, or of the weights that a callback chose at the end; None if there was
            none.
        stopped: why the last fit ended early; None if it did not.
        spent: what all workers had spent at the end of the last fit; None before.
        skipped_steps: of all replicas, as the gradient overflowed; known at the end of a fit.
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
        self.model, self.whole, self.params, self.backend = (
            replica.model,
            replica.whole,
            replica.params,
            replica.backend,
        )
        self.synchronizer = Synchronizer() if synchronizer is None else synchronizer
        replica.join(self.groups, shares_gradients=self.synchronizer.shares_gradients)
        self.callbacks = list(callbacks)
        self._guard = next((each for each in callbacks if isinstance(each, NonFinite)), None) or NonFinite()
        self._prefetch_buffer = prefetch_buffer
        self._on_device = data_on_device
        self._shared = Shared() if shared is None else shared
        self._feed: BatchFeed | None = None  # of the batches that this fit trains on
        self._evaluator = Evaluator(replica, self.groups, self._who, self._open_feed)
        self.report_every = report_every
        self.total_iterations = self.total_epochs = 0
        self.evaluation: Evaluation | None = None
        self.stopped: Stop | None = None
        self.spent: Spent | None = None
        self.skipped_steps = 0
        self.consensus = StopConsensus(self.groups)
        self.at = TrainerState(replica, self.synchronizer, self.callbacks, self.consensus)
        self.synchronizer.start(replica, self.replicas)
        self._closing = self._start_callbacks(run)

    def _start_callbacks(self, run: Run | None) -> ExitStack:
        with ExitStack() as started:
            for callback in self.callbacks:
                started.callback(callback.close)  # also if `start` fails
                callback.start(self, run)
            return started.pop_all()

    @property
    def iteration(self) -> int:
        """Iterations so far."""
        return self.at.iteration

    @property
    def epoch(self) -> int:
        """Complete epochs so far."""
        return self.at.epoch

    @property
    def round(self) -> int:
        """Complete rounds of the epoch after those."""
        return self.at.round

    @property
    def statistics(self) -> Statistics:
        """What this worker counted."""
        return self.at.statistics

    @property
    def clock(self) -> Clock:
        """Where this worker's time went."""
        return self.statistics.clock

    @property
    def _who(self) -> str:
        return f"worker {self.rank} ({self.replica.place})"

    @property
    def _schedule(self) -> Schedule:
        return self.replica.optimizer.learning_rate

    @property
    def unfinished(self) -> bool:
        """Whether a fit has begun that has not ended: one that runs, or whose state was restored."""
        return self.at.fit_start is not None

    def stop(self, text: str = "stop() was called", reason: StopReason = StopReason.REQUEST) -> None:
        """Let all workers end their fit after the same round, soon; from any thread, a callback or a signal handler."""
        wish = Stop(reason, text)
        self.consensus.wish = self.consensus.wish or wish

    def diverged(self, text: str) -> None:
        """Tell callbacks that a fit has ended because a number was not finite, of this worker's or of another's.

        From the thread that called the fit, when all workers have left it: nothing can be exchanged any more.
        """
        self.backend.activate()
        self._emit("on_diverged", text)
        self.backend.synchronize()
        self.backend.deactivate()

    def close(self) -> None:
        """Close all callbacks, even if one of them fails; once."""
        self._closing.close()

    def state(self) -> dict[str, Any]:
        """Return where training is, after any round: what a checkpoint of this worker must hold to continue exactly.

        Numbers, and arrays on the host, by name, in dictionaries. It causes no average.
        """
        self._catch_up()
        return self.at.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; the next `fit` continues there, its learning-rate schedule too.

        Raises:
            ConfigError: it is the state of another network, optimizer or synchronizer, or of too few workers.
        """
        self.at.restore(state)

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

        An epoch that a stop broke off is continued, if `train` has as many samples in batches of the same size as then;
        else it begins again. A learning-rate schedule stretches over this fit, and begins again in the next.

        Args:
            train: the batches of all workers.
            epochs: how many more; 0 only if the state of an unfinished fit was restored, which is ended then.
            evaluate_on: what is evaluated, in parallel, every `evaluate_every` epochs and after the last.
            split: what to call it, `test` or `validation`.

        Raises:
            ConfigError: an argument is not valid, or the data do not fit the network.
            DivergedError: a loss or a gradient is not finite, found before anything of it is used, see `NonFinite`; or
                a weight, found in the next round or when replicas are averaged.
        """
        fit = Fit(train, epochs, evaluate_on, evaluate_every, split, unfinished=self.unfinished)
        fit.check_choosers([*self.callbacks, self._schedule], self.synchronizer, self.replicas.size)
        for loader in filter(None, (train, evaluate_on)):
            self.replica.check(loader.dataset)
            refuse_other_data(self.world, loader)
        self._begin(fit)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"), ExitStack() as opened:
                self._feed = opened.enter_context(self._open_feed(train))
                if evaluate_on is not None:
                    opened.enter_context(self._evaluator.hold(evaluate_on))
                self.replica.begin()
                self.synchronizer.begin(self.replica)
                self.replica.run_ahead(self._guard.action == "stop" and not self.synchronizer.shares_gradients)
                self._emit("on_fit_start")
                self._agree(self.consensus.meet(self.clock, begun=False))
                while self.epoch < self.total_epochs and not self.stopped:
                    self._epoch(fit, self._feed)
                    self._agree(self.consensus.meet(self.clock))
                if self.stopped and not self.at.finished:
                    self._emit("on_stop")
                self._finish()
            if self.epoch == self.total_epochs:
                self.stopped = None  # the wish came when everything was done
            self._choose(fit)
            if self.replica.scaler is not None:
                self.skipped_steps = self.replica.scaler.of_all(self.replicas)
            self.consensus.count_bytes(self.clock)
            self.spent = Spent.of(self.world.gather_numbers(*self.clock.spent()))
            self._emit("on_fit_end")
        finally:
            self.consensus.wish, self.at.fit_start = None, None  # these belong to one fit

    def _begin(self, fit: Fit) -> None:
        """Set where this fit starts and where it will end."""
        rounds, deal = self._rounds(fit.train), fit.train.deal(self.replicas.size)
        if deal != self.at.deal:
            self.at.round, self.at.deal = 0, deal
        self.at.round = min(self.round, rounds)  # with more workers an epoch may have fewer rounds than were done
        start = self.iteration if self.at.fit_start is None else self.at.fit_start
        self.total_epochs = self.epoch + fit.epochs
        self.total_iterations = self.iteration + fit.epochs * rounds - self.round
        self._schedule.span(start, self.total_iterations, rounds, self.total_epochs)
        if self.rank == 0 and self._schedule.doubt:
            log.warning("learning rate: %s", self._schedule.doubt)
        self.at.finished = self.at.finished and self.unfinished and not fit.epochs  # restored after its last average
        self.stopped, self.at.fit_start = None, start

    def _rounds(self, loader: Batches) -> int:
        """Return the rounds of an epoch: iterations of the busiest worker."""
        return loader.rounds(self.replicas.size)

    def _open_feed(self, loader: Batches) -> BatchFeed:
        try:
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
        except Exception as error:
            annotate(error, f"{self._who}, making room for batches")
            raise

    def _epoch(self, fit: Fit, feed: BatchFeed) -> None:
        """Train one epoch, or the rest of it: its rounds, the average that ends it, its evaluation."""
        rounds, where = self._rounds(fit.train), "before the first batch"
        at, clock = self.at, self.clock
        self.evaluation = None  # the last one is of weights that are about to move
        if at.round == 0:
            self.consensus.count_bytes(clock)
            self.statistics.begin_epoch()
        try:
            with closing(feed.epoch(at.epoch, at.round)) as batches:
                while at.round < rounds and not self.stopped:
                    began, waited_s, where = time.perf_counter(), feed.waited_s, "loading a batch"
                    batch = self._next(batches)
                    clock.data_s += feed.waited_s - waited_s
                    where = "without a batch" if batch is None else f"at batch {batch.index}"
                    images = fit.train.images_of_round(at.round, self.replicas.size)
                    average = self._round(batch)
                    clock.count(at.iteration, images, time.perf_counter() - began)
                    self._after_round(average)
                self._catch_up()
        except DivergedError:
            raise  # it names the replica itself; several workers may raise it together
        except Exception as error:
            annotate(error, f"{self._who}, epoch {at.epoch + 1}, {where}")
            raise
        if at.round == rounds:
            at.epoch, at.round = at.epoch + 1, 0
            self._guard.end_epoch(self, fit.train)
            self._end_epoch(fit)

    def _next(self, batches: Iterator[Batch | None]) -> Batch | None:
        """Return the next batch of this worker; None if it has none in this round."""
        return next(batches)

    def _round(self, batch: Batch | None) -> Average | None:
        """Train one round: the same calls on every worker, with a batch or without one."""
        replica, synchronizer, at = self.replica, self.synchronizer, self.at
        began = time.perf_counter()
        step = self._guard.checked(self, replica.gradient(batch))
        derived = time.perf_counter()
        wanted = step.ahead or self._before_update(step.samples)
        shared = time.perf_counter()
        if wanted:
            self.world.check()  # a worker that timed out must not touch the user's model
            replica.update(at.iteration, None if synchronizer.shares_gradients else step.squared_norm)
        if step.ahead and synchronizer.looks(at.iteration):
            self._settle()
        updated = time.perf_counter()
        average = synchronizer.after_update(replica, at.iteration)
        at.iteration, at.round = at.iteration + 1, at.round + 1
        clock = at.statistics.clock
        clock.worked(derived - began + updated - shared, replica.waited_s)
        clock.averaging_s += shared - derived + time.perf_counter() - updated
        at.statistics.count(step.samples, replica.losses)
        return average

    def _before_update(self, samples: int) -> bool:
        wanted = self.synchronizer.before_update(self.replica, samples)
        if not is_bool(wanted):
            name = type(self.synchronizer).__name__
            raise ConfigError(f"{name}.before_update returned {wanted!r}: return True or False")
        return wanted

    def _after_round(self, average: Average | None) -> None:
        """Call callbacks, report if one is due, and learn whether a worker wishes to stop or has failed."""
        iteration, clock = self.iteration, self.clock
        if average is not None:
            self._averaged(average)
        self.world.check()
        if self.report_every and iteration % self.report_every == 0:
            self._catch_up()
            self._emit("on_report", self.statistics.report(iteration, self.epoch, self._schedule(iteration - 1)))
        self._emit("on_iteration_end")  # last: a state taken here includes everything of this round
        began = time.perf_counter()
        agreed = self.consensus.after_round(clock, iteration, averaged=average is not None)
        if agreed is not None:
            self._agree(agreed)
            clock.meeting(time.perf_counter() - began)  # workers wait for each other here too

    def _catch_up(self) -> None:
        """Between two rounds: wait for the steps that run ahead of the host, and count them."""
        began = time.perf_counter()
        if self._settle():
            self.clock.caught_up(time.perf_counter() - began)

    def _settle(self) -> bool:
        """Wait for the steps that run ahead, and count them; False if there are none.

        Raises:
            DivergedError: the replica stands still since one of them.
        """
        found = self.replica.settle()
        if found is None:
            return False
        if found.halted is not None:
            assert self._feed is not None
            batch = self._feed.reload(self.epoch, self.round - (self.iteration - found.halted))
            raise self._guard.halted(self, batch)
        self.replica.losses = found.losses
        for number in range(found.rounds):  # which of them the samples are of is not known, and does not matter
            self.synchronizer.before_update(self.replica, 0 if number else found.samples)
        self.statistics.count(found.samples, found.losses)
        return True

    def launch_singly(self, wanted: bool) -> None:
        """See `TrainerView`."""
        self._catch_up()
        self.replica.launch_singly(wanted)

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
            Piece(self.consensus, "after_round", "agreement", "waiting"),
            Piece(self, "evaluate", "evaluation", "evaluation"),
            Piece(self, "_emit", "callbacks", "training"),
        ]

    # the end of an epoch, and of a fit ------------------------------------------------------------------------------

    def _end_epoch(self, fit: Fit) -> None:
        """Make the average that the rules ask for here, then evaluate replicas that are identical."""
        last, rate = self.epoch == self.total_epochs, self._schedule(self.iteration - 1)
        self.statistics.read_losses()
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
        self.consensus.count_bytes(self.clock)
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
        self._emit("on_epoch_end", record)

    def _finish(self) -> None:
        """End a fit, once: from here on all replicas are identical."""
        if self.at.finished:
            return
        self.at.finished = True
        moved = self._moved_in("before_finish")
        began = time.perf_counter()
        if self.replicas.gather_numbers(moved).any():
            self.synchronizer.changed(self.replica)
        self.clock.meeting(time.perf_counter() - began)
        self._average("fit")
        name = type(self.synchronizer).__name__
        refuse_different(
            self.replica, self.replicas,
            f"{name}: the replicas differ at the end of a fit: average them in finish(replica, 'fit')",
        )  # fmt: skip
        self.replica.assemble()

    def _choose(self, fit: Fit) -> None:
        """Let callbacks give the replicas other weights, and evaluate these; not after a signal, which is urgent."""
        if not self.world.gather_numbers(self._moved_in("after_finish")).any():
            return
        refuse_different(
            self.replica, self.replicas,
            "a callback changed the weights of some replicas alone, in after_finish: let it run on every worker "
            "(every_rank = True) and do the same on each",
        )  # fmt: skip
        self.replica.assemble()
        self.evaluation = None
        if fit.evaluate_on is not None and (self.stopped is None or self.stopped.reason != StopReason.SIGNAL):
            self.evaluation = self.evaluate(fit.evaluate_on)

    def _moved_in(self, event: str) -> bool:
        """Emit an event in which callbacks may change weights; return whether they did, on this worker."""
        vectors = self.params.vectors
        copies = [vector.copy() for vector in vectors]
        self._emit(event)
        return any(starmap(moved, zip(vectors, copies, strict=True)))

    def _average(self, moment: Moment) -> None:
        """Make whatever average the synchronizer makes at this moment; if it makes none, check the weights."""
        began = time.perf_counter()
        average = self.synchronizer.finish(self.replica, moment)
        if average is not None:
            self.clock.meeting(time.perf_counter() - began)
            self._averaged(average)
        elif not is_finite(*self.params.vectors):
            raise DivergedError(
                f"the replica of worker {self.rank} is not finite after iteration {self.iteration}: "
                "lower learning_rate, or train in a wider dtype"
            )

    def _averaged(self, average: Average) -> None:
        """Take note of an average: replicas agree on a loss scale, and the next report has what it found."""
        if self.replica.scaler is not None:
            self.replica.scaler.meet(self.replicas)
        if self.groups.stages.size > 1 and not math.isnan(average.divergence):
            self.consensus.own = average  # other stages hear of it when workers agree the next time
            average = Average(average.score, math.nan)
        self.statistics.averaged(average)

    def _agree(self, agreed: Agreed) -> None:
        """Take over what all workers know: whether to stop, and how far the stages' replicas were apart."""
        self.stopped = agreed.stop
        self.statistics.agreed(agreed.bytes_sent, agreed.measured)

    def _emit(self, event: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *arguments)

    def evaluate(self, loader: Batches) -> Evaluation:
        """Evaluate a data set in parallel: each worker its own batches; the same result on all of them.

        Raises:
            ConfigError: the data do not fit the network.
        """
        began = time.perf_counter()
        self.replica.check(loader.dataset)
        refuse_other_data(self.world, loader)
        evaluation = self._evaluator.evaluate(loader)
        self.clock.evaluate_s += time.perf_counter() - began
        return evaluation


def refuse_other_data(world: Communicator, loader: Batches) -> None:
    """Refuse data or an order of them that differ between workers: processes load for themselves. DataError."""
    if world.size == 1:
        return
    found = world.gather_numbers(loader.signature)[:, 0]  # (W,)
    others = np.flatnonzero(found != found[0]).tolist()
    if others:
        who = f"worker{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
        raise DataError(
            f"{who} would train on other data than worker 0, or in another order: bring the same data to all "
            "machines, and start them with the same settings"
        )


def refuse_different(replica: Replica, replicas: Communicator, message: str) -> None:
    """Refuse replicas that differ where they must be identical. ConfigError."""
    own = [float(replica.backend.total(vector)) for vector in replica.params.vectors]
    if len({tuple(theirs) for theirs in replicas.gather_numbers(*own).tolist()}) > 1:
        raise ConfigError(message)
