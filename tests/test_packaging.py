"""Installation: the wheel in an empty environment, the supported Pythons, and the packages that make installs."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests import wheels
from tests.support.commands import ROOT


@pytest.mark.slow
def test_a_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    wheel = wheels.built(tmp_path)
    empty = wheels.use(sys.executable, wheel, "", tmp_path)
    assert [path.name for path in empty.iterdir()] == ["outputs"]
    assert list(empty.glob("outputs/**/report.html"))
    inside = zipfile.ZipFile(wheel).namelist()
    kernels = [path.relative_to(wheels.ROOT).as_posix() for path in wheels.ROOT.glob("cupynet/**/*.cu*")]
    assert len(kernels) > 1 and {"cupynet/conf/config.yaml", *kernels} <= set(inside)


def test_every_supported_python_is_in_the_classifiers_the_makefile_and_the_ci_workflow() -> None:
    project, makefile = ((ROOT / name).read_text("utf-8") for name in ("pyproject.toml", "Makefile"))
    (oldest, beyond) = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project)[0]
    versions = [f"3.{minor}" for minor in range(int(oldest), int(beyond))]
    (workflow,) = (ROOT / ".github" / "workflows").iterdir()
    gate = yaml.safe_load(workflow.read_text("utf-8"))["jobs"]["gate"]
    assert versions == wheels.supported() == gate["strategy"]["matrix"]["python"]
    assert f"OLDEST := 3.{oldest}\n" in makefile and f"BEYOND := 3.{beyond}\n" in makefile


def test_make_train_installs_no_packages_for_tests_and_make_test_does(tmp_path: Path) -> None:
    def recipe(target: str) -> str:
        command = ["make", "-n", target, f"VENV={tmp_path}"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert ".[images,plots" in recipe("train") and "dev" not in recipe("train").replace("/dev/null", "")
    assert ".[dev,mpi" in recipe("test")
    Path(re.findall(r'touch "(.+)"', recipe("train"))[0]).touch()  # newer than pyproject.toml
    assert "pip install" not in recipe("train") and "pip install" in recipe("test")
