"""`resume=...` as a user types it: a run that was killed or stopped continues as if nothing had happened."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import config
from cupynet.commands import train
from cupynet.config import resume, stored
from cupynet.config.overrides import quoted
from cupynet.config.schema import Settings
from cupynet.core import lock
from cupynet.core.errors import Interrupted
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.commands import QUICK, SMALL, Command, Line, summary_of
from tests.support.refusals import data_error, refused
from tests.support.resumed_runs import MORE, EndAfter, resumed, same, trained
from tests.support.settings import settings_of

RUN = Path("outputs/day/run")
NORM = ["workers=2", "model=lenet_norm", "epochs=2"]  # has running estimates and dropout


@pytest.fixture(scope="module")
def one_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that SIGTERM stopped between averages, two iterations after a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted, match=f"cupynet train resume={folder / RUN}"):
        trained(folder / RUN, *QUICK, *SMALL, *MORE, *NORM, callbacks=[EndAfter(14)])
    return folder


@pytest.fixture
def stopped(one_stopped: Path, in_folder: Path, caplog: pytest.LogCaptureFixture) -> Path:
    shutil.copytree(one_stopped, in_folder, dirs_exist_ok=True)
    caplog.set_level("INFO", "cupynet")
    return RUN


def train_job(settings: Settings, folder: Path) -> float | None:
    return train.train(train.prepare(settings), folder)


def contents(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


# tests/test_soak.py kills runs at every step of a save, with and without averages
def test_a_stopped_run_resumes_bit_for_bit_and_its_times_add_up(stopped: Path, command: Command) -> None:
    assert summary_of(stopped)["stopped_by"] == "SIGTERM" and (stopped / "weights.safetensors").is_file()
    trained(Path("whole"), *QUICK, *SMALL, *MORE, *NORM)
    started, newest = Run(stopped).last_start()["started"], Checkpoints(stopped / "checkpoints").newest()
    assert newest is not None
    compile_s = newest.state["workers"][0]["numbers"]["clock"]["compile_s"]
    assert command(f"resume={stopped}", task=train_job)[0] == 0
    assert same(Path("whole"), stopped)
    cost = Run(stopped).summary().cost
    assert cost.wall_s >= cost.train_s + cost.evaluate_s + cost.compile_s and cost.compile_s > compile_s > 0
    assert Run(stopped).last_start()["started"] == started
    assert not [entry for entry in (stopped / "checkpoints").iterdir() if "." in entry.name]


def test_the_time_of_earlier_processes_counts(stopped: Path) -> None:
    store = Checkpoints(stopped / "checkpoints")
    newest = store.newest()
    assert newest is not None
    for worker in newest.state["workers"]:
        worker["numbers"]["clock"]["compile_s"] += 1000
    store.save(store.steps()[-1], newest.state, newest.arrays)
    resumed(stopped)
    assert Run(stopped).summary().cost.wall_s > 1000


STEP = "optimizer.learning_rate={name: step, initial: 0.1, factor: 0.5, every: 7}"


@pytest.mark.parametrize(
    ("settings", "as_in_one_go"),
    [
        (["workers=1"], False),  # OneCycle
        (["workers=1", "optimizer.learning_rate=0.05"], True),
        (["workers=2", "parallel.learning_rate_scale=linear", STEP], True),
    ],
    ids=["one cycle", "constant", "scaled step"],
)
def test_training_further_is_as_in_one_go_or_warns_that_the_schedule_changed(
    settings: list[str], as_in_one_go: bool, in_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick = [*QUICK, "model=mlp", "data.train=128", "backend=numpy", *settings]
    trained(in_folder / "whole", *quick, "epochs=4")
    trained(in_folder / "parts", *quick, "epochs=2")
    caplog.clear()
    resumed(in_folder / "parts", "epochs=4")
    one, other = (Run(in_folder / name).weights() for name in ("whole", "parts"))
    assert all((one[name] == other[name]).all() for name in one) == as_in_one_go
    warned = [each for each in caplog.records if isinstance(each.args, tuple) and each.args[:3] == (4, 2, 4)]
    assert bool(warned) != as_in_one_go


def test_a_schedule_may_be_named_again(in_folder: Path) -> None:
    settings = ["optimizer=adam", "optimizer.learning_rate=cosine"]
    stored.keep(in_folder / "run", settings_of(*settings), settings)
    before = config.load(in_folder / "run").optimizer
    for again in (settings, ["++optimizer.learning_rate={name:cosine,initial:0.001}"]):
        assert config.load(in_folder / "run", again).optimizer == before


@pytest.mark.parametrize(
    "arguments",
    [
        *(["resume=outputs/day/run", "batch_size=16"], ["resume=outputs/day/run", "hydra.run.dir=other"]),
        *(["resume=outputs/day"], ["resume=latest", "-m", "seed=1,2"]),
        *(["hydra.run.dir=outputs/day/run"], ["-m", "hydra.sweep.dir=outputs/day/run"]),
    ],
)
def test_an_invalid_resume_is_refused_and_changes_nothing(
    stopped: Path, arguments: list[str], command: Command, error_line: Line
) -> None:
    before = contents(stopped)
    assert command(*arguments) == (2, [])
    assert error_line() and contents(stopped) == before


def test_a_complete_run_is_left_alone(stopped: Path, command: Command) -> None:
    assert command(f"resume={stopped}", task=train_job)[0] == 0
    before = contents(stopped)
    assert command(f"resume={stopped}", "workers=1", task=train_job)[0] == 0
    assert command(f"resume={stopped}", "epochs=1", task=train_job)[0] == 2  # the run has had two
    log = stopped / "train.log"
    assert {**contents(stopped), log: b""} == {**before, log: b""}


def test_a_complete_run_whose_last_checkpoint_is_older_is_left_alone(in_folder: Path, command: Command) -> None:
    run = Path("run")
    trained(run, *QUICK, *SMALL, "epochs=3", "callbacks.checkpoint.every_epochs=2")
    checkpoint, newest = sorted((run / "checkpoints").iterdir())
    shutil.rmtree(newest)  # earlier versions wrote no checkpoint at the end
    before = {path: text for path, text in contents(run).items() if path.name != "train.log"}
    for path, same_rows in ((run, True), (in_folder / run, True), (checkpoint, False)):  # a checkpoint is resumed
        assert command(f"resume={path}", task=train_job)[0] == 0
        assert (before.items() <= contents(run).items()) == same_rows


SCHEDULE = {"_target_": "cupynet.optim.Warmup", "steps": 9, "then": {"_target_": "A", "peak": 0.2}}


@pytest.mark.parametrize(
    ("given", "stored", "key"),
    [
        ({"rate": 0.01}, {"rate": SCHEDULE}, "rate"),
        ({"rate": {**SCHEDULE, "then": {"_target_": "A", "peak": 0.1}}}, {"rate": SCHEDULE}, "rate.then.peak"),
        ({"rate": 0.01}, {}, "rate"),
        ({"optimizer": {}}, {"optimizer": {"momentum": 0.9}}, "optimizer.momentum"),
    ],
)
def test_a_setting_that_must_not_change_is_refused(given: dict[str, Any], stored: dict[str, Any], key: str) -> None:
    with refused(key):
        resume.check_same_settings({**given, "seed": 1}, {**stored, "seed": 1}, RUN)
    resume.check_same_settings({"data": {"folder": "elsewhere"}}, {"data": {"folder": "here"}}, RUN)
    resume.check_same_settings({"epochs": 2}, {"epochs": 1, "callbacks": {"mine": {"path": "x"}}}, RUN)
    resume.check_same_settings({"parallel": {"timeout_s": 9}}, {"parallel": {"timeout_s": 5}}, RUN)


def test_a_running_run_cannot_be_resumed(
    stopped: Path, command: Command, error_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    hold = Hold(stopped)
    before = contents(stopped)
    for arguments in ([f"resume={stopped}", "epochs=9"], [f"hydra.run.dir={stopped}"]):
        assert command(*arguments) == (2, [])
        line = error_line()
        assert str(stopped) in line and str(os.getpid()) in line
    assert contents(stopped) == before
    assert resume.find("latest", []) is None
    hold.release()
    assert resume.find("latest", []) == stopped


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("backend.tf32=true", 2),  # found when the settings are checked
        ("callbacks.history.path=/proc/x/h.jsonl", 74),  # found before the data are loaded
        ("callbacks.checkpoint.path={other}", 2),  # found when training begins
    ],
)
def test_a_resume_that_fails_before_training_changes_no_settings(
    stopped: Path, change: str, code: int, command: Command
) -> None:
    other = Path("other").absolute()
    Checkpoints(other).save(3, {}, {})
    kept = [stopped / ".hydra", stopped / "checkpoints"]
    before = contents(*kept), (stopped / "started.json").read_bytes()
    typed = [f"resume={stopped}", "epochs=9", change.format(other=other)]
    assert command(*typed, check=train.prepare, task=train_job)[0] == code
    assert (contents(*kept), (stopped / "started.json").read_bytes()) == before
    assert command(f"resume={stopped}", task=train_job)[0] == 0
    assert config.load(stopped).epochs == 2 == Run(stopped).summary().outcome.epochs


def test_a_resume_on_other_labels_keeps_the_history(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(1).integers(0, 256, (80, 6, 6), np.uint8), np.arange(80) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = ["data=npz", f"data.file={tmp_path / 'own.npz'}", "model=mlp", "backend=numpy", "workers=1", "epochs=2"]
    trained(tmp_path / "run", *own)
    before = (tmp_path / "run" / "history.jsonl").read_bytes()
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels[::-1], x_test=images, y_test=labels)
    first = min((tmp_path / "run" / "checkpoints").iterdir())
    with data_error(first.name):
        train.train(train.prepare(config.load(tmp_path / "run", [f"resume={quoted(first)}"])), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == before


def test_the_changes_of_a_resume_are_stored(stopped: Path, command: Command) -> None:
    changes = {"callbacks.checkpoint.keep_last=5", "backend=numba"}
    assert command("resume=latest", *changes, task=train_job)[0] == 0
    assert Run(stopped).last_start()["changed"]
    settings = config.load(stopped)
    assert settings.callbacks["checkpoint"]["keep_last"] == 5 and settings.backend.name == "numba"
    assert {*changes, "epochs=2"} <= {*config.overrides_of(stopped)}


def test_a_resumed_run_is_still_repeated_with_the_files_of_its_user(stopped: Path, command: Command) -> None:
    began = json.loads((stopped / "started.json").read_bytes())
    (stopped / "started.json").write_text(json.dumps(began | {"config_dir": "mine"}))
    assert command("resume=latest", task=train_job)[0] == 0
    assert Run(stopped).last_start()["config_dir"] == "mine"


def test_a_run_that_was_killed_before_its_results_were_written_is_finished(stopped: Path, command: Command) -> None:
    resumed(stopped)
    assert resume.find("latest", []) is None
    before = (stopped / "weights.safetensors").read_bytes()
    (stopped / "summary.json").unlink()
    assert resume.find("latest", []) == stopped
    resumed(stopped)
    assert (stopped / "weights.safetensors").read_bytes() == before and (stopped / "summary.json").is_file()
    code, (settings,) = command("resume=latest")  # no run is unfinished, so a new one begins
    assert code == 0 and settings.resume is None


def test_a_run_resumed_from_an_earlier_checkpoint_is_unfinished_again(stopped: Path) -> None:
    """Its results are outdated, and checkpoints newer than the resumed one are removed."""
    resumed(stopped)
    store = Checkpoints(stopped / "checkpoints")
    first, last = store.steps()[-2:]
    kept = (stopped / "summary.json").read_bytes()
    experiment = train.prepare(config.load(stopped, [f"resume={quoted(store.path(first))}"]))
    experiment.callbacks.append(EndAfter(first + 1, killed=True))
    with pytest.raises(KeyError, match="as if killed"):
        train.train(experiment, stopped)
    assert last not in store.steps() and first in store.steps()
    assert (stopped / "summary.json").read_bytes() == kept and resume.find("latest", []) == stopped
    resumed(stopped)
    assert resume.find("latest", []) is None and resume.finished(stopped)


def test_a_damaged_checkpoint_is_passed_over(stopped: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Checkpoints(stopped / "checkpoints")
    first, newest = store.steps()[-2:]
    path = store.path(newest) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    resumed(stopped)
    assert str(path) in caplog.text and f"iteration {first}," in caplog.text
