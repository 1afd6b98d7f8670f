"""The bench: what it prints follows from what it measured. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cupynet import bench, bench_gpu, measure
from cupynet.errors import ConfigError
from cupynet.settings import BenchSettings
from tests.test_conf_files import settings_of
from tests.test_train import run

ROOT = Path(__file__).resolve().parents[1]
RESULT = {
    "batch_size": 100,
    "accumulate": 1,
    "ceiling_gflop_per_s": {"one core": 50.0, "all cores": 100.0},
    "operations": [
        {"operation": "conv forward", "ms": 2.0, "mflop": 60.0, "gflop_per_s": 30.0, "share_of_ceiling": 0.6},
        {"operation": "conv backward", "ms": 4.0, "mflop": 40.0, "gflop_per_s": 10.0, "share_of_ceiling": 0.2},
        {"operation": "update", "ms": 0.5},
    ],
    "images_per_s": {
        "loop, workers=1": 40000.0,
        "bare step, workers=1": 44000.0,
        "torch channels_last, threads=1": 20000.0,
        "loop, workers=2": 76000.0,
        "bare step, workers=2": 80000.0,
        "torch channels_last, threads=2": 38000.0,
        "train, threads=2": 75000.0,
        "train, ranks=2": 74250.0,
        "torch channels_last, processes=2": 37500.0,
    },
}


def test_ratios() -> None:
    found = bench.ratios(SimpleNamespace(placement=SimpleNamespace(workers=2)), RESULT)
    assert found == {
        "loop as dense arithmetic / ceiling of all cores": pytest.approx(76000 * 1.0e-3 / 100),  # 1 MFLOP per image
        "loop, workers=2 / bare step": pytest.approx(0.95),
        "loop, workers=2 / workers=1": pytest.approx(1.9),
        "loop, workers=1 / torch channels_last, threads=1": pytest.approx(2.0),
        "loop, workers=2 / torch channels_last, threads=2": pytest.approx(2.0),
        "train, ranks=2 / train, threads=2": pytest.approx(0.99),
        "train, threads=2 / torch channels_last, processes=2": pytest.approx(2.0),
        "train, ranks=2 / torch channels_last, processes=2": pytest.approx(1.98),
    }


def test_ratios_without_mpi_and_without_a_second_core() -> None:
    kept = {"loop, workers=1", "bare step, workers=1", "train, threads=2", "torch channels_last, processes=2"}
    result = RESULT | {"images_per_s": {k: v for k, v in RESULT["images_per_s"].items() if k in kept}}  # type: ignore[attr-defined]
    found = bench.ratios(SimpleNamespace(placement=SimpleNamespace(workers=1)), result)
    assert [name for name in found if "train" in name] == ["train, threads=2 / torch channels_last, processes=2"]


def test_memory_is_compared_with_a_straight_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    def trained(overrides: list[str]) -> tuple[None, float]:
        return None, 200e6 + 20e6 * int(overrides[-1].removeprefix("workers=")) + 10e6 * ("workers=8" in overrides)

    monkeypatch.setattr(measure, "trained", trained)
    found = bench.memory(tmp_path)
    assert list(found["mb"]) == [1, 2, 8, 16, 32] and found["mb"][32] == pytest.approx(840)
    assert found["line"]["mb_per_worker"] == pytest.approx(20, rel=0.05) and 0 < found["line"]["off_by"] < 0.05
    assert "MB a worker" in capsys.readouterr().out


def test_whole_runs_have_as_many_workers_whatever_was_typed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads, and two ranks, which are workers themselves; with the folder of settings that was named."""
    stored, mine, ran = tmp_path / "run/.hydra", tmp_path / "mine", []
    stored.mkdir(parents=True)
    mine.mkdir()
    (stored / "overrides.yaml").write_text("- workers=1\n- model=own\n- repeats=1\n")
    source = f"{{path: {mine}, schema: file, provider: command-line}}"
    (stored / "hydra.yaml").write_text(f"hydra: {{runtime: {{config_sources: [{source}]}}}}\n")
    for name, result in (("loop_images_per_s", 1.0), ("step_times", np.ones((1, 2)))):
        monkeypatch.setattr(measure, name, lambda *_, result=result, **__: result)

    def trained(overrides: list[str], ranks: int = 0) -> Any:
        ran.append((overrides, ranks))
        return SimpleNamespace(images_per_s=1.0), 0

    monkeypatch.setattr(measure, "trained", trained)
    settings = SimpleNamespace(images=10, repeats=1, peers=None, batch_size=1)
    experiment = SimpleNamespace(
        load=lambda: SimpleNamespace(train=range(5)), placement=SimpleNamespace(workers=1), settings=settings
    )
    asked: Any = SimpleNamespace(experiment=experiment, settings=settings, without_ranks="", network=None)
    found = bench.loops(asked, tmp_path / "run")
    assert {"train, threads=2", "train, ranks=2"} <= found.keys()
    common = [f"--config-dir={mine}", "data=synthetic", "model=own", "epochs=2", "evaluate_every_epochs=2"]
    assert ran == [([*common, "workers=2"], 0), (common, 2)]


