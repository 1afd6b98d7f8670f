"""`cupynet tune` as a user types it, and arguments rejected before the first trial."""

import csv
import json
import shlex
from pathlib import Path
from unittest.mock import Mock

import pytest

pytest.importorskip("optuna")

from cupynet import config
from cupynet.commands.train import train
from cupynet.commands.tune import command
from cupynet.commands.tune.command import for_hydra, kept_out, prepare
from cupynet.commands.tune.search import Plan, PruningCallback
from cupynet.config.experiment import Experiment
from cupynet.config.resume import find
from cupynet.config.schema import TuneSettings
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.wording import percent
from cupynet.runs.run import Run
from tests.support.commands import run
from tests.support.refusals import refused
from tests.support.resumed_runs import trained
from tests.support.settings import settings_of, settings_of_command

TINY = [
    *("data=synthetic", "data.train=300", "data.test=100", "model=mlp", "epochs=1", "workers=1", "backend=numpy"),
    "callbacks.checkpoint=null",
]
RATE = "optimizer.learning_rate=interval(0.001,0.3)"


def tune_settings_of(given: list[str]) -> TuneSettings:
    """Return the composed settings of `cupynet tune`, without options and Hydra's own."""
    return settings_of_command("tune", TuneSettings, *(each for each in given if not each.startswith(("-", "hydra."))))


def prepared(*typed: str) -> Plan:
    given, resumed = for_hydra(typed)
    return prepare(given, resumed, typed, tune_settings_of(given))


def table(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "tune.csv").read_text().splitlines()))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    folder = tmp_path_factory.mktemp("searched")
    stdout, stderr = run(folder, *TINY, RATE, "trials=2", command="tune")
    assert stderr == ""
    (found,) = folder.glob("outputs/tune/*/*")
    return folder, found, stdout


def test_a_search_writes_a_run_for_each_trial_and_tune_csv_and_study_db(searched: tuple[Path, Path, str]) -> None:
    _, folder, _ = searched
    assert {path.name for path in folder.iterdir()} == {".hydra", "train.log", "study.db", "trials", "tune.csv"}
    rows = table(folder)
    assert len({row["optimizer.learning_rate"] for row in rows}) == 2
    assert {row["outcome"] for row in rows} == {"complete"}
    assert (folder.parents[2] / "latest").resolve() == folder.resolve()


def test_trials_are_scored_on_validation_images_and_see_no_test_images(searched: tuple[Path, Path, str]) -> None:
    for row in table(searched[1]):
        trial = searched[1] / "trials" / f"{int(row['trial']):04d}"
        scores = Run(trial).summary().scores
        assert scores.validation_accuracy == float(row["accuracy"])
        assert scores.test_accuracy is None and scores.test is None
        assert config.load(trial).data["validation"] == 30
        assert "test" not in (trial / "history.jsonl").read_text()


def test_tune_prints_the_train_command_of_the_best_settings(searched: tuple[Path, Path, str], tmp_path: Path) -> None:
    _, folder, stdout = searched
    _, _, line = stdout.rpartition("cupynet train ")
    trained(tmp_path, *shlex.split(line))
    again = Run(tmp_path).summary().scores
    assert again.validation_accuracy == max(float(row["accuracy"]) for row in table(folder))
    assert again.test_accuracy is not None and f"accuracy {percent(again.test_accuracy)}" in stdout


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ([], ""),  # no setting to search
        (["dtype=interval(1,2)"], "dtype"),
        (["workers=0,1"], "workers"),
        ([RATE, "optimizer.learning_rate=0.1"], "optimizer.learning_rate"),
        ([RATE, "data.validation=0"], ""),
        ([RATE, "objective=auc"], "objective"),
        (["-m", RATE], "-m"),
        (["hydra.sweep.dir=mine", RATE], "hydra.sweep.dir"),
        (["search={seed:range(1,9)}"], "search"),
        (["batch_sise=32,64"], "batch_sise"),
        (["optimizer=adam,adum"], "optimizer"),
        (["workers=1,0"], "workers"),
        (["resume=nowhere"], "resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_of_a_search_are_refused_before_the_first_trial(arguments: list[str], setting: str) -> None:
    typed = {each.partition("=")[0] for each in arguments}
    with refused(setting):
        prepared(*(each for each in TINY if each.partition("=")[0] not in typed), *arguments)


def test_without_optuna_a_search_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with refused(""):
        prepared(*TINY, RATE)


def test_a_search_holds_out_validation_images_unless_some_are_already() -> None:
    assert prepared(*TINY, RATE, "objective=val_auc", "metrics=[auc]").settings.objective == "auc"
    assert prepared(*TINY, RATE).shared == [*TINY, "data.validation=30"]
    assert prepared(*TINY, RATE, "data.validation=50").shared == [*TINY, "data.validation=50"]


def stored_search(folder: Path, *typed: str) -> list[str]:
    """Store a search's command line in a folder, and return the arguments for Hydra."""
    arguments, _ = for_hydra(typed)
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(arguments))
    (folder / "study.db").write_bytes(b"a study")
    return arguments


