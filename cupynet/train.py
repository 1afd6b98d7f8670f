"""Train a network: `python -m cupynet.train [key=value ...]`.

Composes the settings into an `Experiment`, which is refused or else trained in its `ParallelWrapper`.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config, resume
from cupynet.errors import CupynetError, Interrupted
from cupynet.settings import Settings

if TYPE_CHECKING:
    from cupynet.data import Data
    from cupynet.experiment import Experiment
    from cupynet.parallel import PipelineSpeed
    from cupynet.runs import Summary
    from cupynet.training import Evaluation, ParallelWrapper, Spent

log = logging.getLogger(__name__)


def main() -> None:
    """The command."""
    config.run(train, prepare, "config", Settings, ranks)


def ranks() -> config.Ranks:
    """The processes that mpiexec started; ConfigError where there is no MPI."""
    from cupynet.parallel import job

    return job()


def prepare(settings: Settings) -> Experiment:
    """The experiment that the settings describe, before anything is written; ConfigError if it cannot work."""
    from cupynet.experiment import Experiment

    experiment = Experiment(settings)
    experiment.check_shards()
    if settings.resume is not None:
        from cupynet.training.checkpoint import check_workers, found

        stored = found(resume.checkpoint_of(Path(settings.resume)), warn=False)  # there is no log yet to warn in
        check_workers(stored, experiment.placement.ranks)
    return experiment


def train(experiment: Experiment, folder: Path) -> float | None:
    """One run into `folder`: summary, history and weights. (Over 40 lines: a run is read in one piece.)

    Where mpiexec started several processes, all of them do this, and rank 0 alone writes and prints.

    Returns what a sweep may choose by: the accuracy on the validation images where some are held out, else on the test
    images.
    """
    from cupynet.runs import Run
    from cupynet.training import StopReason
    from cupynet.training.console import result_table

    began, settings, run = time.perf_counter(), experiment.settings, Run(folder)
    if experiment.rank == 0:
        if settings.resume is None:
            run.begin()
        experiment.announce()
    with _signals(_stop_at_once):
        data = experiment.load()
    split, held_out = ("test", data.test) if data.validation is None else ("validation", data.validation)
    received: list[int] = []

    def stop(number: int) -> None:
        """End training soon, with its results saved; a second signal ends it at once."""
        if received:
            _stop_at_once(number)
        received.append(number)
        wrapper.stop(signal.Signals(number).name, StopReason.SIGNAL)  # prints nothing: it may interrupt another print

    with experiment.wrapper(run) as wrapper, _signals(stop):
        if wrapper.blas_threads:
            log.info("BLAS threads per worker: %d", wrapper.blas_threads)
        experiment.limit_memory()
        compile_s = wrapper.warm_up(settings.batch_size)
        log.info("kernels ready after %.1f s", compile_s)
        if settings.resume is not None:
            wrapper.restore(resume.checkpoint_of(Path(settings.resume)))
            log.info("going on after iteration %d, epoch %d", wrapper.trainer.iteration, wrapper.trainer.epoch)
            if wrapper.trainer.epoch >= settings.epochs and run.summary_path.is_file():
                log.info("all of its %d epochs are complete: epochs=... asks for more", wrapper.trainer.epoch)
                return None
            if experiment.rank == 0:
                run.summary_path.unlink(missing_ok=True)  # it is of less than what is to come
        if wrapper.placement.stages > 1 and wrapper.pipeline is not None:
            log.info("stages: %s", wrapper.pipeline.describe(wrapper.layers))
        try:
            done = wrapper.trainer.epoch
            if done < settings.epochs:  # else it was killed between its last epoch and its results
                wrapper.fit(
                    experiment.train_loader(data),
                    settings.epochs - done,
                    evaluate_on=experiment.evaluation_loader(held_out),
                    evaluate_every=settings.evaluate_every_epochs,
                    split=split,
                )
        except CupynetError:
            found = _early_stopping(wrapper)
            if found is not None and found["reason"] == "diverged" and found["restored"]:
                ended = (found["details"], found["reason"])
                summary = summarise(
                    experiment, data, wrapper, None, None, compile_s, time.perf_counter() - began, ended
                )
                run.save(summary, wrapper.model.weights())
                log.info("the weights of epoch %d, the best, are in %s", found["best_epoch"], folder)
            raise
        interrupted = wrapper.greatest(received[0] if received else 0)  # a signal may reach one process of several
        speed = _pipeline_speed(wrapper)
        if speed is not None:
            log.info("pipeline: %s", speed)
        chosen = wrapper.trainer.evaluation  # of the last epoch, unless that was broken off, or of the best
        if chosen is None and not interrupted:
            chosen = wrapper.evaluate(experiment.evaluation_loader(held_out))
        test, validation = (chosen, None) if split == "test" else (None, chosen)
        if split != "test" and not interrupted:
            test = wrapper.evaluate(experiment.evaluation_loader(data.test))
        summary = summarise(experiment, data, wrapper, test, validation, compile_s, time.perf_counter() - began)
        if experiment.rank == 0:
            run.save(summary, wrapper.model.weights())
        interrupted = int(wrapper.greatest(received[0] if received else 0))
    if experiment.rank == 0 and (summary.test is not None or not interrupted):
        result_table(summary, run)
    if interrupted:  # which may also have come too late to stop anything: a sweep must not go on
        goes_on = f"; resume={folder} goes on" if any(run.checkpoints_path.glob("step-*")) else ""
        raise Interrupted(interrupted, f"what was trained is in {folder}{goes_on}")
    return summary.test_accuracy if data.validation is None else summary.validation_accuracy


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
    """What the run came to. (As many lines as it has figures.)

    test, validation: None where they were not evaluated. ended: why and how, where the trainer does not know.
    """
    from dataclasses import asdict

    from cupynet.backend.environment import commit, environment
    from cupynet.runs import Summary

    settings, trainer = experiment.settings, wrapper.trainer
    clock, stopped, spent, measured = trainer.clock, trainer.stopped, trainer.spent, trainer.measured
    speed = _pipeline_speed(wrapper)
    if stopped is not None:
        ended = stopped.text, stopped.reason.name.lower()
    stopped_by, stop_reason = (None, None) if ended is None else ended
    return Summary(
        dataset=data.name,
        fallback=data.fallback,
        backend=experiment.backend_name,
        devices=wrapper.placement.names(),
        dtype=settings.dtype,
        workers=wrapper.placement.workers,
        seed=settings.seed,
        epochs=trainer.epoch,
        iterations=trainer.iteration,
        batch_size=settings.batch_size,
        averaging_frequency=experiment.synchronizer.frequency,
        synchronizer=trainer.synchronizer.describe(),
        stages=wrapper.placement.stages,
        pipeline=None if speed is None else speed.to_dict(),
        parameters=wrapper.model.params.count,
        stopped_by=stopped_by,
        images=clock.images,
        images_per_s=clock.images_per_s,
        wall_s=wall_s,
        train_s=clock.rounds_s,
        compile_s=compile_s,
        evaluate_s=clock.evaluate_s,
        data_s=clock.data_s,
        averaging_s=clock.averaging_s,
        validation_accuracy=None if validation is None else _finite(validation.accuracy),
        test_accuracy=None if test is None else _finite(test.accuracy),
        test_loss=None if test is None else _finite(test.loss),
        test_f1=None if test is None else _finite(test.f1),
        test=None if test is None else test.to_dict(),
        commit=commit(),
        environment=environment(),
        stop_reason=stop_reason,
        early_stopping=_early_stopping(wrapper),
        bytes_sent=0 if spent is None else sum(spent.bytes_sent),
        spent=None if spent is None else asdict(spent),
        divergence=None if measured is None else _finite(measured.divergence),
        divergence_by_layer=None if measured is None else dict(measured.by_layer),
        advice=None if spent is None else _advice(experiment, wrapper, data, spent),
    )


def _early_stopping(wrapper: ParallelWrapper) -> dict[str, Any] | None:
    """What early stopping came to, if it was asked for."""
    from cupynet.training import EarlyStopping

    results = [each.result for each in wrapper.callbacks if isinstance(each, EarlyStopping)]
    return next((result.to_dict() for result in results if result is not None), None)


def _pipeline_speed(wrapper: ParallelWrapper) -> PipelineSpeed | None:
    """How fast the stages were; None where there is but one, which is no pipeline."""
    return wrapper.pipeline_speed() if wrapper.placement.stages > 1 else None


def _advice(experiment: Experiment, wrapper: ParallelWrapper, data: Data, spent: Spent) -> str:
    from cupynet.backend import available_cores
    from cupynet.parallel import ParameterAveraging
    from cupynet.training import advise

    placement, synchronizer = wrapper.placement, experiment.synchronizer
    frequency = synchronizer.when if isinstance(synchronizer, ParameterAveraging) else synchronizer.frequency
    rounds = wrapper.trainer.rounds(experiment.train_loader(data))
    return advise(
        spent,
        frequency,
        always=rounds * min(experiment.settings.evaluate_every_epochs, experiment.settings.epochs),
        speed=_pipeline_speed(wrapper),
        stages=placement.stages,
        cores=None if placement.devices else available_cores(),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _stop_at_once(number: int) -> None:
    """End the command at once: nothing is worth saving yet, or a second signal came."""
    raise KeyboardInterrupt(number)  # no Exception: a download takes those for one more thing that can go wrong


@contextmanager
def _signals(stop: Callable[[int], None]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 call `stop` with their number; its KeyboardInterrupt leaves as Interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]
    before = {number: signal.signal(number, lambda number, frame: stop(number)) for number in numbers}
    try:
        yield
    except KeyboardInterrupt as stopped:
        raise Interrupted(*stopped.args) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
