"""Two machines on one: what is there without root, and with it."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.mpi import needs_mpi
from tests.test_train import QUICK, run, run_folder


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_mpi)])
def test_two_machines_train_together(tmp_path, mark):
    """With root each is a network of its own; without it, or where the kernel has none, two groups of processes."""
    stdout, _ = run(tmp_path, "--rate", "200mbit", *QUICK, command="machines")
    assert json.loads((run_folder(tmp_path) / "summary.json").read_text())["workers"] == 2
    if "two groups of processes" not in stdout:
        assert "a cable of 200mbit" in stdout and "through the cable: " in stdout
        assert "cupynet-" not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout


def test_no_ranks_are_refused(tmp_path):
    _, stderr = run(tmp_path, "--ranks", "0", command="machines", code=2)
    assert stderr == "cupynet: --ranks=0: must be an integer of at least 1\n"