def test_a_resumed_search_uses_its_stored_command_line_and_may_change_its_trials(tmp_path: Path) -> None:
    first = stored_search(tmp_path, *TINY, RATE, "trials=5", "trusted_modules=[mine]")
    again, resumed = for_hydra([f"resume={tmp_path}", "trials=9"])
    expected = [each for each in first if not each.startswith(("trials", "trusted_modules"))]
    assert again == [*expected, "trials=9", f"hydra.run.dir='{tmp_path}'"] and resumed == tmp_path
    assert tune_settings_of(again).search == [RATE]
    with pytest.raises(ConfigError, match="epochs=3"):
        for_hydra([f"resume={tmp_path}", "epochs=3"])


def test_a_search_over_a_grid_of_an_earlier_version_is_resumed_with_another_sampler(tmp_path: Path) -> None:
    stored_search(tmp_path, *TINY, RATE, "sampler=grid")
    with refused("sampler"):
        prepared(f"resume={tmp_path}")
    assert prepared(f"resume={tmp_path}", "sampler=random").settings.sampler == "random"


def test_the_latest_search_is_resumed_in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outputs" / "tune").mkdir(parents=True)
    stored_search(tmp_path / "outputs" / "tune", *TINY, RATE)
    (tmp_path / "outputs" / "latest").symlink_to("tune")
    (tmp_path / "outputs" / "tune" / ".hydra" / "config.yaml").touch()
    monkeypatch.chdir(tmp_path)
    again, resumed = for_hydra(["resume=latest"])
    assert resumed == Path("outputs/tune") and again[-1] == "hydra.run.dir='outputs/tune'"
    with refused("resume"):  # train resumes its runs, and names the other command
        find("outputs/latest", [])


@pytest.mark.parametrize("file", ["study.db", "trials"])
def test_a_new_search_in_the_folder_of_another_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ConfigError) as caught:
        prepared(*TINY, RATE, f"hydra.run.dir={tmp_path}")
    assert ("resume=" in str(caught.value)) == (file == "study.db")  # trials without a study cannot be resumed


def test_a_resumed_search_follows_neither_links_nor_references(tmp_path: Path) -> None:
    """SQLite would write to the journal, and trials would write to their folders."""
    stored_search(tmp_path, *TINY, RATE)
    (tmp_path / "trials").mkdir()
    for link in (tmp_path / "study.db-journal", tmp_path / "trials/0001"):
        link.symlink_to("/tmp")
        with pytest.raises(DataError):
            for_hydra([f"resume={tmp_path}"])
        link.unlink()
    for reference in ("seed=${oc.env:HOME}", "search=['seed=choice(\\${x},1)']"):
        (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps([*TINY, reference]))
        with pytest.raises(DataError):
            for_hydra([f"resume={tmp_path}"])


@pytest.mark.parametrize(
    ("stored", "setting"),
    [
        ("callbacks.history.path=/tmp/a", "callbacks.history.path"),
        ("callbacks.history.path=choice(/tmp/a,/tmp/b)", "callbacks.history.path"),
        ("data.folder=/tmp/a", "data.folder"),  # the folder for downloaded images
    ],
)
def test_a_resumed_search_with_a_path_outside_its_folder_is_refused(stored: str, setting: str, tmp_path: Path) -> None:
    own = TINY if setting != "data.folder" else []
    stored_search(tmp_path, *own, RATE, stored)
    with refused(setting, "/tmp/a"):
        prepared(f"resume={tmp_path}")


def test_a_pruned_trial_stops_all_workers_after_the_same_round(tmp_path: Path) -> None:
    settings = ("backend=numpy", "workers=2", "epochs=4", "data.validation=50", "metrics=[top_1_accuracy]")
    experiment, trial = Experiment(settings_of(*TINY[:5], *settings)), Mock()
    trial.should_prune.side_effect = [False, True]
    experiment.tests, callback = False, PruningCallback(trial, "top_1_accuracy")
    experiment.callbacks.append(callback)
    train(experiment, tmp_path)
    summary = Run(tmp_path).summary()
    assert (summary.outcome.epochs, summary.outcome.stop_reason, callback.pruned) == (2, "early", True)
    (_, first), (value, second) = (reported.args for reported in trial.report.call_args_list)
    assert (first, second) == (1, 2) and callback.figure == summary.scores.validation_accuracy == value
    assert summary.scores.test_accuracy is None


def test_validation_images_of_a_search_leave_samples_to_train_on() -> None:
    for images, out in ((60_000, 5000), (49_999, 4999), (600, 60), (11, 1), (2, 1)):
        assert kept_out(images) == out < images
