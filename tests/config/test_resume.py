"""`resume=...` as a user types it: a run that was killed or stopped continues as if nothing had happened."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import config
from cupynet.commands import train
from cupynet.config import resume, stored
from cupynet.config.overrides import quoted
from cupynet.core import lock
from cupynet.core.errors import Interrupted
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.called import called, entered, train_job
from tests.support.commands import QUICK, SMALL, Command, Line, summary_of
from tests.support.refusals import data_error, refused
from tests.support.resumed_runs import MORE, EndAfter, resumed, same, trained
from tests.support.settings import settings_of

pytestmark = pytest.mark.usefixtures("minimal_conf")

RUN = Path("outputs/day/run")
FEW = ["batch_size=16", "data.train=320", "data.test=40"]
NORM = [*QUICK, *SMALL, *MORE, *FEW, "workers=2", "model=lenet_norm", "epochs=2"]  # has running estimates and dropout
MLP = ["model=mlp", "model.layers.dense1.units=8", "model.layers.dense2.units=8", "backend=numpy"]
CHANGES = ["callbacks.checkpoint.keep_last=5", "backend=numba"]


@pytest.fixture(scope="module")
def one_stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that SIGTERM stopped between averages, two iterations after a checkpoint."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Interrupted, match=f"cupynet train resume={folder / RUN}"):
        trained(folder / RUN, *NORM, callbacks=[EndAfter(14)])
    return folder


@pytest.fixture(scope="module")
def one_resumed(one_stopped: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the command resumed that run with some changes.

    The run had begun with --config-dir=mine, and had spent another 1000 s on compiling.
    """
    folder = shutil.copytree(one_stopped, tmp_path_factory.mktemp("resumed"), dirs_exist_ok=True)
    start = folder / RUN / "started.json"
    start.write_text(json.dumps(json.loads(start.read_bytes()) | {"config_dir": "mine"}))
    store = Checkpoints(folder / RUN / "checkpoints")
    newest = store.newest()
    assert newest is not None
    for worker in newest.state["workers"]:
        worker["numbers"]["clock"]["compile_s"] += 1000
    store.save(store.steps()[-1], newest.state, newest.arrays)
    with entered(folder):
        assert called("resume=latest", *CHANGES, task=train_job)[0] == 0
    return folder


@pytest.fixture
def stopped(one_stopped: Path, in_folder: Path, caplog: pytest.LogCaptureFixture) -> Path:
    shutil.copytree(one_stopped, in_folder, dirs_exist_ok=True)
    caplog.set_level("INFO", "cupynet")
    return RUN


@pytest.fixture
def complete(one_resumed: Path, in_folder: Path) -> Path:
    """Return the run that was resumed, which has ended."""
    shutil.copytree(one_resumed, in_folder, dirs_exist_ok=True)
    return RUN


