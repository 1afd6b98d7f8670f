"""Train a network: `cupynet train [key=value ...]`."""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet.config import resume
from cupynet.config.schema import Settings
from cupynet.core import signals
from cupynet.core.errors import CupynetError, Interrupted

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment
    from cupynet.data import Batches, Data
    from cupynet.parallel import MpiJob, PipelineSpeed
    from cupynet.runs.run import Run, Setup, Start, Summary
    from cupynet.training import Evaluation, ParallelWrapper, Spent

log = logging.getLogger(__name__)


def main() -> None:
    """The command."""
    signals.command(_command)


def _command() -> None:
    from cupynet import config

    config.run(train, prepare, "config", Settings, ranks)


def ranks() -> MpiJob:
    """Return the ranks that mpiexec started. ConfigError without MPI."""
    from cupynet.parallel import job

    return job()


def prepare(settings: Settings) -> Experiment:
    """Build the experiment, before anything is written. ConfigError if it cannot work."""
    from cupynet.config.experiment import Experiment

    if settings.fast_dev_run:
        settings = replace(settings, epochs=1, evaluate_every_epochs=1, report_every_iterations=1)
    stored, stages = None, None
    if settings.resume is not None:
        from cupynet.training.checkpointing import check_stages, found, stages_of

        stored = found(resume.checkpoint_of(Path(settings.resume)), warn=False)  # there is no log yet to warn in
        stages = stages_of(stored)
    experiment = Experiment(settings, stages)
    experiment.check_memory()
    experiment.check_shards()
    if stored is not None:
        check_stages(stored, experiment.placement.stages)
    return experiment


def train(experiment: Experiment, folder: Path) -> float | None:
    """Train into `folder`: summary, history, checkpoints and weights.

    Under mpiexec every process calls this, and only rank 0 writes and prints.

    Returns the accuracy by which a sweep may choose: on the validation images if there are some, else on the test
    images.
    """
    from dataclasses import asdict

    from cupynet.runs.run import Run

    run = Run(folder, asdict(experiment.settings))
    try:
        with signals.handled(signals.leave):
            return _train(experiment, run)
    except KeyboardInterrupt as stopped:
        raise Interrupted.by(stopped, _left(run)) from None
    finally:
        experiment.release_memory()


def _train(experiment: Experiment, run: Run) -> float | None:
    """Train; a second signal raises KeyboardInterrupt."""
    from cupynet import config
    from cupynet.commands.result_table import is_quiet, result_table
    from cupynet.training import StopReason, unlearned

    began, settings = time.perf_counter(), experiment.settings
    if experiment.rank == 0:
        experiment.announce()
    data = experiment.load()
    if experiment.rank == 0:  # after loading: the folder is not emptied if there is nothing to train on
        if settings.resume is None:
            run.begin()
        else:
            run.tidy()
        if settings.fast_dev_run:
            run.mark_trial(int(settings.fast_dev_run))
    split, held_out = ("test", data.test) if data.validation is None else ("validation", data.validation)
    with experiment.wrapper(run) as wrapper:
        if wrapper.blas_threads:
            log.info("BLAS threads per worker: %d", wrapper.blas_threads)
        experiment.limit_memory()
        compile_s = wrapper.warm_up(settings.batch_size)
        if settings.resume is not None:
            if not _goes_on(experiment, wrapper, run):
                return None
            clock = wrapper.trainer.statistics.clock
            began -= clock.rounds_s + clock.evaluate_s  # of the processes before this one
        config.keep_settings()
        if experiment.rank == 0:
            run.describe(_start(experiment, wrapper, data, run))
        if wrapper.placement.stages > 1 and wrapper.pipeline is not None:
            log.info("stages: %s", wrapper.pipeline.describe(wrapper.layers))
        stop = _Stop(wrapper, speaks=experiment.rank == 0)
        with signals.handled(stop):
            try:
                _fit(experiment, wrapper, data, experiment.evaluation_loader(held_out), split)
            except CupynetError:
                _keep_best(experiment, wrapper, data, run, compile_s, began)
                raise
            early = wrapper.trainer.stopped
            complete = early is None or early.reason != StopReason.SIGNAL  # a signal came too late to stop anything
            stopped = wrapper.greatest(stop.number) and not complete  # it may reach one process of several
            speed = _pipeline_speed(wrapper)
            if speed is not None:
                log.info("pipeline: %s", speed)
            chosen = wrapper.trainer.evaluation  # of the last epoch, unless that was broken off, or of the best
            if chosen is None and not stopped:
                chosen = wrapper.evaluate(experiment.evaluation_loader(held_out))
            test, validation = (chosen, None) if split == "test" else (None, chosen)
            if split != "test" and not stopped and experiment.tests:
                test = wrapper.evaluate(experiment.evaluation_loader(data.test))
            summary = summarise(experiment, data, wrapper, test, validation, compile_s, time.perf_counter() - began)
            if experiment.rank == 0:
                wrong = [] if test is None else [mistake.sample for mistake in test.mistakes]
                run.save(summary, wrapper.model.weights(), data.test.images[wrong])
            number = int(wrapper.greatest(stop.number))
    if experiment.rank == 0 and test is not None and not settings.fast_dev_run:
        warning = unlearned(test)
        if warning is not None:
            log.warning("%s", warning)
    silent = config.in_sweep() or is_quiet(settings.callbacks)  # a sweep has a table of all jobs
    if experiment.rank == 0 and not silent and (summary.scores.test is not None or not number):
        result_table(summary, run)
    if number:  # which may also have come too late to stop anything: a sweep must not go on
        raise Interrupted(number, _left(run, complete=complete))
    return summary.scores.test_accuracy if data.validation is None else summary.scores.validation_accuracy


