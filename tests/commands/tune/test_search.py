"""A search without training: what is tried, what counts, what is pruned, and how it is resumed."""

from __future__ import annotations

import math
import signal
import sqlite3
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna
from optuna.samplers import TPESampler

from cupynet.commands.tune import search as command
from cupynet.commands.tune import study as command_study
from cupynet.commands.tune.arguments import Plan
from cupynet.commands.tune.results import figure_of, outcome_of
from cupynet.commands.tune.study import PruningCallback, Study, open_study
from cupynet.config import search_space
from cupynet.config.search_space import written
from cupynet.core import signals
from cupynet.core.errors import (
    ConfigError,
    CupynetError,
    DataError,
    DeviceError,
    DivergedError,
    Interrupted,
    OutputError,
)
from cupynet.training import StopReason

RATE = "optimizer.learning_rate=interval(0.0001,1)"
CHANNELS = "model.layers.conv1.channels=int(interval(4,32))"

Train = Callable[[Any], float]  # an Optuna trial -> its figure


def good(trial: Any) -> float:
    """Best at a learning rate of 0.01."""
    return 0.9 - 0.1 * abs(math.log10(trial.params.get("optimizer.learning_rate", 0.01)) + 2)


@cache
def empty_database() -> bytes:
    """Optuna's tables without a study: creating them takes ten times as long as opening them."""
    with tempfile.TemporaryDirectory() as folder:
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db")
        storage.remove_session()
        storage.engine.dispose()
        return Path(folder, "study.db").read_bytes()


def tune_settings(**changed: Any) -> Any:
    defaults = {"objective": "accuracy", "sampler": "tpe", "sampler_seed": 0, "pruner": "none"}
    return SimpleNamespace(**defaults | changed)


@contextmanager
def stored_study(folder: Path, *texts: str, **changed: Any) -> Iterator[Study]:
    """The study in this folder, which is created if it does not exist."""
    folder.mkdir(exist_ok=True)
    if not (folder / "study.db").exists():
        (folder / "study.db").write_bytes(empty_database())
    with open_study(folder / "study.db", search_space(texts or (RATE, CHANNELS)), tune_settings(**changed)) as opened:
        yield opened


def study(*texts: str, storage: optuna.storages.BaseStorage | None = None, **changed: Any) -> Study:
    """Return a study in memory. Its trials run ten times as fast as in a file."""
    storage = storage or optuna.storages.InMemoryStorage()
    return Study(storage, search_space(texts or (RATE, CHANNELS)), tune_settings(**changed))


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Runs trials of a study, each of which calls a function instead of training."""

    def run(opened: Study, trials: int, train: Train = good, timeout_s: float | None = None) -> None:
        def trained(plan: Plan, folder: Path, study: Study, trial: Any) -> tuple[float, bool]:
            return train(trial), False

        monkeypatch.setattr(command, "train_trial", trained)
        monkeypatch.setattr(command, "gc", SimpleNamespace(collect=lambda: None))  # there are no models to free
        settings: Any = SimpleNamespace(trials=trials, timeout_s=timeout_s)
        command.run_trials(Plan(settings, opened.space, [], None, None, []), tmp_path, opened)

    return run


def settings_tried(opened: Study) -> list[dict[str, Any]]:
    return [each.params for each in opened.counted]


def outcomes(opened: Study) -> list[str]:
    return [outcome_of(each) for each in opened.trials]


def test_the_same_seed_tries_the_same_settings(search: Callable[..., None]) -> None:
    tried = []
    for seed in (7, 7, 8):
        opened = study(sampler_seed=seed)
        search(opened, 3)
        tried.append(settings_tried(opened))
        figures = [each.value for each in opened.ranked]
        assert len(figures) == 3 and figures == sorted(figures, reverse=True)
    assert tried[0] == tried[1] != tried[2]
    assert all(0.0001 <= each["optimizer.learning_rate"] <= 1 for each in tried[0])
    assert all(4 <= each["model.layers.conv1.channels"] <= 32 for each in tried[0])
    assert len({each["optimizer.learning_rate"] for each in tried[0]}) == 3


def test_a_keyboard_interrupt_that_no_signal_raised_is_not_reported_as_one(tmp_path: Path, monkeypatch: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_trials", interrupted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.db").write_bytes(empty_database())
    settings: Any = SimpleNamespace(
        search=[RATE], trials=1, objective="accuracy", sampler="random", sampler_seed=0, pruner="none"
    )
    with signals.handled(signals.leave), pytest.raises(KeyboardInterrupt):
        command.search(Plan(settings, search_space([RATE]), [], None, None, []), tmp_path)


def test_the_lowest_loss_is_the_best(search: Callable[..., None]) -> None:
    opened = study(objective="loss")
    search(opened, 3)
    figures = [each.value for each in opened.ranked]
    assert figures == sorted(figures) and len(set(figures)) == 3


@pytest.fixture
def few_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with two random trials instead of ten; later trials depend on earlier ones."""
    monkeypatch.setattr(command_study, "TPESampler", partial(TPESampler, n_startup_trials=2))


