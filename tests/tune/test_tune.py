"""`python -m cupynet.tune` as a user types it, and what it refuses before anything is tried."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from hydra import compose, initialize_config_dir

from cupynet import config, trust
from cupynet.checks import percent
from cupynet.config import composing
from cupynet.errors import ConfigError, DataError
from cupynet.runs import Run
from cupynet.settings import Settings, TuneSettings
from cupynet.training import Evaluation
from cupynet.tune import asked
from cupynet.tune.asked import Asked, Given, prepare
from cupynet.tune.judged import Judged
from tests.test_train import environment, run

TINY = [
    *("data=synthetic", "data.train=300", "data.test=100", "model=mlp", "epochs=1", "workers=1", "backend=numpy"),
    "callbacks.checkpoint=null",
]
RATE = "optimizer.learning_rate=interval(0.001,0.3)"


def settings_of(given: Given) -> TuneSettings:
    overrides = [each for each in given.arguments if not each.startswith("-")]
    composing.register(TuneSettings)
    try:
        with initialize_config_dir(str(config.conf_folder()), version_base="1.3"):
            return composing.settings_of(compose("tune", overrides), overrides, TuneSettings, trust.typed(overrides))
    finally:
        composing.register(Settings)


def prepared(*arguments: str) -> Asked:
    given = Given.of(arguments)
    return prepare(given, settings_of(given))


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


def test_a_search_leaves_runs_a_table_and_the_best_setting(searched: tuple[Path, Path, str]) -> None:
    _, folder, stdout = searched
    names = {path.name for path in folder.iterdir()}
    assert names == {".hydra", "train.log", "study.db", "trials", "tune.csv", "tune.json", "experiment"}
    rows = table(folder)
    assert [row["batch_size"] for row in rows] == ["32", "64"] and {row["outcome"] for row in rows} == {"complete"}
    told = json.loads((folder / "tune.json").read_text())
    accuracies = [float(row["accuracy"]) for row in rows]
    best = told["best"]
    assert best["figure"] == max(accuracies) and best["number"] == accuracies.index(max(accuracies))
    for row in rows:
        trial = folder / "trials" / f"{int(row['trial']):04d}"
        summary = Run(trial).summary()
        assert summary.validation_accuracy == float(row["accuracy"])
        assert summary.test_accuracy is None and summary.test is None  # nobody has looked at the test images
        assert config.load(trial).data["validation"] == 30
        assert "test" not in (trial / "history.jsonl").read_text()
    assert f"accuracy {percent(told['test']['accuracy'])}" in stdout
    assert "data.validation=30: images kept out of training" in stdout
    assert all(len(line) <= 80 for line in stdout.splitlines() if line[:1] == " ")


def test_the_best_setting_can_be_made_again(searched: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, folder, stdout = searched
    told = json.loads((folder / "tune.json").read_text())
    (line,) = [line for line in stdout.splitlines() if line.startswith("the same again")]
    (short,) = [line for line in stdout.splitlines() if line.startswith("or ")]
    typed = shlex.split(line.partition("python -m cupynet.train ")[2])
    assert typed == told["settings"]
    named = config.compose(["experiment=best"], Path(shlex.split(short)[4].partition("=")[2]))
    assert asdict(named) == asdict(config.compose(typed))
    run(tmp_path, *typed, "hydra.run.dir=again")
    again = Run(tmp_path / "again").summary()
    assert (again.validation_accuracy, again.test_accuracy) == (told["best"]["figure"], told["test"]["accuracy"])


def test_a_search_that_was_complete_goes_on_with_more_trials(searched: tuple[Path, Path, str]) -> None:
    where, folder, _ = searched
    stdout, _ = run(where, f"resume={folder}", "trials=3", command="tune")
    assert "going on: 2 trials are done" in stdout and "all 2 settings that there are have been tried" in stdout
    assert len(list(folder.glob("trials/*"))) == 2


def test_a_study_that_is_text_is_no_study(searched: tuple[Path, Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text((searched[1] / ".hydra" / "overrides.yaml").read_text())
    (folder / "study.db").write_text("trials: 20\n" * 100)
    _, stderr = run(tmp_path, "resume=outputs", command="tune", code=65)
    assert stderr.startswith("cupynet: ") and "study.db: is not a study" in stderr and stderr.count("\n") == 1


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, stderr = run(tmp_path, *TINY, "batch_size=32,64", "hydra.run.dir=file/run", command="tune", code=74)
    assert stderr.startswith("cupynet: ") and stderr.count("\n") == 1


@pytest.mark.slow
def test_a_search_that_is_stopped_or_killed_goes_on(tmp_path: Path) -> None:
    begin = [*TINY, "epochs=4", "batch_size=32,64", "seed=range(0,20)", "trials=3", "hydra.run.dir=there"]
    for arguments, number in ((begin, signal.SIGINT), (["resume=there"], signal.SIGKILL)):
        command = [sys.executable, "-m", "cupynet.tune", *arguments]
        process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True)
        there, before = tmp_path / "there" / "trials", len(list(tmp_path.glob("there/trials/*/history.jsonl")))
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(list(there.glob("*/history.jsonl"))) == before:
            time.sleep(0.05)
        os.kill(process.pid, number)
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
        if number == signal.SIGINT:
            assert "resume=" in stderr and stderr.splitlines()[-1].startswith("cupynet: stopped by SIGINT: ")
    run(tmp_path, "resume=there", command="tune")
    rows = table(tmp_path / "there")
    assert sum(row["outcome"] in ("complete", "pruned", "repeated") for row in rows) == 3
    assert [row["outcome"] for row in rows].count("interrupted") >= 1


# refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, wrong",
    [
        ([], "nothing is searched"),
        (["batch_sise=32,64"], "batch_sise=32: there is no setting 'batch_sise'; did you mean 'batch_size'?"),
        (["dtype=interval(1,2)"], "dtype=1.0: must be one of"),
        (["batch_size=interval(16,64)"], "batch_size='int(interval(16,64))' has integers alone"),
        (["optimizer=choice(adam,adum)"], "optimizer=adum: there is no 'adum' in conf/optimizer"),
        (["workers=1,0"], "workers=0: must be an integer of at least 1"),
        (["optimizer=choice(nesterov,sgd)", "optimizer.momentum=interval(0.1,0.9)"], "optimizer.momentum=0.1: there"),
        (["trials=1,2", RATE], "trials is the same for all trials"),
        (["data.validation=10,20"], "data.validation is the same for all trials"),
        ([RATE, "optimizer.learning_rate=0.1"], "is given one value too"),
        ([RATE, "data.validation=0"], "a search chooses by images kept out of training"),
        ([RATE, "sampler=grid"], "has no end of values"),
        ([RATE, "parallel.launcher=mpi"], "a search trains in threads"),
        (["-m", RATE], "leave -m out"),
        (["resume=nowhere"], "resume=nowhere: is not the folder of a search"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_tried(arguments: list[str], wrong: str) -> None:
    typed = {each.partition("=")[0] for each in arguments}
    with pytest.raises(ConfigError) as refused:
        prepared(*(each for each in TINY if each.partition("=")[0] not in typed), *arguments)
    assert wrong in str(refused.value) and "\n" not in str(refused.value)


def test_without_optuna_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'cupynet\[sweep\]'"):
        prepared(*TINY, RATE)


def test_every_value_that_may_be_tried_first_is_looked_at() -> None:
    tiny = [each for each in TINY if each != "epochs=1"]
    found = prepared(*tiny, "batch_size=32,64,128", "epochs=range(2,9,2)", "optimizer=choice(adam,sgd)")
    assert found.held_out == "data.validation=30" and found.epochs == 8 and found.workers is None
    assert found.shared == [*tiny, "data.validation=30"]
    combinations = list(asked._combinations(found.space))
    assert len(combinations) == len({tuple(each) for each in combinations}) == 2 * (1 + 2 + 1)
    own = prepared(*(each for each in TINY if each != "workers=1"), RATE, "data.validation=50")
    assert own.held_out == "" and own.workers is not None and own.workers >= 1


def test_a_search_goes_on_with_its_own_command_line(tmp_path: Path) -> None:
    first = Given.of([*TINY, RATE, "trials=5", "trusted_modules=[mine]"])
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(first.arguments))
    (tmp_path / "study.db").write_text("")
    with pytest.raises(ConfigError, match="holds a search"):
        prepared(*TINY, RATE, f"hydra.run.dir={tmp_path}")
    again = Given.of([f"resume={tmp_path}", "jobs=2", "trials=9"])
    expected = [each for each in first.arguments if not each.startswith(("trials", "trusted_modules"))]
    assert again.arguments == [*expected, "jobs=2", "trials=9", f"hydra.run.dir='{tmp_path}'"]
    assert again.resumed == tmp_path and again.settings == TINY
    assert settings_of(again).search == [RATE]
    with pytest.raises(ConfigError, match="epochs=3: where a search goes on only"):
        Given.of([f"resume={tmp_path}", "epochs=3"])
    (tmp_path / "study.db-journal").symlink_to("/tmp")  # to which SQLite would write
    with pytest.raises(DataError, match="is a link"):
        Given.of([f"resume={tmp_path}"])


class Way:
    """What is asked, and answered, of a trial."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), []

    def ask(self, question: dict[str, Any]) -> str:
        self.asked.append(question)
        return self.answers.pop(0) if self.answers else ""


