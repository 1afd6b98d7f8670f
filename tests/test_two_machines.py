"""Training on two machines: two network namespaces, and a cable through which the ranks exchange everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.support.commands import QUICK, ROOT, environment, run, run_folder
from tests.support.mpi import needs_mpi
from tests.support.two_machines import do, inside, mpi_command, two_machines, unavailable

pytestmark = [*needs_mpi, pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def start(names: tuple[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start this Python with `arguments` on both machines, in a folder."""
    command = [*mpi_command(names, folder), sys.executable, *arguments]
    variables = environment() | {"UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, cwd=folder, env=variables, stdin=null, stdout=null, stderr=pipe, text=True)


def test_two_machines_give_the_weights_of_two_threads(tmp_path: Path) -> None:
    folders = [tmp_path / "threads", tmp_path / "machines"]
    for folder in folders:
        folder.mkdir()
    run(folders[0], *QUICK, "workers=2")
    with two_machines("200mbit") as names:
        with start(names, folders[1], "-m", "cupynet", "train", *QUICK, "parallel.launcher=mpi") as process:
            _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        sent = [int(inside(name, "statistics/tx_bytes")) for name in names]
    threads, machines = (run_folder(folder) / "weights.safetensors" for folder in folders)
    assert threads.read_bytes() == machines.read_bytes()
    size = sum(array.nbytes for array in load_file(threads).values())
    assert min(sent) > size  # at least one average went each way


TRAINING = """
import os
from pathlib import Path
from cupynet.parallel import MpiLauncher

def task(c):
    for now in range(1_000_000):
        c.gather_numbers(now)
        if now == 20:
            Path(f"{c.rank}.part").write_text(str(os.getpid()))
            os.rename(f"{c.rank}.part", f"{c.rank}.pid")

MpiLauncher(timeout_s=1.0).run(task)
"""


def test_a_cut_cable_ends_the_ranks_on_both_machines(tmp_path: Path) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
    with two_machines("200mbit") as names, start(names, tmp_path, "training.py") as process:
        assert until(lambda: all(file.exists() for file in files))
        do("ip", "-n", names[0], "link", "set", "cable", "down")
        ranks = [int(file.read_text()) for file in files]
        ended = until(lambda: not any(map(runs, ranks)))
        for rank in filter(runs, ranks):
            os.kill(rank, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    assert ended and process.returncode == 1 and " waited 1 s for " in stderr


def until(true: Callable[[], bool]) -> bool:
    """Wait, for a minute, until something is true; return whether it is."""
    deadline = time.monotonic() + 60
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def runs(process: int) -> bool:
    """Return True if a process is there and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
