"""The results of a search: lines and a table on the terminal, tune.csv."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from optuna.trial import FrozenTrial

from cupynet.commands.tune.arguments import Plan
from cupynet.commands.tune.study import Study
from cupynet.config.search_space import written
from cupynet.config.sweep_table import Column, Screen, as_csv, heading, shortened, show
from cupynet.core.checks import one_line, percent
from cupynet.core.files import write_whole
from cupynet.core.terminal import near
from cupynet.training import Evaluation

MOST_SHOWN = 10  # rows of the table


def folder_of(search: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return search / "trials" / f"{number:04d}"


def outcome_of(trial: FrozenTrial) -> str:
    """Return complete, pruned, diverged, out of memory, failed or interrupted.

    A trial that was running when the search was killed counts as failed: it may have been the cause.
    """
    return one_line(trial.user_attrs.get("outcome", "failed"))


def figure_of(trial: FrozenTrial) -> float | None:
    """Return the objective of a trial, at its end or in its last evaluation; None if it was not evaluated."""
    figure = trial.value if trial.value is not None else trial.intermediate_values.get(trial.last_step)
    return None if figure is None else float(figure)


def figure_text(value: float | None, objective: str) -> str:
    """Format a value of the objective: accuracy in percent."""
    if value is None:
        return "-"
    return percent(value) if objective == "accuracy" else f"{value:.4g}"


def line(trial: FrozenTrial, study: Study, trials: int) -> str:
    """Return a line about a trial that has ended."""
    names, outcome = shortened([key.lstrip("+") for key in study.space]), outcome_of(trial)
    settings = " ".join(f"{names[key.lstrip('+')]}={value}" for key, value in _written(trial, study).items())
    result = figure_text(figure_of(trial), study.objective)
    if outcome != "complete":
        result = ", ".join(each for each in (result, outcome, reason_of(trial)) if each not in ("", "-"))
    elif study.ranked[0].number == trial.number:
        result += ", the best so far"
    return f"trial {trial.number} ({len(study.counted)} of {trials}): {settings}: {result} ({_seconds(trial):.1f} s)"


def reason_of(trial: FrozenTrial) -> str:
    """Return why a trial is not complete."""
    killed = "the search was killed during this trial" if "outcome" not in trial.user_attrs else ""
    return one_line(trial.user_attrs.get("reason", killed))


def _written(trial: FrozenTrial, study: Study) -> dict[str, str]:
    return {key: written(each, trial.params[key]) for key, each in study.space.items() if key in trial.params}


def _seconds(trial: FrozenTrial) -> float:
    return 0.0 if trial.duration is None else float(trial.duration.total_seconds())


def _columns(trials: Sequence[FrozenTrial], study: Study) -> list[Column]:
    names, objective = shortened([key.lstrip("+") for key in study.space]), study.objective
    numbers, figures = [each.number for each in trials], [figure_of(each) for each in trials]
    epochs = [each.last_step or 0 for each in trials]
    columns = [
        Column("trial", "trial", [str(each) for each in numbers], numbers, weight=9),
        Column(objective, objective, [figure_text(each, objective) for each in figures], figures, weight=8),
        Column("epochs", "epochs", [str(each) for each in epochs], epochs),
    ]
    for key in study.space:
        name, cells = key.lstrip("+"), [_written(each, study).get(key, "") for each in trials]
        columns.append(Column(name, heading(names[name]), cells, cells, weight=5))
    return columns


def print_table(study: Study) -> None:
    """Print the best trials. Columns that do not fit the terminal are in tune.csv."""
    screen = Screen()
    left_out = show(_columns(study.ranked[:MOST_SHOWN], study), {0: "bold"}, screen)
    if left_out:
        screen.print(f"(no room for {', '.join(column.key for column in left_out)}: see tune.csv)")


def write_table(folder: Path, study: Study) -> None:
    """Write all trials to tune.csv. OutputError."""
    trials = [each for each in study.trials if each.state.is_finished()]
    columns = _columns(trials, study)
    for name, value_of in (("outcome", outcome_of), ("wall_s", _seconds), ("reason", reason_of)):
        columns.append(Column(name, name, [], [value_of(each) for each in trials]))
    write_whole(folder / "tune.csv", as_csv(columns).encode())


def summary(folder: Path, study: Study, plan: Plan, test: Evaluation) -> list[str]:
    """Return lines about the best trial, and the command that trains it again."""
    best = study.ranked[0]
    config_dir = [] if plan.config_dir is None else [f"--config-dir={plan.config_dir}"]
    command = shlex.join(["cupynet", "train", *config_dir, *plan.overrides(best.params)])
    return [
        f"best trial      {best.number}, validation {study.objective} {figure_text(best.value, study.objective)}",
        f"test images     accuracy {percent(test.accuracy)}, loss {test.loss:.4g} (evaluated by this trial only)",
        f"run folder      {near(folder_of(folder, best.number))}",
        f"all trials      {near(folder / 'tune.csv')}",
        f"train it again  {command}",
    ]
