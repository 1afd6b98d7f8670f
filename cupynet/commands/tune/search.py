"""The trials of a search, one after the other."""

from __future__ import annotations

import gc
import logging
import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from optuna.trial import FrozenTrial, Trial

from cupynet import config
from cupynet.commands import train
from cupynet.commands.evaluate import evaluated
from cupynet.commands.tune import results
from cupynet.commands.tune.arguments import Plan
from cupynet.commands.tune.results import folder_of, outcome_of, reason_of
from cupynet.commands.tune.study import INTERRUPTED, PruningCallback, Study, open_study
from cupynet.config import resume
from cupynet.core import signals
from cupynet.core.errors import CupynetError, DataError, DivergedError, Interrupted, OutputError, signal_of
from cupynet.core.exits import Console, out_of_memory
from cupynet.core.terminal import near, printable

log = logging.getLogger(__name__)


def search(plan: Plan, folder: Path) -> float:
    """Run all trials, evaluate the best on the test images, and print the results.

    Returns the best value of the objective.
    """
    resume.mark_latest(folder)
    settings = plan.settings
    with open_study(folder / resume.STUDY, plan.space, settings) as study:
        try:
            with signals.handled(signals.leave):
                log.info("searched: %s", " ".join(settings.search))
                log.info(
                    "%d trials (%d done), compared by validation %s; sampler %s, pruner %s",
                    settings.trials, len(study.counted), settings.objective, settings.sampler, settings.pruner,
                )  # fmt: skip
                log.info("settings of all trials: %s", " ".join(plan.shared))
                run_trials(plan, folder, study)
                best = best_trial(study)
                trusted = ",".join(settings.trusted_modules)
                test, _, _ = evaluated(folder_of(folder, best.number), [f"trusted_modules=[{trusted}]"])
        except (KeyboardInterrupt, Interrupted) as stopped:
            if isinstance(stopped, KeyboardInterrupt) and not signal_of(stopped):
                raise  # a callback raised it
            interrupted = stopped if isinstance(stopped, Interrupted) else Interrupted.by(stopped)
            command = shlex.join(["cupynet", "tune", f"resume={near(folder)}"])
            done = f"{len(study.counted)} of {settings.trials} trials are done. Resume with: {command}"
            raise Interrupted(interrupted.signal_number, done) from None
        summary = "\n".join(results.summary(folder, study, plan, test))
        with _only_in_the_log():
            log.info("%s", summary)
        print()
        results.print_table(study)
        print(f"\n{printable(summary)}")
    return float(best.value)


def run_trials(plan: Plan, folder: Path, study: Study) -> None:
    """Run trials until their number or the time is reached, or all combinations have been tried."""
    settings, began = plan.settings, time.monotonic()
    while len(study.counted) < settings.trials:
        if study.exhausted:
            log.info("all combinations have been tried")
            return
        if settings.timeout_s is not None and time.monotonic() - began >= settings.timeout_s:
            log.info("timeout_s=%g: the search ends after %d trials", settings.timeout_s, len(study.counted))
            return
        log.info("%s", results.line(run_trial(plan, folder, study), study, settings.trials))
        results.write_table(folder, study)
        gc.collect()  # models have reference cycles


def run_trial(plan: Plan, folder: Path, study: Study) -> FrozenTrial:
    """Run one trial and record its outcome. A failed trial does not end the search.

    Raises:
        Interrupted, KeyboardInterrupt: a signal came. The trial does not count.
        DataError, OutputError: all other trials would fail too.
    """
    trial = study.ask()
    with _only_in_the_log():
        try:
            figure, pruned = train_trial(plan, folder, study, trial)
        except (KeyboardInterrupt, Interrupted, DataError, OutputError) as error:
            study.tell(trial, INTERRUPTED, reason=str(error))
            raise
        except DivergedError as error:
            return study.tell(trial, "diverged", reason=str(error))
        except Exception as error:
            log.info("trial %d failed", trial.number, exc_info=error)
            no_memory = out_of_memory(error) or "memory" in str(error).lower()
            reason = str(error) if isinstance(error, CupynetError) else f"{type(error).__name__}: {error}"
            return study.tell(trial, "out of memory" if no_memory else "failed", reason=reason)
    if pruned:
        return study.tell(trial, "pruned")
    if figure is None or math.isnan(figure):
        return study.tell(trial, "diverged", reason="the last evaluation is not a number")
    return study.tell(trial, "complete", figure)


def train_trial(plan: Plan, folder: Path, study: Study, trial: Trial) -> tuple[float | None, bool]:
    """Train a trial in its own run folder. Return the objective, and True if it was pruned."""
    overrides = plan.overrides(trial.params)
    settings = config.compose(overrides, plan.config_dir)
    silent = {"_target_": "cupynet.training.Progress", "style": "none"}
    settings = replace(settings, callbacks={**settings.callbacks, "progress": silent})
    experiment = train.prepare(settings)
    experiment.tests = False
    callback = PruningCallback(trial, study.objective)
    experiment.callbacks.append(callback)
    run = folder_of(folder, trial.number)
    run.mkdir(parents=True, exist_ok=True)
    config.keep(run, settings, overrides)
    train.train(experiment, run)
    return callback.figure, callback.pruned


@contextmanager
def _only_in_the_log() -> Iterator[None]:
    """Keep log records off the terminal: train.log of the search has them."""
    loggers = [logging.getLogger(name) for name in ("cupynet", "__main__")]
    levels = {each: each.level for logger in loggers for each in logger.handlers if isinstance(each, Console)}
    try:
        for each in levels:
            each.setLevel(logging.CRITICAL)
        yield
    finally:
        for each, level in levels.items():
            each.setLevel(level)


def best_trial(study: Study) -> FrozenTrial:
    """Return the best trial. CupynetError if none is complete."""
    if study.ranked:
        return study.ranked[0]
    failed = study.counted
    kind = DivergedError if failed and all(outcome_of(each) == "diverged" for each in failed) else CupynetError
    reason = f": trial {failed[0].number}: {reason_of(failed[0])}" if failed else ""
    raise kind(f"no trial was completed{reason}")
