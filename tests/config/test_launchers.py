"""Jobs in other processes: with `hydra/launcher=processes`, where they may end in any way, or another launcher."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, run_job
from omegaconf import OmegaConf, open_dict

from cupynet import backend, config
from cupynet.config import process_launcher, sweep_record
from cupynet.config.process_launcher import VISIBLE, ProcessLauncher
from cupynet.config.schema import Settings
from tests.support.commands import Command, environment
from tests.support.compared_runs import made
from tests.support.run_folders import sweep_rows

Launch = Callable[..., None]
TINY = [
    *("data=synthetic", "data.train=64", "data.test=20", "batch_size=16", "model=mlp", "workers=1", "backend=numpy"),
    *("callbacks.report=null", "hydra/launcher=processes", "hydra.sweep.dir=sweep"),
]


def test_each_job_of_a_sweep_trains_in_its_own_process(
    command: Command, in_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    own = in_folder / "mine" / "experiment" / "small.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# @package _global_\ndata:\n  limit: 32\n")
    settings = ["experiment=small", "--config-dir=mine", "epochs=1", "seed=5", "+callbacks.mine=null"]
    arguments = ["-m", *TINY, *settings, "hydra.launcher.jobs=1"]
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-m", "cupynet", "train", *arguments])
    code, ran = command(*arguments)
    assert (code, ran, capsys.readouterr().err) == (0, [], "")  # no job ran in this process
    (done,) = sweep_rows(in_folder / "sweep").values()
    assert done["exit_code"] == "0" and done["test_accuracy"]
    job = config.load(in_folder / "sweep" / "0")
    assert (job.seed, job.data["limit"], job.callbacks["mine"]) == (5, 32, None)


@pytest.fixture
def two_jobs(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a sweep of three jobs, two of which have begun to train."""
    settings = [*TINY, "epochs=100000", "seed=1,2,3", "hydra.launcher.jobs=2"]
    line = [sys.executable, "-m", "cupynet", "train", "-m", *settings]
    variables, pipe = environment(CUPYNET_REPORT="false"), subprocess.PIPE
    process = subprocess.Popen(line, cwd=tmp_path, text=True, env=variables, stdout=pipe, stderr=pipe)
    for job in (0, 1):
        wait_for(tmp_path, f"sweep/{job}/checkpoints/step-*", 1)
    return process


def wait_for(folder: Path, files: str, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(folder.glob(files))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_stops_all_concurrent_jobs_and_no_more_begin(two_jobs: subprocess.Popen[str], tmp_path: Path) -> None:
    two_jobs.send_signal(signal.SIGINT)
    _, stderr = two_jobs.communicate(timeout=120)
    assert two_jobs.returncode == 130 and "Traceback" not in stderr
    assert {name: row["exit_code"] for name, row in sweep_rows(tmp_path / "sweep").items()} == {"0": "143", "1": "143"}
    assert len(list(tmp_path.glob("sweep/*/summary.json"))) == 2


@pytest.mark.slow
def test_concurrent_jobs_stop_and_save_if_the_sweep_is_killed(two_jobs: subprocess.Popen[str], tmp_path: Path) -> None:
    two_jobs.kill()
    two_jobs.communicate(timeout=120)
    wait_for(tmp_path, "sweep/*/summary.json", 2)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return launch(jobs, at_once=, devices=, first=), which launches a sweep's jobs on a machine with `devices`."""
    (tmp_path / "sweep").mkdir()
    sweep_record._ended.clear()

    def call(jobs: int, *, at_once: int | None = None, devices: tuple[str, ...] = (), first: int = 0) -> None:
        monkeypatch.setattr(process_launcher, "_devices", lambda config: [*devices])
        sweep = {"dir": str(tmp_path / "sweep"), "subdir": "x"}
        config = OmegaConf.create({"hydra": {"job": {"num": 0, "id": "0"}, "sweep": sweep, "overrides": {"hydra": []}}})
        context: Any = SimpleNamespace(config_loader=SimpleNamespace(load_sweep_config=lambda *_: config))
        launcher = ProcessLauncher(at_once)
        launcher.setup(hydra_context=context, task_function=lambda config: None, config=config)
        launcher.launch([[f"seed={number}"] for number in range(jobs)], first)

    return call


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[str], str | None]]:
    """Return the number, overrides and device of each job. Jobs sleep briefly instead of starting a process."""
    jobs: list[tuple[int, list[str], str | None]] = []

    def process(self: ProcessLauncher, job: Any, device: str | None) -> tuple[int, str]:
        jobs.append((job.number, [*job.overrides], device))
        time.sleep(0.2)
        return 0, ""

    monkeypatch.setattr(ProcessLauncher, "_process", process)
    return jobs


