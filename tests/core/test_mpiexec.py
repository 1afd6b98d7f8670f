"""Ranks in the environment, and runs without MPI."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.core import mpiexec
from cupynet.core.errors import ConfigError
from cupynet.parallel import SerialCommunicator
from cupynet.parallel.launchers import mpi
from cupynet.training import ParallelWrapper
from tests.support.commands import QUICK, run
from tests.support.training import small_model


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without other processes."""
    for name in (*(variable for pair in mpiexec.CLAIMS for variable in pair), mpiexec.TERMINAL):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    """Set variables, written as in a shell: `A=1 B=2`."""
    for each in variables.split():
        monkeypatch.setenv(*each.split("="))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("PMI_RANK=2 PMI_SIZE=4", (2, 4)),
        ("PMI_RANK=0 PMI_SIZE=1", None),  # one by itself
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0", (0, 2)),
        ("PMI_RANK=0 PMI_SIZE=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", (3, 4)),  # mpirun in a step of srun
        ("PMIX_RANK=3 SLURM_STEP_NUM_TASKS=8", (3, 8)),
        ("PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1", None),
        ("PMIX_RANK=1", (1, None)),
        ("PMI_RANK=word", None),
        ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8", (3, 8)),  # srun without PMI
        ("SLURM_STEP_NUM_TASKS=8", None),
        ("SLURM_PROCID=0 SLURM_NTASKS=8", None),  # in a batch script, before anything is started
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", None),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 SLURM_PTY_PORT=1", None),  # in the shell of srun --pty
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=8 SLURM_PTY_PORT=1", (1, 8)),
    ],
)
def test_rank_and_size_from_the_environment(
    alone: pytest.MonkeyPatch, variables: str, expected: tuple[int, int | None] | None
) -> None:
    set_all(alone, variables)
    found = mpiexec.started()
    assert (found and found[:2]) == expected


@pytest.mark.parametrize(
    ("variables", "rank", "size", "agrees"),
    [
        ("", 0, 1, True),
        ("", 1, 2, True),  # a launcher that sets none of these variables
        ("PMI_RANK=1 PMI_SIZE=2", 1, 2, True),
        ("PMI_RANK=1 PMI_SIZE=2", 0, 1, False),
        ("PMI_RANK=0 PMI_SIZE=2", 1, 2, False),
        ("PMI_RANK=0 PMI_SIZE=1", 0, 2, False),
        ("PMIX_RANK=1", 1, 2, True),
        ("PMIX_RANK=1", 0, 1, False),
        ("SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3", 0, 1, False),
        ("SLURM_PROCID=0 SLURM_NTASKS=3", 0, 1, True),
        ("PMI_RANK=0 PMI_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", 0, 1, True),  # mpiexec -n 1 in a task
        ("PMI_RANK=1 PMI_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", 1, 4, True),  # mpiexec over two machines
    ],
)
def test_the_environment_and_mpi_must_agree(
    alone: pytest.MonkeyPatch, variables: str, rank: int, size: int, agrees: bool
) -> None:
    set_all(alone, variables)
    assert (mpiexec.disagreement(rank, size, "MPICH") == "") == agrees


OTHERS = {
    "of MPICH": {"PMI_RANK": "1", "PMI_SIZE": "2"},
    "of Open MPI": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    "rank 0": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    "of srun without PMI": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_ID": "0"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_wrapper_refuses_ranks_of_another_mpi(alone: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    one = SimpleNamespace(rank=0, size=1, library="MPICH", announce=lambda error: None)
    alone.setattr(mpi, "_start", lambda: one)
    for variable, number in OTHERS[name].items():
        alone.setenv(variable, number)
    with pytest.raises(ConfigError, match=f"^{next(iter(OTHERS[name]))}="):
        ParallelWrapper(small_model(), launcher="mpi", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ranks_share_paths_of_any_bytes() -> None:
    one: Any = SimpleNamespace(communicator=SerialCommunicator)
    assert mpi.MpiJob._gather(one, "outputs/\udcff/ä") == ["outputs/\udcff/ä"]


def test_a_run_without_an_mpi_library_is_refused_in_one_line(tmp_path: Path) -> None:
    """mpi4py raises a RuntimeError if it finds no MPI library."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    _, stderr = run(tmp_path, *QUICK, "parallel.launcher=mpi", code=2)
    assert stderr.count("\n") == 1 and not (tmp_path / "outputs").exists()


def test_the_mpiexec_of_this_environment_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    (tmp_path / "mpiexec").touch()
    monkeypatch.setattr(mpiexec.sys, "executable", str(tmp_path / "python"))
    assert mpiexec.find_mpiexec() == str(tmp_path / "mpiexec")
    (tmp_path / "mpiexec").unlink()
    monkeypatch.setattr(mpiexec.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError):
        mpiexec.find_mpiexec()
