"""The command under mpiexec, as a user types it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cupynet import config
from cupynet.commands import train as train_command
from cupynet.config import stored
from cupynet.config.schema import Settings
from cupynet.core.lock import Hold
from cupynet.runs.checkpoints import read
from tests.support.commands import QUICK, SMALL, environment, run, run_folder
from tests.support.mpi import ROOT, mpiexec, needs_mpi, ranks_of, under_mpiexec
from tests.support.resumed_runs import MORE, EndAfter, resumed, same, trained
from tests.support.settings import settings_of

pytestmark = needs_mpi

MPI = [*QUICK, "parallel.launcher=mpi"]
FAULTS = """
import os, resource, signal
from cupynet.training import Callback

def deliberate_failure():
    raise ZeroDivisionError("on purpose")

class Fault(Callback):
    every_rank = True

    def __init__(self, rank, iteration, kind):
        self.rank, self.iteration, self.kind = rank, iteration, kind

    def on_iteration_end(self, trainer):
        if (trainer.rank, trainer.iteration) == (self.rank, self.iteration):
            if self.kind == "raise":
                deliberate_failure()
            if self.kind == "diverge":
                trainer.params.master[0] = float("nan")
                return
            if self.kind == "disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
                return
            if self.kind == "SIGKILL in a save":
                trainer.world.send = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
                return
            os.kill(os.getpid(), getattr(signal, self.kind))
"""


def train(folder: Path, ranks: int, *arguments: str, code: int = 0) -> tuple[str, str]:
    """`cupynet.commands.train` under mpiexec; its stdout and stderr."""
    done = under_mpiexec(ranks, "-m", "cupynet", "train", *arguments, cwd=folder, timeout=200)
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def faulty(folder: Path, kind: str, rank: int, iteration: int) -> list[str]:
    """Settings under which `rank` meets a fault after `iteration`."""
    (folder / "faults.py").write_text(FAULTS)
    part = {"_target_": "faults.Fault", "rank": rank, "iteration": iteration, "kind": f"'{kind}'"}
    return ["trusted_modules=[faults]", *(f"+callbacks.fault.{key}={value}" for key, value in part.items())]


@pytest.mark.slow
def test_ranks_on_stand_in_devices_learn_what_ranks_on_the_cpu_learn(tmp_path: Path) -> None:
    """Each process on the stand-in of CuPy: its weights go over the host to the others, and back."""
    small = ["data.train=104", "data.test=32", "dtype=double", "parallel.launcher=mpi", "parallel.reduce=host"]
    found = {}
    for backend, through in (("cupy", ["-m", "tests.standin"]), ("numpy", [])):
        (tmp_path / backend).mkdir()
        command = [*through, "-m", "cupynet", "train", *QUICK, *small, f"backend={backend}"]
        done = under_mpiexec(2, *command, cwd=tmp_path / backend, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        found[backend] = run_folder(tmp_path / backend)
    assert summary_of(found["cupy"])["devices"] == ["cuda:0", "cuda:1"]
    weights = load_file(found["cupy"] / "weights.safetensors")
    for name, weight in load_file(found["numpy"] / "weights.safetensors").items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-9, err_msg=name)


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [p.stem for p in sorted((ROOT / "conf/parallel").glob("*.yaml"))])
def test_every_mode_gives_the_same_weights_and_sends_as_much(tmp_path: Path, parallel: str) -> None:
    settings = [*QUICK, f"parallel={parallel}", "batch_size=16"]
    for name in ("ranks", "threads"):
        (tmp_path / name).mkdir()
    train(tmp_path / "ranks", 2, *settings, "parallel.launcher=mpi")
    ranks = run_folder(tmp_path / "ranks")
    run(tmp_path / "threads", *settings, f"workers={summary_of(ranks)['workers']}")
    threads = run_folder(tmp_path / "threads")
    assert (ranks / "weights.safetensors").read_bytes() == (threads / "weights.safetensors").read_bytes()
    assert summary_of(ranks)["bytes_sent"] == summary_of(threads)["bytes_sent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["workers=3", "parallel.launcher=thread"])
def test_a_wrong_setting_is_refused_once_and_leaves_no_folder(tmp_path: Path, setting: str) -> None:
    stdout, stderr = train(tmp_path, 2, *MPI, setting, code=2)
    assert stdout == "" and stderr.startswith("cupynet: ") and stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_with_different_settings_are_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cupynet", "train", *MPI]
    other = "model.layers.dense1.units=100"
    done = under_mpiexec(1, *command[1:], ":", "-n", "1", *command, other, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.count("\n") == 1
    assert "model.layers.dense1.units" in done.stderr and list(tmp_path.iterdir()) == []


SCRIPT = """
import os, signal, sys
from cupynet.core.mpiexec import started
from cupynet.parallel import job
from cupynet.commands.train import main

