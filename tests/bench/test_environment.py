"""Whether an interpreter can be used on a GPU as it is: said in one line, before anything is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupynet.backend import select_backend
from cupynet.bench import environment as equipped
from tests.support.backends import GPU

ROOT = Path(__file__).resolve().parents[2]


def test_a_module_that_is_not_there_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(equipped.NEEDED, "cupy", "numpy")  # whatever this machine has
    monkeypatch.setattr(equipped, "_there", lambda name: name not in ("hydra", "nowhere"))
    assert equipped.main(["pytest", "nowhere"]) == 2
    line = f"cupynet: {sys.executable} lacks the modules hydra (hydra-core), nowhere: name an interpreter that has them"
    assert capsys.readouterr().err == f"{line}, PYTHON=...\n"


def test_a_machine_without_a_gpu_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipped, "_there", lambda name: True)
    monkeypatch.setattr("cupynet.backend.cuda.probe", lambda: "CuPy finds no usable GPU: there is no NVIDIA driver")
    assert equipped.main([]) == 2
    assert (
        capsys.readouterr().err == "cupynet: no GPU can be used: CuPy finds no usable GPU: there is no NVIDIA driver\n"
    )


def test_one_that_has_everything_is_silent() -> None:
    line = [sys.executable, "-m", "tests.standin", "-m", "cupynet.bench.environment", "pytest"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_gpu_is_seen_by_a_test_that_is_not_for_one() -> None:
    """Whatever this machine has: see tests/conftest.py."""
    name, why = select_backend()
    assert name != "cupy" and why is not None
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not GPU


def test_nor_where_there_are_some() -> None:
    line = [
        sys.executable,
        "-m",
        "tests.standin",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        __file__,
        "-k",
        "no_gpu",
    ]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("target", ["test-gpu", "bench-gpu"])
def test_make_asks_first_and_installs_nothing(target: str, tmp_path: Path) -> None:
    """An interpreter with nothing but Python: named, with what it lacks."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", target, f"PYTHON={bare}"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    first = done.stderr.splitlines()[0]
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert " lacks the modules numpy, filelock, hydra (hydra-core), " in first and "cupy (cupy-cuda12x or " in first
    assert ("pytest, hypothesis" in first) == (target == "test-gpu")


def test_what_is_needed_is_what_the_project_says() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    for name, brings in equipped.NEEDED.items():
        assert all(f'"{each}' in project for each in brings.split(" or ")), name
    core = re.findall(r'^    "([\w-]+)', project.partition("\ndependencies = [")[2].partition("\n]")[0], re.MULTILINE)
    assert len(core) > 5 and set(core) <= set(equipped.NEEDED.values())