def contents(*folders: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


# tests/test_soak.py kills runs at every step of a save, with and without averages
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_run(
    one_stopped: Path, one_resumed: Path, tmp_path: Path
) -> None:
    stopped, ended = one_stopped / RUN, one_resumed / RUN
    assert summary_of(stopped)["stopped_by"] == "SIGTERM" and (stopped / "weights.safetensors").is_file()
    trained(tmp_path / "whole", *NORM)
    assert same(tmp_path / "whole", ended)
    assert Run(ended).last_start()["started"] == Run(stopped).last_start()["started"]
    assert not [entry for entry in (ended / "checkpoints").iterdir() if "." in entry.name]


def test_the_times_of_a_resumed_run_include_earlier_processes(one_stopped: Path, one_resumed: Path) -> None:
    newest, cost = Checkpoints(one_stopped / RUN / "checkpoints").newest(), Run(one_resumed / RUN).summary().cost
    assert newest is not None
    compile_s = newest.state["workers"][0]["numbers"]["clock"]["compile_s"]
    assert cost.compile_s > compile_s + 1000 > 1000
    assert cost.wall_s >= cost.train_s + cost.evaluate_s + cost.compile_s


def test_a_resumed_run_stores_the_settings_that_were_changed_and_keeps_its_config_dir(one_resumed: Path) -> None:
    run = one_resumed / RUN
    start, settings = Run(run).last_start(), config.load(run)
    assert start["changed"] and start["config_dir"] == "mine"
    assert settings.callbacks["checkpoint"]["keep_last"] == 5 and settings.backend.name == "numba"
    assert {*CHANGES, "epochs=2"} <= {*config.overrides_of(run)}


@pytest.mark.parametrize("workers", [1, 2])
def test_another_number_of_workers_counts_as_a_change_on_resume(workers: int, in_folder: Path) -> None:
    """By default, the number of workers depends on the machine, and is not among the settings of the command."""
    with pytest.raises(Interrupted):
        trained(in_folder, *QUICK, *MLP, "data.train=128", "data.test=20", callbacks=[EndAfter(1)])
    start = in_folder / "started.json"
    start.write_text(json.dumps(json.loads(start.read_bytes()) | {"workers": workers}))
    resumed(in_folder)
    now = Run(in_folder).last_start()
    assert now["changed"] == (now["workers"] != workers)


STEP = "optimizer.learning_rate={name: step, initial: 0.1, factor: 0.5, every: 3}"


@pytest.mark.parametrize(
    ("settings", "as_in_one_go"),
    [
        (["workers=1"], False),  # OneCycle
        (["workers=1", "optimizer.learning_rate=0.05"], True),
        (["workers=2", "parallel.learning_rate_scale=linear", STEP], True),
    ],
    ids=["one cycle", "constant", "scaled step"],
)
def test_a_run_resumed_for_more_epochs_equals_training_at_once_or_warns_that_the_schedule_changed(
    settings: list[str], as_in_one_go: bool, in_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quick = [*QUICK, *MLP, "data.train=128", "data.test=20", *settings]
    trained(in_folder / "whole", *quick, "epochs=2")
    trained(in_folder / "parts", *quick, "epochs=1")
    caplog.clear()
    resumed(in_folder / "parts", "epochs=2")
    one, other = (Run(in_folder / name).weights() for name in ("whole", "parts"))
    assert all((one[name] == other[name]).all() for name in one) == as_in_one_go
    warned = [each.args for each in caplog.records if isinstance(each.args, tuple) and each.args[:3] == (2, 1, 2)]
    assert bool(warned) != as_in_one_go
    if warned:
        last = json.loads((in_folder / "parts" / "history.jsonl").read_text().splitlines()[0])["learning_rate"]
        assert warned[0][4] == last < warned[0][3]  # the rates before and after the jump


def test_a_resumed_run_accepts_its_learning_rate_schedule_by_name(in_folder: Path) -> None:
    settings = ["optimizer=adam", "optimizer.learning_rate=cosine"]
    stored.keep(in_folder / "run", settings_of(*settings), settings)
    before = config.load(in_folder / "run").optimizer
    for again in (settings, ["++optimizer.learning_rate={name:cosine,initial:0.001}"]):
        assert config.load(in_folder / "run", again).optimizer == before


def test_a_resumed_run_accepts_changes_of_every_form_and_needs_no_user_files(command: Command, in_folder: Path) -> None:
    before = ["optimizer.momentum=0.5", "workers=2", "seed=5"]
    own = replace(settings_of(*before), model={"_target_": "mine.Stack"})
    stored.keep(in_folder / "r", own, ["model=own", *before])
    changes = ["epochs=20", "~callbacks.progress", "+callbacks.mine={_target_:a.B}", "backend=numpy"]
    code, (settings,) = command("resume=r", *changes, "trusted_modules=[mine]")
    assert code == 0 and settings.optimizer["momentum"] == 0.5 and settings.model == {"_target_": "mine.Stack"}
    assert (settings.seed, settings.workers, settings.epochs, settings.backend.name) == (5, 2, 20, "numpy")
    assert settings.callbacks["progress"] is None and settings.callbacks["mine"] == {"_target_": "a.B"}
    assert settings.trusted_modules == ["mine"]


def exits_with_2_and_changes_nothing(run: Path, command: Command, error_line: Line, *typed: str) -> None:
    before = contents(run)
    for arguments in typed:
        assert command(*arguments.split()) == (2, [])
        assert error_line() and contents(run) == before


def test_a_wrong_resume_exits_with_2_and_changes_nothing(stopped: Path, command: Command, error_line: Line) -> None:
    changed = f"resume={stopped} batch_size=64", f"resume={stopped} hydra.run.dir=other"
    wrong = f"resume={stopped.parent}", "resume=latest -m seed=1,2"
    exits_with_2_and_changes_nothing(stopped, command, error_line, *changed, *wrong)


def test_a_new_run_or_sweep_never_overwrites_another_run(stopped: Path, command: Command, error_line: Line) -> None:
    typed = f"hydra.run.dir={stopped}", f"-m hydra.sweep.dir={stopped}"
    exits_with_2_and_changes_nothing(stopped, command, error_line, *typed)


def test_resuming_a_complete_run_exits_with_0_and_changes_nothing_and_fewer_epochs_are_refused(
    complete: Path, command: Command
) -> None:
    before = contents(complete)
    assert command(f"resume={complete}", "workers=1", task=train_job)[0] == 0
    assert command(f"hydra.run.dir={complete}", "resume=latest", task=train_job)[0] == 0
    assert command(f"resume={complete}", "epochs=1", task=train_job)[0] == 2  # the run has had two
    log = complete / "train.log"
    assert {**contents(complete), log: b""} == {**before, log: b""}


def test_resuming_a_complete_run_without_a_last_checkpoint_changes_nothing(complete: Path, command: Command) -> None:
    *_, checkpoint, newest = sorted((complete / "checkpoints").iterdir())
    shutil.rmtree(newest)  # earlier versions wrote no checkpoint at the end
    before = {path: text for path, text in contents(complete).items() if path.name != "train.log"}
    for path, same_rows in ((complete, True), (complete.absolute(), True), (checkpoint, False)):
        assert command(f"resume={path}", task=train_job)[0] == 0
        assert (before.items() <= contents(complete).items()) == same_rows  # training continues from a checkpoint


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
def test_a_resumed_run_refuses_other_changed_settings(given: dict[str, Any], stored: dict[str, Any], key: str) -> None:
    with refused(key):
        resume.check_same_settings({**given, "seed": 1}, {**stored, "seed": 1}, RUN)


def test_a_resumed_run_may_change_settings_such_as_epochs_workers_dtype_and_launcher() -> None:
    names = ("epochs", "workers", "devices", "backend", "dtype", "callbacks", "profile", "memory", "accumulation_steps")
    changed = dict.fromkeys((*names, "trusted_modules"), 2)
    nested = {"parallel": ("timeout_s", "prefetch_buffer", "launcher"), "data": ("folder", "file")}
    given, stored = ({group: dict.fromkeys(nested[group], value) for group in nested} for value in (1, 2))
    resume.check_same_settings({**given, **changed}, stored, RUN)


def test_a_running_run_can_be_neither_resumed_nor_replaced_and_resume_latest_skips_it(
    stopped: Path, command: Command, error_line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    hold = Hold(stopped)
    before = contents(stopped)
    for arguments in ([f"resume={stopped}", "epochs=9"], [f"hydra.run.dir={stopped}"]):
        assert command(*arguments) == (2, [])
        assert str(stopped) in error_line()
    assert contents(stopped) == before
    assert resume.find("latest", []) is None
    hold.release()
    assert resume.find("latest", []) == stopped


@pytest.mark.parametrize(
    "asked", [[f"resume={RUN}"], ["resume=latest", f"hydra.run.dir={RUN}"]], ids=["folder", "latest"]
)
def test_a_relative_run_folder_is_resumed_in_a_run_that_changes_to_its_folder(
    asked: list[str], stopped: Path, command: Command
) -> None:
    found: list[Any] = []
    arguments = [*asked, "epochs=9", "hydra.job.chdir=true"]
    assert command(*arguments, check=train.prepare, task=lambda experiment, folder: found.append(folder))[0] == 0
    assert [each.samefile(stopped) for each in found] == [True]


FAILING = {
    "backend.tf32=true": 2,  # found when the settings are checked
    "callbacks.history.path=/proc/x/h.jsonl": 74,  # found before the data are loaded
    "callbacks.checkpoint.path=other": 2,  # found when training begins
}


def test_a_resume_that_fails_before_training_changes_no_checkpoint_or_setting(stopped: Path, command: Command) -> None:
    Checkpoints("other").save(3, {}, {})
    kept = [stopped / ".hydra", stopped / "checkpoints"]
    before = contents(*kept), (stopped / "started.json").read_bytes()
    for change, code in FAILING.items():
        assert command(f"resume={stopped}", "epochs=9", change, check=train.prepare, task=train_job)[0] == code
        assert (contents(*kept), (stopped / "started.json").read_bytes()) == before
    resumed(stopped)
    assert Run(stopped).summary().outcome.epochs == 2


def test_a_resume_on_other_labels_is_refused_and_keeps_the_history(tmp_path: Path) -> None:
    images, labels = np.random.default_rng(1).integers(0, 256, (80, 6, 6), np.uint8), np.arange(80) % 10
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    own = ["data=npz", f"data.file={tmp_path / 'own.npz'}", *MLP, "workers=1", "epochs=2"]
    trained(tmp_path / "run", *own)
    before = (tmp_path / "run" / "history.jsonl").read_bytes()
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels[::-1], x_test=images, y_test=labels)
    first = min((tmp_path / "run" / "checkpoints").iterdir())
    with data_error(first.name):
        train.train(train.prepare(config.load(tmp_path / "run", [f"resume={quoted(first)}"])), tmp_path / "run")
    assert (tmp_path / "run" / "history.jsonl").read_bytes() == before


def test_resume_latest_finishes_a_run_killed_before_its_results_were_written(complete: Path) -> None:
    assert resume.find("latest", []) is None
    before = (complete / "weights.safetensors").read_bytes()
    (complete / "summary.json").unlink()
    assert resume.find("latest", []) == complete
    resumed(complete)
    assert (complete / "weights.safetensors").read_bytes() == before and (complete / "summary.json").is_file()


@pytest.mark.usefixtures("complete")
def test_resume_latest_starts_a_new_run_if_none_is_unfinished(command: Command) -> None:
    code, (settings,) = command("resume=latest")
    assert code == 0 and settings.resume is None


def test_resuming_an_earlier_checkpoint_deletes_newer_ones_and_keeps_the_results_until_it_ends(complete: Path) -> None:
    store = Checkpoints(complete / "checkpoints")
    first, last = store.steps()[-2:]
    kept = (complete / "summary.json").read_bytes()
    experiment = train.prepare(config.load(complete, [f"resume={quoted(store.path(first))}"]))
    experiment.callbacks.append(EndAfter(first + 1, killed=True))
    with pytest.raises(KeyError, match="as if killed"):
        train.train(experiment, complete)
    assert last not in store.steps() and first in store.steps()
    assert (complete / "summary.json").read_bytes() == kept and resume.find("latest", []) == complete
    resumed(complete)
    assert resume.find("latest", []) is None and resume.finished(complete)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Checkpoints(stopped / "checkpoints")
    first, newest = store.steps()[-2:]
    path = store.path(newest) / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    resumed(stopped)
    assert str(path) in caplog.text and f"iteration {first}," in caplog.text
