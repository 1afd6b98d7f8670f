"""The door: what comes in as settings, what is refused and how, and how a command leaves."""

from __future__ import annotations

import errno
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig

from cupynet import __version__, config
from cupynet.checks import listed
from cupynet.config import composing
from cupynet.config.door import settings_first
from cupynet.config.explain import GROUPS
from cupynet.errors import ConfigError, DataError, DivergedError, Interrupted, annotate
from cupynet.parts import build, build_as
from cupynet.settings import (
    BackendSettings,
    BenchSettings,
    PlanSettings,
    PrioritySettings,
    RateSettings,
    Settings,
    TuneSettings,
)

REPOSITORY = Path(config.__file__).parents[2]


# --- stand-ins for parts


class Conv:
    def __init__(self, filters: int, kernel: int = 3) -> None:
        if kernel < 1:
            raise ConfigError(f"kernel={kernel}: must be at least 1")
        if filters == 13:
            raise ConfigError("model.layers.a: filters=13: said by somebody who knows the key")
        self.filters, self.kernel = filters + 0, kernel


class Stack:
    def __init__(self, layers: dict[str, Any], *, extra: list[Any] | None = None) -> None:
        self.layers, self.extra = layers, extra


class Anything:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


def function() -> None:
    raise AssertionError("a function was called")


HERE = __name__


