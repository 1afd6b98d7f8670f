"""The command entry point: composed settings, rejected settings, and exit codes."""

import logging
import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from cupynet import config
from cupynet.config import composing
from cupynet.config.instantiate import build
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError
from cupynet.runs.run import Run
from tests.support.commands import Command, Line
from tests.support.compared_runs import summary
from tests.support.run_folders import sweep_rows

# arguments, and the setting or name in the error line
REFUSED = {
    "workrs=4": "'workers'",
    "+workrs=4": "'workers'",
    "workers=0": "cupynet: workers=0",
    "=3": "=3",
    "workers=1,2": "workers",
    "workers=four": "cupynet: workers",
    "-m workers=1,four": "cupynet: workers",  # before the first job
    "workers=[1": "workers=[1",
    "-m seed=1,2 hydra.launcher.jobs=0 hydra/launcher=processes": "hydra.launcher",
    "workers": "workers",
    "hydra.run.dir=${nothing}": "hydra.run.dir",
    "hydra.job_logging.root.level=NOPE": "hydra.job_logging",
    "--nonsense": "--nonsense: ",
}


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("bad", REFUSED)
def test_a_wrong_setting_exits_with_2_and_one_line_before_anything_is_written(
    bad: str, command: Command, in_folder: Path, error_line: Line
) -> None:
    assert command(*bad.split()) == (2, [])
    assert REFUSED[bad] in error_line()
    assert list(in_folder.iterdir()) == []


