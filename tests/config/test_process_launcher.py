"""`hydra/launcher=processes`: jobs as processes side by side, however they end."""

from __future__ import annotations

import csv
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cupynet import config
from cupynet.config import process_launcher, sweep_record
from cupynet.config.process_launcher import VISIBLE, ProcessLauncher
from tests.support.commands import Command, environment

TINY = [
    *("data=synthetic", "data.train=64", "data.test=20", "batch_size=16", "model=mlp", "workers=1", "backend=numpy"),
    *("callbacks.report=null", "hydra/launcher=processes", "hydra.sweep.dir=sweep"),
]
ENDING = """
import os, sys
job = int(next(word for word in sys.argv if word.startswith("hydra.job.num=")).partition("=")[2])
if job == 0:
    os.kill(os.getpid(), 9)
if job == 1:
    sys.exit("cupynet: how unexpected")
if job == 2:
    os.kill(os.getpid(), 40)  # a real-time signal has no name
"""
WARNING = """
from cupynet.core import logs
from logging import makeLogRecord
for level, text in ((20, "epoch 1"), (30, "MNIST is not there"), (20, "epoch 2: warning: not one")):
    logs.Console().handle(makeLogRecord({"msg": text, "levelno": level}))
print("warning: printed by a callback", flush=True)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cupynet", "train", "-m", *TINY, *arguments], cwd=folder, text=True,
        env=environment(CUPYNET_REPORT="false"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The rows of sweep.csv by the numbers of the jobs."""
    path = folder / "sweep" / "sweep.csv"
    return {row["job"]: row for row in csv.DictReader(path.read_text().splitlines())}


def wait_for(folder: Path, files: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob(files))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_job_trains_in_its_own_process(
    command: Command, in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_launcher, "_program", lambda: [sys.executable, "-m", "cupynet", "train"])
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    code, ran = command("-m", *TINY, "epochs=1", "seed=5", "hydra.launcher.jobs=1")
    stdout, stderr = capsys.readouterr()
    assert (code, ran, stderr) == (0, [], ""), stdout  # no job ran in this process
    (done,) = rows(in_folder).values()
    assert done["exit_code"] == "0" and done["test_accuracy"] and "cupynet compare sweep" in stdout
    assert config.load(in_folder / "sweep" / "0").seed == 5


@pytest.mark.parametrize(
    ("program", "arguments", "expected"),
    [
        (["-P", "-m", "cupynet", "train"], ["-m", "seed=1"], ["-P", "-m", "cupynet", "train"]),
        (["/bin/cupynet", "train"], ["-m", "seed=1"], ["/bin/cupynet", "train"]),
    ],
    ids=["module", "script"],
)
def test_a_job_is_started_as_its_sweep_was(
    program: list[str], arguments: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["/bin/python", *program, *arguments])
    monkeypatch.setattr(sys, "argv", ["cupynet", *arguments])
    assert process_launcher._program() == [sys.executable, *expected]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_stops_all_jobs_and_no_more_begin(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "epochs=100000", "seed=1,2,3", "hydra.launcher.jobs=2")
    for job in (0, 1):
        wait_for(tmp_path, f"sweep/{job}/checkpoints/step-*", 1)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    code = 130 if number == signal.SIGINT else 143
    assert process.returncode == code, stdout + stderr
    assert {name: row["exit_code"] for name, row in rows(tmp_path).items()} == {"0": "143", "1": "143"}
    assert len(list(tmp_path.glob("sweep/*/summary.json"))) == 2 and "Traceback" not in stderr


@pytest.mark.slow
def test_jobs_stop_and_save_if_the_sweep_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, "epochs=100000", "seed=1,2", "hydra.launcher.jobs=2")
    for job in (0, 1):
        wait_for(tmp_path, f"sweep/{job}/checkpoints/step-*", 1)
    process.kill()
    process.communicate(timeout=120)
    wait_for(tmp_path, "sweep/*/summary.json", 2)


def launched(
    at_once: int | None, folder: Path, monkeypatch: Any, *, jobs: int, devices: list[str], first: int = 0
) -> None:
    """Launch jobs of a sweep in a folder, on a machine with these devices."""
    monkeypatch.setattr(process_launcher, "_devices", lambda config: devices)
    launcher = ProcessLauncher(at_once)
    job, sweep = {"num": 0, "id": "0"}, {"dir": str(folder / "sweep"), "subdir": "x"}
    config = OmegaConf.create({"hydra": {"job": job, "sweep": sweep, "overrides": {"hydra": []}}})
    context: Any = type(
        "Context", (), {"config_loader": type("Loader", (), {"load_sweep_config": lambda *_: config})()}
    )
    launcher.setup(hydra_context=context, task_function=lambda config: None, config=config)
    launcher.launch([[f"seed={number}"] for number in range(jobs)], first)


