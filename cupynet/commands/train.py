"""Train a network: `cupynet train [key=value ...]`."""

from __future__ import annotations

import gc
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet.core import signals
from cupynet.core.errors import Interrupted, signal_of

if TYPE_CHECKING:
    from cupynet.config.experiment import Experiment
    from cupynet.config.schema import Settings
    from cupynet.parallel import MpiJob


def main() -> None:
    gc.disable()  # until training begins: start-up creates 250,000 long-lived objects
    try:
        signals.command(_command)
    finally:
        gc.enable()


def _command() -> None:
    from cupynet import config
    from cupynet.config.schema import Settings

    config.run(train, prepare, "config", Settings, ranks)


def ranks() -> MpiJob:
    from cupynet.parallel import job

    return job()


def prepare(settings: Settings) -> Experiment:
    from cupynet.config import resume
    from cupynet.config.experiment import Experiment
    from cupynet.training.checkpointing import check_classes, check_epochs, check_stages, found, stages_of

    if settings.resume is None:
        experiment = Experiment(settings)
        experiment.check_new()
    else:
        stored = found(resume.checkpoint_of(Path(settings.resume)), warn=False)  # there is no log yet
        experiment = Experiment(settings, stages_of(stored))
        check_classes(stored, experiment.source)
        check_stages(stored, experiment.placement.stages)
        check_epochs(stored, settings.epochs)
    return experiment


def train(experiment: Experiment, folder: Path) -> float | None:
    """Train, and return the validation accuracy if there are validation images, or else the test accuracy.

    Returns None if a resumed run is already complete. All ranks call this, but only rank 0 writes and prints.
    """
    from cupynet.commands.train_job import TrainJob, saved
    from cupynet.runs.run import Run

    run = Run(folder, asdict(experiment.settings))
    with experiment.pools_limited():
        try:
            with signals.handled(signals.leave):
                return TrainJob(experiment, run).train()
        except KeyboardInterrupt as stopped:
            if not signal_of(stopped):  # a callback raised it
                raise
            raise Interrupted.by(stopped, saved(run, experiment)) from None
        except Exception as error:
            if experiment.rank == 0 and not isinstance(error, Interrupted):
                run.fail(error)
            raise
