"""The records of `make test-gpu`, here for made-up tests on CuPy's stand-in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupynet.bench import records as bench_records
from tests.support.commands import ROOT

MADE_UP = """
import pytest

@pytest.fixture
def broken():
    raise OSError

@pytest.mark.parametrize("number", range(5))
def test_right(number): pass

def test_around(broken): pass
def test_not_here(): pytest.skip("there is one device")

@pytest.mark.xfail
def test_known(): assert False

def test_lost():
    from tests.standin import machine

    machine.switched_on().lose(0)
    assert False
"""


def run_tests(folder: Path, *arguments: str, standin: bool = True) -> subprocess.CompletedProcess[str]:
    (folder / "test_made_up.py").write_text(MADE_UP)
    (folder / "pytest.ini").write_text("[pytest]\n")
    line = [sys.executable, *(["-m", "tests.standin"] if standin else []), "-m", "pytest", "-q"]
    line += ["-p", "no:cacheprovider", "-p", "tests.gpu_record", *arguments]
    hidden = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(line, cwd=folder, env=os.environ | hidden, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_outcomes_of_gpu_tests_are_recorded_even_if_the_device_is_lost(processes: int, tmp_path: Path) -> None:
    done = run_tests(tmp_path, *(["-p", "xdist.plugin", "-n", str(processes)] if processes else []))
    (path,) = tmp_path.glob("outputs/records/gpu-tests-made-up-device-*")
    found = json.loads(path.read_text())
    assert done.returncode == found["exit_status"] == 1, done.stdout + done.stderr
    counts = {"passed": 5, "failed": 1, "error": 1, "skipped": 1, "xfailed": 1, "xpassed": 0}
    assert found["counts"] == counts and found["seconds"] > 0
    assert found["failures"] == [f"test_made_up.py::test_{name}" for name in ("around", "lost")]
    assert found["skipped_because"] == {"there is one device": 1}
    assert found["device"]["name"] == "made-up device"


def test_records_of_one_day_do_not_replace_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_records, "RECORDS", tmp_path / "records")
    made = [bench_records.write({"device": {"name": "A (B)"}, "date": "2026-01-02", "n": n}) for n in range(3)]
    assert [path.name for path in made] == [f"gpu-a-b-2026-01-02{end}.json" for end in ("", "-2", "-3")]
    assert [json.loads(path.read_text())["n"] for path in made] == [0, 1, 2]


def test_without_a_gpu_no_gpu_test_runs_and_nothing_is_recorded(tmp_path: Path) -> None:
    done = run_tests(tmp_path, standin=False)
    assert done.returncode == 4
    assert not (tmp_path / "outputs").exists()
