"""The command entry point: which settings come in, what is refused, and with which exit code a command ends."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from cupynet import config
from cupynet.config import GROUPS, composing, stored
from cupynet.config.instantiate import build
from cupynet.config.schema import (
    BackendSettings,
    BenchSettings,
    PlanSettings,
    PrioritySettings,
    RateSettings,
    Settings,
    TuneSettings,
    own_names,
)
from cupynet.core.errors import ConfigError, DataError, Interrupted, annotate
from tests.support.commands import Command
from tests.support.refusals import refused
from tests.support.settings import MINIMAL, settings_of

REPOSITORY = Path(config.__file__).parents[2]


def test_only_an_explicit_data_set_has_no_fallback() -> None:
    assert settings_of("data.limit=9").data["fallback"] == "auto"
    assert settings_of("data=mnist").data["fallback"] is None


# what is refused -> the setting or the name that the line shows
REFUSED = {
    "workrs=4": "'workers'",
    "=3": "=3",
    "workers=1,2": "workers",
    "workers=[1": "workers=[1",
    "hydra.run.dir=${nothing}": "hydra.run.dir",
    "hydra.output_subdir=/elsewhere": "hydra.output_subdir",
    "hydra.job_logging.root.level=NOPE": "hydra.job_logging",
    "workers": "workers",
}


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("bad", REFUSED)
def test_refused_in_one_line_and_without_a_folder(
    bad: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = command(bad)
    out, err = capsys.readouterr()
    assert (code, ran, out) == (2, [], "") and list(in_folder.iterdir()) == []
    assert err.startswith("cupynet: ") and err.count("\n") == 1 and REFUSED[bad] in err


# override -> what the error names: the setting, and the nearest name if there is one
WRONG = {
    "++workrs=4": ("workrs", "'workers'"),
    "optimzer=sgd": ("optimzer", "'optimizer'"),
    "workers=four": ("workers", ""),
    "workers=???": ("workers", ""),
    "parallel.averaging_freqency=3": ("parallel.averaging_freqency", "'parallel.averaging_frequency'"),
    "model.layers.conv2.kernal=5": ("model.layers.conv2.kernal", "'model.layers.conv2.kernel'"),
    "experiment=dl4j_gpu_guid": ("experiment", "'dl4j_gpu_guide'"),
    "averaging_frequency=3": ("averaging_frequency", "'parallel.averaging_frequency'"),
    "callbacks=loud": ("callbacks", "early_stopping"),
    "parallel={timeout:1}": ("parallel.timeout", "'parallel.timeout_s'"),
    "parallel.synchronizer.averaging_frequency=${parallel.every}": ("parallel", "parallel.every"),
    "~optimizer": ("optimizer", ""),
    "callbacks=[tensorboard,nope]": ("callbacks", ""),
}


SMALL_CONF = {
    "config": {
        **{group: MINIMAL[group] for group in ("backend", "memory", "loss")},
        "parallel": {"synchronizer": {"averaging_frequency": 3}},
        "defaults": [
            *("spine", {"data": "mnist"}, {"model": "lenet"}, {"optimizer": "nesterov"}, {"callbacks": "default"}),
            *("_self_", {"experiment": None}),
        ],
    },
    "data/mnist": {},
    "data/npz": {},
    "model/lenet": {"layers": {"conv2": {"kernel": 5}}},
    "optimizer/nesterov": {},
    "callbacks/default": {},
    "callbacks/early_stopping": {},
    "experiment/dl4j_gpu_guide": {},
}


@pytest.fixture
def small_conf(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace conf/ with `SMALL_CONF` for `config.compose`, which then takes half the time."""
    folder = tmp_path_factory.mktemp("conf")
    for name, content in SMALL_CONF.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(content))
    monkeypatch.setattr(composing, "conf_folder", lambda: folder)


@pytest.mark.usefixtures("small_conf")
@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_setting_is_named(override: str) -> None:
    setting, nearest = WRONG[override]
    with pytest.raises(ConfigError) as caught:
        config.compose([override])
    assert caught.value.setting.startswith(setting) and nearest in str(caught.value)


