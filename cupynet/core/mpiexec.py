"""Finds mpiexec, and determines the rank of this process from the environment, before MPI is started.

The environment may be wrong, because variables are inherited and the launcher may belong to another MPI than the
library. MPI itself is authoritative, see `disagreement`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from cupynet.core.errors import ConfigError

# Rank and size from MPICH, Open MPI, PMIx under Slurm, and plain srun. Only variables of a Slurm step are used, because
# variables of the job, such as SLURM_NTASKS, are also set in the shell of a batch script.
CLAIMS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
TERMINAL = "SLURM_PTY_PORT"  # set by srun --pty, which gives its terminal to rank 0


class Claim(NamedTuple):
    """Rank of this process according to the environment variable `variable`. size: None if unknown."""

    rank: int
    size: int | None
    variable: str


def claims() -> list[Claim]:
    """Return the ranks claimed in the environment. There may be several, because variables are inherited."""
    found = [(_number(rank), _number(size), rank) for rank, size in CLAIMS]
    several = [Claim(rank, size, variable) for rank, size, variable in found if rank is not None]
    return [each for each in several if not _is_slurm_shell(each)]


def started() -> Claim | None:
    """Return the rank of this process and the number of ranks, or None for a single process."""
    return next((each for each in claims() if each.size != 1), None)


def rank() -> int:
    """Return the rank of this process; 0 unless mpiexec started several processes."""
    process = started()
    return 0 if process is None else process.rank


def disagreement(rank: int, size: int, library: str) -> str:
    """Return why the environment contradicts MPI's `rank` and `size`, or "" if it does not.

    A contradiction means that the launcher of another MPI started the processes. Each of them would train alone.
    """
    found = claims()
    if not found or any(each.rank == rank and each.size in (size, None) for each in found):
        return ""
    other = started() or found[0]
    return (
        f"{other.variable}={other.rank}: a launcher started rank {other.rank} of {other.size or 'several'}, but for "
        f"{library} this is rank {rank} of {size}. Start the ranks with the mpiexec of {library}. If this is a single "
        f"process, unset {other.variable}"
    )


def _is_slurm_shell(claim: Claim) -> bool:
    """Return True in a shell of `srun --pty` and its child processes, when all other tasks of the step have ended."""
    return claim.variable == "SLURM_PROCID" and (claim.size is None or (claim.rank == 0 and TERMINAL in os.environ))


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def find_mpiexec() -> str:
    """Find mpiexec next to this Python or on the path. Raises ConfigError."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise ConfigError("mpiexec not found. Install it with pip install 'cupynet[mpi]'")
    return found
