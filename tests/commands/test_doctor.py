"""The doctor: what it says of a machine that has everything, and of machines that lack one thing each."""

from __future__ import annotations

import gzip
import hashlib
import importlib.machinery
import json
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cupynet.commands import doctor
from cupynet.commands.doctor import Finding
from cupynet.core.errors import DataError
from cupynet.data import MNIST
from cupynet.data.idx_file import IdxFile
from tests.support import warm
from tests.support.commands import environment
from tests.support.mpi import needs_mpi

SMALL = ["data=synthetic", "data.train=64", "data.test=32", "batch_size=8", "workers=1"]


def told(folder: Path, *arguments: str, code: int = 0, **more: str) -> str:
    """What the command prints; nothing on stderr, and no traceback anywhere."""
    done = warm.command("cupynet", ("doctor", *arguments), folder, environment(**more), 240, **more)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done.stdout + done.stderr


def states(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.part, finding.state) for finding in found]


def shadow(folder: Path, name: str, text: str) -> str:
    """A module that stands in the way of one that is installed; the path to look for modules on."""
    place = folder / "shadows"
    place.mkdir(exist_ok=True)
    (place / f"{name}.py").write_text(text)
    return f"{place}{os.pathsep}{environment()['PYTHONPATH']}"


# The command ----------------------------------------------------------------------------------------------------------


def test_help_says_what_the_settings_are(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", "--help"])
    with pytest.raises(SystemExit):
        doctor.main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["key=value"])
    assert "settings of cupynet train" in line


def test_a_finding_about_a_strangers_file_cannot_control_the_terminal(monkeypatch, capsys):
    def check(settings):
        yield Finding("disk", "ok", "a\x1b[2J\u202eb")

    monkeypatch.setitem(doctor.CHECKS, "disk", check)
    assert doctor.diagnose(["check=disk"]) == 0
    assert capsys.readouterr().out == f"{'ok':<9}{'disk':<10}a\ufffd[2J\ufffdb\n"


@pytest.mark.slow
def test_a_machine_that_can_train(tmp_path):
    found = json.loads(told(tmp_path, "json=true", *SMALL))
    findings = [Finding(**each) for each in found["findings"]]
    assert found["exit_code"] == 0 and not any(each.state == "problem" or each.code for each in findings)
    parts = [each.part for each in findings]
    for part in ("python", "packages", "cpu", "memory", "blas", "numba", "gpu", "mpi", "data", "disk", "training"):
        assert part in parts, parts
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    text = told(tmp_path, *SMALL)
    assert len(text.splitlines()) >= 12 and text.splitlines()[-1].startswith("training works here")


def test_one_check_alone_and_as_json(tmp_path):
    found = json.loads(told(tmp_path, "check=cpu", "json=true"))["findings"]
    assert {each["part"] for each in found} <= {"cpu", "memory"} and "core" in found[0]["text"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["check=cpuu"], "cupynet: check=cpuu: must be one of packages, cpu, "),
        (["json=perhaps"], "cupynet: json=perhaps: must be one of true, false"),
    ],
)
def test_unsupported_arguments_are_refused(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor", *arguments])
    with pytest.raises(SystemExit) as left:
        doctor.main()
    assert left.value.code == 2 and capsys.readouterr().err.startswith(line)


def test_doctor_runs_as_one_process(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["doctor"])
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(SystemExit) as left:
        doctor.main()
    assert left.value.code == 2 and "without mpiexec" in capsys.readouterr().err


def test_the_exit_code_is_that_of_the_first_problem(monkeypatch, capsys):
    findings = {
        "cpu": [Finding("cpu", "ok", "one")],
        "data": [Finding("data", "problem", "damaged", "bring others", 65)],
        "training": [Finding("training", "problem", "refused", "", 2), Finding("training", "note", "x")],
    }
    monkeypatch.setattr(doctor, "examine", lambda name, settings: findings.get(name, []))
    assert doctor.diagnose(["check=cpu"]) == 0
    assert doctor.diagnose([]) == 65
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "problem  data      damaged: bring others"
    assert lines[-1] == "training would end with exit code 65: see the first problem"


# Checks that fail -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "finding"),
    [
        ("gpu", ImportError("gone"), Finding("gpu", "note", "could not be checked: ImportError: gone")),
        ("data", DataError("damaged"), Finding("data", "problem", "damaged", "", 65)),
        ("training", IndexError("x"), Finding("training", "problem", "IndexError: x", "", 1)),
        (
            "training",
            MemoryError("x"),
            Finding("training", "problem", "MemoryError: x", "lower batch_size or workers", 1),
        ),
    ],
)
def test_a_check_that_fails_is_a_finding(name, error, finding, monkeypatch):
    """What it found before is kept."""

    def check(settings):
        yield Finding(name, "ok", "one")
        raise error

    monkeypatch.setitem(doctor.CHECKS, name, check)
    assert doctor.examine(name, []) == [Finding(name, "ok", "one"), finding]


