"""A test that is not marked `gpu` sees no GPU, on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupynet.backend import select_backend
from tests.support.backends import GPU

ROOT = Path(__file__).resolve().parents[1]


def test_no_gpu_is_visible() -> None:
    name, reason = select_backend()
    assert name != "cupy" and reason is not None
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not GPU


@pytest.mark.slow
def test_no_gpu_is_visible_on_a_machine_with_gpus() -> None:
    line = [sys.executable, "-m", "tests.standin", "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    line += ["-k", "test_no_gpu_is_visible and not machine"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
