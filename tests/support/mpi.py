"""Tests under mpiexec. Without it they are skipped, or fail if CUPYNET_TEST_ALL is set."""

import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cupynet.core.errors import ConfigError
from cupynet.core.mpiexec import find_mpiexec
from tests.support.commands import ROOT as ROOT
from tests.support.commands import environment


def missing() -> str:
    """Return why ranks cannot be started on this machine, or "" if they can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'cupynet[mpi]'"
    try:
        find_mpiexec()
    except ConfigError as error:
        return str(error)
    return ""


NO_MPI = "" if "CUPYNET_TEST_ALL" in os.environ else missing()  # the reason for skipping
needs_mpi = [pytest.mark.mpi, pytest.mark.skipif(bool(NO_MPI), reason=NO_MPI)]


def under_mpiexec(
    ranks: int, *arguments: str, cwd: Path = ROOT, timeout: float = 120, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run this Python with `arguments` on `ranks` ranks; more: additional environment variables."""
    assert not missing(), missing()
    line, null = [find_mpiexec(), "-n", str(ranks), sys.executable, *arguments], subprocess.DEVNULL
    variables = environment(**{"PYTHONPATH": f"{ROOT}{os.pathsep}{cwd}", **more})
    return subprocess.run(line, cwd=cwd, env=variables, stdin=null, capture_output=True, text=True, timeout=timeout)


def ranks_of(mark: str) -> list[int]:
    """Return the process IDs of the ranks that have `MARK=mark` in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or is another user's
            variables = (process / "environ").read_bytes().split(b"\0")
            if f"MARK={mark}".encode() in variables and any(each.startswith(b"PMI_RANK=") for each in variables):
                found.append(int(process.name))
    return sorted(found)