@pytest.mark.usefixtures("minimal_conf")
def test_a_refused_run_removes_only_the_folders_that_were_made_for_it(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []

    def check(settings: Settings) -> None:
        seen.append(settings)
        raise ConfigError("is\n too large", "model.layers.conv2.kernel", "29")

    (in_folder / "full" / "empty").mkdir(parents=True)
    (in_folder / "full" / "precious").write_text("mine")
    assert command("workers=3", "hydra.run.dir=full/empty/a/b", check=check) == (2, [])
    assert seen[0].workers == 3
    assert capsys.readouterr().err == "cupynet: model.layers.conv2.kernel=29: is too large\n"
    assert command("hydra.run.dir=full", check=lambda settings: 1 / 0) == (1, [])  # a bug is shown
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "ZeroDivisionError: division by zero" in err.splitlines()[-1]
    assert sorted(path.name for path in in_folder.rglob("*")) == ["empty", "full", "precious"]


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("parallel.averaging_frequency=0",), "parallel.averaging_frequency"),
        (("parallel.synchronizer.averaging_frequency=0",), "parallel.synchronizer.averaging_frequency"),
        (("parallel=adaptive", "parallel.averaging_frequency=epoch"), "parallel.averaging_frequency"),
        (("parallel.report_score_after_averaging=true", "parallel.average_updaters=3"), "parallel.average_updaters"),
    ],
)
def test_an_error_names_the_setting_that_was_typed(
    overrides: tuple[str, ...], setting: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(settings: Settings) -> None:
        build(settings.parallel.synchronizer, "parallel.synchronizer")

    assert command(*overrides, check=check) == (2, [])
    assert capsys.readouterr().err.startswith(f"cupynet: {setting}=")
    assert list(in_folder.iterdir()) == []


FREQUENCY = "parallel.averaging_frequency"
OTHER = "parallel.synchronizer.averaging_frequency"


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        ((f"{FREQUENCY}=7", f"{OTHER}=3"), FREQUENCY),
        ((f"{OTHER}=3", f"{FREQUENCY}=7", "workers=1"), FREQUENCY),
        ((f"{FREQUENCY}=7", "parallel.synchronizer={averaging_frequency:3}"), FREQUENCY),
        ((f"{FREQUENCY}=7", f"{OTHER}={{_target_:cupynet.parallel.Adaptive,target:0.1}}"), FREQUENCY),
        (
            ("parallel.report_score_after_averaging=true", "parallel.synchronizer.report_score=false"),
            "parallel.report_score_after_averaging",
        ),
    ],
)
def test_two_values_for_one_argument_are_refused(overrides: tuple[str, ...], setting: str) -> None:
    with refused(setting):
        settings_of(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{FREQUENCY}=7", f"{OTHER}=7"),
        (f"{FREQUENCY}=7", "workers=1"),
        (f"{FREQUENCY}=7", "parallel=gradients"),  # another job of a sweep may average
        (f"{FREQUENCY}=7", "parallel=post_local", f"{OTHER}.epochs=3"),
        (f"{FREQUENCY}=7", f"{OTHER}={{_target_:cupynet.parallel.Adaptive,target:0.1,first:${{{FREQUENCY}}}}}"),
    ],
)
def test_a_setting_that_is_not_used_is_accepted(overrides: tuple[str, ...]) -> None:
    assert settings_of(*overrides).parallel.averaging_frequency == 7


