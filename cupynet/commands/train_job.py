"""A training run: load the data, train, evaluate, and write the results."""

from __future__ import annotations

import copy
import gc
import logging
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

from cupynet import config
from cupynet.backend import available_cores
from cupynet.backend.environment import commit, environment
from cupynet.commands.result_table import result_table
from cupynet.config import resume
from cupynet.config.announcement import announce
from cupynet.config.experiment import Experiment
from cupynet.core import signals
from cupynet.core.checks import finite
from cupynet.core.errors import CupynetError, DataError, Interrupted
from cupynet.data import Data, Loader
from cupynet.runs.layout import CHECKPOINTS, checkpoints
from cupynet.runs.run import Cost, Outcome, Run, Scores, Setup, Start, Summary
from cupynet.training import (
    EarlyStopping,
    Evaluation,
    LambdaCallback,
    ParallelWrapper,
    Pools,
    Spent,
    StopReason,
    Trainer,
    advise,
    unlearned,
)

log = logging.getLogger(__name__)


class TrainJob:
    """Runs an experiment and writes its results to the run folder. All ranks train; only rank 0 writes and prints."""

    data: Data
    wrapper: ParallelWrapper

    def __init__(self, experiment: Experiment, run: Run) -> None:
        self.experiment, self.run, self.settings = experiment, run, experiment.settings
        self.first, self.began = experiment.rank == 0, time.perf_counter()
        self.resumed = None if self.settings.resume is None else Path(self.settings.resume)
        self._epochs_left = self.settings.epochs
        self._deferred = config.deferred()
        self._rehearsal = Thread(target=experiment.rehearse, name="cupynet-rehearsal")

    def train(self) -> float | None:
        """See `cupynet.commands.train.train`. A second signal raises KeyboardInterrupt."""
        if self.first:
            announce(self.experiment)
            for callback in self.experiment.callbacks:
                callback.check_path()
        if self.experiment.backend_name == "numba":
            self._rehearsal.start()  # compile kernels while loading the data
        self.data = self.experiment.load()
        if self.first:  # after loading, so that the folder is unchanged if loading fails
            if self.resumed is None:
                self.run.begin()
            else:
                self.run.tidy()
        split = "test" if self.data.validation is None else "validation"  # evaluated after each epoch
        held_out = self.experiment.evaluation_loader(getattr(self.data, split))
        beginning = LambdaCallback(on_fit_start=self.begin)
        beginning.last = True  # nothing is replaced if another callback fails
        with self.experiment.wrapper([*self.experiment.own_callbacks(), beginning], self.run) as self.wrapper:
            if self.resumed is not None and not self._restore(self.resumed):
                return None
            if self.first and self.resumed is None:
                self.run.describe(self._start())
            received = _Signals(self.wrapper, prints=self.first)
            with signals.handled(received):
                self._fit(split, held_out)
                evaluations = self._evaluate(split, held_out)
                summary = self._save(evaluations)
                number = self._signal(received.number)
        if self.first:  # after closing the wrapper, because its callbacks write the report
            self._show(summary, evaluations.get("test"), interrupted=number != 0)
        if number:  # even if training was already complete, to end a sweep
            raise Interrupted(number, saved(self.run, self.experiment))
        chosen = evaluations.get(split)
        return None if chosen is None else finite(chosen.accuracy)

    def begin(self, trainer: Trainer) -> None:
        """Called on rank 0 when training begins. From then on, a resumed run replaces its earlier results."""
        if self._rehearsal.ident is not None:
            self._rehearsal.join()
        if self.resumed is None:
            self._deferred()
            return
        self.run.reopen(trainer.iteration)
        settings, _ = config.stored_settings(self.run.folder)
        self._deferred()  # stores the changed settings
        previous, setup = self.run.last_start(), asdict(self._setup())
        warn_of_other_rates(trainer, previous.get("epochs"))
        changed = resume.changes_results(settings, config.stored_settings(self.run.folder)[0])
        changed |= any(previous.get(name, setup[name]) != setup[name] for name in ("backend", "workers", "stages"))
        self.run.describe(self._start(previous, changed=changed))

    def _restore(self, path: Path) -> bool:
        """Restore a checkpoint. Return False if there is nothing left to train."""
        self.wrapper.restore(resume.checkpoint_of(path))
        trainer = self.wrapper.trainer
        if trainer.data not in (None, self.experiment.train_loader(self.data).identity):  # None: from version 0.1.0
            reason = "the labels or the order of the training images differ from the run's"
            raise DataError(f"{path}: cannot resume, because {reason}. Start a new run")
        log.info("resuming after iteration %d, epoch %d", trainer.iteration, trainer.epoch)
        if resume.checkpoint_of(path).name == CHECKPOINTS and resume.finished(self.run.folder):
            epochs = self.run.summary().outcome.epochs  # its last checkpoint may be older
            if epochs >= self.settings.epochs:
                log.info("the run is complete (epoch %d). Set a larger epochs=... to continue training", epochs)
                return False
        self._epochs_left = max(self.settings.epochs - trainer.epoch, 0)  # 0 if it was killed after its last epoch
        clock = trainer.statistics.clock
        self.began -= clock.compile_s + clock.rounds_s + clock.evaluate_s  # `wall_s` covers all processes
        return True

    def _fit(self, split: str, held_out: Loader) -> None:
        """Train. If training diverges, save the best weights if there are any."""
        wrapper, pipeline = self.wrapper, self.wrapper.options.pipeline
        if wrapper.placement.stages > 1 and pipeline is not None:
            log.info("stages: %s", pipeline.describe(wrapper.layers))
        if not gc.isenabled():  # the command has disabled it
            gc.freeze()
            gc.unfreeze()  # moves all objects to the oldest generation without scanning them
            gc.enable()
        train, every = self.experiment.train_loader(self.data), self.settings.evaluate_every_epochs
        evaluated: dict[str, Any] = {"evaluate_on" if split == "test" else "validation_data": held_out}
        try:
            wrapper.fit(train, epochs=self._epochs_left, evaluate_every=every, **evaluated)
        except CupynetError:
            found = self._early_stopping()
            if found is not None and found["reason"] == "diverged" and found["restored"]:
                self.run.save(self._summary({}), wrapper.model.weights())
                log.info("the best weights (epoch %d) are in %s", found["best_epoch"], self.run)
            raise

    def _evaluate(self, split: str, held_out: Loader) -> dict[str, Evaluation]:
        """Return the evaluations of the held-out images and the test images by split; empty if interrupted."""
        wrapper, data, stop = self.wrapper, self.data, self.wrapper.trainer.stopped
        complete = stop is None or not stop.urgent
        chosen = wrapper.trainer.evaluation  # evaluation of the last epoch or the best weights; None if interrupted
        if chosen is None and complete:
            chosen = wrapper.evaluate(held_out)
        found = {} if chosen is None else {split: chosen}
        if complete and "test" not in found and self.experiment.tests and len(data.test):
            found["test"] = wrapper.evaluate(self.experiment.evaluation_loader(data.test))
        return found

    def _save(self, evaluations: Mapping[str, Evaluation]) -> Summary:
        summary, test = self._summary(evaluations), evaluations.get("test")
        if self.first:
            wrong = [] if test is None else [mistake.sample for mistake in test.mistakes]
            self.run.save(summary, self.wrapper.model.weights(), self.data.test.images[wrong])
        return summary

    def _signal(self, received: int) -> int:
        """Return the signal that any of the processes received, or 0."""
        found: list[float] = []
        self.wrapper.on_workers(lambda trainer: found.append(trainer.world.gather_numbers(received).max()))
        return int(found[0])

    def _show(self, summary: Summary, test: Evaluation | None, *, interrupted: bool) -> None:
        """Warn if the model has learned nothing, and print a table of the results."""
        if test is not None and (warning := unlearned(test)) is not None:
            log.warning("%s", warning)
        progress = self.settings.callbacks.get("progress") or {}
        silent = config.in_sweep() or progress.get("style") == "none"  # a sweep prints a table of all jobs
        if not silent and (test is not None or not interrupted):
            result_table(summary, self.run)

    # results --------------------------------------------------------------------------------------------------------

    def _start(self, previous: Mapping[str, Any] | None = None, *, changed: bool = False) -> Start:
        """Describe this start. If the run is resumed, pass the content of started.json and whether settings changed."""
        head, *rows = self.wrapper.model.rows()
        previous = previous or {}
        own = config.own_folder() or previous.get("config_dir")
        return Start(
            setup=self._setup(),
            started=str(previous.get("started") or time.strftime("%Y-%m-%d %H:%M:%S")),
            epochs=self.settings.epochs,
            overrides=config.overrides_of(self.run.folder),
            config_dir=None if own is None else str(own),
            processes=None if self.experiment.job is None else self.experiment.job.size,
            layers=[dict(zip(head, row, strict=True)) for row in rows],
            changed=changed or bool(previous.get("changed")),
        )

    def _setup(self) -> Setup:
        settings, placement, model, data = self.settings, self.wrapper.placement, self.wrapper.model, self.data
        return Setup(
            dataset=data.name,
            fallback=data.fallback,
            backend=self.experiment.backend_name,
            devices=placement.names(),
            dtype=settings.dtype,
            workers=placement.workers,
            stages=placement.stages,
            seed=settings.seed,
            batch_size=settings.batch_size,
            averaging_frequency=self.experiment.synchronizer.averaging_frequency,
            synchronizer=str(self.wrapper.synchronizer),
            parameters=model.params.count,
            image_shape=list(model.input.shape),
            normalize=data.train.pixels.normalization(),
            class_names=list(model.class_names) or None,
            class_weights=self.experiment.class_weights,
            commit=commit(),
            environment=environment(),
        )

    def _summary(self, evaluations: Mapping[str, Evaluation]) -> Summary:
        trainer, callbacks = self.wrapper.trainer, self.wrapper.callbacks
        clock, measured, spent = trainer.statistics.clock, trainer.statistics.measured, trainer.statistics.spent
        stop = trainer.stopped
        outcome = Outcome(
            epochs=trainer.epoch,
            iterations=trainer.iteration,
            images=clock.images,
            train_loss=finite(trainer.statistics.loss),
            stopped_by=None if stop is None else stop.text,
            stop_reason=None if stop is None else stop.reason.name.lower(),
            early_stopping=self._early_stopping(),
            drift=None if measured is None else finite(measured.drift),
            drift_by_layer=None if measured is None else dict(measured.drift_by_layer),
            skipped_steps=trainer.statistics.skipped_steps,
            advice=None if spent is None else self._advice(spent),
        )
        cost = Cost(
            images_per_s=clock.images_per_s,
            wall_s=time.perf_counter() - self.began,
            train_s=clock.rounds_s,
            compile_s=clock.compile_s,
            evaluate_s=clock.evaluate_s,
            data_s=clock.data_s,
            averaging_s=clock.averaging_s,
            bytes_sent=0 if spent is None else sum(spent.bytes_sent),
            spent=None if spent is None else asdict(spent),
            pipeline=None if spent is None else self._pipeline_speed(spent, clock.images_per_s),
            memory=next((each.found for each in callbacks if isinstance(each, Pools) and each.found), None),
        )
        test, validation = evaluations.get("test"), evaluations.get("validation")
        scores = Scores(
            validation_accuracy=None if validation is None else finite(validation.accuracy),
            validation_samples=None if validation is None else validation.samples,
            test_accuracy=None if test is None else finite(test.accuracy),
            test_loss=None if test is None else finite(test.loss),
            test_f1=None if test is None else finite(test.f1),
            test=None if test is None else test.to_dict(),
            validation=None if validation is None else validation.to_dict(),
        )
        return Summary(setup=self._setup(), outcome=outcome, cost=cost, scores=scores)

    def _early_stopping(self) -> dict[str, Any] | None:
        results = [each.result for each in self.wrapper.callbacks if isinstance(each, EarlyStopping)]
        return next((result.to_dict() for result in results if result is not None), None)

    def _pipeline_speed(self, spent: Spent, images_per_s: float) -> dict[str, Any] | None:
        """Return the speed-up of the pipeline and its upper bound, or None without a pipeline or a measured speed."""
        wrapper, pipeline = self.wrapper, self.wrapper.options.pipeline
        if wrapper.placement.stages == 1 or pipeline is None or not images_per_s:
            return None
        batch_size = min(self.settings.batch_size, len(self.data.train))
        iteration_s = batch_size * wrapper.placement.workers / images_per_s
        return pipeline.speed(wrapper.layers, batch_size, spent.compute_s, spent.samples, iteration_s)

    def _advice(self, spent: Spent) -> str:
        placement = self.wrapper.placement
        return advise(
            spent,
            iterations=self.experiment.train_loader(self.data).iterations(placement.workers),
            stages=placement.stages,
            cores=None if placement.devices else available_cores(),
            scheduled=self.wrapper.synchronizer.schedule is not None,
        )


