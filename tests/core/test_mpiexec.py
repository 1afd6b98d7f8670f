"""What the environment tells of other processes, and what happens where there is no MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupynet.core import mpiexec
from cupynet.core.errors import ConfigError
from cupynet.training import ParallelWrapper
from tests.support.commands import QUICK, run
from tests.support.training import small_model


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that tells of no other processes."""
    for name in (*mpiexec.RANK_VARIABLES, *mpiexec.SIZE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"PMI_RANK": "2", "PMI_SIZE": "4"}, (2, 4)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),  # one by itself
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, (0, 2)),
        ({"PMIX_RANK": "3", "SLURM_STEP_NUM_TASKS": "8"}, (3, 8)),
        ({"PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"PMIX_RANK": "1"}, (1, None)),
        ({"PMI_RANK": "no number"}, None),
        ({"SLURM_STEP_NUM_TASKS": "8"}, None),  # in a batch script, before anything is started
    ],
)
def test_rank_and_size_from_the_environment(
    alone: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int | None] | None
) -> None:
    for name, value in variables.items():
        alone.setenv(name, value)
    assert mpiexec.started() == expected


def test_without_mpi_one_line_says_what_to_install(tmp_path):
    """Also where mpi4py is there but finds no MPI library: it raises then."""
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    _, stderr = run(tmp_path, *QUICK, "parallel.launcher=mpi", code=2)
    assert stderr.startswith("cupynet: launcher=mpi: MPI cannot be used (cannot load MPI library): install it with pip")
    assert stderr.count("\n") == 1 and not (tmp_path / "outputs").exists()


def test_greatest_is_the_same_on_all_workers() -> None:
    with ParallelWrapper(small_model(), 2) as wrapper:
        assert (wrapper.greatest(15), wrapper.greatest(0)) == (15.0, 0.0)


def test_a_launcher_is_given_by_name_or_as_an_object() -> None:
    with pytest.raises(ConfigError, match="launcher=mip: must be one of thread, mpi"):
        ParallelWrapper(small_model(), 2, launcher="mip")


def test_the_mpiexec_of_this_environment_is_preferred(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    (tmp_path / "mpiexec").touch()
    monkeypatch.setattr(mpiexec.sys, "executable", str(tmp_path / "python"))
    assert mpiexec.find_mpiexec() == str(tmp_path / "mpiexec")
    (tmp_path / "mpiexec").unlink()
    monkeypatch.setattr(mpiexec.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="^there is no mpiexec: pip install 'cupynet.mpi.'$"):
        mpiexec.find_mpiexec()
