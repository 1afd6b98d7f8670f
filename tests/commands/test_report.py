"""`cupynet report` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cupynet.commands.report import main
from tests.support.commands import Call, environment
from tests.support.mpi import needs_mpi, under_mpiexec
from tests.support.run_folders import finished, unfinished

QUICK = ("data=synthetic", "data.train=100", "data.test=50", "batch_size=16", "backend=numpy", "model=mlp")


def test_report_writes_the_page_and_prints_its_path(tmp_path: Path, call: Call) -> None:
    folder = finished(tmp_path)
    assert call(main, folder) == (0, f"{folder}/report.html\n", "")
    assert "<svg" in (folder / "report.html").read_text() and (folder / "curves.png").is_file()


@pytest.mark.parametrize("name", ["none", Path(__file__).parent], ids=["missing", "no run"])
def test_a_folder_that_is_not_a_run_is_refused(name: object, call: Call) -> None:
    found = call(main, name)
    assert (found.code, found.out) == (2, "") and str(name) in found.error


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path, call: Call) -> None:
    folder = unfinished(tmp_path)
    (folder / "report.html" / "x").mkdir(parents=True)
    found = call(main, folder)
    assert found.code == 74 and f"{folder}/report.html" in found.error


def test_a_closed_stdout_is_no_error(tmp_path: Path) -> None:
    folder = unfinished(tmp_path)
    command = f"{sys.executable} -m cupynet report {folder} >&-"
    done = subprocess.run(["bash", "-c", command], env=environment(), stderr=subprocess.PIPE, text=True, timeout=120)
    assert "Traceback" not in done.stderr and (folder / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.mpi
@needs_mpi[1]
def test_of_several_processes_one_has_the_page(tmp_path: Path) -> None:
    settings = (*QUICK, "epochs=1", "parallel.launcher=mpi", f"hydra.run.dir={tmp_path}/run")
    done = under_mpiexec(2, "-m", "cupynet", "train", *settings, cwd=tmp_path, CUPYNET_REPORT="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report.html" not in done.stderr
    text = (tmp_path / "run" / "report.html").read_text()
    assert "finished" in text and "mpiexec -n 2 cupynet train" in text