def leaves(value: Any) -> Iterator[Any]:
    """Every value that is no dataclass, dict or list; these themselves are nothing else."""
    if is_dataclass(value):
        for each in fields(value):
            yield from leaves(getattr(value, each.name))
    elif type(value) in (dict, list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def test_plain_values_arrive(command: Command, in_folder: Path) -> None:
    arguments = ("workers=2", "devices=[0,2]", "data=mnist", "data.limit=7", "data.folder=${hydra:runtime.cwd}/x")
    code, (settings,) = command(*arguments)
    assert code == 0
    assert (settings.workers, settings.devices, settings.data["limit"]) == (2, [0, 2], 7)
    assert settings.data["folder"] == f"{in_folder}/x" and settings.data["fallback"] is None  # because data=mnist
    assert settings.backend == BackendSettings(name="auto", priority=PrioritySettings(gpu=100, cpu=0))
    assert {type(value) for value in leaves(settings)} <= {int, float, bool, str, type(None)}


@pytest.mark.usefixtures("minimal_conf")
def test_a_job_has_a_folder_with_its_settings(command: Command, in_folder: Path) -> None:
    folders: list[Path] = []
    assert command(task=lambda settings, folder: folders.append(folder))[0] == 0
    (folder,) = folders
    assert folder.is_absolute() and folder.parent.parent == in_folder / "outputs"
    assert {path.name for path in folder.rglob("*")} == {".hydra", "config.yaml", "hydra.yaml", "overrides.yaml"}


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND_PRIORITY_CPU", "200")
    monkeypatch.delenv("BACKEND_PRIORITY_GPU", raising=False)
    monkeypatch.setenv("CUPYNET_REPORT", "false")
    composed = composing.composed([], None)
    settings = composing.settings_of(composed, [], Settings)
    assert settings.backend.priority == PrioritySettings(gpu=100, cpu=200)
    assert settings.callbacks["report"]["enabled"] is False
    for wrong in ("abc", "[1"):
        monkeypatch.setenv("BACKEND_PRIORITY_GPU", wrong)
        with refused("backend.priority.gpu"):
            composing.settings_of(composed, [], Settings)


@pytest.mark.usefixtures("minimal_conf")
def test_a_job_gets_what_was_prepared_for_it(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int | None] = []
    done: list[list[int | None]] = []

    def prepare(settings: Settings) -> list[int | None]:
        assert not list(in_folder.rglob("config.yaml"))  # nothing is written yet
        prepared.append(settings.workers)
        return prepared

    def task(job: list[int | None], folder: Path) -> None:
        assert (folder / ".hydra" / "config.yaml").is_file()
        done.append(job)

    monkeypatch.setattr(sys, "argv", ["train.py", "workers=2"])
    config.run(task, prepare, "config", Settings)
    assert prepared == [2] and len(done) == 1 and done[0] is prepared


def raising(error: BaseException) -> Callable[[Settings, Path], float | None]:
    def task(settings: Settings, folder: Path) -> float | None:
        raise error

    return task


@pytest.mark.usefixtures("minimal_conf")
def test_a_cupynet_error_is_one_line_on_the_terminal_and_in_the_log(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = DataError("train-images: is\n damaged")
    annotate(error, "worker 1, epoch 2, batch 7")
    assert command(task=raising(error))[0] == 65
    line = "train-images: is damaged; worker 1, epoch 2, batch 7"
    assert capsys.readouterr().err == f"cupynet: {line}\n"
    (log,) = in_folder.glob("outputs/*/*/train.log")
    assert log.read_text().endswith(f" ERROR cupynet: {line}\n")


@pytest.mark.usefixtures("minimal_conf")
def test_a_bug_of_a_job_leaves_with_its_traceback(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(task=raising(SystemExit(7)))[0] == 7
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "test_hydra_main.py" in err and "site-packages/hydra" not in err
    assert err.endswith(f"cupynet: SystemExit: 7 (in module {__name__})\n")
    (log,) = in_folder.glob("outputs/*/*/train.log")
    assert "Traceback" in log.read_text()


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("sweep", [(), ("-m", "seed=1,2")])
def test_run_folder_that_cannot_be_made(
    sweep: Any, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "outputs").write_text("a file")
    assert command(*sweep) == (74, [])
    err = capsys.readouterr().err
    assert "outputs" in err and err.count("\n") == 1


@pytest.mark.usefixtures("minimal_conf")
def test_settings_that_cannot_be_stored(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_folder / "here").mkdir()
    (in_folder / "here" / ".hydra").write_text("a file")
    assert command("hydra.run.dir=here") == (74, [])
    assert "here/.hydra" in capsys.readouterr().err
    assert [path.name for path in (in_folder / "here").iterdir()] == [".hydra"]


# --- sweeps


def logging_task(settings: Settings, folder: Path) -> None:
    logging.getLogger("cupynet.training").info("epoch %d", 1)
    logging.getLogger("cupynet").warning("careful")
    logging.getLogger("cupynet").debug("never")
    logging.getLogger("other_package").warning("%s", "unexpected\x1b[2J\x07\u202e")


def check_log(log: Path) -> str:
    """Check that a log starts with the records of `logging_task`, and return the rest."""
    *lines, rest = log.read_text(encoding="utf-8").split("\n", 3)
    texts = [line.split(" ", 2)[2] for line in lines]
    assert texts[:2] == ["INFO cupynet.training: epoch 1", "WARNING cupynet: careful"]
    assert texts[2].startswith("WARNING other_package: unexpected\ufffd")  # no control characters in the log
    assert not {"\x1b", "\x07", "\u202e"} & set(texts[2])
    return rest


@pytest.mark.usefixtures("minimal_conf")
def test_one_bad_job_does_not_stop_a_sweep(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One job has a bug, another is refused. Both are reported with their numbers, and the first decides the code."""
    code, ran = command("-m", "epochs=1,-1,2", task=lambda settings, folder: 1 / (settings.epochs - 1))
    assert code == 1 and [settings.epochs for settings in ran] == [1, 2]
    err = capsys.readouterr().err
    first, second = [line for line in err.splitlines() if line.startswith("cupynet: ")]
    assert "job 0: ZeroDivisionError" in first and "job 1: epochs=-1" in second and err.count("Traceback") == 1
    (sweep,) = in_folder.glob("outputs/sweeps/*/*")
    assert sorted(path.name for path in sweep.glob("[0-9]*")) == ["0", "2"]  # a refused job leaves no folder
    assert "ERROR cupynet: job 0: ZeroDivisionError" in (sweep / "0" / "train.log").read_text()


@pytest.mark.usefixtures("minimal_conf")
def test_a_sweep_shows_warnings_only_and_each_job_has_its_log(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "seed=1,2", task=logging_task)[0] == 0
    out = capsys.readouterr().out
    assert (out.count("warning: careful"), out.count("epoch 1")) == (2, 0)
    (sweep,) = in_folder.glob("outputs/sweeps/*/*")
    assert [check_log(sweep / job / "train.log") for job in "01"] == ["", ""]


@pytest.mark.usefixtures("minimal_conf")
def test_a_sweep_that_cannot_be_composed_never_starts(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("-m", "workers=1,four") == (2, [])
    err = capsys.readouterr().err
    assert err.startswith("cupynet: ") and "workers" in err and err.count("\n") == 1
    assert not list(in_folder.rglob(".hydra"))


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(15), 143)])
def test_an_interrupt_ends_the_sweep(error: BaseException, code: int, command: Command) -> None:
    exit_code, ran = command("-m", "workers=1,2", task=raising(error))
    assert (exit_code, [settings.workers for settings in ran]) == (code, [1])


# --- the terminal and the log


@pytest.mark.usefixtures("minimal_conf")
def test_a_record_appears_once_on_the_terminal_and_once_in_the_log(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quiet run prints only warnings. The next run prints everything and has its own folder."""
    quiet, usual = ("+callbacks.progress.style=none", ["warning: careful"]), (None, ["epoch 1", "warning: careful"])
    for setting, printed in (quiet, usual):
        assert command(*filter(None, [setting]), task=logging_task)[0] == 0
        out, err = capsys.readouterr()
        lines = [line.partition("] ") for line in out.splitlines()]
        assert all(len(time) == len("[12:30:05") and time.count(":") == 2 for time, _, _ in lines)
        assert [text for _, _, text in lines] == printed and err == ""
    logs = [check_log(log) for log in in_folder.glob("outputs/20*/*/train.log")]
    assert logs == ["", ""]


@pytest.mark.parametrize("arguments", [["--info", "defaults"], ["-c", "job", "-p", "optimizer"]])
def test_questions_are_answered_and_start_nothing(
    arguments: list[str], command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == (0, [])
    out, err = capsys.readouterr()
    assert {"--info": "spine", "-c": "momentum: 0.9"}[arguments[0]] in out and err == ""
    assert list(in_folder.iterdir()) == []


def as_ranks(monkeypatch: pytest.MonkeyPatch, *arguments: str, rank: int | None = None, **job: Any) -> int:
    """Run a command as a rank of two. rank: as the environment says; None if it says nothing. Return the exit code."""
    if rank is not None:
        monkeypatch.setenv("PMI_RANK", str(rank))
        monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    ranks: Any = SimpleNamespace(**{"size": 2, "rank": rank, "exit_code": 2, "library": "MPICH", **job})
    try:
        config.run(lambda settings, folder: None, lambda settings: settings, "config", Settings, lambda: ranks)
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
    return 0


@pytest.mark.usefixtures("minimal_conf")
def test_under_mpiexec_the_launcher_must_be_mpi(in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert as_ranks(monkeypatch, "parallel.launcher=thread", rank=0, speaks=lambda error: True) == 2
    err = capsys.readouterr().err
    assert "parallel.launcher=mpi" in err and err.count("\n") == 1 and list(in_folder.iterdir()) == []


@pytest.mark.usefixtures("minimal_conf")
@pytest.mark.parametrize("number", [0, 1])
def test_ranks_that_the_environment_does_not_know_are_refused(
    number: int, in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each already has a folder and a log when MPI says that there are several."""
    monkeypatch.setattr(sys, "argv", ["train.py", "parallel.launcher=mpi"])
    job: Any = SimpleNamespace(rank=number, size=2, library="MPICH", speaks=lambda error: number == 0, exit_code=2)
    with pytest.raises(SystemExit):
        config.run(lambda *_: None, lambda settings: settings, "config", Settings, lambda: job)
    assert capsys.readouterr().err.count("\n") == 1 - number and list(in_folder.iterdir()) == []


@pytest.mark.usefixtures("minimal_conf")
def test_ranks_compare_all_but_machine_specific_settings(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: dict[str, Any] = {}
    own = ("parallel.launcher=mpi", "+data.folder=mine", "devices=[0]", "batch_size=7")
    found = {"agree": compared.update, "share": lambda text: text, "ranks": SimpleNamespace()}
    assert as_ranks(monkeypatch, *own, rank=1, **found) == 0
    assert compared["batch_size"] == 7 and "the version of cupynet" in compared
    assert not {key for key in compared if key.startswith(("data.folder", "devices"))}


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        *(("config", Settings), ("bench", BenchSettings), ("plan", PlanSettings)),
        *(("find_rate", RateSettings), ("tune", TuneSettings)),
    ],
)
def test_help_lists_the_settings_that_exist(
    name: str, schema: type[Settings], in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every group in one line, with files that are there; a command's own settings; the exit codes."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    config.run(lambda settings, folder: None, lambda settings: settings, name, schema)
    page = capsys.readouterr().out.strip().splitlines()
    assert max(map(len, page)) <= 80 and len(page) <= 40
    groups = {line.split()[0]: line.split() for line in page if line[:2] == "  " and line[2:].split()[0] in GROUPS}
    assert list(groups) == list(GROUPS)
    for group, words in groups.items():
        there = {path.stem for path in (composing.conf_folder() / group).glob("*.yaml")}
        listed = [word for word in words[1:] if word in there]
        after = words[words.index(listed[0]) :]
        assert set(after) <= there | {"..."} and ("..." in after) == (set(listed) != there)
    assert name == "config" or all(setting in " ".join(page) for setting in own_names(schema))
    codes = [int(code) for code in re.findall(r"\d+", next(line for line in page if line.startswith("Exit codes")))]
    assert codes == [0, 1, 2, 3, 65, 74, 130, 143]


@pytest.fixture
def own_files(in_folder: Path) -> Path:
    """A folder for --config-dir."""
    for name, text in {
        "model/own.yaml": "_target_: mine.Stack\nlayers: {}\n",
        "parallel/own.yaml": "averaging_frequency: 7\nsynchronizer:\n  _target_: mine.Anything\n"
        "  every: ${parallel.averaging_frequency}\n",
        "experiment/wrong.yaml": "# @package _global_\nworkrs: 4\n",
        "experiment/typed.yaml": "# @package _global_\nworkers: four\n",
        "experiment/group.yaml": "# @package _global_\ndefaults:\n  - override /data: nothing\n",
        "experiment/broken.yaml": "# @package _global_\nworkers: [\n",
    }.items():
        path = in_folder / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return in_folder / "mine"


def test_own_files(own_files: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """--config-dir may appear between overrides."""
    code, (settings,) = command("epochs=3", "-cd", "mine", "model=own", "-r", "parallel=own")
    assert code == 0 and settings.epochs == 3 and settings.model == {"_target_": "mine.Stack", "layers": {}}
    assert settings.parallel.synchronizer == {"_target_": "mine.Anything", "every": 7}
    assert settings.parallel.prefetch_buffer == 24
    capsys.readouterr()
    assert command("--config-dir=mine", "experiment=broken")[0] == 2
    assert "broken.yaml" in capsys.readouterr().err


@pytest.mark.usefixtures("small_conf")
@pytest.mark.parametrize(
    ("name", "named"),
    [("wrong", ("experiment/wrong", "workrs", "'workers'")), ("typed", ("workers",)), ("group", ("data=nothing",))],
)
def test_a_wrong_setting_in_a_file_is_named_with_the_file(name: str, named: tuple[str, ...], own_files: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config.compose([f"experiment={name}"], own_files)
    assert all(each in str(caught.value) for each in named), caught.value


@pytest.mark.usefixtures("minimal_conf")
def test_a_resumed_run_accepts_overrides_of_every_form_and_needs_no_user_files(
    command: Command, in_folder: Path
) -> None:
    before = ["optimizer.momentum=0.5", "workers=2", "seed=5"]
    stored.keep(
        in_folder / "r", replace(settings_of(*before), model={"_target_": "mine.Stack"}), ["model=own", *before]
    )
    changes = ["epochs=20", "~callbacks.progress", "+callbacks.mine={_target_:a.B}", "backend=numpy"]
    code, (settings,) = command("resume=r", *changes, "trusted_modules=[mine]")
    assert code == 0 and settings.optimizer["momentum"] == 0.5 and settings.model == {"_target_": "mine.Stack"}
    assert (settings.seed, settings.workers, settings.epochs, settings.backend.name) == (5, 2, 20, "numpy")
    assert settings.callbacks["progress"] is None and settings.callbacks["mine"] == {"_target_": "a.B"}
    assert settings.trusted_modules == ["mine"]


def test_conf_is_found_in_a_wheel_and_in_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.conf_folder() == REPOSITORY / "conf"
    (tmp_path / "cupynet").mkdir()
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(composing, "__file__", str(tmp_path / "cupynet" / "config" / "composing.py"))
    assert config.conf_folder() == tmp_path.resolve() / "conf"
    (tmp_path / "cupynet" / "conf").mkdir()
    assert config.conf_folder() == tmp_path.resolve() / "cupynet" / "conf"


# --- broken pipe


@pytest.mark.usefixtures("minimal_conf")
def test_a_broken_pipe_is_not_reported_as_a_bug(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert command(task=lambda settings, folder: print("epoch 1"))[0] == 141
    assert capsys.readouterr().err == ""


SCRIPT = """
import sys
from cupynet.config import run
from cupynet.config.instantiate import build
from cupynet.config.schema import Settings

try:
    run(lambda settings, folder: None, lambda settings: settings, "config", Settings)
finally:
    assert "numpy" not in sys.modules and "numba" not in sys.modules
"""


def test_help_imports_no_numpy_and_ends_quietly_on_a_broken_pipe(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SCRIPT, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 141


@pytest.mark.parametrize("option", ["--nonsense", "-x", "--helpp", "--config-fir=x", "--speed"])
def test_an_unknown_option_is_refused(
    option: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("seed=1", option) == (2, [])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"cupynet: {option.partition('=')[0]}: ") and err.count("\n") == 1
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize("options", [["-cjob"], ["--cf", "job"]])
def test_options_may_be_written_as_argparse_permits(options: list[str], command: Command, capsys: Any) -> None:
    assert command(*options) == (0, []) and "batch_size" in capsys.readouterr().out