class _Signals:
    """Signal handler. The first signal stops training; a second one, or one before the kernels are compiled, exits."""

    def __init__(self, wrapper: ParallelWrapper, *, prints: bool) -> None:
        self.number, self._wrapper, self._prints = 0, wrapper, prints

    def __call__(self, number: int) -> None:
        if self.number or not self._wrapper.warm:
            signals.leave(number)
            return
        self.number, name = number, signal.Signals(number).name
        self._wrapper.stop(name, StopReason.SIGNAL)
        if self._prints:
            signals.say(f"cupynet: {name}: stopping and saving. A second signal exits immediately, without saving\n")


def warn_of_other_rates(trainer: Trainer, planned: Any) -> None:
    """Warn if changing `epochs` changes the learning rates of past iterations, because the schedule spans the fit."""
    plan, iteration = trainer.plan, trainer.iteration
    epochs, start, per_epoch = plan.epochs, plan.start, plan.iterations_per_epoch
    if type(planned) is not int or planned == epochs or start is None or not per_epoch:
        return
    then = copy.deepcopy(trainer.schedule)
    then.begin_fit(start, plan.iterations + (planned - epochs) * per_epoch, per_epoch, planned)
    if iteration > start and then(iteration - 1) != trainer.schedule(iteration - 1):
        log.warning(
            "epochs=%d instead of the planned %d: the learning-rate schedule now spans %d epochs, and the rate "
            "continues at %.4g after %.4g. The result differs from an uninterrupted run of %d epochs. To avoid this, "
            "use a constant rate, or a schedule such as StepDecay that does not depend on the length of training",
            *(epochs, planned, epochs, trainer.schedule(iteration), then(iteration - 1), epochs),
        )


def saved(run: Run, experiment: Experiment) -> str:
    """Describe what an interrupted run saved, and how to resume it."""
    steps = bool(checkpoints(run.checkpoints_path))
    if not run.saved and not steps:
        return "no results of this run were saved"
    launcher = [] if experiment.job is None else ["mpiexec", "-n", str(experiment.job.size)]
    settings = config.not_stored(experiment.settings, run.folder)
    command = shlex.join([*launcher, "cupynet", "train", f"resume={run}", *settings])
    return f"the results so far are in {run}{f'; to resume: {command}' if steps else ''}"
