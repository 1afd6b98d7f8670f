"""`cupynet tune` as a user types it, and what it refuses before anything is tried."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("optuna")

from cupynet import config
from cupynet.commands import compare, evaluate
from cupynet.commands.tune import command
from cupynet.commands.tune import search as tune_search
from cupynet.commands.tune.command import for_hydra, kept_out, prepare
from cupynet.commands.tune.search import Plan, PruningCallback, search, summary
from cupynet.config.schema import TuneSettings
from cupynet.core.errors import ConfigError, DataError, Interrupted
from cupynet.core.wording import percent
from cupynet.runs.run import Run
from cupynet.training import Evaluation
from cupynet.training.callbacks.loggers import base
from tests.support.commands import environment, run
from tests.support.resumed_runs import trained
from tests.support.settings import settings_of, settings_of_command

TINY = [
    *("data=synthetic", "data.train=300", "data.test=100", "model=mlp", "epochs=1", "workers=1", "backend=numpy"),
    "callbacks.checkpoint=null",
]
RATE = "optimizer.learning_rate=interval(0.001,0.3)"


def tune_settings_of(given: list[str]) -> TuneSettings:
    """What `cupynet tune` composes, without options and Hydra's own settings."""
    return settings_of_command("tune", TuneSettings, *(each for each in given if not each.startswith(("-", "hydra."))))


def prepared(*typed: str) -> Plan:
    given, resumed = for_hydra(typed)
    return prepare(given, resumed, typed, tune_settings_of(given))


@pytest.fixture
def fast_compose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose trials with `settings_of`, which lets Hydra compose each selection of files only once."""
    monkeypatch.setattr(config, "compose", lambda overrides, config_dir=None: settings_of(*overrides))


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "tune.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Where a search was started, its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("searched")
    stdout, stderr = run(folder, *TINY, "batch_size=32,64", "trials=2", "sampler=grid", command="tune")
    assert stderr == ""
    (found,) = folder.glob("outputs/tune/*/*")
    return folder, found, stdout


def test_a_search_leaves_runs_a_table_and_the_best_settings(searched: tuple[Path, Path, str]) -> None:
    _, folder, stdout = searched
    names = {path.name for path in folder.iterdir()}
    assert names == {".hydra", "train.log", "study.db", "trials", "tune.csv"}
    rows = table(folder)
    assert {row["batch_size"] for row in rows} == {"32", "64"} and {row["outcome"] for row in rows} == {"complete"}
    for row in rows:
        trial = folder / "trials" / f"{int(row['trial']):04d}"
        summary = Run(trial).summary()
        assert summary.scores.validation_accuracy == float(row["accuracy"])
        assert summary.scores.test_accuracy is None and summary.scores.test is None
        assert config.load(trial).data["validation"] == 30
        assert "test" not in (trial / "history.jsonl").read_text()
    best = best_of(folder)
    assert re.search(rf"^best trial +{best['trial']}, ", stdout, re.MULTILINE)
    assert stdout[stdout.index("best trial") :].strip() in (folder / "train.log").read_text()
    assert "data.validation=30" in stdout
    assert (folder.parents[2] / "latest").resolve() == folder.resolve()
    assert all(len(line) <= 80 for line in stdout.splitlines() if line[:1] == " ")


def best_of(folder: Path) -> dict[str, str]:
    return max(table(folder), key=lambda row: float(row["accuracy"]))


def test_the_best_settings_can_be_pasted(searched: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, folder, stdout = searched
    _, _, line = stdout.rpartition("cupynet train ")
    trained(tmp_path, *shlex.split(line))
    again = Run(tmp_path).summary().scores
    assert again.validation_accuracy == float(best_of(folder)["accuracy"])
    assert again.test_accuracy is not None and f"accuracy {percent(again.test_accuracy)}" in stdout


def test_a_trial_is_a_run_for_other_commands(
    searched: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, stdout = searched
    best = folder / "trials" / f"{int(best_of(folder)['trial']):04d}"
    monkeypatch.setattr(sys, "argv", ["evaluate", str(best), "--json"])
    with pytest.raises(SystemExit, match="^0$"):
        evaluate.main()
    assert f"accuracy {percent(json.loads(capsys.readouterr().out)['accuracy'])}" in stdout
    monkeypatch.setattr(sys, "argv", ["compare", str(folder / "trials")])
    with pytest.raises(SystemExit, match="^0$"):
        compare.main()
    assert "batch_size" in capsys.readouterr().out


@pytest.mark.usefixtures("fast_compose")
def test_a_complete_search_can_be_resumed(
    searched: tuple[Path, Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where, folder, stdout = searched
    monkeypatch.chdir(where)
    search(prepared(f"resume={folder}", "trials=2"), folder)
    again = capsys.readouterr().out
    assert len(list(folder.glob("trials/0*"))) == 2
    assert again[again.index("best trial") :] == stdout[stdout.index("best trial") :]


@pytest.mark.slow
def test_a_search_that_is_stopped_or_killed_can_be_resumed(tmp_path: Path) -> None:
    begin = [*TINY, "epochs=4", "batch_size=32,64", "seed=range(0,20)", "trials=4", "hydra.run.dir=there"]
    typed = begin
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        before = len(list(tmp_path.glob("there/trials/*/history.jsonl")))
        command = [sys.executable, "-m", "cupynet", "tune", *typed]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(list(tmp_path.glob("there/trials/*/history.jsonl"))) == before:
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == code
        if number != signal.SIGKILL:
            line = stderr.splitlines()[-1]
            assert line.startswith(f"cupynet: stopped by {number.name}: ") and "Traceback" not in stderr
            typed = shlex.split(line.partition("cupynet tune ")[2])
            assert typed == ["resume=there"]
    run(tmp_path, *typed, command="tune")
    found = [row["outcome"] for row in table(tmp_path / "there")]
    assert found.count("fail") == 3 and len(found) >= 7


WATCHED = """
import json, logging, os, signal, threading
from threadpoolctl import threadpool_info
from cupynet.commands.tune import search
from cupynet.commands.tune import command as tune

