"""On any machine, a test without the mark `gpu` sees no GPU."""

import os
import subprocess
import sys

import pytest

from cupynet.backend import select_backend
from tests.support.backends import GPU
from tests.support.commands import ROOT


def test_no_gpu_is_visible() -> None:
    name, reason = select_backend()
    assert name != "cupy" and reason is not None
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not GPU


@pytest.mark.slow
def test_no_gpu_is_visible_on_a_machine_with_gpus() -> None:
    test = f"{__file__}::test_no_gpu_is_visible"
    line = [sys.executable, "-m", "tests.standin", "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