@pytest.mark.parametrize(
    ("jobs", "devices", "expected"),
    [(None, ["0", "1", "2"], {"0", "1", "2"}), (2, ["4", "5", "6"], {"4", "5"}), (3, ["7"], {"7"}), (2, [], {None})],
    ids=["each", "fewer", "shared", "none"],
)
def test_jobs_are_spread_over_the_devices(
    jobs: int | None, devices: list[str], expected: set[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    overrides: dict[int, list[str]] = {}

    def process(self: ProcessLauncher, job: Any, device: str | None) -> tuple[int, str]:
        used.put(device)
        overrides[job.number] = [*job.overrides]
        time.sleep(0.2)
        return 0, ""

    monkeypatch.setattr(ProcessLauncher, "_process", process)
    launched(jobs, tmp_path, monkeypatch, jobs=6, devices=devices)
    found = [used.get() for _ in range(6)]
    assert set(found) == expected and used.empty()
    assert overrides == {number: [f"seed={number}"] for number in range(6)}


def test_jobs_go_on_counting_where_the_last_batch_of_a_sweeper_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = []
    monkeypatch.setattr(ProcessLauncher, "_process", lambda self, job, device: (numbers.append(job.number) or 0, ""))
    launched(1, tmp_path, monkeypatch, jobs=2, devices=[], first=3)
    assert numbers == [3, 4]


def test_a_job_that_is_killed_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    sweep_record._ended.clear()
    monkeypatch.setattr(process_launcher, "_program", lambda: [sys.executable, "-c", ENDING])
    launched(2, tmp_path, monkeypatch, jobs=4, devices=[])
    found = rows(tmp_path)
    assert {job: row["exit_code"] for job, row in found.items()} == {"0": "137", "1": "1", "2": "168", "3": "0"}
    assert [bool(found[job]["error"]) for job in "0123"] == [True, True, True, False]
    assert "job 1: how unexpected\n" in capsys.readouterr().err


def test_warnings_of_jobs_are_shown_with_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep").mkdir()
    monkeypatch.setattr(process_launcher, "_program", lambda: [sys.executable, "-c", WARNING])
    launched(2, tmp_path, monkeypatch, jobs=2, devices=[])
    stdout = capsys.readouterr().out
    assert sorted(line.split("] ")[1] for line in stdout.splitlines() if "warning" in line) == [
        "warning: job 0: MNIST is not there",
        "warning: job 1: MNIST is not there",
    ]
    assert "epoch" not in stdout and "callback" not in stdout


def test_a_signal_that_another_thread_receives_stops_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may deliver a signal to any thread; Python's handler needs the main thread, which waits."""
    begun = []

    def process(self: ProcessLauncher, job: Any, device: str | None) -> tuple[int, str]:
        begun.append(job.number)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        with suppress(OSError):
            os.read(self._lifeline, 1)  # returns when the pipe closes
        return 0, ""

    monkeypatch.setattr(ProcessLauncher, "_process", process)
    with pytest.raises(SystemExit) as left:
        launched(1, tmp_path, monkeypatch, jobs=2, devices=[])
    assert left.value.code == 143 and begun == [0]


def test_devices_are_named_as_this_process_sees_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupynet import backend

    config = OmegaConf.create({"devices": None, "backend": {"name": "cupy", "priority": {"gpu": 1, "cpu": 0}}})
    monkeypatch.setattr(backend, "select_backend", lambda *_, **__: ("cupy", None))
    monkeypatch.setattr(backend, "device_count", lambda name: 3)
    monkeypatch.delenv(VISIBLE, raising=False)
    assert process_launcher._devices(config) == ["0", "1", "2"]
    monkeypatch.setenv(VISIBLE, "4,GPU-5,6")
    assert process_launcher._devices(config) == ["4", "GPU-5", "6"]
    monkeypatch.setenv(VISIBLE, "4,GPU-5,6,-1,7")  # devices after one that does not exist are hidden
    assert process_launcher._devices(config) == ["4", "GPU-5", "6"]
    config.devices = [1]
    assert process_launcher._devices(config) == []