# --- running a command in this process


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder, with the environment a command expects, and logging put back afterwards."""
    monkeypatch.chdir(tmp_path)
    for name in ("BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    loggers = [logging.getLogger(name) for name in (None, "cupynet", "hydra", "__main__")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield tmp_path
    for logger, handlers, level, propagate in before:
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers[:], logger.level, logger.propagate = handlers, level, propagate
    HydraConfig.instance().cfg = None


Command = Callable[..., Any]


@pytest.fixture
def command(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """command(*arguments, task=, check=) -> (exit code, settings of the jobs that ran)"""

    def call(*arguments: str, task: Any = None, check: Any = None) -> tuple[int, list[Settings]]:
        ran: list[Settings] = []

        def job(settings: Settings, folder: Path) -> float | None:
            ran.append(settings)
            return None if task is None else task(settings, folder)

        def prepare(settings: Settings) -> Settings:
            if check is not None:
                check(settings)
            return settings

        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        try:
            config.run(job, prepare, "config", Settings)
        except SystemExit as left:
            assert isinstance(left.code, int)
            return left.code, ran
        return 0, ran

    return call


@pytest.mark.parametrize(
    ("arguments", "fallbacks"),
    [
        ((), ["auto"]),
        (("data.limit=9", "experiment=data_parallel"), ["auto"]),  # whose file has `override /data: mnist`
        (("data=mnist",), [None]),
        (("experiment=data_parallel", "data=mnist"), [None]),
        (("data=mnist", "data.fallback=synthetic"), ["synthetic"]),
        (("-m", "data=mnist,synthetic"), [None, "none of it"]),
        (("-m", "seed=1,2", "data=mnist"), [None, None]),
    ],
)
def test_who_types_which_data_gets_no_others(command: Command, arguments: Any, fallbacks: list[str | None]) -> None:
    code, ran = command(*arguments)
    assert code == 0 and [each.data.get("fallback", "none of it") for each in ran] == fallbacks


def test_what_was_typed_then_counts_where_a_run_is_read_again(command: Command, in_folder: Path) -> None:
    for arguments, fallback in ((["data=mnist"], None), ([], "auto")):
        folder = f"run-{fallback}"
        assert command(*arguments, f"hydra.run.dir={folder}")[0] == 0
        assert config.load(folder).data["fallback"] == fallback
        assert config.load(folder, ["data=mnist"]).data["fallback"] is None
        assert config.load(folder, ["data.fallback=synthetic"]).data["fallback"] == "synthetic"


NAMES = listed(sorted(each.name for each in fields(Settings)), "and")

# what is refused at the door; what is said begins with the setting as it was written (": ..."), or differently
REFUSED = {
    "workrs=4": ": there is no setting 'workrs'; did you mean 'workers'?",
    "++workrs=4": "workrs=4: there is no setting 'workrs'; did you mean 'workers'?",
    "optimzer=sgd": ": there is no setting 'optimzer'; did you mean 'optimizer'?",
    "workers=0": ": must be an integer of at least 1, or null for one per device",
    "workers=four": ": must be an integer of at least 1, or null for one per device",
    "batch_size=-1": ": must be an integer of at least 1",
    "epochs=0": ": must be an integer of at least 1",
    "seed=x": ": must be an integer of at least 0 and below 2**64",
    "dtype=float16x": ": must be one of half, bfloat16, float, double; did you mean 'bfloat16'?",
    "devices=[0,0]": ": names a device twice",
    "parallel.averaging_frequency=0": ": must be an integer of at least 1, epoch or end",
    "parallel.averaging_freqency=3": ": there is no setting 'parallel.averaging_freqency'"
    "; did you mean 'parallel.averaging_frequency'?",
    "+parallel.averaging_freqency=3": "parallel.averaging_freqency=3: "
    "there is no setting 'parallel.averaging_freqency'"
    "; did you mean 'parallel.averaging_frequency'?",
    "~parallel.timeout_s": ": every run has this setting: parallel.timeout_s=... changes it, nothing takes it out",
    "model.layers.conv2.kernal=5": ": there is no setting 'model.layers.conv2.kernal'"
    "; did you mean 'model.layers.conv2.kernel'?",
    "model.layer.conv2.kernel=5": ": there is no setting 'model.layer'; did you mean 'model.layers'?",
    "optimizer.momentun=1": ": there is no setting 'optimizer.momentun'; did you mean 'optimizer.momentum'?",
    "optimizer=nesterof": ": there is no 'nesterof' in conf/optimizer; did you mean 'nesterov'?",
    "optimizer=5": ": must be the name of a file in conf/optimizer",
    "~optimizer": "optimizer: is missing; choose it with optimizer=... (--help lists them)",
    "experiment=dl4j_gpu_guid": ": there is no 'dl4j_gpu_guid' in conf/experiment; did you mean 'dl4j_gpu_guide'?",
    "workers=99999999999999999999": ": must be at most 10000, or null for one per device"
    ": every worker is a thread with its own replica",
    "parallel.prefetch_buffer=1000000000": ": must be at most 100000: every batch prepared ahead takes memory",
    "seed=18446744073709551616": ": must be an integer of at least 0 and below 2**64",
    "averaging_frequency=3": ": there is no setting 'averaging_frequency'"
    "; did you mean 'parallel.averaging_frequency'?",
    "profile=0": ": must be an integer of at least 1, or true or false",
    "profile=always": ": must be an integer of at least 1, or true or false",
    "profile=20000": ": must be at most 10000, or true or false: the file grows with them",
    "backend.priority=3": ": must be a group of settings: gpu, cpu",
    "backend=null": ": must be the name of a file in conf/backend",
    "callbacks=loud": ": there is no 'loud' in conf/callbacks; the names are default, early_stopping"
    ", mlflow, tensorboard, wandb and weight_average",
    "parallel={timeout:1}": "parallel.timeout: there is no setting 'parallel.timeout'"
    "; did you mean 'parallel.timeout_s'?",
    "parallel.synchronizer.frequency=${parallel.every}": ": refers to a setting that is not there"
    ": write a value, or the name of a setting",
    "~parallel.synchronizer": ": every run has this setting"
    ": parallel.synchronizer=... changes it, nothing takes it out",
    "~parallel.nothing": ": there is no setting 'parallel.nothing' to take out",
    "=3": ": is not written as key=value: there is no key",
    "experiment=null": ": must be the name of a file in conf/experiment; leave it out for none",
    "model=null": ": must be the name of a file in conf/model",
    "callbacks=[tensorboard,nope]": ": there is no 'nope' in conf/callbacks; the names are default, early_stopping"
    ", mlflow, tensorboard, wandb and weight_average",
    "backend=[numpy,nump]": ": there is no 'nump' in conf/backend; did you mean 'numpy'?",
    "parallel.pipeline.stages=2": ": there is no setting 'parallel.pipeline.stages'"
    "; replicas are whole: parallel=pipeline cuts them into stages",
    "callbacks.checkpoint.evry=1": ": there is no setting 'callbacks.checkpoint.evry'; the names are best, "
    "every_epochs, every_iterations, keep_every, keep_last and path"
    "; for an argument of another class write ++callbacks.checkpoint.evry=...",
    "workers=???": ": is missing: write a value, or leave it out",
    "+foo=1": f"foo=1: there is no setting 'foo'; the names are {NAMES}",
    "+epochs=3": ": there is a setting 'epochs' already; write it without the +",
    "workers=1,2": ": several values need -m, to try each; for a list write workers=[1,2], for a text quotes",
    "workers=range(1,3)": ": several values need -m, to try each",
    "workers=[1": ": is not written as key=value, or has special characters without quotes"
    ": no viable alternative at input '[1'",
    "workers": ": is not written as key=value, or has special characters without quotes",
    "--workers=4": ": settings are written without dashes: workers=4",
    "--parallel.timeout_s=4": ": settings are written without dashes: parallel.timeout_s=4",
    "data.folder=${nothing}": ": refers to a setting that is not there: write a value, or the name of a setting",
}

# further values that break a rule, whichever way they come in
WRONG = {
    "workers=4.0": ": must be an integer of at least 1, or null for one per device",
    "workers='1,2'": ": must be an integer of at least 1, or null for one per device",
    "batch_size=true": ": must be an integer of at least 1",
    "epochs=": ": must be an integer of at least 1",
    "evaluate_every_epochs=0": ": must be an integer of at least 1",
    "seed=null": ": must be an integer of at least 0 and below 2**64",
    "dtype=bfloat61": ": must be one of half, bfloat16, float, double; did you mean 'bfloat16'?",
    "dtype=null": ": must be one of half, bfloat16, float, double",
    "devices=[a]": ": must be a list of device numbers such as [0,2], or null for all",
    "devices=[-1]": ": must be a list of device numbers such as [0,2], or null for all",
    "devices=[]": ": must be a list of device numbers such as [0,2], or null for all",
    "devices={a:1}": ": must be a list of device numbers such as [0,2], or null for all",
    "data.augment={_target_:cupynet.data.Shift}": ": must be a list: data.augment=[{_target_:cupynet.data.Shift}]",
    "model.layers=[a]": ": must be a mapping: {name: value}",
    "devices=3": ": must be a list of device numbers such as [0,2], or null for all",
    "trusted_modules=[os,1x]": ": must be a list of Python modules such as [mynet,mynet.layers]",
    "parallel.averaging_frequency=epoc": ": must be an integer of at least 1, epoch or end; did you mean 'epoch'?",
    "parallel.timeout_s=inf": ": must be a number of seconds above 0 and below 9.22337e+09",
    "parallel.prefetch_buffer=-1": ": must be an integer of at least 0",
    "parallel.prefetch_buffer=true": ": must be an integer of at least 0",
    "parallel.average_updaters=yess": ": must be true or false",
    "parallel.average_updaters=2": ": must be true or false",
    "callbacks.progress=bars": ": must be a part with a _target_, or null for none",
    "report_every_iterations=0": ": must be an integer of at least 1",
    "memory.device_pool_limit=2.5": ": must be bytes, an amount such as 2GiB"
    ", a share of the device such as 80%, or null",
    "memory.device_pool_limit=120%": ": must be bytes, an amount such as 2GiB"
    ", a share of the device such as 80%, or null",
    "memory.device_pool_trim_above=80%": ": must be bytes, an amount such as 2GiB, or null",
    "memory.data_on_device=always": ": must be auto, true or false",
    "memory.data_on_device=1": ": must be auto, true or false",
    "memory.data_on_device=null": ": must be auto, true or false",
    "memory.pinned_pool_trim_above=1GiB": ": must be an integer of at least 0, or null for never",
}


def said(bad: str) -> str:
    text = {**REFUSED, **WRONG}[bad]
    return bad + text if text.startswith(":") else text


@pytest.mark.parametrize("bad", REFUSED)
def test_refused_in_one_line_before_a_folder_exists(
    bad: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, ran = command(bad)
    out, err = capsys.readouterr()
    assert err == f"cupynet: {said(bad)}\n"
    assert (code, ran, out) == (2, [], "")
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize(("bad", "good"), [("workers=four", "workers=4"), ("devices=x", "devices=[0]")])
def test_of_a_setting_written_twice_the_wrong_one_is_told(
    bad: str, good: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ((bad, good), (good, bad)):
        assert command(*arguments) == (2, [])
        assert capsys.readouterr().err.startswith(f"cupynet: {bad}: must be ")


@pytest.mark.parametrize("gone", ["~callbacks.progress", "callbacks.progress=null"])
def test_a_reference_to_what_was_taken_out(
    gone: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(gone, "+callbacks.mine.style=${callbacks.progress.style}") == (2, [])
    assert capsys.readouterr().err == (
        "cupynet: callbacks.mine.style=${callbacks.progress.style}: refers to a setting that is not there"
        ": write a value, or the name of a setting\n"
    )
    (in_folder / "mine" / "callbacks").mkdir(parents=True)
    (in_folder / "mine" / "callbacks" / "own.yaml").write_text("own:\n  style: ${callbacks.progress.style}\n")
    assert command("-cd", "mine", "callbacks=own") == (2, [])
    assert capsys.readouterr().err.startswith("cupynet: callbacks.own.style=${callbacks.progress.style}: refers to a")
    assert [path.name for path in in_folder.iterdir()] == ["mine"]


def test_the_wrong_one_of_two_is_named(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, wrong in ((["epochs=1", "epochs=0.5"], 1), (["backend=numpy", "parallel=3"], 1)):
        assert command(*arguments) == (2, [])
        assert capsys.readouterr().err.startswith(f"cupynet: {arguments[wrong]}: must be ")


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
    folders: list[tuple[Path, Path]] = []
    arguments = ("workers=2", "devices=[0,2]", "data.limit=7")
    code, (settings,) = command(*arguments, task=lambda settings, folder: folders.append((folder, Path.cwd())))
    assert code == 0
    assert (settings.workers, settings.devices, settings.data["limit"]) == (2, [0, 2], 7)
    assert settings.backend == BackendSettings(name="auto", priority=PrioritySettings(gpu=100, cpu=0))
    for value in leaves(settings):
        assert type(value) in (int, float, bool, str, type(None)), value
    ((folder, working_folder),) = folders
    assert folder.is_absolute() and folder.parent.parent == in_folder / "outputs"
    assert sorted(path.name for path in folder.iterdir()) == [".hydra", "train.log"]
    assert working_folder == in_folder


def test_two_starts_never_share_a_folder(command: Command, in_folder: Path) -> None:
    for _ in range(3):
        assert command()[0] == 0
    assert len(list(in_folder.glob("outputs/20*/*"))) == 3


def test_good_values(command: Command) -> None:
    for arguments, key, value in (
        (["parallel.averaging_frequency=end"], "parallel", "end"),
        (["memory.device_pool_limit=80%", "memory.device_pool_trim_above=512MiB"], "memory", "80%"),
        (["callbacks.progress.style=none"], "callbacks", "none"),
        (["callbacks.progress=null"], "callbacks", "'progress': None"),
        (["+callbacks.mine._target_=mymodule.Mine"], "callbacks", "{'_target_': 'mymodule.Mine'}"),
        (["loss=hinge"], "loss", "Hinge"),
        (["optimizer.learning_rate=0.01"], "optimizer", 0.01),
        (["+model.layers.dense2={_target_:cupynet.nn.Dense,units:3}"], "model", "dense2"),
        (["data.folder=${hydra:runtime.cwd}/x"], "data", f"{Path.cwd()}/x"),
        (["+workers=3"], "workers", 3),
    ):
        code, ran = command(*arguments)
        assert code == 0 and str(value) in str(getattr(ran[0], key)), arguments


def test_priorities_of_the_environment(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    monkeypatch.setenv("BACKEND_PRIORITY_CPU", "200")
    assert command("backend=numpy")[1][0].backend.priority == PrioritySettings(gpu=100, cpu=200)
    for unset in ("", " "):  # as a script leaves it
        monkeypatch.setenv("BACKEND_PRIORITY_GPU", unset)
        assert command("backend=numpy")[1][0].backend.priority == PrioritySettings(gpu=100, cpu=200)
    capsys.readouterr()
    started = len(list(in_folder.glob("outputs/20*/*")))
    for value in ("abc", "1.5", "[1", "${oc.env:HOME}"):
        monkeypatch.setenv("BACKEND_PRIORITY_GPU", value)
        for question in ([], ["-m", "seed=1,2"], ["--cfg", "job", "--resolve"]):
            assert command(*question) == (2, [])
            line = f"BACKEND_PRIORITY_GPU={value}: must be an integer, or unset for 100"
            assert capsys.readouterr().err == f"cupynet: {'job 0: ' * ('-m' in question)}{line}{more(question)}\n"
    assert len(list(in_folder.glob("outputs/20*/*"))) == started
    monkeypatch.delenv("BACKEND_PRIORITY_GPU")
    for value, means in (("", True), ("False", False), ("true", True), ("0", False), ("1", True)):
        monkeypatch.setenv("CUPYNET_REPORT", value)
        assert command()[1][0].callbacks["report"]["enabled"] is means
    monkeypatch.setenv("CUPYNET_REPORT", "no")
    assert command() == (2, [])
    assert capsys.readouterr().err == "cupynet: CUPYNET_REPORT=no: must be true or false, or unset for true\n"


def more(arguments: list[str]) -> str:
    """What is said of the second job of a sweep, where both are refused."""
    return " (1 more of 2 jobs is refused too)" if "-m" in arguments else ""


def test_check_refuses_before_a_folder_exists(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Settings] = []

    def check(settings: Settings) -> None:
        seen.append(settings)
        raise ConfigError("model.layers.conv2: kernel=29\n is larger than its input")

    assert command("workers=3", check=check) == (2, [])
    assert seen[0].workers == 3
    assert capsys.readouterr().err == "cupynet: model.layers.conv2: kernel=29 is larger than its input\n"
    assert list(in_folder.iterdir()) == []


def test_a_bug_in_check_is_shown(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(check=lambda settings: 1 / 0) == (1, [])
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("cupynet: this is a bug: ZeroDivisionError: division by zero\n")
    assert list(in_folder.iterdir()) == []


def test_a_job_gets_what_was_prepared_for_it(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[Any] = []
    done: list[Any] = []

    def prepare(settings: Settings) -> list[Any]:
        assert not (in_folder / "outputs").exists() or "-m" in sys.argv
        prepared.append([settings.workers])
        return prepared[-1]

    def task(job: list[Any], folder: Path) -> None:
        assert folder.is_dir()
        done.append(job)

    for arguments, workers in ((["workers=3"], [3]), (["-m", "workers=1,2"], [1, 2, 1, 2])):  # all are checked first
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        config.run(task, prepare, "config", Settings)
        assert [job[0] for job in prepared] == workers
        assert all(one is other for one, other in zip(done, prepared[-len(done) :], strict=True))
        prepared.clear(), done.clear()


def raising(error: BaseException) -> Callable[[Settings, Path], float | None]:
    def task(settings: Settings, folder: Path) -> float | None:
        raise error

    return task


@pytest.mark.parametrize(
    ("error", "code"),
    [(DataError("train-images: is\n damaged"), 65), (DivergedError("loss is nan"), 3), (ConfigError("no"), 2)]
    + [(Interrupted(15), 143), (Interrupted(2), 130), (KeyboardInterrupt(), 130)],
)
def test_exit_codes_of_a_run(
    error: BaseException, code: int, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(task=raising(error))[0] == code
    line = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        line = "stopped by SIGINT: nothing of this run was saved"
    assert capsys.readouterr().err == f"cupynet: {line}\n"
    (log,) = in_folder.glob("outputs/*/*/train.log")
    assert log.read_text().endswith(f" ERROR cupynet: {line}\n")


def test_a_typed_error_says_where_it_happened(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    error = DivergedError("loss is nan")
    annotate(error, "worker 1, epoch 2, batch 7")
    assert command(task=raising(error))[0] == 3
    assert capsys.readouterr().err == "cupynet: loss is nan; worker 1, epoch 2, batch 7\n"


def test_a_bug_leaves_with_1_and_its_traceback(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for error in (ZeroDivisionError("oops"), BrokenPipeError(32, "not on stdout"), SystemExit(7), SystemExit(0)):
        assert command(task=raising(error))[0] == 1
        err = capsys.readouterr().err
        assert err.startswith("Traceback") and "test_config.py" in err and "hydra" not in err
        assert err.endswith(f"cupynet: this is a bug: {type(error).__name__}: {error}\n")
    for log in in_folder.glob("outputs/*/*/train.log"):
        assert "Traceback" in log.read_text()


def test_run_folder_that_cannot_be_made(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (in_folder / "outputs").write_text("a file")
    assert command()[0] == 74
    err = capsys.readouterr().err
    folder = err.removeprefix("cupynet: the run's folder cannot be written: ").removesuffix(": Not a directory\n")
    assert folder.startswith("outputs/") and "\n" not in folder


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [(["hydra.run.dir=here"], "here"), (["-m", "seed=1", "hydra.sweep.dir=all"], "all")],
)
def test_a_full_disk_is_told_with_the_folder(
    arguments: list[str],
    folder: str,
    command: Command,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # of a file that is written: Python names none

    monkeypatch.setattr("hydra.core.utils._save_config", full)
    assert command(*arguments) == (74, [])
    assert capsys.readouterr().err == (
        f"cupynet: the run's folder cannot be written: {folder}: No space left on device\n"
    )


# --- sweeps


def test_one_bad_job_does_not_stop_a_sweep(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = {2: DataError("damaged"), 3: ZeroDivisionError("oops"), 4: SystemExit(9), 5: DivergedError("nan")}

    def task(settings: Settings, folder: Path) -> float | None:
        if settings.epochs in errors:
            raise errors[settings.epochs]
        return 1.0

    code, ran = command("-m", "epochs=1,2,3,4,5", task=task)
    assert [settings.epochs for settings in ran] == [1, 2, 3, 4, 5]
    assert code == 65  # of the first that failed
    err = capsys.readouterr().err
    told = [line for line in err.splitlines() if line.startswith("cupynet: ")]
    assert told == [
        "cupynet: job 1: damaged",
        "cupynet: job 2: this is a bug: ZeroDivisionError: oops",
        "cupynet: job 3: this is a bug: SystemExit: 9",
        "cupynet: job 4: nan",
    ]
    assert err.count("Traceback") == 2
    (sweep,) = in_folder.glob("outputs/sweeps/*/*")
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "3", "4", "multirun.yaml"]
    logs = {job: (sweep / job / "train.log").read_text() for job in "01234"}
    assert logs["0"] == ""
    assert logs["1"].endswith("ERROR cupynet: job 1: damaged\n") and logs["1"].count("\n") == 1
    assert "ZeroDivisionError" in logs["2"] and "damaged" not in logs["2"]


def test_exit_code_of_a_sweep_is_that_of_the_first_failed_job(command: Command) -> None:
    def task(settings: Settings, folder: Path) -> float | None:
        raise DataError("x") if settings.workers == 2 else DivergedError("y")

    assert command("-m", "workers=2,3", task=task)[0] == 65


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["workers=1,four"], "workers=four: must be an integer of at least 1, or null for one per device"),
        (["workrs=1,2"], "workrs=1: there is no setting 'workrs'; did you mean 'workers'?"),
        (["optimizer=sgd,nesterof"], "optimizer=nesterof: there is no 'nesterof' in conf/optimizer; did you mean"),
        (["optimizer=sgd,nesterov", "optimizer.momentum=0.5"], "optimizer.momentum=0.5: there is no setting"),
        (["workers=1,2", "sede=3"], "sede=3: there is no setting 'sede'; did you mean 'seed'?"),
        (["-cd", "mine", "experiment=grid"], "epochs=x: must be an integer of at least 1"),
        (["workers=1,0"], "job 1: workers=0: must be an integer of at least 1, or null for one per device"),
        (["epochs=0", "seed=1,2,3"], "job 0: epochs=0: must be an integer of at least 1 (2 more of 3 jobs are refused"),
        (["workers=1,2", "hydra.launcher.jobs=2"], "hydra.launcher.jobs=2: there is no setting 'hydra.launcher.jobs'"),
        (["workers=1,2", "hydra/launcher=processes"], "hydra/launcher=processes: only jobs of cupynet.train"),
        (["workers=1,2", "hydra/launcher=processes", "hydra.launcher.jobs=0"], "hydra.launcher.jobs=0: must be"),
        (["workers=1,2", "hydra/launcher=processes", "+hydra.launcher.x=0"], "hydra.launcher.x: there is no such"),
    ],
)
def test_a_sweep_that_is_wrong_on_the_command_line_never_starts(
    arguments: list[str], line: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (in_folder / "mine" / "experiment").mkdir(parents=True)
    grid = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      epochs: 1,x\n"
    (in_folder / "mine" / "experiment" / "grid.yaml").write_text(grid)
    assert command("-m", *arguments) == (2, [])
    err = capsys.readouterr().err
    assert err.startswith(f"cupynet: {line}") and err.count("\n") == 1
    assert [path.name for path in in_folder.iterdir()] == ["mine"]


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Interrupted(15), 143)])
def test_an_interrupt_ends_the_sweep(error: BaseException, code: int, command: Command) -> None:
    exit_code, ran = command("-m", "workers=1,2,3", task=raising(error))
    assert (exit_code, [settings.workers for settings in ran]) == (code, [1])


# --- the terminal and the log


def test_a_record_appears_once_on_the_terminal_and_once_in_the_log(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(settings: Settings, folder: Path) -> float | None:
        logging.getLogger("cupynet.training").info("epoch %d", 1)
        logging.getLogger("cupynet").warning("careful")
        logging.getLogger("cupynet").debug("never")
        logging.getLogger("somebody").warning("else")
        return None

    assert command("-m", "workers=1,2", task=task)[0] == 0
    out, err = capsys.readouterr()
    lines = [line.partition("] ") for line in out.splitlines()]
    assert all(len(time) == len("[12:30:05") and time.count(":") == 2 for time, _, _ in lines)
    assert [text for _, _, text in lines] == [
        "Launching 2 jobs locally",
        *("#0 : workers=1", "epoch 1", "warning: careful"),
        *("#1 : workers=2", "epoch 1", "warning: careful"),
    ]
    assert err == ""
    for log in in_folder.glob("outputs/sweeps/*/*/*/train.log"):
        texts = [line.split(" ", 2)[2] for line in log.read_text().splitlines()]
        assert texts == ["INFO cupynet.training: epoch 1", "WARNING cupynet: careful", "WARNING somebody: else"]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--cfg", "job"], ["--info", "defaults"], ["-c", "job", "-p", "optimizer"], ["--hydra-help"]],
)
def test_questions_are_answered_and_start_nothing(
    arguments: list[str], command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == (0, [])
    out, err = capsys.readouterr()
    expected = {
        "--help": "optimizer    how weights move",
        "--cfg": "batch_size: 128",
        "--info": "spine",
        "-c": "momentum: 0.9",
    }
    assert expected.get(arguments[0], "hydra/launcher: basic") in out and err == ""
    assert list(in_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["config", "bench", "plan", "find_rate", "tune"])
def test_help_is_a_page_that_tells_the_truth(
    name: str, in_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group in one line, with files that are there; examples that compose; the exit codes."""
    schema = {
        **{"config": Settings, "bench": BenchSettings, "plan": PlanSettings},
        **{"find_rate": RateSettings, "tune": TuneSettings},
    }[name]
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    config.run(lambda settings, folder: None, lambda settings: settings, name, schema)
    page = capsys.readouterr().out.replace("test_config", "train").splitlines()  # where the job is defined
    assert max(map(len, page)) <= 80 and len(page) <= 40
    groups = {line.split()[0]: line.split() for line in page if line[:2] == "  " and line[2:].split()[0] in GROUPS}
    assert list(groups) == list(GROUPS) and len(groups) == sum(line[2:].startswith(GROUPS) for line in page)
    for group, words in groups.items():
        there = {path.stem for path in (composing.conf_folder() / group).glob("*.yaml")}
        listed = [word for word in words[1:] if word in there]
        after = words[words.index(listed[0]) :]
        assert set(after) <= there | {"..."} and ("..." in after) == (set(listed) != there)
    examples = [line.split()[3:] for line in page if line.startswith("  python -m cupynet.")]
    assert len(examples) >= (5 if name == "config" else 2)
    if name == "config":
        for example in examples:
            asked = [word for word in example if "=" in word and "," not in word and not word.startswith("resume")]
            assert config.compose(asked)
    if name in ("find_rate", "tune"):
        completion = next(line for line in page if line.startswith("Completion"))
        assert completion.split("(")[1].split()[0] in (Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8")
    codes = [int(code) for code in re.findall(r"\d+", next(line for line in page if line.startswith("Exit codes")))]
    assert codes == [0, 1, 2, 3, 65, 74, 130, 143]


def test_a_quiet_run_tells_of_warnings_alone(
    command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def task(settings: Settings, folder: Path) -> float | None:
        logging.getLogger("cupynet.training").info("epoch 1")
        logging.getLogger("cupynet").warning("careful")
        raise ConfigError("no more")

    assert command("callbacks.progress.style=none", "hydra.run.dir=here", task=task)[0] == 2
    out, err = capsys.readouterr()
    assert [line.partition("] ")[2] for line in out.splitlines()] == ["warning: careful"]
    assert err == "cupynet: no more\n"
    assert "INFO cupynet.training: epoch 1" in (in_folder / "here" / "train.log").read_text()
    assert command("hydra.run.dir=there", task=task)[0] == 2  # and the next one speaks again
    assert "epoch 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--epochs", "5"], "--epochs: settings are written without dashes: epochs=5"),
        (["--epochs=5"], "--epochs=5: settings are written without dashes: epochs=5"),
        (["--epochs"], "--epochs: settings are written without dashes: epochs=..."),
        (["--data.limit", "5"], "--data.limit: settings are written without dashes: data.limit=5"),
        (["--speed", "5"], "--speed: there is no such option; --help says how settings are written"),
        (
            ["+experiment=diloco"],
            "+experiment=diloco: there is a choice of experiment already; write it without the +: experiment=diloco",
        ),
        (["--config-dir"], "--config-dir/-cd: expected one argument; --help says how settings are written"),
        ([f"{'x' * 300}=1"], f"{'x' * 40}...: no setting has a name of 300 characters"),
        (
            ["model.layers={}"],
            "model.layers={}: takes nothing out of what is there: ~model.layers.conv1 takes one out",
        ),
    ],
    ids=[
        "dashes",
        "dashes and =",
        "nothing after",
        "in a group",
        "no option",
        "plus",
        "no value",
        "long",
        "empty",
    ],
)
def test_what_is_written_otherwise_is_told_in_a_line(
    arguments: list[str], line: str, command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(*arguments) == (2, [])
    assert capsys.readouterr() == ("", f"cupynet: {line}\n") and list(in_folder.iterdir()) == []


def test_a_wrong_choice_of_an_option(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--cfg", "jobb") == (2, [])
    err = capsys.readouterr().err
    assert err.startswith("cupynet: --cfg/-c: invalid choice: 'jobb' (choose from ") and err.count("\n") == 1


def test_the_version_is_that_of_cupynet(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--version") == (0, [])
    assert capsys.readouterr() == (f"cupynet {__version__}\n", "")


def test_an_answer_that_nobody_reads_to_its_end_is_no_fault(tmp_path: Path) -> None:
    with process(tmp_path, "--info", "all") as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        assert child.stderr.read() == ""


def test_questions_about_wrong_settings_are_refused(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    for question in (["--help"], ["--cfg", "job"]):
        assert command(*question, "workrs=4") == (2, [])
        assert capsys.readouterr().err == f"cupynet: {said('workrs=4')}\n"


def test_completion(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_folder: Path
) -> None:
    monkeypatch.setenv("COMP_LINE", "train.py parallel.averaging")
    assert command("-sc", "query=bash") == (0, [])
    assert capsys.readouterr().out.strip() == "parallel.averaging_frequency="
    assert list(in_folder.iterdir()) == []


def test_the_environment_is_left_as_it_was(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("workers=0")
    assert "HYDRA_FULL_ERROR" not in os.environ
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    command("workers=0")
    assert os.environ["HYDRA_FULL_ERROR"] == "0"


def test_own_files(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--config-dir: a model of one's own, and what is wrong in one's own files is told with the file."""
    for name, text in {
        "model/mine.yaml": f"_target_: {HERE}.Stack\nlayers: {{}}\n",
        "parallel/mine.yaml": f"averaging_frequency: 7\nsynchronizer:\n  _target_: {HERE}.Anything\n"
        "  every: ${parallel.averaging_frequency}\n",
        "experiment/wrong.yaml": "# @package _global_\nworkrs: 4\n",
        "experiment/headless.yaml": "workers: 4\n",
        "experiment/typed.yaml": "# @package _global_\nworkers: four\n",
        "experiment/open.yaml": "# @package _global_\ncallbacks:\n  mine:\n    x: ???\n",
        "experiment/group.yaml": "# @package _global_\ndefaults:\n  - override /data: nothing\n",
    }.items():
        path = in_folder / "mine" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert command("-cd", "mine", "model=mine")[1][0].model == {"_target_": f"{HERE}.Stack", "layers": {}}
    parallel = command("-cd", "mine", "parallel=mine")[1][0].parallel
    assert parallel.synchronizer == {"_target_": f"{HERE}.Anything", "every": 7} and parallel.prefetch_buffer == 24
    assert command("epochs=3", "--config-dir", "mine", "model=mine", "-r", "workers=1")[1][0].epochs == 3
    capsys.readouterr()
    for name, line in {
        "wrong": "experiment/wrong: workrs: there is no setting 'workrs'; did you mean 'workers'?",
        "headless": "experiment/headless: experiment: there is no setting 'experiment'; "
        "does the file begin with '# @package _global_'?",
        "open": "callbacks.mine.x: is missing: give it with callbacks.mine.x=...",
        "typed": "experiment/typed: workers: must be an integer of at least 1, or null for one per device",
        "group": "data=nothing: there is no 'nothing' in conf/data; the names are cifar10, fashion_mnist, "
        "folder, idx, kmnist, mnist, npz and synthetic",
    }.items():
        assert command("-cd", "mine", f"experiment={name}")[0] == 2
        assert capsys.readouterr().err == f"cupynet: {line}\n"
    assert command("-cd", "mine", "model=[mine,min]")[0] == 2
    assert capsys.readouterr().err == (
        "cupynet: model=[mine,min]: there is no 'min' in conf/model; did you mean 'mine'?\n"
    )
    assert command("-cd", "nowhere")[0] == 2
    assert command("-cn", "nowhere")[0] == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_run_with_own_files_goes_on(command: Command, in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder need not be named again; where it is not there any more, that is said."""
    (in_folder / "mine/model").mkdir(parents=True)
    (in_folder / "mine/model/own.yaml").write_text(f"_target_: {HERE}.Stack\nlayers: {{}}\n")
    begun = ["--config-dir=mine", "model=own", "hydra.run.dir=r", "epochs=1"]
    assert command(*begun)[0] == 0
    for again in (["resume=r", "epochs=3"], ["--config-dir", "mine", "resume=r", "epochs=3"], ["resume=r", "epochs=3"]):
        code, ran = command(*again)
        assert code == 0 and ran[0].model["_target_"] == f"{HERE}.Stack" and ran[0].epochs == 3
    (in_folder / "mine").rename(in_folder / "moved")
    capsys.readouterr()
    assert command("resume=r", "epochs=3") == (2, [])
    assert capsys.readouterr().err == (
        f"cupynet: r: began with --config-dir={in_folder / 'mine'}, which is not there: bring it back, or say "
        "with --config-dir where it is now\n"
    )
    assert command("-cd", "moved", "resume=r", "epochs=3")[0] == 0
    (in_folder / "moved").rename(in_folder / "r/mine")  # a stranger's run that would bring its own settings along
    hydra_file = in_folder / "r/.hydra/hydra.yaml"
    hydra_file.write_text(hydra_file.read_text().replace(f"{in_folder}/mine", f"{in_folder}/r/mine"))
    capsys.readouterr()
    assert command("resume=r", "epochs=3") == (2, [])
    assert "there is no 'own' in conf/model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        ("epochs=1 --config-dir=x seed=2", "epochs=1 seed=2 --config-dir=x"),
        ("--config-dir x seed=2 -m ~a", "seed=2 ~a --config-dir x -m"),
        ("-cd x seed=2 --config-d y epochs=1", "seed=2 epochs=1 -cd x --config-d y"),
        ("--info seed=2 --info config epochs=1", "seed=2 epochs=1 --info --info config"),
        ("-c job seed=2 -p trainer", "seed=2 -c job -p trainer"),
        ("", ""),
    ],
)
def test_options_may_stand_between_settings(typed: str, given: str) -> None:
    assert settings_first(typed.split()) == given.split()


def test_conf_is_found_inside_a_wheel_and_beside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.conf_folder() == REPOSITORY / "conf"
    (tmp_path / "cupynet").mkdir()
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(composing, "__file__", str(tmp_path / "cupynet" / "config" / "composing.py"))
    assert config.conf_folder() == tmp_path.resolve() / "conf"
    (tmp_path / "cupynet" / "conf").mkdir()
    assert config.conf_folder() == tmp_path.resolve() / "cupynet" / "conf"


# --- as processes

SCRIPT = """
import sys
from cupynet.config import run
from cupynet.settings import Settings

def task(settings, folder):
    for _ in range(20000):
        print("a line that nobody reads")

if __name__ == "__main__":
    try:
        run(task, lambda settings: settings, "config", Settings)
    finally:
        assert "numpy" not in sys.modules and "numba" not in sys.modules
"""


def process(folder: Path, *arguments: str, unbuffered: str = "") -> subprocess.Popen[str]:
    (folder / "command.py").write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, "-W", "error", "command.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": unbuffered},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_process_refuses(tmp_path: Path) -> None:
    with process(tmp_path, "workrs=4") as child:
        assert child.communicate() == ("", f"cupynet: {said('workrs=4')}\n")
        assert child.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["command.py"]


def test_a_process_helps_without_numpy(tmp_path: Path) -> None:
    with process(tmp_path, "--help") as child:
        out, err = child.communicate()
    assert (child.returncode, err) == (0, "") and "python -m cupynet.command workers=4" in out


@pytest.mark.parametrize(("arguments", "unbuffered"), [([], ""), ([], "1"), (["--help"], ""), (["--help"], "1")])
def test_a_reader_that_leaves_is_not_a_bug(tmp_path: Path, arguments: list[str], unbuffered: str) -> None:
    with process(tmp_path, *arguments, unbuffered=unbuffered) as child:
        assert child.stdout is not None and child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == ""
    assert child.returncode == 141


# --- parts


def test_build_makes_parts_inside_parts_in_order() -> None:
    conv = {"_target_": f"{HERE}.Conv", "filters": 2}
    node = {
        "_target_": f"{HERE}.Stack",
        "layers": {"z": conv, "a": {**conv, "kernel": 5}, "m": conv},
        "extra": [conv, 3, {"plain": (1, 2)}],
    }
    stack = build(node, "model", [HERE])
    assert type(stack) is Stack and list(stack.layers) == ["z", "a", "m"]
    assert (stack.layers["z"].kernel, stack.layers["a"].kernel) == (3, 5)
    assert stack.extra is not None and type(stack.extra[0]) is Conv and stack.extra[1:] == [3, {"plain": [1, 2]}]
    assert build({"a": [1, "b", None]}, "x") == {"a": [1, "b", None]}
    assert build({"_target_": f"{HERE}.Anything", "whatever": 1}, "x", [HERE]).settings == {"whatever": 1}
    assert node["_target_"] == f"{HERE}.Stack"  # what was given is left as it was


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"filters": 1, "kernal": 5}, "model.layers.a.kernal: Conv has no argument 'kernal'; did you mean 'kernel'?"),
        ({"kernel": 5}, "model.layers.a.filters: is missing: Conv needs it"),
        ({"filters": 1, "_partial_": True}, "model.layers.a._partial_: Conv has no argument '_partial_'"),
        ({"filters": 1, "kernel": 0}, "model.layers.a.kernel=0: must be at least 1"),
        ({"filters": "many"}, "model.layers.a: "),  # TypeError
        ({"filters": 13}, "model.layers.a: filters=13: said by"),
    ],
)
def test_build_says_where(node: dict[str, Any], message: str) -> None:
    model = {"_target_": f"{HERE}.Stack", "layers": {"a": {"_target_": f"{HERE}.Conv", **node}}}
    with pytest.raises(ConfigError) as caught:
        build(model, "model", [HERE])
    assert str(caught.value).startswith(message)
    assert str(caught.value).count("model.layers.a") == 1


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("os.mkdir", "only classes of cupynet"),
        ("cupynetx.nn.Conv2D", "only classes of cupynet"),
        ("pathlib.Path", "only classes of cupynet"),
        (f"{HERE}x.Conv", "only classes of cupynet"),
        (f"{HERE}.os.mkdir", "there is no module"),
        (f"{HERE}.os", "there is no class 'os'"),
        (f"{HERE}.Path", "is a class of pathlib, which is not trusted"),
        (f"{HERE}.function", "there is no class 'function'"),
        (f"{HERE}.HERE", "there is no class 'HERE'"),
        (f"{HERE}.Conw", "there is no class 'Conw' in " + HERE + "; did you mean 'Conv'?"),
        (f"{HERE}.Conv.__init__", "there is no module"),
        (
            "cupynet.nn.init.zeros",
            "there is no class 'zeros' in cupynet.nn.init; the names are Filled, Normal, Orthogonal, TruncatedNormal, "
            "Uniform and VarianceScaling",
        ),
        ("cupynet.parts.os.mkdir", "there is no module"),
        ("cupynet.parts.ModuleType", "is a class of builtins, which is not trusted"),
        ("cupynet.nowhere.Conv2D", "there is no module 'cupynet.nowhere'"),
        ("cupynet", "must be a class with its module"),
        ("..Conv2D", "must be a class with its module"),
        ("", "must be a class with its module"),
        (3, "must be a class with its module"),
        (None, "must be a class with its module"),
    ],
)
def test_build_trusts_definitions_only(target: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"_target_": target}, "loss", [HERE])
    assert str(caught.value).startswith(f"loss._target_={target}: ") and reason in str(caught.value)


