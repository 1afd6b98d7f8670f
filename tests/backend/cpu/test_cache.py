"""Compiled kernels on disk: kernels work whatever happens to the files, and a warning names the problem."""

import gc
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from cupynet.backend.cpu.kernels import cache, jit
from tests.support.commands import ROOT


def double_all(x: Any) -> None:
    for i in range(x.size):
        x[i] *= 2


def check_kernel(dtype: type = np.float64) -> Any:
    """Return a new kernel after checking its result. Each dtype compiles different code."""
    kernel: Any = jit.kernel(double_all)
    x: Any = np.arange(3, dtype=dtype)
    kernel(x)
    assert x.tolist() == [0, 2, 4]
    return kernel


def hits(kernel: Any) -> int:
    return sum(kernel.stats.cache_hits.values())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder for kernels compiled in this test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_warned", set())
    return tmp_path / "kernels"


def test_compiled_kernels_are_kept_on_disk(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_kernel()
    assert len(list(folder.rglob("*.nbi"))) == len(list(folder.rglob("*.nbc"))) == 1
    assert hits(check_kernel()) == 1 and not caplog.records


@pytest.mark.parametrize("frozen", [False, True])
def test_compilation_keeps_the_garbage_collector_frozen_or_not(folder: Path, frozen: bool) -> None:
    (gc.freeze if frozen else gc.unfreeze)()
    check_kernel()
    assert bool(gc.get_freeze_count()) == frozen


@pytest.mark.parametrize(
    ("ending", "damaged"),
    [
        ("nbi", lambda content: b""),
        ("nbi", lambda content: content[: len(content) // 2]),
        ("nbc", lambda content: content[:-1]),
        ("nbc", lambda content: bytes(range(256)) * 8),
    ],
)
def test_a_damaged_cache_file_is_written_again_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, ending: str, damaged: Callable[[bytes], bytes]
) -> None:
    check_kernel()
    (path,) = folder.rglob(f"*.{ending}")
    path.write_bytes(damaged(path.read_bytes()))
    check_kernel()
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(path.parent) in record.getMessage()
    assert hits(check_kernel()) == 1 and len(caplog.records) == 1


def test_a_cache_file_of_another_kernel_is_not_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If two processes start at once, one's index may name the other's code."""
    check_kernel()
    check_kernel(np.float32)
    one, other = folder.rglob("*.nbc")
    shutil.copy(other, one)
    check_kernel()
    check_kernel(np.float32)
    assert len(caplog.records) == 1


COMPILE = """
import logging, sys
logging.basicConfig(level="WARNING", format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
import numpy as np
from cupynet.backend import create_backend, select_backend
from cupynet.backend.cpu.kernels import update
assert select_backend("auto", gpu_priority=-1) == ("numba", None), select_backend("auto", gpu_priority=-1)
assert create_backend("numba").squared_norm(np.full(3, 2, np.float32)) == 12
print("hits", *update.squared_norm.stats.cache_hits.values())
"""


def compiled(cwd: Path = ROOT, limit: Callable[[], None] | None = None, **variables: str) -> list[str]:
    """Compile a kernel in a process, and return the lines that it prints."""
    of_the_user = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in of_the_user}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=cwd, env=environment, capture_output=True, text=True, preexec_fn=limit
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_kernels_are_compiled_with_a_warning_if_no_folder_is_writable(tmp_path: Path) -> None:
    """Containers may have a read-only package and no home. NumPy instead would be a seventh as fast."""
    shutil.copytree(ROOT / "cupynet", tmp_path / "cupynet", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cupynet" / "backend" / "cpu" / "kernels" / "__pycache__").touch()  # a file: even root cannot write
    warning, last = compiled(tmp_path, HOME="/dev/null", PYTHONPATH=str(tmp_path))
    assert "NUMBA_CACHE_DIR" in warning and last == "hits"


def test_a_full_disk_keeps_no_kernels_and_no_list_of_them(tmp_path: Path) -> None:
    """The index would fit, but not the code. The next start must not read code that was never written."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    warning, last = compiled(limit=full, NUMBA_CACHE_DIR=str(tmp_path))
    assert "WARNING" in warning and f"({tmp_path}" in warning and last == "hits"
    assert list(tmp_path.rglob("*.nbc")) == []
    assert compiled(NUMBA_CACHE_DIR=str(tmp_path)) == ["hits"]