def test_output_of_libraries_is_not_a_finding(tmp_path):
    path = shadow(tmp_path, "mnist", "print('hello')\ndef parse_idx(x): pass")
    done = warm.command(
        "cupynet",
        ("doctor", "check=data", "json=true", "data=synthetic"),
        tmp_path,
        environment(PYTHONPATH=path),
        240,
        PYTHONPATH=path,
    )
    assert json.loads(done.stdout)["exit_code"] == 0


# Checks ---------------------------------------------------------------------------------------------------------------


def test_installed_packages_are_listed(monkeypatch):
    found = list(doctor.check_packages([]))
    assert states(found) == [("python", "ok"), ("packages", "ok")]
    assert "numpy 2" in found[1].text and "hydra-core 1.3" in found[1].text
    monkeypatch.setattr(doctor, "requirements", lambda: [])
    assert states(list(doctor.check_packages([]))) == [("python", "ok"), ("packages", "note")]


def test_packages_that_are_missing_or_of_another_version(monkeypatch):
    requirement = pytest.importorskip("packaging.requirements").Requirement
    wanted = ["numpy<1.20", "numba>=99", "nowhere-to-be-found>=2,<3", "rich"]
    monkeypatch.setattr(doctor, "requirements", lambda: [requirement(each) for each in wanted])
    found = list(doctor.check_packages([]))
    assert states(found) == [
        ("python", "ok"),
        ("numpy", "problem"),
        ("numba", "note"),  # NumPy computes without it
        ("nowhere-to-be-found", "problem"),
        ("packages", "ok"),
    ]
    assert [each.code for each in found] == [0, 1, 0, 1, 0]
    assert str(found[1]).endswith("<1.20 is required: pip install 'numpy<1.20'")
    assert str(found[3]) == "is not installed: pip install 'nowhere-to-be-found<3,>=2'"


@pytest.mark.parametrize("missing", ["hydra", pytest.param("rich", marks=pytest.mark.slow)])
def test_a_package_that_cannot_be_imported_is_no_traceback(tmp_path, missing):
    """Also the ones that other commands begin with."""
    path = shadow(tmp_path, missing, "raise ImportError('libgone.so: cannot open shared object file')")
    text = told(tmp_path, "check=packages", code=1, PYTHONPATH=path)
    assert "cannot be imported (ImportError: libgone.so: cannot open shared object file): pip install '" in text
    if missing == "hydra":
        text = told(tmp_path, "check=training", code=1, PYTHONPATH=path)
        assert text.startswith("problem  training  ImportError: libgone.so")