class _Stop:
    """Signal handler: the first signal stops training after this round, the next one ends the process.

    Attributes:
        number: the first signal, or 0.
    """

    def __init__(self, wrapper: ParallelWrapper, *, speaks: bool) -> None:
        self.number, self._wrapper, self._speaks = 0, wrapper, speaks

    def __call__(self, number: int) -> None:
        from cupynet.training import StopReason

        if self.number:
            signals.leave(number)
            return
        self.number, name = number, signal.Signals(number).name
        self._wrapper.stop(name, StopReason.SIGNAL)
        if self._speaks:
            signals.say(f"cupynet: {name}: stopping after this round and saving; again: at once\n")


def _start(experiment: Experiment, wrapper: ParallelWrapper, data: Data, run: Run) -> Start:
    """Describe the run that begins."""
    from cupynet import config
    from cupynet.runs.run import Start

    settings, (head, *rows) = experiment.settings, wrapper.model.rows()
    overrides, own = None, None
    with contextlib.suppress(CupynetError):  # damaged overrides do not concern the training
        overrides, own = config.overrides_of(run.folder), config.own_folder(sys.argv[1:])
    return Start(
        setup=_setup(experiment, wrapper, data),
        started=run.started() or time.strftime("%Y-%m-%d %H:%M:%S"),
        epochs=settings.epochs,
        overrides=overrides,
        config_dir=None if own is None else str(own),
        processes=None if experiment.job is None else experiment.job.size,
        layers=[dict(zip(head, row, strict=True)) for row in rows],
    )


def _setup(experiment: Experiment, wrapper: ParallelWrapper, data: Data) -> Setup:
    from cupynet.backend.environment import commit, environment
    from cupynet.runs.run import Setup

    settings, placement = experiment.settings, wrapper.placement
    return Setup(
        dataset=data.name,
        fallback=data.fallback,
        backend=experiment.backend_name,
        devices=placement.names(),
        dtype=settings.dtype,
        workers=placement.workers,
        stages=placement.stages,
        seed=settings.seed,
        batch_size=settings.batch_size,
        averaging_frequency=experiment.synchronizer.frequency,
        synchronizer=str(wrapper.trainer.synchronizer),
        parameters=wrapper.model.params.count,
        image_shape=list(wrapper.model.input.shape),
        normalize=data.train.pixels.normalization(),
        class_names=list(wrapper.model.class_names) or None,
        fast_dev_run=int(settings.fast_dev_run),
        commit=commit(),
        environment=environment(),
    )


def _goes_on(experiment: Experiment, wrapper: ParallelWrapper, run: Run) -> bool:
    """Restore the checkpoint of the resumed run. Return False if there is nothing left to train."""
    settings = experiment.settings
    wrapper.restore(resume.checkpoint_of(Path(settings.resume or "")))
    log.info("going on after iteration %d, epoch %d", wrapper.trainer.iteration, wrapper.trainer.epoch)
    if wrapper.trainer.epoch >= settings.epochs and run.iterations() == wrapper.trainer.iteration:
        log.info("the run is complete (epoch %d): epochs=... trains it further", wrapper.trainer.epoch)
        return False
    return True


def _fit(experiment: Experiment, wrapper: ParallelWrapper, data: Data, evaluate_on: Batches, split: str) -> None:
    """Train the epochs that are not complete yet."""
    settings, trainer = experiment.settings, wrapper.trainer
    left = settings.epochs - trainer.epoch
    if left > 0 or trainer.unfinished:  # killed between the last epoch and its results
        wrapper.fit(
            experiment.train_loader(data),
            max(left, 0),
            evaluate_on=evaluate_on,
            evaluate_every=settings.evaluate_every_epochs,
            split=split,
        )


def _keep_best(
    experiment: Experiment, wrapper: ParallelWrapper, data: Data, run: Run, compile_s: float, began: float
) -> None:
    """Save the best weights, if early stopping restored them after the training diverged."""
    found = _early_stopping(wrapper)
    if found is not None and found["reason"] == "diverged" and found["restored"]:
        ended = (found["details"], found["reason"])
        summary = summarise(experiment, data, wrapper, None, None, compile_s, time.perf_counter() - began, ended)
        run.save(summary, wrapper.model.weights())
        log.info("the weights of epoch %d, the best, are in %s", found["best_epoch"], run)


