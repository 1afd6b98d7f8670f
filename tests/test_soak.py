"""A sample of `make soak`: each place of the save path, and moments at random."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests import soak
from tests.support.commands import ROOT, environment

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

KILLS = """
import sys
from pathlib import Path
from tests import soak

soak.warm()
runs = soak.Soak(Path(sys.argv[1]), images=160, seed=1, say=print)
for number, (mode, place) in enumerate(
    [("averaging, 1 worker", "mid-write"), ("gradients, 4 workers", "before rename")]
):
    fault = runs.refer(mode)
    assert not fault, fault
    point = runs.point(number, mode, place)
    assert point.kills and not point.fault, point
"""


@linux
@pytest.mark.slow
def test_a_run_that_is_killed_in_a_save_resumes_bit_for_bit(tmp_path):
    command = [sys.executable, "-c", KILLS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@linux
@pytest.mark.slow
def test_twelve_runs_that_are_killed_resume_bit_for_bit(tmp_path):
    command = [sys.executable, "-m", "tests.soak", "--points", "12", "--repeats", "3", "--images", "640"]
    command += ["--lanes", "2", "--no-drift", "--folder", str(tmp_path / "soak")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert (found["points"], found["agreed"], found["faults"]) == (12, 12, [])
    assert found["repeats"] == {"runs": 3, "outcomes": 1} and found["numpy_and_numba_apart_in_double"] < 1e-9


def test_a_soak_reaches_every_place_in_every_mode():
    assert {soak.case(number)[1] for number in range(12)} == {*soak.PLACES, "moment"}
    assert {soak.case(number) for number in range(4 * len(soak.KINDS))} == {
        (mode, kind) for mode in soak.MODES for kind in soak.KINDS
    }


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda folder: (folder / ".weights.safetensors.7.part").touch(), "left over: .weights.safetensors.7.part"),
        (
            lambda folder: (folder / "checkpoints/step-00000001.old-7").mkdir(),
            "left over: checkpoints/step-00000001.old",
        ),
        (lambda folder: (folder / "history.jsonl").write_text('{"loss": 1.5, "a_s": 2}\n'), "other history"),
        (lambda folder: (folder / "weights.safetensors").write_bytes(b"1"), "other final weights"),
        (lambda folder: (folder / "summary.json").unlink(), "FileNotFoundError"),
        (lambda folder: (folder / "history.jsonl").write_text('{"loss": 1.25, "a_s": 3}\n'), ""),
    ],
)
def test_a_soak_finds_differences(tmp_path, harm, said):
    from cupynet.runs.checkpoints import Checkpoints

    Checkpoints(tmp_path / "checkpoints").save(3, {"workers": []}, {"weights": {}, "state": {}})
    (tmp_path / "history.jsonl").write_text('{"loss": 1.25, "a_s": 2}\n')
    (tmp_path / "weights.safetensors").write_bytes(b"0")
    summary = dict.fromkeys(("epochs", "iterations", "images", "test_loss", "test_accuracy"), 1)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    wanted = soak.left_by(tmp_path)
    harm(tmp_path)
    found = soak.differences(tmp_path, wanted)
    assert found.startswith(said) and bool(found) == bool(said)


def test_drift_is_detected(tmp_path):
    def watched(growth: float, threads: list[int]) -> str:
        samples = [
            {"s": 10.0 * n, "fits": n, "rss_mb": 100 * (1 + growth * n / 60), "descriptors": 5, "pool_bytes": 1}
            | {"threads": threads[n % len(threads)], "python_threads": 2}
            for n in range(61)
        ]
        (tmp_path / "drift.jsonl").write_text("\n".join(map(json.dumps, samples)))
        return soak.drift(tmp_path / "drift.jsonl")["fault"]

    assert watched(0.005, [5]) == ""
    assert watched(0.03, [5]).startswith("memory grew by 2.")
    assert watched(0.0, [5, 6]) == "threads from 5 to 6"