# an override, the setting named in the error, and the closest name if there is one
WRONG = {
    "++workrs=4": ("workrs", "'workers'"),
    "metrics=auc": ("metrics", ""),  # one name instead of a list
    "freeze=conv*": ("freeze", ""),
    "parallel.averaging_freqency=3": ("parallel.averaging_freqency", "'parallel.averaging_frequency'"),
    "model.layers.conv2.kernal=5": ("model.layers.conv2.kernal", "'model.layers.conv2.kernel_size'"),
    "experiment=dl4j_gpu_guid": ("experiment", "'dl4j_gpu_guide'"),
    "averaging_frequency=3": ("averaging_frequency", "'parallel.averaging_frequency'"),
    "learning_rate=0.1": ("learning_rate", "'optimizer.learning_rate'"),
    "parallel={timeout:1}": ("parallel.timeout", "'parallel.timeout_s'"),
    "parallel.synchronizer.averaging_frequency=${parallel.every}": ("parallel", "parallel.every"),
    "~optimizer": ("optimizer", ""),
    "optimizer.lr=0.1": ("optimizer.lr", "'optimizer.learning_rate'"),
    "callbacks=[tensorboard,nope]": ("callbacks", ""),
    "callbacks=null": ("callbacks", "early_stopping"),
    "optimizer=0.1": ("optimizer", "adam"),
    "data=/pictures/leaves": ("data", "data.folder"),
    "data=pictures/leaves": ("data", "data.folder"),
    "seed=null": ("seed", ""),
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_setting_is_refused_and_the_nearest_setting_or_a_remedy_is_named(override: str) -> None:
    setting, nearest = WRONG[override]
    with pytest.raises(ConfigError) as caught:
        config.compose([override])
    assert caught.value.setting.startswith(setting) and nearest in str(caught.value)
    assert "/" not in caught.value.setting


@pytest.mark.parametrize("value", ["Bücher", "~/pictures", "a (1) & b", "a=b#$(c)"])
def test_the_quoted_form_that_an_error_suggests_is_accepted(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.compose([f"hydra.run.dir={value}"])
    (remedy,) = shlex.split(str(caught.value).rpartition(": ")[2])
    assert OverridesParser.create().parse_override(remedy).value() == os.path.expanduser(value)


@pytest.mark.usefixtures("minimal_conf")
def test_a_refused_run_removes_only_folders_made_for_it(command: Command, in_folder: Path, error_line: Line) -> None:
    def check(settings: Settings) -> None:
        raise ConfigError("is\n too large", "model.layers.conv2.kernel_size", "29")

    (in_folder / "full" / "empty").mkdir(parents=True)
    (in_folder / "full" / "precious").write_text("mine")
    assert command("hydra.run.dir=full/empty/a/b", check=check) == (2, [])
    assert error_line() == "cupynet: model.layers.conv2.kernel_size=29: is too large\n"
    assert command("hydra.run.dir=full", check=lambda settings: 1 / 0) == (1, [])
    assert sorted(path.name for path in in_folder.rglob("*")) == ["empty", "full", "precious"]


@pytest.mark.parametrize("typed", ["averaging_frequency=0", "synchronizer.averaging_frequency=0", "average_updaters=3"])
def test_an_error_names_the_setting_that_was_typed(typed: str, command: Command, error_line: Line) -> None:
    def check(settings: Settings) -> None:
        build(settings.parallel.synchronizer, "parallel.synchronizer")

    assert command("parallel.report_score_after_averaging=true", f"parallel.{typed}", check=check) == (2, [])
    assert error_line().startswith(f"cupynet: parallel.{typed}: ")


def test_commands_get_their_settings_as_plain_values(command: Command, in_folder: Path) -> None:
    arguments = ("workers=2", "devices=[0,2]", "data.limit=7", "data.folder=${hydra:runtime.cwd}/x")
    code, (settings,) = command(*arguments)
    assert code == 0
    assert (settings.workers, settings.devices, settings.data["limit"]) == (2, [0, 2], 7)
    assert settings.data["folder"] == f"{in_folder}/x"
    assert {type(each) for each in (settings.devices, settings.model, settings.model["layers"])} == {list, dict}


WRONG_VARIABLES = [
    *(("CUPYNET_REPORT", "0", "0"), ("CUPYNET_REPORT", "", "''")),
    *(("BACKEND_PRIORITY_GPU", "[1", "'[1'"), ("BACKEND_PRIORITY_CPU", "abc", "'abc'")),
]


def test_environment_variables_set_backend_priorities_and_turn_reports_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND_PRIORITY_CPU", "200")
    monkeypatch.delenv("BACKEND_PRIORITY_GPU", raising=False)
    monkeypatch.setenv("CUPYNET_REPORT", "false")
    settings = composing.settings_of(composing.composed([], None), [], Settings)
    assert (settings.backend.priority.gpu, settings.backend.priority.cpu) == (100, 200)
    assert settings.callbacks["report"]["enabled"] is False


def test_an_environment_variable_with_a_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    composed = composing.composed([], None)
    for name, value, shown in WRONG_VARIABLES:
        with monkeypatch.context() as patch, pytest.raises(ConfigError) as caught:
            patch.setenv(name, value)
            build(composing.settings_of(composed, [], Settings).callbacks["report"], "callbacks.report")
        error = composing.as_typed(caught.value, composed, [])
        assert (error.setting, error.value) == (name, shown)


def write_own_file(folder: Path, name: str, content: str, encoding: str = "utf-8") -> Path:
    """Write a file below the folder `mine`, which is returned."""
    path = folder / "mine" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding)
    return folder / "mine"


def test_files_of_the_user_are_found_in_config_dir(command: Command, in_folder: Path) -> None:
    synchronizer = "  _target_: mine.Anything\n  every: ${parallel.averaging_frequency}\n"
    write_own_file(in_folder, "model/own", "_target_: mine.Stack\nlayers: {}\n")
    write_own_file(in_folder, "parallel/own", f"averaging_frequency: 7\nsynchronizer:\n{synchronizer}")
    code, (settings,) = command("epochs=3", "-cd", "mine", "model=own", "-r", "parallel=own")
    assert code == 0 and settings.epochs == 3 and settings.model == {"_target_": "mine.Stack", "layers": {}}
    assert settings.parallel.synchronizer == {"_target_": "mine.Anything", "every": 7}
    assert settings.parallel.prefetch_buffer == 24


def test_a_file_of_the_user_may_read_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = "${oc.decode:${oc.env:SLURM_CPUS_PER_TASK,2}}"
    own_files = write_own_file(tmp_path, "experiment/own", f"# @package _global_\nworkers: {cores}\n")
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert config.compose(["experiment=own"], own_files).workers == 2
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "7")
    assert config.compose(["experiment=own"], own_files).workers == 7


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("workrs: 4\n", ("experiment/own", "workrs", "'workers'")),
        ("workers: four\n", ("workers",)),
        ("defaults:\n  - override /data: nothing\n", ("data=nothing",)),
    ],
)
def test_a_wrong_setting_in_a_file_of_the_user_is_named(content: str, named: tuple[str, ...], tmp_path: Path) -> None:
    own_files = write_own_file(tmp_path, "experiment/own", f"# @package _global_\n{content}")
    with pytest.raises(ConfigError) as caught:
        config.compose(["experiment=own"], own_files)
    assert all(each in str(caught.value) for each in named), caught.value