run_trial = search.run_trial
def watched(*arguments):
    found = {
        "threads": threading.active_count(), "files": len(os.listdir("/proc/self/fd")),
        "children": open(f"/proc/self/task/{os.getpid()}/children").read(),
        "blas": [library["num_threads"] for library in threadpool_info()],
        "handlers": [len(logging.getLogger(name).handlers) for name in (None, "cupynet", "__main__")],
        "levels": [each.level for each in logging.getLogger("cupynet").handlers],
        "signals": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
    }
    print("found", json.dumps(found))
    return run_trial(*arguments)
search.run_trial = watched
tune.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not show what a process holds")
def test_a_trial_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    trials = ["workers=1,2", "optimizer.learning_rate=0.01,1e30", "sampler=grid", "callbacks.report=null"]
    tiny = [each for each in TINY if each != "workers=1"]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *tiny, *trials, "hydra.run.dir=there"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(row["outcome"] for row in table(tmp_path / "there")) == ["complete"] * 2 + ["pruned"] * 2
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(found) == 4 and found[1] == found[2] == found[3]
    assert found[1] | {"files": 0} == found[0] | {"files": 0}


# refused --------------------------------------------------------------------------------------------------------------


def refusal(*arguments: str) -> str:
    typed = {each.partition("=")[0] for each in arguments}
    with pytest.raises(ConfigError) as refused:
        prepared(*(each for each in TINY if each.partition("=")[0] not in typed), *arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.usefixtures("fast_compose")
@pytest.mark.parametrize(
    "arguments, wrong",
    [
        ([], "nothing is searched"),
        (["dtype=interval(1,2)"], "dtype=1.0"),
        (["workers=0,1"], "workers=0"),
        ([RATE, "optimizer.learning_rate=0.1"], "optimizer.learning_rate"),
        ([RATE, "data.validation=0"], "data.validation"),
        ([RATE, "sampler=grid"], "sampler=grid"),
        (["-m", RATE], "-m"),
        (["resume=nowhere"], "resume=nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_settings_are_refused_before_the_first_trial(arguments: list[str], wrong: str) -> None:
    assert wrong in refusal(*arguments)


def test_trials_that_cannot_be_composed_are_refused_before_the_first() -> None:
    assert "did you mean 'batch_size'" in refusal("batch_sise=32,64")
    assert "'16.0' of type 'float'" in refusal("batch_size=interval(16,64)")
    assert "optimizer=adum" in refusal("optimizer=choice(adum,adam)")


def test_without_optuna_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"cupynet\[sweep\]"):
        prepared(*TINY, RATE)


@pytest.mark.usefixtures("fast_compose")
def test_images_are_held_out_unless_some_are_already() -> None:
    assert prepared(*TINY, RATE).shared == [*TINY, "data.validation=30"]
    assert prepared(*TINY, RATE, "data.validation=50").shared == [*TINY, "data.validation=50"]


def test_a_resumed_search_uses_its_stored_command_line(tmp_path: Path) -> None:
    first, _ = for_hydra([*TINY, RATE, "trials=5", "trusted_modules=[mine]"])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(first))
    (tmp_path / "study.db").write_bytes(b"a study")
    with pytest.raises(ConfigError, match="holds a search"):
        prepared(*TINY, RATE, f"hydra.run.dir={tmp_path}")
    again, resumed = for_hydra([f"resume={tmp_path}", "trials=9"])
    expected = [each for each in first if not each.startswith(("trials", "trusted_modules"))]
    assert again == [*expected, "trials=9", f"hydra.run.dir='{tmp_path}'"] and resumed == tmp_path
    assert tune_settings_of(again).search == [RATE]
    with pytest.raises(ConfigError, match="epochs=3"):
        for_hydra([f"resume={tmp_path}", "epochs=3"])
    (tmp_path / "study.db-journal").symlink_to("/tmp")  # to which SQLite would write
    with pytest.raises(DataError, match="must be a plain file"):
        for_hydra([f"resume={tmp_path}"])
    (tmp_path / "study.db-journal").unlink()
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "0001").symlink_to("/tmp")  # the folder of a trial
    with pytest.raises(DataError, match="0001: must be a plain file"):
        for_hydra([f"resume={tmp_path}"])


def test_an_empty_study_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "study.db").touch()
    with pytest.raises(DataError, match=r"study\.db"):
        for_hydra([f"resume={tmp_path}", "trials=9"])
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]
    (tmp_path / "study.db").rename(tmp_path / "trials")
    with pytest.raises(ConfigError, match="holds the trials of a search"):
        prepared(*TINY, RATE, f"hydra.run.dir={tmp_path}")


