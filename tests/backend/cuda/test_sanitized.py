"""The tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, and accesses that they must find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.host import compiler

ROOT = Path(__file__).resolve().parents[3]


def asan() -> str | None:
    """The library that has to be loaded first; None if the compiler has none."""
    found = compiler()
    if found is None:
        return None
    command = [found, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return path if Path(path).is_absolute() else None


LIBRARY = asan()
needs_asan = pytest.mark.skipif(
    LIBRARY is None and "CUPYNET_TEST_ALL" not in os.environ, reason="the C++ compiler has no AddressSanitizer"
)


def under_sanitizers(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert LIBRARY is not None, "the C++ compiler has no AddressSanitizer"
    sanitizers = {"LD_PRELOAD": LIBRARY, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    hidden = [name for name in os.environ if name.startswith("PYTEST_XDIST")]
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {**sanitizers, "CUPYNET_TEST_SANITIZED": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@needs_asan
def test_kernels_stay_within_their_arrays() -> None:
    """In two precisions: one process, as compiling is what takes the time."""
    tests = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-k",
        "(half or float) and not bfloat16",
        "tests/backend/cuda/test_kernels.py",
    ]
    done = under_sanitizers("-m", "pytest", "-q", *tests)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


PLANTED = """
import numpy as np
from tests.backend.cuda.test_kernels import array, kernel
x = array(np.ones({length}), np.float32, {start})
kernel("activation", "relu_float")((1,), (32,), (x, np.int64({size})))
print("done")
"""


@needs_asan
@pytest.mark.parametrize(("length", "start", "size"), [(100, 0, 101), (100, 1, 104)])
def test_the_sanitizer_finds_an_access_beyond_an_array(length: int, start: int, size: int) -> None:
    done = under_sanitizers("-c", PLANTED.format(length=length, start=start, size=size))
    assert done.returncode != 0 and done.stdout == ""
    assert "heap-buffer-overflow" in done.stderr and "common.cuh" in done.stderr
