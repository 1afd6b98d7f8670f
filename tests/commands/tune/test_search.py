"""Searches without training: settings tried, trials counted, pruning, and resumption."""

import contextlib
import csv
import math
import shlex
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("optuna")

from optuna import TrialPruned
from optuna.exceptions import StorageInternalError
from optuna.study import Study
from optuna.trial import TrialState

from cupynet.commands.tune import search as command
from cupynet.commands.tune.search import DONE, Plan, PruningCallback, ranked
from cupynet.config import search_space
from cupynet.config.search_space import rounded
from cupynet.core import errors
from cupynet.training import StopReason
from tests.support.refusals import data_error

RATE = "optimizer.learning_rate=interval(0.0001,1)"
CHANNELS = "model.layers.conv1.channels=int(interval(4,32))"
COMPLETE, FAIL = TrialState.COMPLETE, TrialState.FAIL

Train = Callable[[Any], float]  # an Optuna trial -> its objective value


def good(trial: Any) -> float:
    """Return an accuracy that is best at a learning rate of 0.01."""
    return 0.9 - 0.1 * abs(math.log10(trial.params.get("optimizer.learning_rate", 0.01)) + 2)


def failing(failures: Mapping[int, BaseException]) -> Train:
    """Return a training function that raises these errors in the trials of these numbers."""

    def train(trial: Any) -> float:
        if trial.number in failures:
            raise failures[trial.number]
        return good(trial)

    return train


@cache
def empty_database() -> bytes:
    """Return Optuna's tables without a study. Creating them takes ten times as long as opening them."""
    with tempfile.TemporaryDirectory() as folder:
        storage = command.storage(Path(folder, "study.db"))
        storage.remove_session()
        storage.engine.dispose()
        return Path(folder, "study.db").read_bytes()


def plan_of(*texts: str, **changed: Any) -> Plan:
    defaults = {
        "search": texts, "objective": "accuracy", "sampler": "tpe", "sampler_seed": 0, "pruner": "none", "trials": 3,
        "timeout_s": None,
    }  # fmt: skip
    settings: Any = SimpleNamespace(**defaults | changed)
    return Plan(settings, search_space(texts or (RATE, CHANNELS)), [], None, None, [])


def study(folder: Path, plan: Plan) -> Study:
    folder.mkdir(exist_ok=True)
    path = folder / "study.db"
    resumed = path.exists()
    if not resumed:
        path.write_bytes(empty_database())
    return command.open_study(path, plan.space, plan.settings, resumed=resumed)


Search = Callable[..., Study]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Search:
    """Return a function that runs a search whose trials call a function instead of training."""

    def run(plan: Plan, train: Train = good, folder: Path = tmp_path) -> Study:
        monkeypatch.setattr(command, "train_trial", lambda plan, folder, study, trial: train(trial))
        opened = study(folder, plan)
        command.run_trials(plan, folder, opened)
        return opened

    return run


def settings_tried(opened: Study) -> list[dict[str, Any]]:
    return [each.params for each in opened.get_trials(states=DONE)]


def states(opened: Study) -> list[TrialState]:
    return [each.state for each in opened.trials]


def test_searches_with_the_same_seed_try_the_same_settings(search: Search, tmp_path: Path) -> None:
    studies = [search(plan_of(sampler_seed=seed), folder=tmp_path / str(n)) for n, seed in enumerate((7, 7, 8))]
    first, again, other = (settings_tried(each) for each in studies)
    assert first == again != other
    assert all(0.0001 <= each["optimizer.learning_rate"] <= 1 for each in first)
    assert all(4 <= each["model.layers.conv1.channels"] <= 32 for each in first)
    figures = [each.value for each in ranked(studies[0])]
    assert len(figures) == 3 and figures == sorted(figures, reverse=True)


EVIL = '{"name": "CategoricalDistribution", "attributes": {"choices": ["64 hydra.run.dir=/"]}}'


@pytest.mark.parametrize(
    "change",
    [
        "update trial_values set value = 'x' where trial_id = 1",
        "delete from trial_params where trial_id = 1",
        "delete from study_directions",
        f"update trial_params set distribution_json = '{EVIL}', param_value = 0 where trial_id = 1",
    ],
)
def test_a_forged_study_db_is_refused(change: str, search: Search, tmp_path: Path) -> None:
    opened = search(plan_of(trials=1))
    opened._storage.remove_session()
    with contextlib.closing(sqlite3.connect(tmp_path / "study.db")) as file:
        file.executescript(change)
    with data_error("study.db"):
        ranked(search(plan_of(trials=5)))


