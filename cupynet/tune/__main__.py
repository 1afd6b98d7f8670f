"""Search for good settings: `python -m cupynet.tune optimizer.learning_rate='interval(0.001,0.3)' [key=value ...]`.

Trials are trained one after the other, in this process, and compared by images held out of training. The test images
are used once, by the best trial.
"""

from __future__ import annotations

import gc
import logging
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet import interrupts
from cupynet.checks import OBJECTIVES, one_line
from cupynet.errors import CupynetError, DataError, DivergedError, Interrupted, OutputError
from cupynet.settings import TuneSettings
from cupynet.terminal import near

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial, Trial

    from cupynet.tune.arguments import Plan
    from cupynet.tune.study import Study

log = logging.getLogger(__name__)


def main() -> None:
    """Run the command."""
    interrupts.command(_command)


def _command() -> None:
    from cupynet import config
    from cupynet.exits import steady_streams, tell
    from cupynet.tune.arguments import for_hydra, prepare

    typed = sys.argv[1:]
    try:
        sys.argv[1:], resumed = for_hydra(typed)
    except CupynetError as error:
        steady_streams()
        raise SystemExit(tell(error)) from None
    config.run(search, partial(prepare, sys.argv[1:], resumed, typed), "tune", TuneSettings)


def search(plan: Plan, folder: Path) -> float | None:
    """Run trials until there are enough, evaluate the best on the test images, and print the results.

    Returns the best figure of the objective.
    """
    from cupynet import resume
    from cupynet.tune import results
    from cupynet.tune.study import Study

    resume.mark_latest(folder)
    study = Study(folder / resume.STUDY, plan.space, plan.settings)
    try:
        with interrupts.handled(interrupts.leave):
            _announce(plan, study)
            _run_trials(plan, folder, study)
            best = _best(study)
            test = _tested(results.folder_of(folder, best.number), plan)
    except (KeyboardInterrupt, Interrupted) as stopped:
        number = stopped.signal_number if isinstance(stopped, Interrupted) else Interrupted.by(stopped).signal_number
        command = shlex.join(["python", "-m", "cupynet.tune", f"resume={near(folder)}"])
        done = f"{len(study.counted)} of {plan.settings.trials} trials are done. Resume with: {command}"
        raise Interrupted(number, done) from None
    finally:
        study.close()
    results.write_best(folder, study, plan.overrides(best.params), test)
    print()
    results.print_table(study)
    print("", *results.summary(folder, study, plan, test), sep="\n")
    return float(best.value)


def _announce(plan: Plan, study: Study) -> None:
    settings = plan.settings
    log.info("searched: %s", " ".join(settings.search))
    log.info(
        "%d trials, compared by validation %s; sampler %s, pruner %s",
        settings.trials, settings.objective, settings.sampler, settings.pruner,
    )  # fmt: skip
    log.info("settings of all trials: %s", " ".join(plan.shared))
    if plan.resumed is not None:
        log.info("resumed: %d trials are done", len(study.counted))


def _run_trials(plan: Plan, folder: Path, study: Study) -> None:
    """Run trials until there are enough, time is up, or all settings have been tried."""
    from cupynet.tune import results

    settings, began = plan.settings, time.monotonic()
    while len(study.counted) < settings.trials:
        if study.exhausted:
            log.info("all %d combinations have been tried", len(study.counted))
            return
        if settings.timeout_s is not None and time.monotonic() - began >= settings.timeout_s:
            log.info("timeout_s=%g: the search ends after %d trials", settings.timeout_s, len(study.counted))
            return
        ended = _run_trial(plan, folder, study)
        log.info("%s", results.line(ended, study, settings.trials))
        results.write_table(folder, study)
        gc.collect()  # models have reference cycles


def _run_trial(plan: Plan, folder: Path, study: Study) -> FrozenTrial:
    """Run one trial and record its outcome: a failure is one of the trial, not of the search.

    Raises:
        Interrupted, KeyboardInterrupt: a signal came. The trial does not count.
        DataError, OutputError: other settings would fail as well.
    """
    from cupynet.exits import out_of_memory
    from cupynet.tune.study import INTERRUPTED

    trial = study.ask()
    twin = study.twin(trial)
    if twin is not None:
        return study.tell(trial, "repeated", twin.value, f"as trial {twin.number}")
    try:
        figure, pruned = _trained(plan, folder, study, trial)
    except (KeyboardInterrupt, Interrupted, DataError, OutputError) as error:
        study.tell(trial, INTERRUPTED, reason=one_line(error))
        raise
    except DivergedError as error:
        return study.tell(trial, "diverged", reason=str(error))
    except Exception as error:
        with _only_in_the_log():
            log.info("trial %d failed", trial.number, exc_info=error)
        no_memory = out_of_memory(error) or "memory" in str(error).lower()
        reason = str(error) if isinstance(error, CupynetError) else f"{type(error).__name__}: {error}"
        return study.tell(trial, "out of memory" if no_memory else "failed", reason=reason)
    if pruned:
        return study.tell(trial, "pruned")
    if figure is None or figure != figure:
        return study.tell(trial, "diverged", reason="the last evaluation is not a number")
    return study.tell(trial, "complete", figure)


def _trained(plan: Plan, folder: Path, study: Study, trial: Trial) -> tuple[float | None, bool]:
    """Train a trial in its own run folder. Return its figure, and True if it was pruned."""
    from cupynet import config, train
    from cupynet.tune.results import folder_of
    from cupynet.tune.study import PruningCallback

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
    with _only_in_the_log():
        train.train(experiment, run)
    return callback.figure, callback.pruned


@contextmanager
def _only_in_the_log() -> Iterator[None]:
    """Keep the records of a trial off the terminal: train.log of the search has them."""
    from cupynet.exits import Console

    handlers = [each for name in ("cupynet", "__main__") for each in logging.getLogger(name).handlers]
    levels = {each: each.level for each in handlers if isinstance(each, Console)}
    for each in levels:
        each.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for each, level in levels.items():
            each.setLevel(level)


def _best(study: Study) -> FrozenTrial:
    """Return the best trial. CupynetError if none is complete."""
    from cupynet.tune.results import reason_of
    from cupynet.tune.study import outcome_of

    if study.ranked:
        return study.ranked[0]
    failed = study.counted
    kind = DivergedError if failed and all(outcome_of(each) == "diverged" for each in failed) else CupynetError
    reason = f": trial {failed[0].number}: {reason_of(failed[0])}" if failed else ""
    raise kind(f"no trial was completed{reason}")


def _tested(run: Path, plan: Plan) -> dict[str, float]:
    """Evaluate the weights of a run on the test images."""
    from cupynet.evaluate import evaluated

    trusted = ",".join(plan.settings.trusted_modules)
    evaluation, _, _ = evaluated(run, [f"trusted_modules=[{trusted}]"])
    return {name: float(getattr(evaluation, name)) for name in OBJECTIVES}


if __name__ == "__main__":
    main()
