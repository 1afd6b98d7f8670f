"""Training on two machines: two network namespaces, and a cable through which all that the ranks exchange goes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from safetensors.numpy import load_file

from tests.machines import inside, mpi_command, two_machines, unavailable
from tests.mpi import ROOT, mpiexec, needs_mpi
from tests.test_train import QUICK, environment, run, run_folder

pytestmark = [*needs_mpi, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]


def test_two_machines_give_the_weights_of_two_threads(tmp_path):
    for name in ("threads", "machines"):
        (tmp_path / name).mkdir()
    run(tmp_path / "threads", *QUICK, "workers=2")
    with two_machines("200mbit") as names:
        command = mpi_command(str(mpiexec()), names, tmp_path)
        train = [sys.executable, "-m", "cupynet.train", *QUICK, "parallel.launcher=mpi"]
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
