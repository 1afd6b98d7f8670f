"""Train a network: `python -m cupynet.train [key=value ...]`.

Composes the settings, launches the workers, and every worker runs `train_worker`.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cupynet import config
from cupynet.errors import Interrupted
from cupynet.processor import choose_blas_kernels
from cupynet.settings import Settings

if TYPE_CHECKING:
    from cupynet.experiment import Experiment

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a worker brings back."""

    trainer: Any  # cupynet.training.Trainer
    test: Any  # cupynet.training.Evaluation, or None where a signal ended the run
    validation: Any  # the same; None too where nothing was held out
    compile_s: float


def main() -> None:
    """The command."""
    choose_blas_kernels()
    config.run(train, prepare, "config", Settings)


def prepare(settings: Settings) -> Experiment:
    """The objects of the run; ConfigError for what cannot work, before anything is written."""
    from cupynet.experiment import Experiment

    return Experiment(settings)


def train(experiment: Experiment, folder: Path) -> float | None:
    """One run into `folder`: summary, history and weights.

    Returns what a sweep may choose by: the accuracy on the validation images where some are held out, else on the test.
    """
    from cupynet.training import History
    from cupynet.training.console import progress, result_table

    began = time.perf_counter()
    (folder / "summary.json").unlink(missing_ok=True)  # of a run before into the same folder
    settings = experiment.settings
    experiment.announce()
    with _signals(_stop_at_once):
        data = experiment.source.load()
    style = progress((settings.callbacks.get("progress") or {"style": "none"})["style"])
    callbacks = [History(folder / "history.jsonl"), style, *experiment.callbacks()]
    with (
        experiment.team() as team,
        _signals(partial(_stop_at_average, team)),
    ):
        if not experiment.devices:
            log.info("BLAS threads per worker: %d", team.blas_threads)
        experiment.limit_memory()
        try:
            outcomes = team.run(lambda communicator: train_worker(experiment, data, communicator, callbacks))
        finally:
            for callback in callbacks:
                callback.close()
        summary = summarise(experiment, data, outcomes[0], time.perf_counter() - began)
        save(folder, summary, outcomes[0].trainer)
    if summary["test"] is not None:
        result_table(summary, str(folder))
    if team.stop_signal:  # which may also have come too late to stop anything: a sweep must not go on
        raise Interrupted(team.stop_signal, f"what was trained is in {folder}")
    chosen: float = summary["test_accuracy" if data.validation is None else "validation_accuracy"]
    return chosen


def train_worker(experiment: Any, data: Any, communicator: Any, callbacks: Sequence[Any]) -> Outcome:
    """What every worker does: make a replica, train it with the others, evaluate it with the others."""
    from cupynet.training import warm_up

    settings: Settings = experiment.settings
    trainer = experiment.trainer(communicator, callbacks)
    compile_s = warm_up(trainer.model, experiment.optimizer(), settings.batch_size)
    if communicator.rank == 0:
        log.info("kernels ready after %.1f s", compile_s)
    held_out = data.validation if data.validation is not None else data.test
    split = "validation" if data.validation is not None else "test"
    trainer.fit(
        experiment.train_loader(data),
        settings.epochs,
        evaluate_on=experiment.evaluation_loader(held_out),
        evaluate_every=settings.evaluate_every_epochs,
        split=split,
    )
    test = trainer.evaluation if split == "test" else None  # of the last epoch, which is always evaluated
    if split != "test" and not trainer.stopped_by:
        test = trainer.evaluate(experiment.evaluation_loader(data.test))
    return Outcome(trainer, test, trainer.evaluation if split != "test" else None, compile_s)


def summarise(experiment: Any, data: Any, outcome: Outcome, wall_s: float) -> dict[str, Any]:
    """The content of summary.json."""
    from cupynet.backend import environment

    settings, trainer, evaluation = experiment.settings, outcome.trainer, outcome.test
    clock = trainer.clock
    return {
        "dataset": data.name,
        "fallback": data.fallback,
        "backend": experiment.backend_name,
        "devices": experiment.device_names(),
        "dtype": settings.dtype,
        "workers": experiment.workers,
        "seed": settings.seed,
        "epochs": trainer.epoch,
        "iterations": trainer.iteration,
        "batch_size": settings.batch_size,
        "averaging_frequency": settings.parallel.averaging_frequency,
        "parameters": trainer.model.params.count,
        "stopped_by": signal.Signals(trainer.stopped_by).name if trainer.stopped_by else None,
        "images": clock.images,
        "images_per_s": clock.images_per_s,
        "wall_s": wall_s,
        "train_s": clock.rounds_s,
        "compile_s": outcome.compile_s,
        "evaluate_s": clock.evaluate_s,
        "data_s": clock.data_s,
        "averaging_s": clock.averaging_s,
        "validation_accuracy": _number(outcome.validation and outcome.validation.accuracy),
        "test_accuracy": _number(evaluation and evaluation.accuracy),
        "test_loss": _number(evaluation and evaluation.loss),
        "test_f1": _number(evaluation and evaluation.f1),
        "test": evaluation and evaluation.to_dict(),
        "environment": environment(),
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def save(folder: Path, summary: dict[str, Any], trainer: Any) -> None:
    """Write weights.safetensors and summary.json."""
    from cupynet.training import save_weights, write_json

    save_weights(folder / "weights.safetensors", trainer.model.weights())
    write_json(folder / "summary.json", summary)


def _stop_at_once(number: int) -> None:
    """While there are no results yet."""
    raise KeyboardInterrupt(number)  # no Exception, which a download takes for one more thing that can go wrong


def _stop_at_average(team: Any, number: int) -> None:
    """End training at the next average, with its results saved; a second signal ends it at once."""
    if team.stop_signal:
        _stop_at_once(number)
    team.stop(number)  # and nothing else: what a handler prints may come in the middle of another print


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
