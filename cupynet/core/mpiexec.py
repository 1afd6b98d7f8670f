"""mpiexec: where it is, and what it or a scheduler in its place tells a process of itself, before MPI is started."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cupynet.core.errors import ConfigError

RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")  # MPICH and its kin; PMIx, which Slurm has; Open MPI
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def started() -> tuple[int, int | None] | None:
    """This process's rank and how many ranks there are, None where that is not told; None: it was started alone.

    One rank by itself is no different from a process that was started without mpiexec.
    """
    rank, size = _number(RANK_VARIABLES), _number(SIZE_VARIABLES)
    return None if rank is None or size == 1 else (rank, size)


def _number(names: tuple[str, ...]) -> int | None:
    found = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in found if text.isdecimal()), None)


def find_mpiexec() -> str:
    """MPICH's mpiexec, of this Python's environment or on the path. ConfigError."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("there is no mpiexec: pip install 'cupynet[mpi]'")
    return found