def _left(run: Run, *, complete: bool = False) -> str:
    """Say what a run that a signal ended has saved, and how to resume it. complete: it was trained to its end."""
    if run.saved and complete:
        return f"training was complete, and its results are in {run}"
    steps = any(run.checkpoints_path.glob("step-*"))
    if not run.saved and not steps:
        return "nothing of this run was saved"
    what = "what was trained" if run.saved else "its last checkpoint"
    how = f"; to resume: cupynet train {shlex.quote(f'resume={run}')}" if steps else ""
    return f"{what} is in {run}{how}"


def summarise(
    experiment: Experiment,
    data: Data,
    wrapper: ParallelWrapper,
    test: Evaluation | None,
    validation: Evaluation | None,
    compile_s: float,
    wall_s: float,
    ended: tuple[str, str] | None = None,
) -> Summary:
    """Return the results of the run.

    Args:
        test, validation: None if they were not evaluated.
        ended: why and how training ended, if the trainer does not know.
    """
    from dataclasses import asdict

    from cupynet.runs.run import Cost, Outcome, Scores, Summary

    settings, trainer = experiment.settings, wrapper.trainer
    clock, measured = trainer.statistics.clock, trainer.statistics.measured
    stopped, spent, speed = trainer.stopped, trainer.spent, _pipeline_speed(wrapper)
    if stopped is not None:
        ended = stopped.text, stopped.reason.name.lower()
    stopped_by, stop_reason = (None, None) if ended is None else ended
    outcome = Outcome(
        epochs=trainer.epoch,
        iterations=trainer.iteration,
        images=clock.images,
        train_loss=_finite(trainer.statistics.loss),
        stopped_by=stopped_by,
        stop_reason=stop_reason,
        early_stopping=_early_stopping(wrapper),
        divergence=None if measured is None else _finite(measured.divergence),
        divergence_by_layer=None if measured is None else dict(measured.by_layer),
        left_out=_left_out(wrapper),
        skipped_steps=trainer.skipped_steps,
        advice=None if spent is None or settings.fast_dev_run else _advice(experiment, wrapper, data, spent),
    )
    cost = Cost(
        images_per_s=clock.images_per_s,
        wall_s=wall_s,
        train_s=clock.rounds_s,
        compile_s=compile_s,
        evaluate_s=clock.evaluate_s,
        data_s=clock.data_s,
        averaging_s=clock.averaging_s,
        bytes_sent=0 if spent is None else sum(spent.bytes_sent),
        spent=None if spent is None else asdict(spent),
        pipeline=None if speed is None else speed.to_dict(),
        memory=_memory(wrapper),
    )
    scores = Scores(validation_accuracy=None if validation is None else _finite(validation.accuracy))
    if test is not None:
        accuracy, loss, f1 = _finite(test.accuracy), _finite(test.loss), _finite(test.f1)
        scores = replace(scores, test_accuracy=accuracy, test_loss=loss, test_f1=f1, test=test.to_dict())
    return Summary(setup=_setup(experiment, wrapper, data), outcome=outcome, cost=cost, scores=scores)


def _early_stopping(wrapper: ParallelWrapper) -> dict[str, Any] | None:
    """The result of early stopping; None without it."""
    from cupynet.training import EarlyStopping

    results = [each.result for each in wrapper.callbacks if isinstance(each, EarlyStopping)]
    return next((result.to_dict() for result in results if result is not None), None)


def _left_out(wrapper: ParallelWrapper) -> int:
    """The number of batches left out because their loss was not finite."""
    from cupynet.training import NonFinite

    return sum(each.left_out for each in wrapper.callbacks if isinstance(each, NonFinite))


def _memory(wrapper: ParallelWrapper) -> list[dict[str, Any]] | None:
    """The statistics of the GPUs' memory pools; None on a CPU."""
    from cupynet.training import Pools

    return next((each.found for each in wrapper.callbacks if isinstance(each, Pools) and each.found), None)


def _pipeline_speed(wrapper: ParallelWrapper) -> PipelineSpeed | None:
    """The speed of the stages; None without a pipeline."""
    return wrapper.pipeline_speed() if wrapper.placement.stages > 1 else None


def _advice(experiment: Experiment, wrapper: ParallelWrapper, data: Data, spent: Spent) -> str:
    from cupynet.backend import available_cores
    from cupynet.parallel import ParameterAveraging
    from cupynet.training import advise

    placement, synchronizer = wrapper.placement, experiment.synchronizer
    frequency = synchronizer.schedule if isinstance(synchronizer, ParameterAveraging) else synchronizer.frequency
    return advise(
        spent,
        frequency,
        rounds=experiment.train_loader(data).rounds(placement.workers),
        evaluated_every=min(experiment.settings.evaluate_every_epochs, experiment.settings.epochs),
        speed=_pipeline_speed(wrapper),
        stages=placement.stages,
        cores=None if placement.devices else available_cores(),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