kind = sys.argv.pop(1)
if started()[0] == 1:
    if kind == "silent":
        job()
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.modules["mpi4py"] = None
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "named"), [("silent", "worker 0"), ("has no MPI", "rank 1")])
def test_a_rank_that_cannot_begin_is_named(tmp_path: Path, kind: str, named: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = under_mpiexec(2, "script.py", kind, *MPI, "parallel.timeout_s=1", cwd=tmp_path, timeout=50)
    assert done.returncode != 0 and done.stderr.count(f"cupynet: {named}") == 1
    assert not (tmp_path / "outputs").exists()


def test_sweeps_and_single_process_commands_are_refused_under_mpiexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before MPI is started: the variables of a rank are enough."""
    rank = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    for name, value in {**rank, "HYDRA_FULL_ERROR": "1"}.items():
        monkeypatch.setenv(name, value)
    ranks: Any = SimpleNamespace(speaks=lambda error: True, exit_code=2)
    monkeypatch.setattr(sys, "argv", ["command", "-m", *MPI, "seed=1,2"])
    with pytest.raises(SystemExit, match="^2$"):
        config.run(train_command.train, train_command.prepare, "config", Settings, lambda: ranks)
    lines = [capsys.readouterr().err, run(tmp_path, command="bench", code=2, **rank)[1]]
    for line in lines:
        assert line.startswith("cupynet: ") and "mpiexec" in line and line.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("report", [1, 1000])  # rank 1 alone finds it, or both
def test_divergence_leaves_the_best_weights(tmp_path: Path, report: int) -> None:
    settings = ["callbacks=early_stopping", "data.validation=200", "data.train=840", "epochs=4"]
    rarely = ["parallel.averaging_frequency=epoch", f"log_every={report}"]
    _, stderr = train(tmp_path, 2, *MPI, *settings, *rarely, *faulty(tmp_path, "diverge", 1, 25), code=3)
    assert stderr.count("\n") == 1 and stderr.startswith("cupynet: ")
    folder = run_folder(tmp_path)
    summary = summary_of(folder)
    assert summary["stop_reason"] == "diverged" and summary["early_stopping"]["best_epoch"] == 2
    assert all(np.isfinite(each).all() for each in load_file(folder / "weights.safetensors").values())


SAVING = [*MPI, "callbacks.checkpoint.every_iterations=4"]


@pytest.mark.slow
def test_a_checkpoint_that_rank_0_cannot_write_ends_all(tmp_path: Path) -> None:
    """The others have handed over what is theirs, and train on until they hear of it."""
    stdout, stderr = train(tmp_path, 2, *SAVING, *faulty(tmp_path, "disk", 0, 8), code=74)
    assert len(stderr.splitlines()) == 1 and "step-00000008" in stderr and "Traceback" not in stdout
    checkpoints = run_folder(tmp_path) / "checkpoints"
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-00000004"]
    assert read(checkpoints / "step-00000004").state["iteration"] == 4


@pytest.mark.slow
def test_a_rank_that_is_killed_while_its_state_is_gathered_ends_all(tmp_path: Path) -> None:
    done = under_mpiexec(
        2, "-m", "cupynet", "train", *SAVING, *faulty(tmp_path, "SIGKILL in a save", 1, 8), cwd=tmp_path, timeout=60
    )
    assert done.returncode != 0
    assert [entry.name for entry in (run_folder(tmp_path) / "checkpoints").iterdir()] == ["step-00000004"]


def in_training(folder: Path) -> subprocess.Popen[str]:
    """Start two ranks that train for minutes, and wait until they train. `MARK` is the folder."""
    settings = [*MPI, "data.train=60000", "epochs=50", "log_every=5"]
    command = [str(mpiexec()), "-n", "2", sys.executable, "-m", "cupynet", "train", *settings]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(MARK=str(folder)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 100
    while not any(p.stat().st_size for p in folder.glob("outputs/**/history.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "receiver"), [(signal.SIGTERM, 143, "mpiexec"), (signal.SIGINT, 130, "a rank")]
)
def test_a_signal_stops_all_ranks_after_the_same_round(
    tmp_path: Path, number: signal.Signals, code: int, receiver: str
) -> None:
    process = in_training(tmp_path)
    os.kill(process.pid if receiver == "mpiexec" else ranks_of(str(tmp_path))[1], number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert stderr.count(f"cupynet: stopped by {number.name}") == 1
    assert summary_of(run_folder(tmp_path))["stopped_by"] == number.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raise", "SIGKILL"])
def test_twenty_faults_of_a_rank_at_random_moments(tmp_path: Path, kind: str) -> None:
    """While it trains, on synthetic data: nobody hangs, and one that raised shows its own traceback."""
    rng = random.Random(5)
    for _ in range(20):
        ranks = rng.randint(2, 3)
        fault = faulty(tmp_path, kind, rng.randrange(ranks), rng.randint(1, 600 // 32 // ranks))
        done = under_mpiexec(ranks, "-m", "cupynet", "train", *MPI, *fault, cwd=tmp_path, timeout=100)
        assert done.returncode != 0
        assert ("in deliberate_failure" in done.stderr) == (kind == "raise")


RUN_COMMANDS = """
import json, runpy, sys
from cupynet.core.errors import ConfigError
from cupynet.core.mpiexec import rank
from cupynet.parallel import job

try:
    job().agree({"seed": 5, "batch_size": 30 + rank()})
except ConfigError as refused:
    if rank():
        print(refused)
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = ["train", *arguments]
    try:
        runpy.run_module("cupynet", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        if left.code:
            raise
"""


def test_ranks_that_stop_and_resume_equal_threads_bit_for_bit(tmp_path: Path) -> None:
    """With synchronized statistics and dropout; in the last round one of the two ranks has no batch.

    Ranks resume a run started with threads, and threads resume a run started with ranks. A signal to one rank stops
    both after the same round. Only rank 0 writes and prints.
    """
    norm = ["model=lenet_norm", *(f"model.layers.norm{i}.sync=true" for i in (1, 2)), "workers=2"]
    settings = [*QUICK, *norm, *SMALL, *MORE, "parallel.averaging_frequency=1", "data.train=328", "epochs=2"]
    as_ranks = [*settings, "parallel.launcher=mpi"]
    whole, resumes, stops = (tmp_path / name for name in ("whole", "resumes", "stops"))
    trained(whole, *settings)
    with pytest.raises(KeyError, match="as if killed"):
        trained(resumes, *settings, callbacks=[EndAfter(7, killed=True)])
    stored.keep(resumes, settings_of(*as_ranks), as_ranks)
    (tmp_path / "several.py").write_text(RUN_COMMANDS)
    stopped = [*as_ranks, *faulty(tmp_path, "SIGTERM", 1, 7), "hydra.run.dir=stops"]
    commands = json.dumps([["resume=resumes"], stopped])
    done = under_mpiexec(2, "several.py", commands, cwd=tmp_path, timeout=200)
    assert done.returncode == 143, done.stdout + done.stderr
    assert "batch_size" in done.stdout and all(f"{30 + rank} on rank {rank}" in done.stdout for rank in (0, 1))
    assert done.stdout.count("test accuracy") == 1 and done.stdout.count("run folder") == 1
    assert done.stderr.count("stopped by SIGTERM") == done.stderr.count("\n") == 1
    assert [p for p in tmp_path.rglob("*.json*") if not {whole, resumes, stops} & {*p.parents}] == []
    summary = summary_of(resumes)
    assert summary["workers"] == 2 and summary["devices"] == ["cpu"] * 2 and summary["images"] == 2 * 288
    assert same(whole, resumes)
    assert (load_file(resumes / "weights.safetensors")["norm1.mean"] != 0).all()
    assert summary_of(stops)["stopped_by"] == "SIGTERM"
    resumed(stops, "parallel.launcher=thread", "callbacks.fault=null")
    assert same(whole, stops)


@pytest.mark.slow
def test_the_folder_of_a_running_run_is_refused_once(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    hold = Hold(tmp_path / "there")
    try:
        stdout, stderr = train(tmp_path, 2, *MPI, "hydra.run.dir=there", code=2)
    finally:
        hold.release()
    assert stdout == "" and stderr.startswith("cupynet: there: ") and stderr.count("\n") == 1
    assert list((tmp_path / "there").iterdir()) == []
