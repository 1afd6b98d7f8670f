"""Locates mpiexec, and reads the rank of this process from the environment before MPI is initialized.

The environment may be wrong: variables are inherited, and the launcher may come from a different MPI than the library.
MPI itself is authoritative (see `disagreement`).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from cupynet.core.errors import ConfigError

# Rank and size variables of MPICH, Open MPI, PMIx under Slurm, and plain srun. Slurm's job variables, such as
# SLURM_NTASKS, are not used, because they are also set in batch scripts.
CLAIMS = (
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMIX_RANK", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
TERMINAL = "SLURM_PTY_PORT"  # set by srun --pty, which connects its terminal to rank 0


class Claim(NamedTuple):
    """Rank of this process according to the environment variable `variable`. `size` is None if unknown."""

    rank: int
    size: int | None
    variable: str


def claims() -> list[Claim]:
    """Return the ranks claimed in the environment. There may be several, because variables are inherited."""
    variables = [(_number(rank), _number(size), rank) for rank, size in CLAIMS]
    ranks = [Claim(rank, size, variable) for rank, size, variable in variables if rank is not None]
    return [claim for claim in ranks if not _is_slurm_shell(claim)]


def started() -> Claim | None:
    """Return the claim of this process if it is one of several ranks, or None for a single process."""
    return next((claim for claim in claims() if claim.size != 1), None)


def rank() -> int:
    """Return the rank of this process; 0 unless mpiexec started several processes."""
    process = started()
    return 0 if process is None else process.rank


def disagreement(rank: int, size: int, library: str) -> str:
    """Describe how the environment contradicts MPI's `rank` and `size`, or return "".

    A contradiction means that a different MPI launched the processes, and each of them would train alone.
    """
    ranks = claims()
    if not ranks or any(claim.rank == rank and claim.size in (size, None) for claim in ranks):
        return ""
    launched = started() or ranks[0]
    return (
        f"{launched.variable}={launched.rank}: a launcher started rank {launched.rank} of "
        f"{launched.size or 'several'}, but for {library} this is rank {rank} of {size}. Start the ranks with the "
        f"mpiexec of {library}. If this is a single process, unset {launched.variable}"
    )


def _is_slurm_shell(claim: Claim) -> bool:
    """Return True if the claim comes from a batch script, or from the shell of `srun --pty`."""
    return claim.variable == "SLURM_PROCID" and (claim.size is None or (claim.rank == 0 and TERMINAL in os.environ))


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else None


def find_mpiexec() -> str:
    """Find mpiexec next to this Python or on the PATH. Raise ConfigError if there is none."""
    sibling = Path(sys.executable).with_name("mpiexec")
    program = str(sibling) if sibling.is_file() else shutil.which("mpiexec")
    if program is None:
        raise ConfigError("mpiexec not found. Install it with pip install 'cupynet[mpi]'")
    return program
