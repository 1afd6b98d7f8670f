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


def test_compiled_kernels_are_kept(folder, caplog):
    assert works(jit.kernel(double_all))
    assert len(files(folder, "nbi")) == len(files(folder, "nbc")) == 1
    again: Any = jit.kernel(double_all)
    assert works(again) and sum(again.stats.cache_hits.values()) == 1
    assert warnings(caplog) == []


@pytest.mark.slow
def test_a_whole_network_is_found_again(tmp_path):
    """Every kernel that training uses: none is taken for another."""
    code = (
        "from cupynet import Conv2D, Dense, Image, Loader, MaxPool2D, Model, ParallelWrapper, Sequential\n"
        "from cupynet import Synthetic, create_backend\n"
        "from cupynet.backend.cpu.kernels.cache import KernelCache\n"
        "found, load = [], KernelCache.load_overload\n"
        "def asked(self, *arguments):\n"
        "    found.append(load(self, *arguments))\n"
        "    return found[-1]\n"
        "KernelCache.load_overload = asked\n"
        "layers = {'conv1': Conv2D(4, 3), 'pool1': MaxPool2D(2), 'output': Dense(10)}\n"
        "data = Synthetic(train=40, test=10).load()\n"
        "model = Model(Sequential(layers), Image(28, 28, 1), create_backend('numba'))\n"
        "with ParallelWrapper(model, workers=1, progress='none') as wrapper:\n"  # of two one finds what the other made
        "    wrapper.fit(Loader(data.train, 10), 1)\n"
        "print(len(found) - found.count(None), found.count(None))\n"
    )
    counts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True, text=True, check=True, timeout=120,
        ).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert counts[0][0] == "0" and int(counts[0][1]) >= 5
    assert int(counts[1][0]) >= 5 and counts[1][1] == "0"


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "one byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "all but one byte": lambda content: content[:-1],
    "garbage": lambda content: bytes(range(256)) * 8,
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize(
    ("ending", "damage"),
    [
        *(("nbi", damage) for damage in ("empty", "half", "garbage", "zeros")),
        *(("nbc", damage) for damage in ("one byte", "all but one byte", "garbage", "zeros")),
    ],
)
def test_a_damaged_file_is_written_anew(folder, caplog, ending, damage):
    assert works(jit.kernel(double_all))
    (path,) = files(folder, ending)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert works(jit.kernel(double_all))
    (text,) = warnings(caplog)
    assert text.startswith(f"damaged kernels are compiled anew ({path.parent}: ")
    again: Any = jit.kernel(double_all)
    assert works(again) and sum(again.stats.cache_hits.values()) == 1
    assert len(warnings(caplog)) == 1


def test_another_kernel_under_the_same_name_is_not_run(folder, caplog):
    """Of two processes that begin at once, one's list may name the other's code."""
    assert works(jit.kernel(double_all)) and works(jit.kernel(double_all), np.float32)
    one, other = files(folder, "nbc")
    shutil.copy(other, one)
    assert works(jit.kernel(double_all)) and works(jit.kernel(double_all), np.float32)
    (text,) = warnings(caplog)
    assert "another kernel is in its place" in text


def test_a_list_that_cannot_be_read_is_no_error(folder, caplog):
    assert works(jit.kernel(double_all))
    (path,) = files(folder, "nbi")
    path.unlink()
    path.mkdir()
    assert works(jit.kernel(double_all))
    assert [text.split()[0] for text in warnings(caplog)] == ["damaged", "compiled"]


def compiled(check: bool = True, **more: Any) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR")
    }
    run, cwd = more.pop("preexec_fn", None), more.pop("cwd", ROOT)
    return subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=cwd, env={**variables, "PYTHONDONTWRITEBYTECODE": "1", **more},
        capture_output=True, text=True, check=False, timeout=120, preexec_fn=run,
    )  # fmt: skip


def test_kernels_are_compiled_if_no_folder_is_writable(tmp_path):
    """A read-only package and no home, as in a container: NumPy instead would be a seventh as fast."""
    shutil.copytree(ROOT / "cupynet", tmp_path / "cupynet", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "cupynet" / "backend" / "cpu" / "kernels" / "__pycache__").touch()  # no folder, for root neither
    done = compiled(cwd=tmp_path, HOME="/dev/null", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    warning, hits = done.stdout.splitlines()
    assert warning.startswith("cupynet.backend.cpu.kernels.cache WARNING compiled kernels cannot be kept")
    assert "NUMBA_CACHE_DIR" in warning
    assert hits == "hits"


def test_a_full_disk_keeps_no_kernels_and_no_list_of_them(tmp_path):
    """The list fits, the code does not: what is read at the next start must not be what was never written."""

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = compiled(NUMBA_CACHE_DIR=str(tmp_path), preexec_fn=full)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1 and f"({tmp_path}" in done.stdout
    assert files(tmp_path, "nbc") == [] and done.stdout.endswith("hits\n")
    assert compiled(NUMBA_CACHE_DIR=str(tmp_path)).stdout == "hits\n"