def test_cores_and_memory(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert states(list(doctor.check_cpu([]))) == [("cpu", "ok"), ("memory", "ok")]
    monkeypatch.setattr(os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    monkeypatch.setattr(sys.modules["cupynet.backend.environment"], "memory", lambda: (100_000_000, "this machine has"))
    found = list(doctor.check_cpu([]))
    assert states(found) == [("cpu", "ok"), ("cpu", "note"), ("memory", "note")]
    assert found[2].text == "this machine has 100 MB"
    monkeypatch.setattr(sys.modules["cupynet.backend.environment"], "memory", lambda: None)
    assert ("memory", "ok") not in states(list(doctor.check_cpu([])))


def test_environment_variables_that_limit_blas(monkeypatch):
    for name in doctor.THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("cupynet.backend.blas.threads_now", lambda: 1)
    assert states(list(doctor.check_blas([]))) == [("blas", "ok")]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr("cupynet.backend.blas.threads_now", lambda: 10_000)
    found = list(doctor.check_blas([]))
    assert states(found) == [("blas", "ok"), *[("blas", "note")] * 2]
    assert "10000 threads for" in found[1].text and "OMP_NUM_THREADS=3 control" in found[2].text


def test_numba_compiles(monkeypatch):
    pytest.importorskip("numba")
    (found,) = doctor.check_numba([])
    assert found.state == "ok" and "kernels are kept in " in found.text
    from numba.core.caching import NullCache

    from cupynet.backend.cpu.kernels import update as update_kernels

    monkeypatch.setattr(update_kernels.squared_norm, "_cache", NullCache())
    assert "compiled kernels are not kept" in next(doctor.check_numba([])).text
    monkeypatch.setattr(update_kernels, "sgd", lambda *_: None)
    (found,) = doctor.check_numba([])
    assert (found.state, found.code) == ("problem", 1)


def test_without_numba(tmp_path, monkeypatch):
    path = shadow(tmp_path, "numba", "raise ImportError('no numba')")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        (found,) = (each for each in doctor.check_packages([]) if each.part == "numba")
    assert found.state == "note" and "NumPy alone is slower" in str(found)
    assert told(tmp_path, "check=training", *SMALL, PYTHONPATH=path).startswith(
        "ok       training  backend numpy, workers=1"
    )


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Gpu:
    mem_info = (70_000_000_000, 80_000_000_000)

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with a driver, a CuPy that stands in for the real one, and two GPUs."""
    program(tmp_path, "nvidia-smi", "echo '570.86, NVIDIA H200'\necho '570.86, NVIDIA H200'")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cupy: Any = ModuleType("cupy")
    cupy.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    cupy.__version__ = "14.0.1"
    cupy.cuda = SimpleNamespace(Device=Gpu)
    cupy.cuda.runtime = SimpleNamespace(
        getDeviceCount=lambda: 2,
        driverGetVersion=lambda: 12090,
        runtimeGetVersion=lambda: 12040,
        getDeviceProperties=lambda number: {"name": b"NVIDIA H200", "major": 9, "minor": 0},
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    cupy.cuda.nccl = SimpleNamespace(get_version=lambda: 22703)
    monkeypatch.setattr("cupynet.backend.cuda.probe", lambda: None)
    return cupy


def test_gpus_are_listed_one_by_one(gpu):
    found = list(doctor.check_gpu([]))
    assert states(found) == [("driver", "ok"), ("cupy", "ok"), ("gpu 0", "ok"), ("gpu 1", "ok"), ("nccl", "ok")]
    assert found[0].text == "nvidia-smi: 570.86, NVIDIA H200; 570.86, NVIDIA H200"
    assert found[1].text == "14.0.1 for CUDA 12.4; the driver supports up to 12.9"
    assert found[2].text == "NVIDIA H200, compute capability 9.0, 70.0 GB free of 80.0 GB"
    assert found[4].text == "2.27.3"


def test_a_driver_that_is_too_old_and_no_nccl(gpu):
    gpu.cuda.runtime.runtimeGetVersion = lambda: 12100
    del gpu.cuda.nccl
    found = list(doctor.check_gpu([]))
    assert states(found)[1:] == [("cupy", "note"), ("gpu 0", "ok"), ("gpu 1", "ok"), ("nccl", "note")]


def test_a_gpu_that_cannot_be_used(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr("cupynet.backend.cuda.probe", lambda: "CuPy cannot run a kernel (no kernel image)")
    found = list(doctor.check_gpu([]))
    assert states(found) == [("driver", "ok"), ("gpu", "note")]
    assert "no kernel image" in found[1].text and "nvidia-smi" in found[1].remedy
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert "cupynet[cuda12x]" in list(doctor.check_gpu([]))[1].remedy
    program(tmp_path, "nvidia-smi", "echo 'cannot talk to the driver'; exit 9")
    assert list(doctor.check_gpu([]))[0].text == "nvidia-smi: cannot talk to the driver"


def test_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    (found,) = doctor.check_gpu([])
    assert found == Finding("gpu", "note", "there is no NVIDIA driver and no CuPy")


@needs_mpi[0]
@needs_mpi[1]
def test_two_ranks_communicate():
    (found,) = doctor.check_mpi([])
    assert found.text.startswith("two ranks communicate: ") and found.state == "ok", found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("for i in 1 2; do echo rank 0 of 1 MPI; done", "starts processes that do not see each other"),
        ("echo it is broken >&2; exit 3", "-n 2 fails (it is broken)"),
        ("echo rank 0 of 2 MPI", "-n 2 fails (rank 0 of 2 MPI)"),
        ("exit 5", "-n 2 fails (exit code 5)"),
    ],
)
def test_ranks_that_do_not_see_each_other(tmp_path, monkeypatch, text, said):
    monkeypatch.setattr(doctor, "find_mpiexec", lambda: str(program(tmp_path, "mpiexec", text)))
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    (found,) = doctor.check_mpi([])
    assert found.state == "note" and said in found.text and found.remedy


def test_without_mpi(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert states(list(doctor.check_mpi([]))) == [("mpi", "note")]
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    (found,) = doctor.examine("mpi", [])
    assert found.state == "note" and "there is no mpiexec" in found.text


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A data set of four small files, and where they belong."""
    files = []
    (tmp_path / "mnist").mkdir()
    shapes = {"images.gz": (2, 3, 3), "labels.gz": (2,), "test-images.gz": (2, 3, 3), "test-labels.gz": (2,)}
    for name, shape in shapes.items():
        content = IdxFile(name, shape, "").header + bytes(2 if len(shape) == 1 else 18)
        files.append(IdxFile(name, shape, hashlib.sha256(content).hexdigest()))
        (tmp_path / "mnist" / name).write_bytes(gzip.compress(content))
    monkeypatch.setattr(MNIST, "files", tuple(files))
    monkeypatch.setattr(MNIST, "_check_validation", lambda *_: None)
    monkeypatch.setenv("CUPYNET_DATA", str(tmp_path))
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    return tmp_path / "mnist"


def test_complete_missing_and_damaged_data(small_mnist, monkeypatch):
    whole = ("data", "ok", f"mnist is whole in {small_mnist}", "", 0)
    assert list(doctor.check_data([])) == [Finding(*whole)]
    labels = small_mnist / "labels.gz"
    content = labels.read_bytes()
    labels.unlink()
    (found,) = doctor.check_data(["data.fallback=synthetic"])
    assert found.state == "note" and "synthetic digits would be used" in found.text and "lacks labels.gz" in found.text
    for asked in ([], ["data.fallback=null"]):  # CUPYNET_DATA says where they are to be
        (found,) = doctor.check_data(asked)
        assert (found.state, found.code) == ("problem", 65)
    monkeypatch.delenv("CUPYNET_OFFLINE")
    (found,) = doctor.check_data([])
    assert found.state == "note" and "would download" in found.text
    labels.write_bytes(content[:-9])
    (found,) = doctor.examine("data", [])
    assert (found.state, found.code) == ("problem", 65) and str(labels) in found.text
    assert states(list(doctor.check_data(["data=synthetic"]))) == [("data", "ok")]
    (found,) = doctor.examine("data", ["workrs=3"])  # settings that are refused: that is said elsewhere
    assert found.code == 65


def test_the_output_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = list(doctor.check_disk([]))
    assert states(found) == [("disk", "ok")]
    assert found[0].text.startswith(f"{tmp_path}: ") and list(tmp_path.iterdir()) == []
    (tmp_path / "outputs").mkdir()
    assert next(doctor.check_disk([])).text.startswith(f"{tmp_path / 'outputs'}: ")
    monkeypatch.setattr(doctor, "ROOM", 1 << 60)
    found = list(doctor.check_disk([]))
    assert found[0].state == "note" and found[0].remedy == "make room"


def test_an_output_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    (found,) = doctor.check_disk([])
    assert (found.state, found.code) == ("problem", 74) and "Permission denied" in found.text


def test_the_settings_describe_the_run_to_check(monkeypatch):
    monkeypatch.setenv("CUPYNET_OFFLINE", "1")
    (found,) = doctor.examine("training", [*SMALL, "backend=numpy"])
    assert found.state == "ok" and found.text.startswith("backend numpy, workers=1 on cpu: one batch trained")
    (found,) = doctor.examine("training", [*SMALL, "workers=0"])
    assert (found.state, found.code) == ("problem", 2) and found.text.startswith("workers=0: ")
    monkeypatch.setattr("cupynet.training.ParallelWrapper.warm_up", lambda *_: [][1])
    (found,) = doctor.examine("training", [*SMALL, "backend=numpy"])
    assert (found.state, found.code) == ("problem", 1) and "IndexError" in found.text