def test_with_objective_loss_the_lowest_loss_is_the_best(search: Search) -> None:
    figures = [each.value for each in ranked(search(plan_of(objective="loss")))]
    assert figures == sorted(figures) and len(set(figures)) == 3


def test_an_interrupted_trial_is_repeated_when_the_search_is_resumed(search: Search) -> None:
    plan = plan_of(trials=3)
    with pytest.raises(KeyboardInterrupt):
        search(plan, failing({1: errors.Interrupted(signal.SIGTERM)}))
    opened = search(plan)
    assert states(opened) == [COMPLETE, FAIL, COMPLETE, COMPLETE]
    assert opened.trials[1].params == opened.trials[2].params
    search(plan)
    assert len(opened.trials) == 4


def test_a_trial_that_was_killed_is_repeated(search: Search) -> None:
    killed = search(plan_of(trials=2)).ask(plan_of().space).params
    opened = search(plan_of(trials=4))
    assert states(opened) == [COMPLETE, COMPLETE, FAIL, COMPLETE, COMPLETE]
    assert [each.params for each in opened.trials].index(killed, 3) == 3


def test_an_invalid_queued_trial_ends_the_search_and_is_not_left_running(search: Search) -> None:
    opened = search(plan_of(trials=1))
    opened.enqueue_trial({RATE.partition("=")[0]: "fast"})
    with data_error("trial 1"):
        search(plan_of(trials=3))
    assert states(opened) == [COMPLETE, FAIL]


FAILURES = [
    (errors.DivergedError("the loss is not finite"), "pruned"),
    (errors.DeviceError("GPU 0 has no memory left"), "fail"),
    (MemoryError(), "fail"),
    (errors.ConfigError("dtype=half: too narrow"), "fail"),
    (ValueError("a bug"), "fail"),
]


def test_trials_that_fail_are_recorded_in_tune_csv_and_the_search_continues(tmp_path: Path, search: Search) -> None:
    opened = search(plan_of(trials=6), failing(dict(enumerate(error for error, _ in FAILURES))))
    assert [each.number for each in ranked(opened)] == [5]
    rows = (tmp_path / "tune.csv").read_text().splitlines()[1:]
    for row, (error, outcome) in zip(rows, FAILURES, strict=False):
        assert f",{outcome}," in row and (str(error) or type(error).__name__) in row


def test_tune_csv_has_the_values_that_the_trials_used(tmp_path: Path, search: Search) -> None:
    """Searched epochs and the epochs of a trial are different columns."""
    opened = search(plan_of(RATE, "epochs=3,4", trials=2))
    for row, trial in zip(csv.DictReader((tmp_path / "tune.csv").read_text().splitlines()), opened.trials, strict=True):
        for name, value in trial.params.items():
            assert row[name] == rounded(value)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (KeyboardInterrupt(signal.SIGINT), errors.Interrupted),
        (errors.OutputError("full"), errors.OutputError),
        (StorageInternalError("full"), errors.OutputError),
    ],
    ids=["interrupted", "disk full", "study.db cannot be written"],
)
def test_a_search_that_is_interrupted_or_cannot_write_prints_the_resume_command(
    end: BaseException, error: type[errors.CupynetError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of(trusted_modules=["mine"], callbacks={}), config_dir=Path("/own conf"))
    monkeypatch.setattr(command, "run_trials", Mock(side_effect=end))
    with pytest.raises(error) as caught:
        command.search(plan, tmp_path)
    _, _, line = str(caught.value).partition("cupynet tune ")
    assert shlex.split(line) == ["--config-dir=/own conf", f"resume={tmp_path}", "trusted_modules=[mine]"]


def test_a_search_starts_no_trial_after_its_timeout(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=Mock(side_effect=[0.0, 599.0, 600.0])))
    assert states(search(plan_of(trials=3, timeout_s=600))) == [COMPLETE]


def test_an_error_independent_of_the_settings_ends_the_search(search: Search) -> None:
    with pytest.raises(errors.OutputError):
        search(plan_of(), failing({0: errors.OutputError("the disk is full")}))
    opened = search(plan_of(trials=1))
    assert states(opened) == [FAIL, COMPLETE]
    assert opened.trials[0].params == opened.trials[1].params