@pytest.mark.parametrize(
    ("at_once", "devices", "expected"),
    [(None, "012", {"0", "1", "2"}), (2, "456", {"4", "5"}), (3, "7", {"7"}), (2, "", {None})],
    ids=["each", "fewer", "shared", "none"],
)
def test_concurrent_jobs_are_spread_over_the_devices(
    at_once: int | None, devices: str, expected: set[str | None], launch: Launch, begun: list[Any]
) -> None:
    launch(6, at_once=at_once, devices=(*devices,))
    assert {device for _, _, device in begun} == expected
    assert sorted(overrides for _, overrides, _ in begun) == [[f"seed={number}"] for number in range(6)]


def test_up_to_four_jobs_run_at_once_on_a_cpu(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    running, together = list[int](), list[int]()

    def process(self: ProcessLauncher, job: Any, device: str | None) -> tuple[int, str]:
        running.append(job.number)
        time.sleep(0.2)
        together.append(len(running))
        running.remove(job.number)
        return 0, ""

    monkeypatch.setattr(backend, "available_cores", lambda: 8)
    monkeypatch.setattr(ProcessLauncher, "_process", process)
    launch(6)
    assert max(together) == 4


def test_job_numbers_continue_after_the_last_batch_of_a_sweeper(launch: Launch, begun: list[Any]) -> None:
    launch(2, at_once=1, first=3)
    assert [number for number, _, _ in begun] == [3, 4]


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


def test_a_job_that_is_killed_stops_no_other_and_has_its_exit_code_in_sweep_csv(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_launcher, "_program", lambda: [sys.executable, "-c", ENDING])
    launch(4, at_once=2)
    codes = {job: row["exit_code"] for job, row in sweep_rows(tmp_path / "sweep").items()}
    assert codes == {"0": "137", "1": "1", "2": "168", "3": "0"}
    assert "job 1: how unexpected\n" in capsys.readouterr().err


WARNING = """
from cupynet.core import logs
from logging import makeLogRecord
for level, text in ((20, "epoch 1"), (30, "MNIST is not there"), (20, "epoch 2: warning: not one")):
    logs.Console().handle(makeLogRecord({"msg": text, "levelno": level}))
print("warning: printed by a callback", flush=True)
"""


def test_warnings_of_concurrent_jobs_are_shown_with_the_numbers_of_the_jobs(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process_launcher, "_program", lambda: [sys.executable, "-c", WARNING])
    launch(2, at_once=2)
    stdout = capsys.readouterr().out
    assert sorted(line.split("] ")[1] for line in stdout.splitlines() if "warning" in line) == [
        "warning: job 0: MNIST is not there",
        "warning: job 1: MNIST is not there",
    ]
    assert "epoch" not in stdout and "callback" not in stdout


def test_a_signal_that_another_thread_receives_stops_the_sweep(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may deliver a signal to any thread, but Python's handler needs the main thread, which is waiting."""
    begun: list[int] = []

    def process(self: ProcessLauncher, job: Any, device: str | None) -> tuple[int, str]:
        begun.append(job.number)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        with suppress(OSError):
            os.read(self._lifeline, 1)  # returns when the pipe closes
        return 0, ""

    monkeypatch.setattr(ProcessLauncher, "_process", process)
    with pytest.raises(SystemExit) as left:
        launch(2, at_once=1)
    assert left.value.code == 143 and begun == [0]


def test_a_job_is_started_with_the_program_and_python_of_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    for program in (["-P", "-m", "cupynet", "train"], ["/bin/cupynet", "train"]):
        monkeypatch.setattr(sys, "orig_argv", ["/bin/python", *program, "-m", "seed=1"])
        monkeypatch.setattr(sys, "argv", ["cupynet", "-m", "seed=1"])
        assert process_launcher._program() == [sys.executable, *program]


@pytest.mark.parametrize(
    ("visible", "asked", "expected"),
    [
        ("", None, ["0", "1", "2"]),
        ("4,GPU-5,6", None, ["4", "GPU-5", "6"]),
        ("4,GPU-5,6,-1,7", None, ["4", "GPU-5", "6"]),  # devices after one that does not exist are hidden
        ("", [1], []),
    ],
)
def test_jobs_get_their_devices_by_the_names_in_cuda_visible_devices(
    visible: str, asked: list[int] | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = OmegaConf.create({"devices": asked, "backend": {"name": "cupy", "priority": {"gpu": 1, "cpu": 0}}})
    monkeypatch.setattr(backend, "select_backend", lambda *_, **__: ("cupy", None))
    monkeypatch.setattr(backend, "device_count", lambda name: 3)
    monkeypatch.setenv(VISIBLE, visible)
    assert process_launcher._devices(settings) == expected


def prepare(settings: Settings) -> Settings:
    return settings


def task(settings: Settings, folder: Path) -> None:
    config.deferred()()
    logging.getLogger("cupynet").warning("little was learned")
    (made(folder / "made", test_accuracy=settings.seed / 10) / "summary.json").rename(folder / "summary.json")


class Elsewhere(ProcessLauncher):
    """Runs each job as another process would: with a copy of the task and without this process's state."""

    def setup(self, **how: Any) -> None:
        super().setup(**how)
        self._context, self._task = how["hydra_context"], pickle.dumps(how["task_function"])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            job = self._loader.load_sweep_config(self._config, [*overrides])
            with open_dict(job):
                job.hydra.job.num, job.hydra.job.id = number, str(number)
            here = sys.argv, [*sweep_record._ended], HydraConfig.instance().cfg
            sys.argv, sweep_record._ended[:] = ["worker"], []
            folders: Any = {"job_dir_key": "hydra.sweep.dir", "job_subdir_key": "hydra.sweep.subdir"}
            work: Any = {"task_function": pickle.loads(self._task), "hydra_context": self._context, "config": job}
            Context().run(run_job, **work, **folders)  # an empty context, without the running command
            sys.argv, sweep_record._ended[:], HydraConfig.instance().cfg = here
        return []


@pytest.mark.usefixtures("in_folder", "minimal_conf")
def test_jobs_run_by_another_hydra_launcher_are_in_sweep_csv_and_show_their_warnings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.cupynet_processes.Processes", Elsewhere)
    sweep = Path("outputs/s")
    typed = ["train", "-m", "hydra/launcher=processes", f"hydra.sweep.dir={sweep}", "seed=1,2,5"]
    monkeypatch.setattr(sys, "argv", typed)
    config.run(task, prepare, "config", Settings)
    stdout, stderr = capsys.readouterr()
    found = [(row["seed"], row["test_accuracy"]) for row in sweep_rows(sweep).values()]
    assert found == [("1", "0.1"), ("2", "0.2"), ("5", "0.5")]
    assert stderr == "" and all(f"warning: job {number}: " in stdout for number in range(3))
    assert Path("outputs/latest").resolve() == sweep.resolve()
    assert {path.name for path in sweep.iterdir()} == {"0", "1", "2", "multirun.yaml", "sweep.csv"}
