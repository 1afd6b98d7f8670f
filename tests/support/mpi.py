"""Tests under mpiexec: what starts them, and whether this machine can.

Where CUPYNET_TEST_ALL is set nothing is skipped: what is missing is an error.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def mpiexec() -> str | None:
    """The mpiexec of this Python's environment, else the one on the path."""
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.is_file() else shutil.which("mpiexec")


def reason() -> str:
    """Why nothing can be run under mpiexec here; "" where it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'cupynet[mpi]'"
    return "" if mpiexec() else "there is no mpiexec: pip install 'cupynet[mpi]'"


REASON = reason()
NO_MPI = "" if "CUPYNET_TEST_ALL" in os.environ else REASON  # why to skip a test
needs_mpi = [pytest.mark.mpi, pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)]


def under_mpiexec(
    ranks: int, *arguments: str, cwd: Path = ROOT, timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` as so many ranks; more: variables of the environment."""
    assert not REASON, REASON
    hidden = {"CUPYNET_DATA", "BACKEND_PRIORITY_GPU", "BACKEND_PRIORITY_CPU", "HYDRA_FULL_ERROR"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", "CUPYNET_OFFLINE": "1", "COLUMNS": "200", **more}
    return subprocess.run(
        [str(mpiexec()), "-n", str(ranks), sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def ranks_of(mark: str) -> list[int]:
    """Return the process IDs of the ranks that have `MARK=mark` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"MARK={mark}".encode() in variables and any(each.startswith(b"PMI_RANK=") for each in variables):
                found.append(int(process.name))
    return sorted(found)