def test_a_users_damaged_file_exits_with_2_and_is_named(command: Command, in_folder: Path, error_line: Line) -> None:
    for line, encoding in (("workers: [", "utf-8"), ("# gr\xfc\xdfe", "latin-1")):
        write_own_file(in_folder, "experiment/own", f"# @package _global_\n{line}\n", encoding)
        assert command("--config-dir=mine", "experiment=own") == (2, [])
        assert "own.yaml" in error_line()


@pytest.mark.parametrize("content", ["", "workers: 2\n", "\ufeff# @package _global_\n"], ids=["none", "other", "BOM"])
def test_an_experiment_without_its_first_line_is_refused(content: str, tmp_path: Path) -> None:
    own_files = write_own_file(tmp_path, "experiment/own", content)
    with pytest.raises(ConfigError) as caught:
        config.compose(["experiment=own"], own_files)
    assert all(each in str(caught.value) for each in ("experiment/own", "@package _global_")), caught.value


@pytest.mark.usefixtures("minimal_conf")
def test_a_run_in_the_folder_of_its_user_replaces_no_files(command: Command, in_folder: Path, error_line: Line) -> None:
    own = ("unfinished.txt", "profile.json", "trace.json", "report.html")
    for name in own:
        (in_folder / name).write_text("mine")
    assert command("hydra.run.dir=.") == (2, [])
    line = error_line()
    assert all(name in line and (in_folder / name).read_text() == "mine" for name in own)


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("typed", ["seed=1", "-m seed=1,2"])
def test_a_run_folder_that_cannot_be_made_exits_with_74(
    typed: str, command: Command, in_folder: Path, error_line: Line
) -> None:
    (in_folder / "outputs").write_text("mine")
    assert command(*typed.split()) == (74, [])
    assert "outputs" in error_line() and (in_folder / "outputs").read_text() == "mine"


def logging_task(settings: Settings, folder: Path) -> None:
    logging.getLogger("cupynet.training").info("epoch %d", 1)
    logging.getLogger("cupynet").warning("careful")
    logging.getLogger("cupynet").debug("never")
    logging.getLogger("other_package").warning("%s", "unexpected\x1b[2J")


def logged(log: Path) -> list[str]:
    """Return the records of a log without their times."""
    return [line.split(" ", 2)[2] for line in log.read_text(encoding="utf-8").splitlines()]


RECORDS = ["INFO cupynet.training: epoch 1", "WARNING cupynet: careful", "WARNING other_package: unexpected\ufffd[2J"]


@pytest.mark.usefixtures("minimal_conf")
def test_a_sweep_prints_warnings_only_and_each_job_has_its_log_and_a_row_in_sweep_csv(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(settings: Settings, folder: Path) -> None:
        logging_task(settings, folder)
        Run(folder).save(summary(), {})

    arguments = ("hydra.mode=MULTIRUN", "seed=1,2", "hydra.sweep.dir=s", "hydra.job.chdir=true")  # as with -m
    assert command(*arguments, task=task)[0] == 0
    out = capsys.readouterr().out
    assert (out.count("warning: careful"), out.count("epoch 1")) == (2, 0)
    assert [logged(log) for log in in_folder.glob("s/[01]/train.log")] == [RECORDS] * 2
    rows = sweep_rows(in_folder / "s").values()
    assert [float(row["test_accuracy"]) for row in rows] == [summary().scores.test_accuracy] * 2


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize(("style", "printed"), [("none", ["warning"]), ("lines", ["epoch 1", "warning"])])
def test_a_message_appears_once_on_the_terminal_and_once_in_train_log(
    style: str, printed: list[str], command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(f"+callbacks.progress.style={style}", task=logging_task)[0] == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^\[\d\d:\d\d:\d\d\] (epoch 1|warning)", out, re.MULTILINE) == printed
    assert out.count("\n") == len(printed) and err == ""
    assert [logged(log) for log in in_folder.glob("outputs/20*/*/train.log")] == [RECORDS]


@pytest.mark.usefixtures("in_folder", "minimal_conf")
def test_ranks_must_agree_on_all_settings_except_data_folders_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: dict[str, Any] = {}
    ranks: Any = SimpleNamespace(rank=1, size=2, library="MPICH", ranks=SimpleNamespace(), agree=compared.update)
    ranks.share = lambda text: text
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    own = ["parallel.launcher=mpi", "+data.folder=mine", "devices=[0]", "batch_size=7"]
    monkeypatch.setattr(sys, "argv", ["train.py", *own])
    config.run(lambda settings, folder: None, lambda settings: settings, "config", Settings, lambda: ranks)
    assert compared["batch_size"] == 7 and "the version of cupynet" in compared
    assert not {key for key in compared if key.startswith(("data.folder", "devices"))}
