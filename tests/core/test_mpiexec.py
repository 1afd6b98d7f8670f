"""Ranks read from the environment, and runs without MPI."""

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
    for name in (*(variable for pair in mpiexec.CLAIMS for variable in pair), mpiexec.TERMINAL):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def set_all(monkeypatch: pytest.MonkeyPatch, variables: str) -> None:
    """Set environment variables written as in a shell: `A=1 B=2`."""
    for each in variables.split():
        monkeypatch.setenv(*each.split("="))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", None),
        ("PMI_RANK=2 PMI_SIZE=4", (2, 4)),
        ("PMI_RANK=0 PMI_SIZE=1", None),  # a single rank
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0", (0, 2)),
        ("PMI_RANK=0 PMI_SIZE=1 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4", (3, 4)),  # mpirun in an srun step
        ("PMIX_RANK=3 SLURM_STEP_NUM_TASKS=8", (3, 8)),
        ("PMIX_RANK=0 SLURM_STEP_NUM_TASKS=1", None),
        ("PMIX_RANK=1", (1, None)),
        ("PMI_RANK=word", None),
        ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8", (3, 8)),  # srun without PMI
        ("SLURM_PROCID=0 SLURM_NTASKS=8", None),  # in a batch script, before any step is started
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=1", None),
        ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=8 SLURM_PTY_PORT=1", None),  # in the shell of srun --pty
        ("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=8 SLURM_PTY_PORT=1", (1, 8)),
    ],
)
def test_rank_and_size_are_read_from_the_environment_of_mpiexec_or_slurm(
    variables: str, expected: tuple[int, int | None] | None, alone: pytest.MonkeyPatch
) -> None:
    set_all(alone, variables)
    found = mpiexec.started()
    assert (found and found[:2]) == expected


@pytest.mark.parametrize(
    ("variables", "rank", "size", "agrees"),
    [
        ("", 1, 2, True),  # a launcher that sets none of these variables
        ("PMI_RANK=1 PMI_SIZE=2", 1, 2, True),
        ("PMI_RANK=1 PMI_SIZE=2", 0, 1, False),
        ("PMI_RANK=0 PMI_SIZE=2", 1, 2, False),
        ("PMI_RANK=0 PMI_SIZE=1", 0, 2, False),
        ("PMIX_RANK=1", 1, 2, True),
        ("PMIX_RANK=1", 0, 1, False),
        ("SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=3", 0, 1, False),
        ("SLURM_PROCID=0 SLURM_NTASKS=3", 0, 1, True),
        ("PMI_RANK=0 PMI_SIZE=1 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2", 0, 1, True),  # mpiexec -n 1 within a Slurm task
        ("PMI_RANK=1 PMI_SIZE=4 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2", 1, 4, True),  # mpiexec over two machines
    ],
)
def test_ranks_of_the_environment_and_of_mpi_must_agree(
    variables: str, rank: int, size: int, agrees: bool, alone: pytest.MonkeyPatch
) -> None:
    set_all(alone, variables)
    assert (mpiexec.disagreement(rank, size, "MPICH") == "") == agrees


@pytest.mark.parametrize(
    "variables",
    ["PMI_RANK=1 PMI_SIZE=2", "SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_ID=0"],
    ids=["MPICH", "srun without PMI"],
)
def test_a_wrapper_refuses_ranks_of_another_mpi(variables: str, alone: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = SimpleNamespace(rank=0, size=1, library="MPICH", announce=lambda error: None)
    alone.setattr(mpi, "_start", lambda: one)
    set_all(alone, variables)
    with pytest.raises(ConfigError, match=f"^{variables.partition('=')[0]}"):
        ParallelWrapper(small_model(), launcher="mpi", run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_ranks_share_paths_that_are_not_valid_unicode() -> None:
    one: Any = SimpleNamespace(communicator=SerialCommunicator)
    assert mpi.MpiJob.share(one, "outputs/\udcff/ä") == "outputs/\udcff/ä"


def test_a_run_without_an_mpi_library_is_refused_in_one_line(tmp_path: Path) -> None:
    """mpi4py raises a RuntimeError if it finds no MPI library."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    _, stderr = run(tmp_path, *QUICK, "parallel.launcher=mpi", code=2)
    assert stderr.count("\n") == 1 and not (tmp_path / "outputs").exists()


def test_the_mpiexec_of_this_environment_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mpiexec").touch()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert mpiexec.find_mpiexec() == str(tmp_path / "mpiexec")
    (tmp_path / "mpiexec").unlink()
    assert mpiexec.find_mpiexec() == "/usr/bin/mpiexec"
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ConfigError):
        mpiexec.find_mpiexec()