def test_the_table_has_a_line_for_everything() -> None:
    lines = bench.table(
        {**RESULT, "ratios": bench.ratios(SimpleNamespace(placement=SimpleNamespace(workers=2)), RESULT)}
    )
    for name in (*RESULT["images_per_s"], "conv forward", "update"):  # type: ignore[misc]
        assert any(line.startswith(name) for line in lines)
    assert any(line.split() == ["sum", "6.500"] for line in lines)


def test_the_table_says_in_how_many_parts_a_batch_was() -> None:
    assert any(line.startswith("one core, batch of 100   ") for line in bench.table(RESULT | {"ratios": {}}))
    lines = bench.table(RESULT | {"ratios": {}, "accumulate": 4})
    assert any(line.startswith("one core, batch of 100 in 4 parts ") for line in lines)


def test_parts_of_batches_are_not_measured_beside_pytorch_on_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    for setting in ("peers=torch", "gpu=true"):
        key, _, value = setting.partition("=")
        base = settings_of("data=synthetic", "accumulate=2")
        own = {each.name: getattr(base, each.name) for each in fields(base)}
        settings = BenchSettings(**own, **{key: value == "true" or value})
        line = f"^accumulate=2: with {setting} PyTorch's step on a whole batch is measured beside ours: leave it at 1$"
        with pytest.raises(ConfigError, match=line):
            bench.prepare(settings)


def test_arithmetic_is_counted_by_layer() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Image, Model
    from tests.training.test_trainer import lenet

    for name in ("numpy", "numba"):
        model = Model(lenet(), Image(28, 28, 1), create_backend(name))
        flop = {step: count for step, _, count in measure.network_steps(model)}
        assert sum(flop.values()) == 2 * (24 * 24 * 25 * 20 + 8 * 8 * 500 * 50 + 800 * 500 + 500 * 10)
        assert ("conv1 + pool1" in flop) == (name == "numba")


def test_arithmetic_within_blocks_is_counted() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Conv2D, Dense, Image, MaxPool2D, Model, Sequential
    from tests.nn.networks import Around

    for name in ("numpy", "numba"):
        block = Sequential([Conv2D(3, (3, 5), padding="same"), MaxPool2D(2), Around(Sequential([Conv2D(3, 1)]))])
        model = Model(Sequential({"block": block, "output": Dense(10)}), Image(8, 6, 2), create_backend(name))
        flop = {step: count for step, _, count in measure.network_steps(model)}
        assert flop == {"block": 2 * (8 * 6 * 15 * 2 * 3 + 4 * 3 * 3 * 3), "output": 2 * 36 * 10}


def test_an_unknown_peer_is_refused(tmp_path) -> None:
    _, stderr = run(tmp_path, "peers=torhc", command="bench", code=2)
    assert stderr == "cupynet: peers=torhc: must be torch, or null for none\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stderr", "reason"), [("Traceback\nImportError: no", "ImportError: no"), ("", "status -9")])
def test_a_peer_that_fails_says_why(stderr: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=-9, stderr=stderr, stdout="")
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=f"could not be measured: .*{reason}"):
        measure.peer("--threads", 1)


def test_a_peer_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PEER_S", 0.01)
    with pytest.raises(ConfigError, match=r"^peers=torch: PyTorch could not be measured: it takes more than 0.01 s$"):
        measure.peer("--threads", 1)


@pytest.mark.slow
def test_a_bench_measures_and_writes(tmp_path) -> None:
    stdout, _ = run(tmp_path, "repeats=1", "images=2000", "data.train=2000", "workers=2", command="bench")
    (file,) = tmp_path.glob("outputs/bench/*/*/bench.json")
    result = json.loads(file.read_text())
    assert all(rate > 0 for rate in result["images_per_s"].values()) and "conv2 + pool2 backward" in stdout
    assert result["optimizer"] == "Nesterov" and result["model"][3].split()[:2] == ["conv1", "Conv2D"]


@pytest.mark.slow
def test_memory_grows_with_the_workers_and_no_faster(tmp_path) -> None:
    """32 workers train an epoch on these cores, and each costs what the one before it did."""
    run(tmp_path, "workers_memory=true", "data.train=4096", "data.test=500", "batch_size=32", command="bench")
    (file,) = tmp_path.glob("outputs/bench/*/*/memory.json")
    found = json.loads(file.read_text())
    assert list(found["mb"]) == ["1", "2", "8", "16", "32"] and found["line"]["off_by"] < 0.15
    early, late = ((found["mb"][b] - found["mb"][a]) / (int(b) - int(a)) for a, b in (("2", "8"), ("16", "32")))
    assert late < 1.5 * early


