"""`cupynet report` as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.mpi import needs_mpi, under_mpiexec
from tests.support.run_folders import finished, unfinished

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("data=synthetic", "data.train=100", "data.test=50", "batch_size=16", "backend=numpy", "model=mlp")


def report(*arguments: str, **more: str) -> warm.Done:
    return warm.command("cupynet", ("report", *arguments), ROOT, {**os.environ, **more}, 120, **more)


def report_into(shell: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a line of a shell, in which it is `"$0" "$@"`."""
    words = [sys.executable, "-m", "cupynet", "report", *arguments]
    return subprocess.run(
        ["bash", "-c", shell, *words], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_report_writes_the_page_and_prints_its_path(tmp_path):
    folder = finished(tmp_path)
    done = report(str(folder))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{folder}/report.html\n", "")
    assert "<svg" in (folder / "report.html").read_text() and (folder / "curves.png").is_file()


def test_open_shows_it_in_the_browser(tmp_path):
    folder = unfinished(tmp_path)
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {seen}\n')
    browser.chmod(0o755)
    done = report(str(folder), "--open", BROWSER=f"{browser} %s")
    assert (done.returncode, done.stderr) == (0, "")
    assert seen.read_text() == (folder / "report.html").as_uri() + "\n"


WRONG = {
    "missing": (lambda folder: folder, 2, "is not the folder of a run: name one under outputs/"),
    "a file": (lambda folder: Path(__file__), 2, "is not the folder of a run"),
    "no run": (lambda folder: ROOT / "tests", 2, "is not the folder of a run"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, name):
    where, code, text = WRONG[name]
    done = report(str(where(tmp_path / "none")))
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith("cupynet: ") and text in done.stderr and done.stderr.count("\n") == 1


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    folder = unfinished(tmp_path)
    (folder / "report.html" / "x").mkdir(parents=True)
    done = report(str(folder))
    assert done.returncode == 74 and done.stderr.startswith(f"cupynet: {folder}/report.html: cannot be written")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("where", [">&-", "> /dev/full"])
def test_a_closed_stdout_is_no_error(tmp_path, where):
    folder = unfinished(tmp_path)
    done = report_into(f'"$0" "$@" {where}', str(folder))
    assert "Traceback" not in done.stderr and (folder / "report.html").is_file()


def test_help_has_an_example():
    done = report("--help")
    assert done.returncode == 0 and "cupynet report outputs/" in done.stdout


@pytest.mark.slow
@pytest.mark.mpi
@needs_mpi[1]
def test_of_several_processes_one_has_the_page(tmp_path):
    settings = (*QUICK, "epochs=1", "parallel.launcher=mpi", f"hydra.run.dir={tmp_path}/run")
    done = under_mpiexec(2, "-m", "cupynet", "train", *settings, cwd=tmp_path, CUPYNET_REPORT="true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "report.html cannot be written" not in done.stdout + done.stderr
    text = (tmp_path / "run" / "report.html").read_text()
    assert "finished" in text and "mpiexec -n 2 cupynet train" in text
