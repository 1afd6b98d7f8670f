"""The command entry point: composed settings, rejected settings, and exit codes."""

import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from cupynet import config
from cupynet.config import composing, stored
from cupynet.config.instantiate import build
from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings, own_names
from cupynet.core import lock
from cupynet.core.errors import ConfigError, Interrupted
from cupynet.core.version import __version__
from cupynet.runs.run import Run
from tests.support.commands import ROOT, Command, Line, environment
from tests.support.compared_runs import summary
from tests.support.run_folders import sweep_rows
from tests.support.settings import CHOICES, CONF, GROUPS, settings_of

# what is refused ------------------------------------------------------------------------------------------------------

# arguments, and the setting or name in the error line
REFUSED = {
    "workrs=4": "cupynet: workrs",
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


# what comes in --------------------------------------------------------------------------------------------------------


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


@pytest.mark.usefixtures("minimal_conf")
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


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("workrs: 4\n", ("experiment/own", "workrs", "'workers'")),
        ("workers: four\n", ("workers",)),
        ("defaults:\n  - override /data: nothing\n", ("data=nothing",)),
        ("workers: [\n", ("own.yaml",)),
        ("# gr\xfc\xdfe\n", ("own.yaml",)),  # not in UTF-8
    ],
)
def test_a_wrong_setting_or_line_of_a_users_file_is_named(content: str, named: tuple[str, ...], tmp_path: Path) -> None:
    own_files = write_own_file(tmp_path, "experiment/own", f"# @package _global_\n{content}", "latin-1")
    with pytest.raises(ConfigError) as caught:
        config.compose(["experiment=own"], own_files)
    assert all(each in str(caught.value) for each in named), caught.value


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


# jobs and sweeps ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("typed", ["seed=1", "-m seed=1,2"])
def test_a_run_folder_that_cannot_be_made_exits_with_74(
    typed: str, command: Command, in_folder: Path, error_line: Line
) -> None:
    (in_folder / "outputs").write_text("mine")
    assert command(*typed.split()) == (74, [])
    assert "outputs" in error_line() and (in_folder / "outputs").read_text() == "mine"


