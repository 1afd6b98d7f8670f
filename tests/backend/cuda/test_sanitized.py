"""Kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, and accesses that these must find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.host import compiler
from tests.support.commands import ROOT


def asan() -> str | None:
    """Return the library to preload, or None if the compiler has none."""
    found = compiler()
    if found is None:
        return None
    command = [found, "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return path if Path(path).is_absolute() else None


LIBRARY = asan()
pytestmark = pytest.mark.skipif(
    LIBRARY is None and "CUPYNET_TEST_ALL" not in os.environ, reason="the C++ compiler has no AddressSanitizer"
)


def under_sanitizers(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert LIBRARY is not None, "the C++ compiler has no AddressSanitizer"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"LD_PRELOAD": LIBRARY, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    environment |= {"CUPYNET_TEST_SANITIZED": "1"}
    line = [sys.executable, *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.parametrize("tests", ["test_kernels.py", "test_operations.py::test_small_launches_equal_the_reference"])
def test_kernels_under_sanitizers_stay_within_their_arrays(tests: str) -> None:
    alone = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    done = under_sanitizers(*alone, "-k", "(half or float) and not bfloat16", f"tests/backend/cuda/{tests}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


BEYOND = """
import numpy as np
from cupynet.backend.cuda.launch import OPTIONS, source
from tests.standin import installed
with installed():
    import cupy
    relu = cupy.RawModule(code=source("activation"), options=OPTIONS).get_function("relu_float")
    relu((1,), (32,), (cupy.ones(100, np.float32), np.int64(101)))
print("done")
"""


def test_the_sanitizer_finds_an_access_beyond_an_array() -> None:
    done = under_sanitizers("-c", BEYOND)
    assert done.returncode != 0 and done.stdout == ""
    assert "heap-buffer-overflow" in done.stderr