@pytest.mark.parametrize(
    ("error", "code"), [(errors.DivergedError("not finite"), 3), (errors.ConfigError("no such thing"), 1)]
)
def test_a_search_of_failed_trials_fails_as_they_did(error: errors.CupynetError, code: int, search: Search) -> None:
    opened = search(plan_of(), failing(dict.fromkeys(range(3), error)))
    with pytest.raises(errors.CupynetError) as caught:
        ranked(opened)
    assert caught.value.exit_code == code


def pruned(opened: Study, accuracies: list[float]) -> tuple[bool, int]:
    """Report a trial's epochs to a study. Return whether it was pruned, and after how many epochs."""
    trial, stops = opened.ask(plan_of().space), []
    callback = PruningCallback(trial, "accuracy")
    view: Any = SimpleNamespace(plan=SimpleNamespace(iterations=len(accuracies)), iteration=0)
    view.stop = lambda text, reason: stops.append(reason)
    while view.iteration < len(accuracies) and not stops:
        view.iteration += 1
        evaluation = SimpleNamespace(figure={"accuracy": accuracies[view.iteration - 1]}.get)
        callback.on_epoch_end(view, SimpleNamespace(evaluation=evaluation, epoch=view.iteration))  # type: ignore[arg-type]
    assert stops == [StopReason.EARLY] * callback.pruned
    opened.tell(trial, None if stops else accuracies[-1], state=TrialState.PRUNED if stops else None)
    return callback.pruned, view.iteration


def test_a_trial_worse_than_the_median_is_pruned_but_not_in_its_last_epoch(tmp_path: Path) -> None:
    opened = study(tmp_path, plan_of(pruner="median"))
    for _ in range(5):
        assert pruned(opened, [0.8, 0.9]) == (False, 2)
    assert pruned(opened, [0.1, 0.9]) == (True, 1)
    assert opened.trials[5].value == 0.1  # the last figure before pruning
    assert pruned(opened, [0.8, 0.1]) == (False, 2)
    assert pruned(opened, [math.nan, 0.9]) == (False, 2)
    assert pruned(study(tmp_path, plan_of(pruner="none")), [0.1, 0.1]) == (False, 2)


def test_a_trial_worse_than_the_others_is_pruned_by_hyperband(tmp_path: Path) -> None:
    opened = study(tmp_path, plan_of(sampler="random", pruner="hyperband"))
    assert [pruned(opened, [accuracy] * 9)[0] for accuracy in (0.8,) * 6 + (0.1,)] == [False] * 6 + [True]


def test_settings_that_are_drawn_again_reuse_their_result(tmp_path: Path) -> None:
    plan = plan_of("batch_size=32,64")
    opened = study(tmp_path, plan)
    for size in ("32", "32", "64", "64"):
        opened.enqueue_trial({"batch_size": size})
    first, same, worse, also_worse = (opened.ask(dict(plan.space)) for _ in range(4))
    opened.tell(first, 0.5)
    opened.tell(worse, state=TrialState.PRUNED)
    assert command.train_trial(plan, tmp_path, opened, same) == 0.5
    with pytest.raises(TrialPruned):
        command.train_trial(plan, tmp_path, opened, also_worse)


def test_the_folder_of_a_search_may_have_any_name(search: Search, tmp_path: Path) -> None:
    folder = tmp_path / "50%20 why?a=b&c#d"
    folder.mkdir()
    for resumed in (False, True):
        opened = command.open_study(folder / "study.db", plan_of().space, plan_of().settings, resumed=resumed)
        opened.ask(plan_of().space)
    assert len(opened.trials) == 2
    assert [each.name for each in folder.iterdir()] == ["study.db"] and list(tmp_path.iterdir()) == [folder]


def test_a_study_db_of_another_search_and_other_files_are_refused(tmp_path: Path, search: Search) -> None:
    search(plan_of(trials=1))
    with pytest.raises(errors.DataError):
        study(tmp_path, plan_of("batch_size=1,2"))
    for content in (b"a text\n" * 100, b"\0" * 4096):
        (tmp_path / "study.db").write_bytes(content)
        with pytest.raises(errors.DataError):
            study(tmp_path, plan_of())
