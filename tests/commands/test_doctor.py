"""The doctor: its findings on a complete machine, and on machines that lack one thing each."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cupynet.commands import doctor
from cupynet.commands.doctor import Finding
from cupynet.core.errors import DataError
from cupynet.data import MNIST
from tests.support.commands import environment, run
from tests.support.mirrors import NAMES, TinyMNIST
from tests.support.mpi import needs_mpi

SMALL = ["data=synthetic", "data.train=64", "data.test=32", "batch_size=8", "workers=1"]


@pytest.mark.slow
def test_doctor_finds_no_problem_on_a_machine_that_can_train_and_leaves_no_files(tmp_path: Path) -> None:
    lines = run(tmp_path, *SMALL, command="doctor")[0].splitlines()
    assert not any(line.startswith("problem") for line in lines)
    for part in ("python", "packages", "cpu", "memory", "blas", "gpu", "mpi", "data", "disk", "training"):
        assert any(line[9:].startswith(part) for line in lines), part
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_doctor_exits_with_the_code_of_the_first_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = {
        "disk": [Finding("data", "problem", "damaged: bring others", 65)],
        "training": [Finding("training", "problem", "refused", 2), Finding("training", "note", "x")],
    }
    monkeypatch.setattr(doctor, "examine", lambda name, settings: findings.get(name, []))
    assert doctor.diagnose([]) == 65
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["problem", "data"] and "65" in lines[-1]


@pytest.mark.parametrize(
    ("name", "error", "finding"),
    [
        ("gpu", ImportError("gone"), Finding("gpu", "note", "ImportError: gone")),
        ("training", DataError("damaged"), Finding("training", "problem", "damaged", 65)),
        ("training", IndexError("x"), Finding("training", "problem", "IndexError: x", 1)),
    ],
)
def test_a_check_of_doctor_that_fails_is_a_finding(
    name: str, error: Exception, finding: Finding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier findings are kept."""

    def check(settings: Sequence[str]) -> Iterator[Finding]:
        yield Finding(name, "ok", "one")
        raise error

    monkeypatch.setitem(doctor.CHECKS, name, check)
    assert doctor.examine(name, []) == [Finding(name, "ok", "one"), finding]


def test_doctor_reports_a_package_that_cannot_be_imported_without_a_traceback(tmp_path: Path) -> None:
    """This includes packages that other commands import first."""
    (tmp_path / "hydra.py").write_text("raise ImportError('libgone.so: cannot open shared object file')")
    path = f"{tmp_path}{os.pathsep}{environment()['PYTHONPATH']}"
    out, err = run(tmp_path, command="doctor", code=1, PYTHONPATH=path)
    assert "libgone.so" in out and "Traceback" not in out + err


@pytest.mark.standin
def test_doctor_lists_gpus_one_by_one() -> None:
    found = list(doctor.check_gpu([]))
    assert [finding.part for finding in found] == ["cupy", "nccl", "gpu 0", "gpu 1"]
    assert {finding.state for finding in found} == {"ok"}
    assert "CUDA 12.9" in found[0].text and all(part in found[2].text for part in ("made-up device", "9.0", "1.1 GB"))


def test_doctor_says_why_a_gpu_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")  # there is a driver
    monkeypatch.setattr("cupynet.backend.cuda.gpus.probe", lambda: "no kernel image")
    (found,) = doctor.check_gpu([])
    assert found[:2] == ("gpu", "note") and "no kernel image" in found.text and "cupynet[cuda12x]" in found.text


@needs_mpi[0]
@needs_mpi[1]
def test_doctor_finds_that_two_ranks_communicate() -> None:
    (found,) = doctor.check_mpi([])
    assert found.state == "ok", found


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "shown"),
    [
        (0, "I am process 0 of 1\n" * 2, "", "I am process 0 of 1"),
        (0, "I am process 0 of 2\n", "", "I am process 0 of 2"),
        (3, "", "it is broken\n", "it is broken"),
        (3, "", "-----\nno slots\nread the manual\n-----\n", "no slots"),
    ],
)
def test_doctor_says_why_ranks_do_not_communicate(
    code: int, stdout: str, stderr: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = subprocess.CompletedProcess("mpiexec", code, stdout, stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(doctor, "find_mpiexec", lambda: "mpiexec")
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    (found,) = doctor.check_mpi([])
    assert found.state == "note" and shown in found.text


def of_data(*settings: str) -> Finding:
    """Return the finding about the data, which is the first one."""
    return doctor.examine("training", [*settings, "workers=1", "model=mlp"])[0]


def test_doctor_tells_complete_missing_and_damaged_data_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TinyMNIST(tmp_path)
    tiny.write()
    monkeypatch.setattr(MNIST, "files", tiny.files)
    monkeypatch.setenv("CUPYNET_DATA", str(tmp_path))
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    assert of_data() == Finding("data", "ok", "mnist")
    labels = tiny.folder / NAMES[1]
    content = labels.read_bytes()
    labels.unlink()
    found = of_data("data.fallback=synthetic")
    assert found[:2] == ("data", "note") and "synthetic" in found.text
    for asked in ([], ["data.fallback=null"]):  # CUPYNET_DATA names the folder
        found = of_data(*asked)
        assert (found.state, found.code) == ("problem", 65) and labels.name in found.text
    monkeypatch.delenv("CUPYNET_OFFLINE")
    found = of_data()  # they would be downloaded
    assert found.state == "note" and str(tiny.folder) in found.text
    labels.write_bytes(content[:-9])
    found = of_data()
    assert (found.state, found.code) == ("problem", 65) and str(labels) in found.text


def test_doctor_checks_a_run_with_the_settings_of_its_command_line() -> None:
    _, found = doctor.examine("training", [*SMALL, "backend=numpy"])
    assert found.state == "ok" and "numpy" in found.text
    (found,) = doctor.examine("training", [*SMALL, "workers=0"])
    assert (found.state, found.code) == ("problem", 2) and found.text.startswith("workers=0: ")


def test_a_file_named_outputs_is_a_problem_with_code_74(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs").touch()
    (found,) = doctor.check_disk([])
    assert (found.state, found.code) == ("problem", 74)


def test_a_full_disk_is_a_problem_with_code_74(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file can be created on it."""
    monkeypatch.chdir(tmp_path)
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda **_: full)
        (found,) = doctor.check_disk([])
    assert (found.state, found.code) == ("problem", 74)
