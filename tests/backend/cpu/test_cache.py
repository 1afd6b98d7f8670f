"""Compiled kernels on disk: kernels work whatever happens to the files, and a warning says what happened."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from cupynet.backend.cpu.kernels import cache, jit

ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import logging, sys, time
logging.basicConfig(level="WARNING", format="%(name)s %(levelname)s %(message)s", stream=sys.stdout)
import numpy as np
from cupynet.backend import create_backend, select_backend
from cupynet.backend.cpu.kernels import update
assert select_backend("auto", gpu_priority=-1) == ("numba", None), select_backend("auto", gpu_priority=-1)
backend = create_backend("numba")
gradient = np.full(3, 2, np.float32)
assert backend.squared_norm(gradient) == 12
backend.clip_norm(gradient, np.float32(12), 1.0)
assert np.allclose(gradient, 1 / np.sqrt(3))
print("hits", *update.squared_norm.stats.cache_hits.values())
"""


def double_all(x: Any) -> None:
    for i in range(x.size):
        x[i] *= 2


def works(kernel: Any, dtype: type = np.float64) -> bool:
    """Whether it does what it should; with another dtype other code is compiled."""
    x = np.arange(3, dtype=dtype)
    kernel(x)
    return x.tolist() == [0, 2, 4]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where kernels are kept that are made in this test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(cache, "_warned", set())
    yield tmp_path / "kernels"


def files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.rglob(f"*.{ending}"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_compiled_kernels_are_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert works(jit.kernel(double_all))
    assert len(files(folder, "nbi")) == len(files(folder, "nbc")) == 1
    again: Any = jit.kernel(double_all)
    assert works(again) and sum(again.stats.cache_hits.values()) == 1
    assert warnings(caplog) == []


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "all but one byte": lambda content: content[:-1],
    "garbage": lambda content: bytes(range(256)) * 8,
}


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        *(("nbi", damage) for damage in ("empty", "half")),
        *(("nbc", damage) for damage in ("all but one byte", "garbage")),
    ],
)
def test_a_damaged_file_is_written_anew(
    folder: Path, caplog: pytest.LogCaptureFixture, ending: str, damage: str
) -> None:
    assert works(jit.kernel(double_all))
    (path,) = files(folder, ending)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert works(jit.kernel(double_all))
    (text,) = warnings(caplog)
    assert str(path.parent) in text
    again: Any = jit.kernel(double_all)
    assert works(again) and sum(again.stats.cache_hits.values()) == 1
    assert len(warnings(caplog)) == 1


def test_another_kernel_under_the_same_name_is_not_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two processes that begin at once, one's list may name the other's code."""
    assert works(jit.kernel(double_all)) and works(jit.kernel(double_all), np.float32)
    one, other = files(folder, "nbc")
    shutil.copy(other, one)
    assert works(jit.kernel(double_all)) and works(jit.kernel(double_all), np.float32)
    assert len(warnings(caplog)) == 1


def compiled(check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
    }
    run, cwd = more.pop("preexec_fn", None), more.pop("cwd", ROOT)
    return subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=cwd, env={**variables, "PYTHONDONTWRITEBYTECODE": "1", **more},
        capture_output=True, text=True, check=False, timeout=120, preexec_fn=run,
    )  # fmt: skip


def test_kernels_are_compiled_if_no_folder_is_writable(tmp_path: Path) -> None:
    """A read-only package and no home, as in a container: NumPy instead would be a seventh as fast."""
    shutil.copytree(ROOT / "cupynet", tmp_path / "cupynet", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cupynet" / "backend" / "cpu" / "kernels" / "__pycache__").touch()  # no folder, for root neither
    done = compiled(cwd=tmp_path, HOME="/dev/null", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    warning, hits = done.stdout.splitlines()
    assert "NUMBA_CACHE_DIR" in warning
    assert hits == "hits"


def test_a_full_disk_keeps_no_kernels_and_no_list_of_them(tmp_path: Path) -> None:
    """The list fits, the code does not: what is read at the next start must not be what was never written."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = compiled(NUMBA_CACHE_DIR=str(tmp_path), preexec_fn=full)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1 and f"({tmp_path}" in done.stdout
    assert files(tmp_path, "nbc") == [] and done.stdout.endswith("hits\n")
    assert compiled(NUMBA_CACHE_DIR=str(tmp_path)).stdout == "hits\n"
