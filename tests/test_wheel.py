"""The wheel in an empty environment, used from an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def call(*command: str | Path, cwd: Path, **more: str) -> str:
    hidden = {"PYTHONPATH", "CUPYNET_DATA", "CUPYNET_REPORT", "VIRTUAL_ENV"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden} | more
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_trains_from_an_empty_directory(tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert "cupynet/conf/config.yaml" in inside
    kernels = [path for path in (ROOT / "cupynet").rglob("*.cu*") if path.suffix in (".cu", ".cuh")]
    assert len(kernels) > 1 and {path.relative_to(ROOT).as_posix() for path in kernels} <= set(inside)
    call(sys.executable, "-m", "venv", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir()
    home.mkdir()
    stdout = call(python, "-m", "cupynet", "train", "data=synthetic", "epochs=1", cwd=empty, HOME=str(home))
    assert "test accuracy" in stdout
    assert [p.name for p in empty.iterdir()] == ["outputs"]
    assert list((empty / "outputs").rglob("report.html"))
    assert "cupynet" in call(tmp_path / "env" / "bin" / "cupynet", "train", "--help", cwd=empty)
