"""A sample of `make soak`, and its judgment of runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupynet.runs.checkpoints import Checkpoints
from tests import soak
from tests.support.commands import ROOT, environment


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_runs_killed_at_twelve_places_resume_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--points", "12", "--images", "640"]
    command += ["--lanes", "2", "--no-drift", "--folder", str(tmp_path / "soak")]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "soak" / "soak.json").read_text())
    assert (found["points"], found["agreed"], found["faults"]) == (12, 12, [])


def test_twelve_points_of_a_soak_reach_every_place_and_68_every_place_in_every_mode() -> None:
    assert {soak.case(number)[1] for number in range(12)} == {*soak.PLACES, "moment"}
    every = {(mode, kind) for mode in soak.MODES for kind in soak.KINDS}
    assert {soak.case(number) for number in range(68)} == every


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Make the files that a run leaves."""
    Checkpoints(tmp_path / "checkpoints").save(3, {"workers": []}, {"weights": {}, "state": {}})
    (tmp_path / "history.jsonl").write_text('{"loss": 1.25, "a_s": 2}\n')
    (tmp_path / "weights.safetensors").write_bytes(b"0")
    summary = dict.fromkeys(("epochs", "iterations", "images", "test_loss", "test_accuracy"), 1)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    return tmp_path


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda run: (run / ".a.7.part").touch(), [".a.7.part"]),
        (lambda run: (run / "checkpoints/step-1.old-7").mkdir(), ["checkpoints/step-1.old-7"]),
        (lambda run: (run / "history.jsonl").write_text('{"loss": 1.5, "a_s": 2}\n'), ["history"]),
        (lambda run: (run / "weights.safetensors").write_bytes(b"1"), ["final weights"]),
        (lambda run: (run / "history.jsonl").write_text('{"loss": 1.25, "a_s": 3}\n'), []),
    ],
    ids=["temporary file", "old checkpoint", "loss", "weights", "time"],
)
def test_soak_compares_results_and_temporary_files_but_no_times(
    run: Path, change: Callable[[Path], None], found: list[str]
) -> None:
    wanted = soak.left_by(run)
    change(run)
    assert soak.differences(run, wanted) == found


@pytest.mark.parametrize(
    ("growth", "threads", "faults"),
    [(0.005, [5], []), (0.03, [5], ["rss_mb"]), (0.0, [5] * 30 + [6] * 31, ["threads"]), (0.0, [5, 6], [])],
)
def test_soak_reports_growing_memory_and_threads(growth: float, threads: list[int], faults: list[str]) -> None:
    samples = [
        {"s": 10.0 * n, "fits": n, "rss_mb": 100 * (1 + growth * n / 60), "threads": threads[n % len(threads)]}
        for n in range(61)
    ]
    assert soak.drift([{**each, "descriptors": 5} for each in samples])["faults"] == faults
