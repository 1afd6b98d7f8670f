"""Run the trials of a search sequentially, in an Optuna study."""

from __future__ import annotations

import gc
import logging
import math
import shlex
import sqlite3
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import StorageInternalError
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.pool import NullPool

from cupynet import config
from cupynet.commands import train
from cupynet.commands.evaluate import evaluated
from cupynet.config import sweep_record
from cupynet.config.experiment import Experiment
from cupynet.config.schema import TuneSettings
from cupynet.config.search_space import rounded
from cupynet.core import signals
from cupynet.core.checks import mode_of
from cupynet.core.errors import CupynetError, DataError, DivergedError, Interrupted, OutputError
from cupynet.core.files import write_whole
from cupynet.core.logs import quiet
from cupynet.core.table import Column, Screen, as_csv, column, setting_columns, show
from cupynet.core.terminal import near, printable
from cupynet.core.wording import one_line, percent
from cupynet.runs.layout import STUDY, TRIALS
from cupynet.runs.run import PRUNED
from cupynet.training import Callback, EpochRecord, Evaluation, StopReason, Trainer

log = logging.getLogger(__name__)

SAMPLERS = {"tpe": TPESampler, "random": RandomSampler}
PRUNERS = {"median": MedianPruner, "hyperband": HyperbandPruner, "none": NopPruner}
DONE = (TrialState.COMPLETE, TrialState.PRUNED)
MAX_ROWS = 10  # maximum number of trials in the printed table
SILENT = {"_target_": "cupynet.training.Progress", "style": "none"}


@dataclass(frozen=True)
class Plan:
    """A validated search."""

    settings: TuneSettings
    space: Mapping[str, Any]  # the distribution of each searched setting
    shared: list[str]  # overrides of all trials
    config_dir: Path | None  # the argument of --config-dir
    resumed: Path | None  # the folder of the search to resume; None for a new search
    typed: Sequence[str]  # the command line

    @property
    def options(self) -> list[str]:
        """Options to repeat when resuming the search or training a trial again."""
        return [] if self.config_dir is None else [f"--config-dir={self.config_dir}"]

    def overrides(self, params: Mapping[str, Any]) -> list[str]:
        return [*self.shared, *(f"{key}={rounded(params[key])}" for key in self.space)]

    def experiment(self, params: Mapping[str, Any]) -> Experiment:
        settings = config.compose(self.overrides(params), self.config_dir)
        if self.resumed is not None:
            config.check_outputs(settings, self.resumed, self.typed)
            config.check_downloads(settings, self.resumed, self.typed)
        return train.prepare(replace(settings, callbacks={**settings.callbacks, "progress": SILENT}))


def search(plan: Plan, folder: Path) -> float:
    """Run all trials, evaluate the best one on the test images, print the results, and return its objective."""
    settings = plan.settings
    study = open_study(folder / STUDY, plan.space, settings, resumed=plan.resumed is not None)
    quiet()  # log records of trials go only to train.log
    _say(f"searched settings: {' '.join(settings.search)}; shared by all trials: {' '.join(plan.shared)}")
    try:
        with signals.handled(signals.leave):
            run_trials(plan, folder, study)
            best, *others = ranked(study)
            trusted = ",".join(settings.trusted_modules)
            found = evaluated(folder_of(folder, best), [f"trusted_modules=[{trusted}]"])
    except (KeyboardInterrupt, OutputError, StorageInternalError) as stopped:
        repeated = config.not_stored(settings, folder)
        command = shlex.join(["cupynet", "tune", *plan.options, f"resume={near(folder)}", *repeated])
        remedy = f"Resume with: {command}"
        with suppress(StorageInternalError):
            remedy = f"{len(study.get_trials(states=DONE))} of {settings.trials} trials are done. {remedy}"
        if isinstance(stopped, KeyboardInterrupt):
            raise Interrupted.by(stopped, remedy) from None
        unwritable = f"{folder / STUDY}: cannot be written ({one_line(stopped)})"
        reason = unwritable if isinstance(stopped, StorageInternalError) else str(stopped)
        raise OutputError(f"{reason}. {remedy}") from stopped
    text = summary(plan, folder, best, found.evaluation if found.split == "test" else None)
    log.info("%s", text)
    print()
    show(columns([best, *others][:MAX_ROWS], plan), Screen(), "see tune.csv")
    print(f"\n{printable(text)}")
    return float(best.value)


