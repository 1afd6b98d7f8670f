"""The benchmark: its output follows from its measurements. No time is asserted."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from cupynet.bench import gpu as bench_gpu
from cupynet.commands import bench
from cupynet.config.schema import BenchSettings
from tests.support.commands import ROOT, run
from tests.support.refusals import refused
from tests.support.settings import settings_of_command


def test_bench_reports_the_ratios_of_its_rates() -> None:
    rates = {"loop, workers=1": 40_000.0, "bare step, workers=1": 44_000.0, "torch channels_last, workers=1": 20_000.0}
    rates |= {"loop, workers=2": 76_000.0, "bare step, workers=2": 80_000.0, "torch channels_last, workers=2": 38_000.0}
    assert bench.ratios(rates) == {
        "loop, workers=1 / bare step, workers=1": pytest.approx(0.909, abs=1e-3),
        "loop, workers=1 / torch channels_last, workers=1": pytest.approx(2.0),
        "loop, workers=2 / loop, workers=1": pytest.approx(1.9),
        "loop, workers=2 / bare step, workers=2": pytest.approx(0.95),
        "loop, workers=2 / torch channels_last, workers=2": pytest.approx(2.0),
    }


@pytest.mark.parametrize(
    "arguments", [["peers=torhc"], ["gpu=true", "backend=numpy"], ["accumulation_steps=2"]], ids=" ".join
)
def test_bench_refuses_what_it_cannot_measure(arguments: list[str]) -> None:
    with refused(arguments[0].partition("=")[0]):
        bench.prepare(settings_of_command("bench", BenchSettings, *arguments))


@pytest.mark.slow
def test_bench_measures_every_rate_and_writes_bench_json(tmp_path: Path) -> None:
    stdout, _ = run(tmp_path, "repeats=1", "images=2000", "data.train=2000", "workers=2", command="bench")
    (file,) = tmp_path.glob("outputs/bench/*/*/bench.json")
    result = json.loads(file.read_text())
    assert all(rate > 0 for rate in result["images_per_s"].values()) and "conv2+pool2 backward" in stdout
    assert result["optimizer"] == "Nesterov" and result["model"][3].split()[:2] == ["conv1", "Conv2D"]


SMALL = [
    *("data=synthetic", "data.train=32", "data.test=16", "batch_size=16", "epochs=1", "repeats=1", "seeds=1"),
    *("images=32", "model.layers.conv1.filters=2", "model.layers.conv2.filters=2", "model.layers.dense1.units=4"),
]


# the stand-in is slower than a GPU, so there is only one of each
MADE_SMALL = """
import sys
from cupynet.bench import gpu as bench_gpu
from cupynet.bench import measure
from tests.standin.__main__ import main
measure.LARGE, measure.PROFILED, bench_gpu.STEP_S = 8, 2, 0.01
long = measure.timed
measure.timed = lambda work, backend, seconds: long(work, backend, 0.01)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.device_code
def test_bench_on_a_gpu_measures_every_figure_and_writes_a_record(tmp_path: Path) -> None:
    """Figures of PyTorch, which is missing here, have a reason instead."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "1"}
    line = [sys.executable, "-c", MADE_SMALL, "--devices", "1", "-m", "cupynet", "bench", "gpu=true", *SMALL]
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "outputs" / "records").glob("gpu-made-up-device-20*.json")
    found = json.loads(file.read_text())
    assert found["device"]["name"] == "made-up device" and found["cuda"]["cupy"] == "14.2.0"
    assert (found["dataset"], found["optimizer"], found["tf32"]) == ("synthetic", "Nesterov", False)
    assert list(found["step_images_per_s"]) == ["float", "half"]
    for rates in found["step_images_per_s"].values():
        assert rates["cupynet"][0] > 0 and list(rates) == ["cupynet", *bench_gpu.PEERS]
        assert all(isinstance(rates[name][0], str) and "PyTorch" in rates[name][0] for name in bench_gpu.PEERS)
    operations = {row["operation"] for row in found["operations"]}
    assert operations >= {"conv1+pool1 forward", "output backward", "update"}
    assert list(found["training"]) == [f"{dtype}, workers={workers}" for dtype, workers in bench_gpu.RUNS]
    for name, (figures,) in found["training"].items():
        if name.startswith("bfloat16") and find_spec("ml_dtypes") is None:
            assert "ml_dtypes" in figures
        else:
            assert len(figures["epoch_s"]) == len(figures["accuracy"]) == 1 and figures["images_per_s"] > 0


def test_the_seconds_to_the_target_include_every_epoch_up_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs, one = {"train_s": [1.0, 0.5, 0.5], "test_accuracy": [0.9, 0.992, 0.993]}, MagicMock()
    one.wrapper.return_value = nullcontext(MagicMock(history=SimpleNamespace(epochs=epochs)))
    monkeypatch.setattr(bench_gpu, "on_one_device", lambda settings, **changes: one)
    assert bench_gpu.training(cast(Any, MagicMock()), cast(Any, MagicMock()))["to_target_s"] == 1.5


def test_the_table_has_speeds_relative_to_pytorch_and_times_to_the_target() -> None:
    run = {"epoch_s": [1.0, 0.2, 0.1], "accuracy": [0.9, 0.99], "images_per_s": 5000.0, "to_target_s": 1.2}
    late = {**run, "accuracy": [0.9, 0.98], "to_target_s": None}
    result = {
        "device": {"name": "H100"},
        **{"dataset": "mnist", "batch_size": 128, "optimizer": "SGD"},
        "step_images_per_s": {"half": {"cupynet": [900.0], "torch": [100.0, 300.0, 500.0], "graph": ["no graph"]}},
        "operations": [{"operation": "update", "ms": 0.5}],
        "training": {"half, workers=4": [run, run, late], "bfloat16, workers=1": ["no ml_dtypes"]},
    }
    lines = [line.split() for line in bench_gpu.table(result)]
    assert ["torch,", "half", "300", "3.00"] in lines and ["graph,", "half", "no", "graph"] in lines
    assert ["half,", "workers=4", "0.150", "5,000", "99.00", "%", "1.20"] in lines
    assert ["bfloat16,", "workers=1", "no", "ml_dtypes"] in lines and ["update", "0.500"] in lines
