"""Training on two machines: two network namespaces, and a cable through which all that the ranks exchange goes."""

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

from tests.support.commands import QUICK, environment, run, run_folder
from tests.support.mpi import ROOT, mpiexec, needs_mpi
from tests.support.two_machines import do, inside, mpi_command, two_machines, unavailable

pytestmark = [*needs_mpi, pytest.mark.slow, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def test_two_machines_give_the_weights_of_two_threads(tmp_path):
    for name in ("threads", "machines"):
        (tmp_path / name).mkdir()
    run(tmp_path / "threads", *QUICK, "workers=2")
    with two_machines("200mbit") as names:
        command = mpi_command(str(mpiexec()), names, tmp_path)
        train = [sys.executable, "-m", "cupynet", "train", *QUICK, "parallel.launcher=mpi"]
        variables = environment() | {"UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [*command, *train], cwd=tmp_path / "machines", env=variables, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        sent = [int(inside(name, "statistics/tx_bytes")) for name in names]
    weights = [run_folder(tmp_path / name) / "weights.safetensors" for name in ("threads", "machines")]
    size = sum(array.nbytes for array in load_file(weights[0]).values())
    assert weights[0].read_bytes() == weights[1].read_bytes()
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


def test_a_cut_cable_ends_the_ranks_on_both_machines(tmp_path):
    (tmp_path / "training.py").write_text(TRAINING)
    files = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
    variables = environment() | {"UCX_TLS": "tcp,self", "PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    with two_machines("200mbit") as names:
        command = [*mpi_command(str(mpiexec()), names, tmp_path), sys.executable, "training.py"]
        with subprocess.Popen(
            command, cwd=tmp_path, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert until(lambda: all(file.exists() for file in files))
            do("ip", "-n", names[0], "link", "set", "cable", "down")
            processes = [int(file.read_text()) for file in files]
            ended = until(lambda: not any(map(runs, processes)))
            for each in filter(runs, processes):
                os.kill(each, signal.SIGKILL)
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