@pytest.mark.usefixtures("minimal_conf")
def test_a_failed_job_does_not_stop_a_sweep_which_exits_with_the_code_of_the_first_one(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job has a bug, another is rejected. Errors name the job numbers. The first decides the exit code."""
    arguments = ("-m", "epochs=1,-1,2", "hydra.sweep.subdir=a${epochs}/b")
    code, ran = command(*arguments, task=lambda settings, folder: 1 / (settings.epochs - 1))
    assert code == 1 and [settings.epochs for settings in ran] == [1, 2]
    first, second = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cupynet: ")]
    assert "job 0: ZeroDivisionError" in first and "job 1: epochs=-1" in second
    (sweep,) = in_folder.glob("outputs/sweeps/*/*")
    assert sorted(path.name for path in sweep.glob("a*")) == ["a1", "a2"]  # a rejected job leaves no folder
    assert "ERROR cupynet: job 0: ZeroDivisionError" in (sweep / "a1" / "b" / "train.log").read_text()


@pytest.mark.usefixtures("minimal_conf")
def test_a_sweep_locks_its_folder_while_it_runs_and_does_not_overwrite_another(
    command: Command, in_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    arguments, sweep, locked = ("-m", "seed=1,2", "hydra.sweep.dir=s"), in_folder / "s", list[bool]()
    assert command(*arguments, task=lambda *_: locked.append(lock.at_work(sweep)))[0] == 0 and locked == [True, True]
    assert not lock.at_work(sweep) and not (sweep / "running.json").exists()
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    assert command(*arguments) == (2, [])
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(15), 143)])
def test_an_interrupted_sweep_exits_with_130_or_143_and_lists_the_jobs_that_did_not_start(
    error: BaseException, code: int, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code, ran = command("-m", "workers=1,2", task=Mock(side_effect=error))
    assert (exit_code, [settings.workers for settings in ran]) == (code, [1])
    assert re.findall(r"^not started: (job \d): .* (workers=\d)", capsys.readouterr().out, re.M) == [
        ("job 1", "workers=2")
    ]


def test_a_sweep_over_learning_rates_may_contain_a_schedule(command: Command) -> None:
    code, ran = command("-m", "optimizer.learning_rate=0.25,{name: step, initial: 0.1, every: 5, factor: 0.5}")
    number, schedule = (settings.optimizer["learning_rate"] for settings in ran)
    assert code == 0 and number == 0.25 and (schedule["_target_"], schedule["every"]) == ("cupynet.optim.StepDecay", 5)


# the terminal and the log ---------------------------------------------------------------------------------------------


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


def test_info_cfg_and_version_print_an_answer_and_write_nothing(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"--info defaults": "spine", "-c job -p optimizer": "momentum: 0.9", "--version": __version__}
    for arguments, answer in answers.items():
        assert command(*arguments.split()) == (0, [])
        out, err = capsys.readouterr()
        assert answer in out and err == "" and list(in_folder.iterdir()) == []


SCHEMAS = {"bench": BenchSettings, "plan": PlanSettings, "find_rate": RateSettings, "tune": TuneSettings}


@pytest.mark.usefixtures("in_folder")
@pytest.mark.parametrize(("name", "schema"), [("config", Settings), ("tune", TuneSettings)])
def test_help_lists_the_groups_the_settings_of_the_command_and_the_exit_codes(
    name: str, schema: type[Settings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page lists each group's files (or some and `...`), the command's own settings, and the exit codes."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    config.run(lambda settings, folder: None, lambda settings: settings, name, schema)
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert name == "config" or all(setting in page for setting in own_names(schema))
    groups = {words[0]: words for words in map(str.split, page.splitlines()) if words and words[0] in GROUPS}
    assert list(groups) == list(GROUPS)
    for group, words in groups.items():
        there = {file for its, file in CHOICES if its == group}
        assert there <= {*words} or (there & {*words} and words[-1] == "...")
    (codes,) = [line for line in page.splitlines() if line.startswith("Exit codes")]
    assert re.findall(r"\d+", codes) == ["0", "1", "2", "3", "65", "74", "130", "143"]


@pytest.mark.parametrize("name", SCHEMAS)
def test_help_of_every_command_lists_its_own_settings(name: str) -> None:
    header = yaml.safe_load((CONF / f"{name}.yaml").read_text())["hydra"]["help"]["header"]
    lines = header.replace("${hydra.job.name}", name).splitlines()
    assert max(map(len, lines)) <= 80 and all(setting in header for setting in own_names(SCHEMAS[name]))


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


SCRIPT = """
import sys
from cupynet.config import run
from cupynet.config.schema import Settings

try:
    run(lambda settings, folder: None, lambda settings: settings, "config", Settings)
finally:
    assert "numpy" not in sys.modules and "numba" not in sys.modules
"""


def test_help_imports_no_numpy_and_ends_quietly_on_a_broken_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-W", "error", "-c", SCRIPT, "--help"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    with open(writer, "w") as stdout:
        done = subprocess.run(line, cwd=tmp_path, env=variables, stdout=stdout, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (141, b"")


ASKED = """
eval "$(cupynet train -sc install=bash)"
complete -p cupynet
COMP_LINE="cupynet train optimizer=nad" COMP_POINT=27 COMP_CWORD=2
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_settings_and_files(tmp_path: Path) -> None:
    script = tmp_path / "cupynet"  # like the script that pip installs
    script.write_text(f"#!{sys.executable}\nfrom cupynet.__main__ import main\nmain()\n")
    script.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    line = ["bash", "--norc", "-c", ASKED]
    done = subprocess.run(line, cwd=tmp_path, env=environment(PATH=path), capture_output=True, text=True, timeout=120)
    registered, found = done.stdout.splitlines()
    assert registered.endswith("-F hydra_bash_completion cupynet") and found == "optimizer=nadam"
    assert (done.returncode, done.stderr) == (0, "")
    assert [each.name for each in tmp_path.iterdir()] == ["cupynet"]
