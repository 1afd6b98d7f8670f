"""The workflow on GitHub runs .ci/run on every supported Python; make installs what a target needs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import yaml

from tests.support.commands import ROOT
from tests.wheels import supported


def test_every_supported_python_is_tested() -> None:
    project, makefile = ((ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "Makefile"))
    (oldest, beyond) = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)[0]
    versions = [f"3.{minor}" for minor in range(int(oldest), int(beyond))]
    (workflow,) = (ROOT / ".github" / "workflows").iterdir()
    gate = yaml.safe_load(workflow.read_text("utf-8"))["jobs"]["gate"]
    assert versions == supported() == gate["strategy"]["matrix"]["python"]
    assert f"OLDEST := 3.{oldest}\n" in makefile and f"BEYOND := 3.{beyond}\n" in makefile


def test_training_installs_no_packages_of_tests(tmp_path: Path) -> None:
    def recipe(target: str) -> str:
        command = ["make", "-n", target, f"VENV={tmp_path}"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert ".[images,plots" in recipe("train") and "dev" not in recipe("train").replace("/dev/null", "")
    assert ".[dev,mpi" in recipe("test")
    Path(re.findall(r'touch "(.+)"', recipe("train"))[0]).touch()  # newer than pyproject.toml
    assert "pip install" not in recipe("train") and "pip install" in recipe("test")