# on a GPU -------------------------------------------------------------------------------------------------------------

SMALL = [
    *("data=synthetic", "data.train=32", "data.test=16", "batch_size=16", "epochs=1", "repeats=1", "seeds=1"),
    *("images=32", "model.layers.conv1.filters=2", "model.layers.conv2.filters=2", "model.layers.dense1.units=4"),
]


def on_the_standin(tmp_path: Path, *arguments: str) -> Any:
    line = [sys.executable, "-c", MADE_SMALL, "--devices", "1", "-m", "cupynet.bench", "gpu=true", *SMALL, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "1"}
    return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)


# the stand-in computes as a GPU does, but not as fast: one of each
MADE_SMALL = """
import sys
from cupynet import bench_gpu, measure
from tests.standin.__main__ import main
measure.LARGE, bench_gpu.STEP_S = 8, 0.01
long = measure.timed
measure.timed = lambda work, backend, at_least_s=0.0: long(work, backend, 0.0)
sys.exit(main(sys.argv[1:]))
"""


def test_a_gpu_is_measured_whole(tmp_path: Path) -> None:
    """Without PyTorch; every figure is there, or why it is not."""
    done = on_the_standin(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "outputs" / "records").glob("gpu-made-up-device-20*.json")
    found = json.loads(file.read_text())
    assert found["device"]["name"] == "made-up device" and found["cuda"]["cupy"] == "14.2.0"
    assert found["environment"]["cores"] and found["dataset"] == "synthetic" and "commit" in found
    assert found["step"]["cupynet"]["median"] > 0 and len(found["step"]["cupynet"]["all"]) == 1
    if find_spec("torch") is None:
        for name in ("torch", "torch, CUDA graph"):
            assert found["step"][name] == {"not_measured": "PyTorch is not installed"}
    operations = {row["operation"] for row in found["operations"]}
    assert operations >= {"conv1 + pool1 forward", "output backward", "loss", "update", "load batch"}
    assert found["epoch"]["seconds"]["median"] > 0 and found["epoch"]["images"] == 32
    (reached,) = found["to_accuracy"]
    assert reached["seed"] == 0 and reached["epochs"] == len(reached["accuracies"]) == 1
    assert list(found["loop_images_per_s"]) == ["float", "half", "bfloat16"]
    for dtype, row in found["loop_images_per_s"].items():
        assert list(row) == ["1", "2", "4"]
        there = dtype != "bfloat16" or find_spec("ml_dtypes") is not None
        assert all(rate > 0 if there else "ml_dtypes" in rate for rate in row.values())
    *_, last = done.stdout.strip().splitlines()
    assert last == f"written to outputs/records/{file.name}"
    for line in (
        "cupynet  ",
        "conv2 + pool2 backward",
        "an epoch of 32 images",
        "99.0 % on the test images",
        "half   ",
    ):
        assert any(printed.startswith(line) for printed in done.stdout.splitlines()), line


def test_a_machine_without_a_gpu_is_not_measured_as_one(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, "gpu=true", "backend=numpy", command="bench", code=2)
    assert stderr.startswith("cupynet: gpu=true: measures on a GPU, and none is used: ")


def test_a_record_of_the_same_day_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        str(bench_gpu.write({"device": {"name": "NVIDIA H200 (141GB)"}, "date": "2026-01-02", "turn": turn}))
        for turn in range(3)
    ]
    stem = "outputs/records/gpu-nvidia-h200-141gb-2026-01-02"
    assert names == [f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"]
    assert [json.loads(Path(name).read_text())["turn"] for name in names] == [0, 1, 2]


def test_a_peer_is_measured_in_turn_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that fails is told, and the rest goes on."""
    asked: list[tuple[Any, ...]] = []

    def peer(*options: Any) -> float:
        asked.append(options)
        if "--graph" in options:
            raise ConfigError("peers=torch: PyTorch could not be measured: no graph")
        return 1000.0 * len(asked)

    monkeypatch.setattr(measure, "peer", peer)
    monkeypatch.setattr(bench_gpu, "find_spec", lambda name: object())
    monkeypatch.setattr(measure, "step_times", lambda *_: np.array([[0.001, 0.0, 3, 0.001]]))
    settings: Any = SimpleNamespace(batch_size=128, repeats=3, dtype="float")
    found = bench_gpu.steps(cast(Any, None), settings)
    assert found["cupynet"]["median"] == pytest.approx(128_000) and len(found["cupynet"]["all"]) == 3
    assert found["torch"]["all"] == [1000.0, 3000.0, 4000.0] and found["torch"]["median"] == 3000.0
    assert found["torch, CUDA graph"] == {"not_measured": "peers=torch: PyTorch could not be measured: no graph"}
    assert asked[0] == ("--device", "cuda", "--batch", 128, "--seconds", bench_gpu.STEP_S)
