"""Find mpiexec, and the rank that it or a scheduler gives to a process, before MPI is started."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cupynet.core.errors import ConfigError

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH, PMIx (Slurm), Open MPI
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def started() -> tuple[int, int | None] | None:
    """Return this process's rank and the number of ranks, None if that is unknown; None for a single process."""
    rank, size = _number(RANK_VARIABLES), _number(SIZE_VARIABLES)
    return None if rank is None or size == 1 else (rank, size)


def rank() -> int:
    """Return this process's rank; 0 unless mpiexec started several processes."""
    process = started()
    return 0 if process is None else process[0]


def _number(names: tuple[str, ...]) -> int | None:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def find_mpiexec() -> str:
    """Find mpiexec in this Python's environment or on the path. ConfigError."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("there is no mpiexec: pip install 'cupynet[mpi]'")
    return found