@pytest.mark.parametrize(
    "stored", ["seed=${oc.env:HOME}", "seed=$\\{oc.env:HOME\\}", "search=['seed=choice(\\${x},1)']"]
)
def test_a_resumed_search_follows_no_reference(stored: str, tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps([*TINY, stored]))
    (tmp_path / "study.db").write_bytes(b"a study")
    with pytest.raises(DataError, match="plain value"):
        for_hydra([f"resume={tmp_path}"])


@pytest.mark.usefixtures("fast_compose")
@pytest.mark.parametrize("searched", [False, True])
def test_a_resumed_search_writes_in_its_folder(searched: bool, tmp_path: Path) -> None:
    path = "callbacks.history.path=" + ("choice(/tmp/a,/tmp/b)" if searched else "/tmp/a")
    given, _ = for_hydra([*TINY, RATE, path])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(given))
    (tmp_path / "study.db").write_bytes(b"a study")
    with pytest.raises(ConfigError, match="callbacks.history.path=/tmp/a"):
        prepared(f"resume={tmp_path}")
    if not searched:
        assert prepared(f"resume={tmp_path}", path).resumed == tmp_path  # typed again


@pytest.mark.usefixtures("fast_compose")
def test_a_search_can_be_resumed_as_its_message_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a callback writes to places that are never taken from a stored search."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt(signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_search, "run_trials", stop)
    monkeypatch.setattr(base, "find_spec", lambda name: "there")
    mine = ["+callbacks.mine._target_=cupynet.training.WandB", "+callbacks.mine.mode=online"]
    typed = [*TINY, RATE, "callbacks=mlflow", "callbacks.history.path=/tmp/a b", *mine]
    folder = Path("there")
    config.keep(folder, tune_settings_of(for_hydra(typed)[0]), for_hydra(typed)[0])
    with pytest.raises(Interrupted) as stopped:
        search(prepared(*typed), folder)
    again = shlex.split(str(stopped.value).partition("cupynet tune ")[2])
    assert again[0] == "resume=there" and "callbacks.mlflow.uri=null" in again
    plan = prepared(*again)
    assert plan.resumed == folder and plan.experiment({"optimizer.learning_rate": 0.1}).settings.callbacks["mlflow"]
    assert prepared("resume=there", *again[1:], "callbacks.mlflow.uri=sqlite:///other.db").resumed == folder
    with pytest.raises(ConfigError, match=r"callbacks\.mlflow\.name"):
        prepared(*again, "callbacks.mlflow.name=other")