def test_an_interrupted_search_resumes_as_if_uninterrupted(search: Callable[..., None], few_at_random: None) -> None:
    opened = study()
    search(opened, 4)
    whole, storage = settings_tried(opened), optuna.storages.InMemoryStorage()
    signals = {1: KeyboardInterrupt(signal.SIGTERM), 4: Interrupted(signal.SIGTERM)}

    def interrupted(trial: Any) -> float:
        if trial.number in signals:
            raise signals[trial.number]
        return good(trial)

    for counted, number in ((1, 1), (3, 4)):
        opened = study(storage=storage)
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            search(opened, 4, interrupted)
        assert len(opened.counted) == counted and outcomes(opened)[number] == "interrupted"
    opened = study(storage=storage)
    search(opened, 4)
    assert settings_tried(opened) == whole
    search(opened, 4)
    assert len(opened.trials) == 6


def test_a_trial_that_killed_the_search_is_not_repeated(tmp_path: Path, search: Callable[..., None]) -> None:
    with stored_study(tmp_path) as opened:
        search(opened, 2)
        killed = opened.ask().params
    with stored_study(tmp_path) as opened:
        assert outcomes(opened) == ["complete", "complete", "failed"]
        search(opened, 4)
        assert [each.params for each in opened.trials].count(killed) == 1 and len(opened.counted) == 4


def test_trials_that_fail_are_recorded_and_the_search_continues(tmp_path: Path, search: Callable[..., None]) -> None:
    failures: list[tuple[Exception | None, str]] = [
        (DivergedError("the loss is not finite"), "diverged"),
        (DeviceError("GPU 0 has no memory left"), "out of memory"),
        (MemoryError(), "out of memory"),
        (ConfigError("dtype=half: too narrow"), "failed"),
        (ValueError("a bug"), "failed"),
        (None, "diverged"),
    ]

    def fails(trial: Any) -> float:
        error = failures[trial.number][0] if trial.number < len(failures) else None
        if error is not None:
            raise error
        return good(trial) if trial.number == len(failures) else math.nan

    count = len(failures)
    opened = study()
    search(opened, count + 1, fails)
    assert outcomes(opened) == [*(outcome for _, outcome in failures), "complete"]
    assert len(opened.counted) == count + 1 and [each.number for each in opened.ranked] == [count]
    rows = (tmp_path / "tune.csv").read_text().splitlines()[1:]
    for row, (error, outcome) in zip(rows, failures, strict=False):
        assert f",{outcome}," in row and (error is None or str(error) in row)


@pytest.mark.parametrize("error", [DataError("no images"), OutputError("the disk is full")], ids=["data", "output"])
def test_an_error_independent_of_the_settings_ends_the_search(search: Callable[..., None], error: CupynetError) -> None:
    def fails(trial: Any) -> float:
        raise error

    opened = study()
    with pytest.raises(type(error)):
        search(opened, 3, fails)
    assert outcomes(opened) == ["interrupted"] and opened.counted == []


def test_without_a_complete_trial_the_search_fails_as_its_trials_did(search: Callable[..., None]) -> None:
    def diverges(trial: Any) -> float:
        raise DivergedError("not finite")

    def fails(trial: Any) -> float:
        raise ConfigError("no such thing")

    for train, code in ((diverges, 3), (fails, 1)):
        opened = study()
        search(opened, 2, train)
        with pytest.raises(CupynetError) as error:
            command.best_trial(opened)
        assert error.value.exit_code == code


