"""The wheel in an empty environment, used in an empty folder."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests import wheels


@pytest.mark.slow
def test_a_wheel_trains_in_an_empty_folder(tmp_path: Path) -> None:
    wheel = wheels.built(tmp_path)
    empty = wheels.use(sys.executable, wheel, "", tmp_path)
    assert [path.name for path in empty.iterdir()] == ["outputs"]
    assert list(empty.glob("outputs/**/report.html"))
    inside = zipfile.ZipFile(wheel).namelist()
    kernels = [path.relative_to(wheels.ROOT).as_posix() for path in wheels.ROOT.glob("cupynet/**/*.cu*")]
    assert len(kernels) > 1 and {"cupynet/conf/config.yaml", *kernels} <= set(inside)