def test_a_trial_that_is_pruned_stops_all_workers_after_the_same_round(tmp_path: Path) -> None:
    from cupynet.experiment import Experiment
    from cupynet.train import train

    settings = config.compose([*TINY[:5], "backend=numpy", "workers=2", "epochs=5", "data.validation=50"])
    for name, answers, epochs in (("pruned", ["go on", "pruned: others"], 2), ("alone", [], 1)):
        way, experiment = Way(*answers), Experiment(settings)
        experiment.tests = False
        experiment.callbacks.append(Judged(way))  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
        train(experiment, tmp_path / name)
        summary = Run(tmp_path / name).summary()
        assert (summary.epochs, summary.stop_reason, summary.test_accuracy) == (epochs, "early", None)
        assert summary.stopped_by is not None and ("no more" if name == "alone" else "pruned") in summary.stopped_by
        assert [each["epoch"] for each in way.asked] == [*range(1, epochs + 1), epochs]
        assert [each.get("last") for each in way.asked[:-1]] == [False] * epochs
        assert way.asked[-1]["result"]["accuracy"] == summary.validation_accuracy


def test_what_is_judged_is_of_the_evaluation() -> None:
    from cupynet.tune.judged import figures

    found = figures(Evaluation(3))
    assert set(found) == {"accuracy", "loss", "f1"}
