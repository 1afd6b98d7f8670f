"""`cupynet train` under mpiexec, as a user types it."""

import json
import sys
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
from cupynet.runs.checkpoints import read
from tests.support.commands import QUICK, SMALL, run, run_folder, summary_of
from tests.support.mpi import ROOT, needs_mpi, under_mpiexec
from tests.support.resumed_runs import MORE, EndAfter, faulty, resumed, same, trained
from tests.support.settings import settings_of

pytestmark = needs_mpi

MPI = [*QUICK, "parallel.launcher=mpi"]


def train(folder: Path, ranks: int, *arguments: str, code: int = 0) -> tuple[str, str]:
    done = under_mpiexec(ranks, "-m", "cupynet", "train", *arguments, cwd=folder, timeout=200)
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


@pytest.mark.slow
def test_ranks_on_stand_in_devices_learn_what_ranks_on_the_cpu_learn(tmp_path: Path) -> None:
    """Each process uses CuPy's stand-in. Averages of weights go through the host."""
    small = ["data.train=104", "data.test=32", "dtype=double", "parallel.reduce=host"]
    for backend, through in (("cupy", ["-m", "tests.standin"]), ("numpy", [])):
        own = [f"backend={backend}", f"hydra.run.dir=on-{backend}"]
        done = under_mpiexec(2, *through, "-m", "cupynet", "train", *MPI, *small, *own, cwd=tmp_path, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
    assert summary_of(tmp_path / "on-cupy")["devices"] == ["cuda:0", "cuda:1"]
    weights = load_file(tmp_path / "on-cupy" / "weights.safetensors")
    for name, weight in load_file(tmp_path / "on-numpy" / "weights.safetensors").items():
        np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [p.stem for p in sorted((ROOT / "conf/parallel").glob("*.yaml"))])
def test_every_parallel_method_gives_ranks_the_weights_and_traffic_of_threads(tmp_path: Path, parallel: str) -> None:
    settings, ranks, threads = (f"parallel={parallel}", "batch_size=16"), tmp_path / "ranks", tmp_path / "threads"
    size = 4 if parallel == "hybrid" else 2  # two replicas of two stages
    train(tmp_path, size, *MPI, *settings, "hydra.run.dir=ranks")
    trained(threads, *QUICK, *settings, f"workers={summary_of(ranks)['workers']}")
    assert (ranks / "weights.safetensors").read_bytes() == (threads / "weights.safetensors").read_bytes()
    assert summary_of(ranks)["bytes_sent"] == summary_of(threads)["bytes_sent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["workers=3", "parallel.launcher=thread"])
def test_a_wrong_setting_of_ranks_is_refused_once_and_leaves_no_folder(tmp_path: Path, setting: str) -> None:
    stdout, stderr = train(tmp_path, 2, *MPI, setting, code=2)
    assert stdout == "" and stderr.startswith("cupynet: ") and stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_sweeps_and_single_process_commands_are_refused_under_mpiexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands detect a rank's environment variables, and are rejected before MPI starts."""
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
def test_a_checkpoint_that_rank_0_cannot_write_ends_all_ranks_with_74(tmp_path: Path) -> None:
    """The others have sent their parts, and continue to train until they learn of the failure."""
    saving = [*MPI, "callbacks.checkpoint.every_iterations=4"]
    stdout, stderr = train(tmp_path, 2, *saving, *faulty(tmp_path, "disk", 8), code=74)
    assert len(stderr.splitlines()) == 1 and "step-00000008" in stderr and "Traceback" not in stdout
    checkpoints = run_folder(tmp_path) / "checkpoints"
    assert [entry.name for entry in checkpoints.iterdir()] == ["step-00000004"]
    assert read(checkpoints / "step-00000004").state["iteration"] == 4


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


def test_ranks_and_threads_resume_each_others_runs_bit_for_bit_and_one_signal_stops_all_ranks(tmp_path: Path) -> None:
    """The network has synchronized statistics and dropout. In the last round, one of the two ranks has no batch.

    Ranks resume a run started with threads, and threads resume a run started with ranks. A signal to one rank stops
    both after the same iteration. Only rank 0 writes and prints.
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
    stopped = [*as_ranks, *faulty(tmp_path, "SIGTERM", 7, rank=1), "hydra.run.dir=stops"]
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