@pytest.mark.usefixtures("fast_compose")
def test_a_resumed_search_downloads_nothing_to_a_folder_that_it_names(tmp_path: Path) -> None:
    given, _ = for_hydra(["data.folder=/tmp/a", RATE])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(given))
    (tmp_path / "study.db").write_bytes(b"a study")
    with pytest.raises(ConfigError, match="data.folder=/tmp/a: the run in .* would download its data to /tmp/a/mnist"):
        prepared(f"resume={tmp_path}")


class Trial:
    """An Optuna trial that is pruned after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs, self.reported = epochs, []

    def report(self, value: float, step: int) -> None:
        self.reported.append((step, value))

    def should_prune(self) -> bool:
        return len(self.reported) >= self.epochs


def test_a_pruned_trial_stops_all_workers_after_the_same_round(tmp_path: Path) -> None:
    from cupynet.commands.train import train
    from cupynet.config.experiment import Experiment

    settings = settings_of(*TINY[:5], "backend=numpy", "workers=2", "epochs=4", "data.validation=50")
    for prune_after, epochs in ((2, 2), (9, 4)):
        trial, experiment, folder = Trial(prune_after), Experiment(settings), tmp_path / str(prune_after)
        experiment.tests = False
        callback = PruningCallback(trial, "accuracy")
        experiment.callbacks.append(callback)
        folder.mkdir()
        train(experiment, folder)
        summary = Run(folder).summary()
        assert (summary.outcome.epochs, summary.scores.test_accuracy, callback.pruned) == (epochs, None, epochs == 2)
        assert summary.outcome.stop_reason == ("early" if callback.pruned else None)
        assert [step for step, _ in trial.reported] == [*range(1, epochs + 1)]
        assert callback.figure == summary.scores.validation_accuracy == trial.reported[-1][1]


def test_a_fast_dev_run_has_no_best_trial(tmp_path: Path) -> None:
    trial: Any = SimpleNamespace(number=0, value=0.9, params={})
    plan, test = prepared(*TINY, RATE), Evaluation(10)
    trial.params = {"optimizer.learning_rate": 0.1}
    test.add(np.eye(10), np.arange(10), np.zeros(10), np.arange(10))
    assert "best trial" in summary(plan, tmp_path, trial, test)
    (tmp_path / "trials" / "0000").mkdir(parents=True)
    (tmp_path / "trials" / "0000" / "FAST_DEV_RUN.txt").touch()
    assert "best trial" not in summary(plan, tmp_path, trial, test)


def test_a_holdout_leaves_samples_to_train_on() -> None:
    for images, out in ((60_000, 5000), (49_999, 4999), (600, 60), (11, 1), (2, 1)):
        assert kept_out(images) == out < images