def open_study(path: Path, space: Mapping[str, BaseDistribution], settings: TuneSettings, *, resumed: bool) -> Study:
    """Open or create the study of a search. Raise DataError if it is damaged or belongs to another search."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    name, pruner = "cupynet", PRUNERS[settings.pruner]()
    try:
        if resumed:
            study = optuna.load_study(storage=storage(path), study_name=name, pruner=pruner)
        else:
            direction = "maximize" if mode_of(settings.objective) == "max" else "minimize"
            study = optuna.create_study(storage=storage(path), study_name=name, direction=direction, pruner=pruner)
        for killed in study.get_trials(states=[TrialState.RUNNING]):
            study.enqueue_trial(killed.params)
            study.tell(killed.number, state=TrialState.FAIL)
        trials = study.get_trials()
        complete = [each for each in trials if each.state == TrialState.COMPLETE]
        if not study.directions or any(not isinstance(each.value, float) for each in complete):
            raise ValueError("a trial has no value")
    except Exception as error:  # from Optuna, Alembic, SQLAlchemy or sqlite3
        raise DataError(f"{path}: this version of Optuna cannot read the study ({one_line(error):.200})") from error
    foreign = any(not each.distributions.items() <= space.items() for each in trials)
    if foreign or any(each.params.keys() != space.keys() for each in complete):
        raise DataError(f"{path}: this study belongs to another search. Resume that one, or start a new search")
    # a resumed search would draw the same settings again with the same seed
    seed = (settings.sampler_seed + len(trials)) % 2**32
    study.sampler = SAMPLERS[settings.sampler](seed=seed)
    return study


def storage(path: Path) -> RDBStorage:
    """Return the SQLite storage of a study, for any path, even with characters that are reserved in URLs."""
    creator = partial(sqlite3.connect, path, check_same_thread=False)
    kwargs = {"creator": creator, "poolclass": NullPool}  # closes connections that are not in use
    return RDBStorage(f"sqlite:///{STUDY}", engine_kwargs=kwargs)


def run_trials(plan: Plan, folder: Path, study: Study) -> None:
    """Run trials up to their number or the time limit. Print the number of trials if some are missing."""
    asked, limit_s, began = plan.settings.trials, plan.settings.timeout_s or math.inf, time.monotonic()
    for _ in range(asked - len(study.get_trials(states=DONE))):
        if time.monotonic() - began >= limit_s:
            break
        record(plan, folder, study, run_trial(plan, folder, study))
        gc.collect()  # models have reference cycles
    done, failed = (len(study.get_trials(states=each)) for each in (DONE, [TrialState.FAIL]))
    if done < asked:
        _say(f"{done} of {asked} trials are done; {failed} failed or were interrupted: see tune.csv")


def ranked(study: Study) -> list[FrozenTrial]:
    complete = study.get_trials(states=[TrialState.COMPLETE])
    if not complete:
        trials = study.get_trials()
        diverged = trials and all(each.state == TrialState.PRUNED for each in trials)
        reason = f": trial {trials[-1].number}: {reason_of(trials[-1])}" if trials else ""
        raise (DivergedError if diverged else CupynetError)(f"no trial was completed{reason}")
    return sorted(complete, key=lambda each: each.value, reverse=study.direction.name == "MAXIMIZE")


# a trial --------------------------------------------------------------------------------------------------------------


def run_trial(plan: Plan, folder: Path, study: Study) -> FrozenTrial:
    """Train a trial and store its objective. If it was pruned, diverged or failed, the search continues.

    Raises:
        KeyboardInterrupt: a signal arrived. The trial is repeated when the search is resumed.
        DataError, OutputError: all other trials would fail too.
    """
    try:
        trial = study.ask(dict(plan.space))
    except (TypeError, ValueError) as error:  # a queued trial in the file is invalid
        (lost,) = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        study.tell(lost.number, state=TrialState.FAIL)
        raise DataError(f"{folder / STUDY}: trial {lost.number}: {one_line(error)}") from error
    figure, state = None, TrialState.FAIL
    try:
        figure, state = train_trial(plan, folder, study, trial), TrialState.COMPLETE
    except (KeyboardInterrupt, Interrupted, DataError, OutputError) as error:
        study.enqueue_trial(trial.params)
        trial.set_user_attr("reason", one_line(error))
        study.tell(trial, state=state)
        if isinstance(error, Interrupted):
            raise KeyboardInterrupt(error.signal_number) from None
        raise
    except (DivergedError, optuna.TrialPruned) as error:
        trial.set_user_attr("reason", one_line(error))
        state = TrialState.PRUNED
    except Exception as error:
        log.info("trial %d failed", trial.number, exc_info=error)
        trial.set_user_attr("reason", one_line(error) or type(error).__name__)
    return study.tell(trial, figure, state=state)


def train_trial(plan: Plan, folder: Path, study: Study, trial: Trial) -> float:
    """Train a trial in its own run folder and return its objective. Raise TrialPruned or DivergedError if it has none.

    If an earlier trial had the same settings, its result is reused.
    """
    earlier = next((each for each in study.get_trials(states=DONE) if each.params == trial.params), None)
    if earlier is not None:
        reason = f"the same settings as in trial {earlier.number}, whose result is reused"
        if earlier.state == TrialState.PRUNED:
            raise optuna.TrialPruned(reason)
        trial.set_user_attr("reason", reason)
        return float(earlier.value)
    experiment = plan.experiment(trial.params)
    experiment.tests = False
    callback = PruningCallback(trial, plan.settings.objective)
    experiment.callbacks.append(callback)
    run = folder_of(folder, trial)
    run.mkdir(parents=True)  # fails if it exists: in an untrusted folder it could be a link
    config.keep(run, experiment.settings, plan.overrides(trial.params))
    train.train(experiment, run)
    if callback.pruned:
        raise optuna.TrialPruned
    if not math.isfinite(callback.figure):
        raise DivergedError("the objective in the last evaluation is not finite")
    return callback.figure


class PruningCallback(Callback):
    """Reports each evaluation to Optuna, and stops training if the trial should be pruned."""

    def __init__(self, trial: Trial, objective: str) -> None:
        self._trial, self._objective = trial, objective
        self.figure, self.pruned = math.nan, False  # figure: the objective at the end of the fit

    def __deepcopy__(self, memo: dict[int, Any]) -> PruningCallback:
        return self  # only rank 0 calls it

    def on_epoch_end(self, trainer: Trainer, record: EpochRecord) -> None:
        if record.evaluation is None:
            return
        figure = record.evaluation.figure(self._objective)
        if not math.isfinite(figure):
            return
        self._trial.report(figure, record.epoch)
        if trainer.iteration < trainer.plan.iterations and self._trial.should_prune():
            self.pruned = True
            trainer.stop(f"{PRUNED}: other trials were better after the same number of epochs", StopReason.EARLY)

    def on_fit_end(self, trainer: Trainer) -> None:
        if trainer.evaluation is not None:
            self.figure = trainer.evaluation.figure(self._objective)


# results --------------------------------------------------------------------------------------------------------------


def folder_of(search: Path, trial: Trial | FrozenTrial) -> Path:
    return search / TRIALS / f"{trial.number:04d}"


def reason_of(trial: FrozenTrial) -> str:
    """Return why a trial failed, was pruned or was not trained, or ""."""
    killed = "the search was killed" if trial.state == TrialState.FAIL else ""
    return one_line(trial.user_attrs.get("reason", killed))


def record(plan: Plan, folder: Path, study: Study, trial: FrozenTrial) -> None:
    """Print a line about a trial that has ended, and write all trials to tune.csv. Raise OutputError if that fails."""
    result = _form(plan)(trial.value) if trial.value is not None else ""
    outcome = "" if trial.state == TrialState.COMPLETE else trial.state.name.lower()
    result = ", ".join(filter(None, [result, outcome, reason_of(trial)]))
    settings = " ".join(f"{key}={rounded(value)}" for key, value in trial.params.items())
    _say(f"trial {trial.number}: {settings}: {result}")
    trials = [each for each in study.get_trials() if each.state.is_finished()]
    table = [
        *columns(trials, plan),
        column("outcome", [each.state.name.lower() for each in trials]),
        column("wall_s", [each.duration and each.duration.total_seconds() for each in trials]),
        column("reason", [reason_of(each) for each in trials]),
    ]
    write_whole(folder / "tune.csv", as_csv(table))


def columns(trials: Sequence[FrozenTrial], plan: Plan) -> list[Column]:
    searched = {
        key.lstrip("+"): [rounded(each.params[key]) if key in each.params else None for each in trials]
        for key in plan.space
    }
    return [
        column("trial", [each.number for each in trials]),
        column(plan.settings.objective, [each.value for each in trials], _form(plan)),
        *setting_columns(searched),
        column("trained_epochs", [each.last_step for each in trials], title="trained\nepochs"),  # `epochs` is a setting
    ]


def _form(plan: Plan) -> Any:
    return percent if plan.settings.objective == "accuracy" else "{:.4g}".format


def summary(plan: Plan, folder: Path, best: FrozenTrial, test: Evaluation | None) -> str:
    lines = [f"best trial      {best.number}, validation {plan.settings.objective} {_form(plan)(best.value)}"]
    if test is not None:
        scores = f"accuracy {percent(test.accuracy)}, loss {test.loss:.4g}"
        lines.append(f"test images     {scores} (only this trial was tested)")
    lines += [
        f"run folder      {near(folder_of(folder, best))}",
        f"all trials      {near(folder / 'tune.csv')}",
        f"train it again  {shlex.join(['cupynet', 'train', *plan.options, *plan.overrides(best.params)])}",
    ]
    return "\n".join(lines)


def _say(text: str) -> None:
    log.info("%s", text)
    sweep_record.say(text)
