"""The workflow on GitHub does what .ci/run does here, on every Python that the project says it supports."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").iterdir())
PYPROJECT = (ROOT / "pyproject.toml").read_text("utf-8")
VERSIONS = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)


def gate() -> dict[str, Any]:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert list(workflow["jobs"]) == ["gate"] and workflow["permissions"] == {"contents": "read"}
    job: dict[str, Any] = workflow["jobs"]["gate"]
    return job


def test_every_supported_python_is_tried() -> None:
    low, high = (
        tuple(map(int, version.split(".")))
        for version in re.findall(r'requires-python = ">=([\d.]+),<([\d.]+)"', PYPROJECT)[0]
    )
    assert [f"{low[0]}.{minor}" for minor in range(low[1], high[1])] == VERSIONS
    assert gate()["strategy"]["matrix"]["python"] == VERSIONS
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert f"OLDEST := {VERSIONS[0]}" in makefile and f"BEYOND := {high[0]}.{high[1]}" in makefile


def test_the_workflow_runs_the_gate_only() -> None:
    steps = gate()["steps"]
    runs = [step for step in steps if "run" in step]
    assert [step["run"] for step in runs] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert runs[0]["env"] == {"PYTHON": "python"}  # which the Makefile takes: the one that was set up
    (version,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert version == "${{ matrix.python }}"


def test_actions_are_pinned_by_their_major_version() -> None:
    assert [path.name for path in WORKFLOWS] == ["ci.yml"]
    used = re.findall(r"uses: (\S+)", WORKFLOWS[0].read_text("utf-8"))
    assert used and all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used)