def test_build_trusts_nobody_unasked() -> None:
    with pytest.raises(ConfigError, match="list '.*' in trusted_modules if it is yours"):
        build({"_target_": f"{HERE}.Conv", "filters": 1}, "model")


def test_build_imports_nothing_untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "poor.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="only classes of"):
        build({"_target_": "trap.Layer"}, "model")
    with pytest.raises(ConfigError, match="poor needs 'no_such_package_anywhere', which is not installed"):
        build({"_target_": "poor.Layer"}, "model", ["poor"])


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ("mse", "loss=mse: must be a Conv, got str: give it a _target_"),
        (None, "loss=null: must be a Conv, got NoneType: give it a _target_"),
        ({"filters": 2}, "loss: must be a Conv, got dict: give it a _target_"),
        (
            {"_target_": f"{HERE}.Anything"},
            f"loss._target_: must be a Conv, and {HERE}.Anything is none: name another class",
        ),
    ],
)
def test_a_part_of_the_wrong_kind(node: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_as(Conv, node, "loss", [HERE])
    assert str(caught.value) == line
    assert type(build_as(Conv, {"_target_": f"{HERE}.Conv", "filters": 2}, "loss", [HERE])) is Conv


# --- types

COMMAND = """
from pathlib import Path
from cupynet import config
from cupynet.settings import BenchSettings

class Job:
    def __init__(self, settings: BenchSettings) -> None:
        self.peers = settings.peers

def task(job: Job, folder: Path) -> None:
    print(job.peers, folder)

config.run(task, Job, "bench", BenchSettings)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "error"),
    [
        ("", "", ""),
        ("settings.peers", "settings.paers", '"BenchSettings" has no attribute "paers"'),
        ("settings.peers", "settings.parallel.timeout", '"ParallelSettings" has no attribute "timeout"'),
        ("job.peers", "job.paers", '"Job" has no attribute "paers"'),
        ("job: Job", "job: str", 'Cannot infer value of type parameter "T"'),
        (", BenchSettings)", ", Settings)", "incompatible type"),
    ],
)
def test_a_misspelt_attribute_of_a_command_is_found(right: str, wrong: str, error: str, tmp_path: Path) -> None:
    text = COMMAND.replace(right, wrong) if right else COMMAND
    (tmp_path / "command.py").write_text(text.replace("import BenchSettings", "import BenchSettings, Settings"))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file",
            REPOSITORY / "pyproject.toml",
            tmp_path / "command.py",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert (error in done.stdout) and (done.returncode == (1 if error else 0)), done.stdout + done.stderr


# --- a finished run


@pytest.fixture
def run_folder(command: Command, in_folder: Path) -> Path:
    assert command("workers=2", "trusted_modules=[evil]", "optimizer=sgd")[0] == 0
    (folder,) = in_folder.glob("outputs/20*/*")
    return folder


def test_load(run_folder: Path) -> None:
    settings = config.load(run_folder, ["batch_size=512", "data.limit=10", "+optimizer.momentum=0.5"], ["mine"])
    assert (settings.workers, settings.batch_size, settings.data["limit"]) == (2, 512, 10)
    assert settings.parallel.synchronizer["frequency"] == settings.parallel.averaging_frequency == 3
    other = config.load(run_folder, ["parallel.averaging_frequency=7", "parallel=averaging", "backend=numpy"])
    assert (other.parallel.synchronizer["frequency"], other.backend.name) == (7, "numpy")
    assert settings.optimizer["_target_"] == "cupynet.optim.SGD" and settings.optimizer["momentum"] == 0.5
    assert settings.trusted_modules == ["mine"]
    assert config.load(str(run_folder)).trusted_modules == []
    assert config.load(run_folder, ["trusted_modules=[mine]"]).trusted_modules == ["mine"]


def test_load_holds_settings_against_the_same_rules(run_folder: Path) -> None:
    for override in (
        *WRONG,
        "workrs=4",
        "workers=0",
        "workers=four",
        "+foo=1",
        "workers=[1",
        "model.layers.conv2.kernal=5",
    ):
        with pytest.raises(ConfigError) as caught:
            config.load(run_folder, [override])
        assert str(caught.value) == said(override)
    for override, message in {
        "data=nothing": "data=nothing: there is no 'nothing' in conf/data",
        "~data": "~data: only single settings can be changed here, as key=value",
        "workers=1,2": "workers=1,2: only single settings can be changed here, as key=value",
    }.items():
        with pytest.raises(ConfigError) as caught:
            config.load(run_folder, [override])
        assert str(caught.value).startswith(message)


def test_load_of_what_is_no_run(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the folder of a run: there is no"):
        config.load(tmp_path / "nowhere")
    stored = run_folder / ".hydra" / "config.yaml"
    text = stored.read_text()
    for damage, error in (("[", DataError), ("- 1\n", DataError), ("", ConfigError), (text + "foo: 1\n", ConfigError)):
        stored.write_text(damage)
        with pytest.raises(error):
            config.load(run_folder)
    for old, new, line in (
        ("report_every_iterations: 50\n", "report_evry: 50\n", "there is no setting 'report_evry'; did you mean"),
        ("  timeout_s: 300.0\n", "  timeout: 300.0\n", "there is no setting 'parallel.timeout'; did you mean"),
        ("workers: 2\n", "workers: two\n", "must be an integer"),
    ):
        assert old in text
        stored.write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=line) as caught:
            config.load(run_folder)
        assert str(caught.value).startswith(f"{stored}: ") and "\n" not in str(caught.value)
    stored.write_text(re.sub(r"  synchronizer:\n(    .*\n)+", "", text))
    with pytest.raises(ConfigError, match="^parallel.synchronizer: is missing: give it with"):
        config.load(run_folder)
    stored.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        config.load(run_folder)
