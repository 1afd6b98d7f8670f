"""What mpiexec, or a scheduler in its place, tells a process of itself, before MPI is started: in the environment."""

from __future__ import annotations

import os

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