def test_a_trial_worse_than_the_median_is_pruned_but_not_in_its_last_epoch() -> None:
    def train(opened: Study, accuracies: list[float]) -> tuple[bool, int]:
        """Whether training was stopped, and after how many epochs."""
        trial, stops = opened.ask(), []
        callback = PruningCallback(trial, "accuracy")
        view: Any = SimpleNamespace(total_iterations=len(accuracies), stop=lambda text, reason: stops.append(reason))
        for epoch, accuracy in enumerate(accuracies, 1):
            view.iteration = epoch
            record: Any = SimpleNamespace(evaluation=SimpleNamespace(accuracy=accuracy), epoch=epoch)
            callback.on_epoch_end(view, record)
            if stops:
                break
        assert stops in ([], [StopReason.EARLY]) and callback.pruned == bool(stops)
        opened.tell(trial, *(("pruned",) if stops else ("complete", accuracies[-1])))
        return callback.pruned, epoch

    storage = optuna.storages.InMemoryStorage()
    opened = study(storage=storage, pruner="median")
    for _ in range(5):
        assert train(opened, [0.8, 0.9]) == (False, 2)
    assert train(opened, [0.1, 0.9]) == (True, 1)
    assert train(opened, [0.8, 0.1]) == (False, 2)
    assert train(opened, [math.nan, 0.9]) == (False, 2)
    assert figure_of(opened.trials[5]) == 0.1
    assert train(study(storage=storage, pruner="none"), [0.1, 0.1]) == (False, 2)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")  # as in `open_study`
def test_a_grid_is_tried_once_in_order(search: Callable[..., None]) -> None:
    texts = ["batch_size=32,64", "model.layers.conv1.channels=range(1,4)"]

    def interrupted(trial: Any) -> float:
        if trial.number == 2:
            raise KeyboardInterrupt(signal.SIGINT)
        return good(trial)

    opened = study(*texts, sampler="grid")
    with pytest.raises(KeyboardInterrupt):
        search(opened, 20, interrupted)
    search(opened, 20)
    tried = [tuple(each.values()) for each in settings_tried(opened)]
    assert tried == [("32", 1), ("32", 2), ("32", 3), ("64", 1), ("64", 2), ("64", 3)]
    assert opened.exhausted


def test_a_search_ends_when_all_combinations_are_tried(search: Callable[..., None]) -> None:
    opened = study("batch_size=32,64", "seed=1,2")
    search(opened, 100)
    assert len({tuple(each.values()) for each in settings_tried(opened)}) == 4 <= len(opened.counted) < 100


def test_no_trial_starts_after_the_timeout(search: Callable[..., None]) -> None:
    opened = study()
    search(opened, 3, timeout_s=1e-9)
    assert opened.trials == []


def test_files_of_another_kind_are_refused(tmp_path: Path, search: Callable[..., None]) -> None:
    with stored_study(tmp_path) as opened:
        search(opened, 1)
    with pytest.raises(DataError, match="another search"), stored_study(tmp_path, "batch_size=1,2"):
        pass
    other = tmp_path / "other"
    other.mkdir()
    for content in (b"a text\n" * 100, b"\0" * 4096):
        (other / "study.db").write_bytes(content)
        with pytest.raises(DataError, match=r"study\.db") as refused, stored_study(other):
            pass
        assert "\n" not in str(refused.value)


def test_a_manipulated_study_gives_no_settings(tmp_path: Path, search: Callable[..., None]) -> None:
    with stored_study(tmp_path, "batch_size=32,64") as opened:
        search(opened, 2)
    with sqlite3.connect(tmp_path / "study.db") as database:
        changed = '{"name": "CategoricalDistribution", "attributes": {"choices": ["32", "64 hydra.run.dir=/"]}}'
        database.execute("UPDATE trial_params SET distribution_json = ?, param_value = 1", (changed,))
    database.close()
    with pytest.raises(DataError), stored_study(tmp_path, "batch_size=32,64"):
        pass


def test_a_manipulated_number_stays_within_its_bounds(tmp_path: Path, search: Callable[..., None]) -> None:
    with stored_study(tmp_path, RATE) as opened:
        search(opened, 1)
    with sqlite3.connect(tmp_path / "study.db") as database:
        database.execute("UPDATE trial_params SET param_value = 1e9")
    database.close()
    with stored_study(tmp_path, RATE) as opened:
        (distribution,) = opened.space.values()
        assert written(distribution, opened.ranked[0].params["optimizer.learning_rate"]) == "1.0"


def test_a_search_prints_no_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], search: Callable[..., None], few_at_random: None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, trials, changed in (("tpe", 3, {"pruner": "hyperband"}), ("grid", 2, {"sampler": "grid"})):
            with stored_study(tmp_path / name, "seed=range(1,13)", **changed) as opened:
                search(opened, trials)
    assert capfd.readouterr() == ("", "")
