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

from cupynet.bench import gpu as bench_gpu
from cupynet.bench import measure, records
from cupynet.commands import bench
from cupynet.config.schema import BenchSettings
from cupynet.core.errors import ConfigError
from cupynet.interop import torch_source
from tests.support.commands import run
from tests.support.settings import settings_of

ROOT = Path(__file__).resolve().parents[2]
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


def test_whole_runs_ignore_a_stored_number_of_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two threads, and two ranks, which are workers themselves; with the folder of settings that was named."""
    stored, mine, ran = tmp_path / "run/.hydra", tmp_path / "mine", []
    stored.mkdir(parents=True)
    mine.mkdir()
    (stored / "overrides.yaml").write_text("- workers=1\n- model=own\n- repeats=1\n")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--config-dir", str(mine)])
    for name, result in (("loop_images_per_s", 1.0), ("step_times", np.ones((1, 2)))):
        monkeypatch.setattr(measure, name, lambda *_, result=result, **__: result)

    def run_images_per_s(overrides: list[str], ranks: int = 0) -> float:
        ran.append((overrides, ranks))
        return 1.0

    monkeypatch.setattr(measure, "run_images_per_s", run_images_per_s)
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


def test_the_table_names_the_parts_of_accumulated_batches() -> None:
    assert any(line.startswith("one core, batch of 100   ") for line in bench.table(RESULT | {"ratios": {}}))
    lines = bench.table(RESULT | {"ratios": {}, "accumulate": 4})
    assert any(line.startswith("one core, batch of 100 in 4 parts ") for line in lines)


def test_accumulation_is_not_compared_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: name)
    for setting in ("peers=torch", "gpu=true"):
        key, _, value = setting.partition("=")
        base = settings_of("data=synthetic", "accumulate=2")
        own = {each.name: getattr(base, each.name) for each in fields(base)}
        settings = BenchSettings(**own, **{key: value == "true" or value})
        with pytest.raises(ConfigError, match=f"^accumulate=2: {setting} compares with PyTorch on whole batches"):
            bench.prepare(settings)


def test_arithmetic_is_counted_by_layer() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Image, Model
    from tests.support.networks import lenet

    for name in ("numpy", "numba"):
        model = Model(lenet(), Image(28, 28, 1), create_backend(name))
        flop = {step: count for step, _, count in measure.network_steps(model)}
        assert sum(flop.values()) == 2 * (24 * 24 * 25 * 20 + 8 * 8 * 500 * 50 + 800 * 500 + 500 * 10)
        assert ("conv1 + pool1" in flop) == (name == "numba")


def test_arithmetic_within_blocks_is_counted() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Conv2D, Dense, Image, MaxPool2D, Model, Sequential
    from tests.support.networks import Around

    for name in ("numpy", "numba"):
        block = Sequential([Conv2D(3, (3, 5), padding="same"), MaxPool2D(2), Around(Sequential([Conv2D(3, 1)]))])
        model = Model(Sequential({"block": block, "output": Dense(10)}), Image(8, 6, 2), create_backend(name))
        flop = {step: count for step, _, count in measure.network_steps(model)}
        assert flop == {"block": 2 * (8 * 6 * 15 * 2 * 3 + 4 * 3 * 3 * 3), "output": 2 * 36 * 10}


def test_an_unknown_peer_is_refused(tmp_path) -> None:
    _, stderr = run(tmp_path, "peers=torhc", command="bench", code=2)
    assert stderr.startswith("cupynet: peers=torhc: ") and "torch" in stderr
    assert not list(tmp_path.iterdir())


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


# on a GPU -------------------------------------------------------------------------------------------------------------

SMALL = [
    *("data=synthetic", "data.train=32", "data.test=16", "batch_size=16", "epochs=1", "repeats=1", "seeds=1"),
    *("images=32", "model.layers.conv1.filters=2", "model.layers.conv2.filters=2", "model.layers.dense1.units=4"),
]


def on_the_standin(tmp_path: Path, *arguments: str) -> Any:
    line = [
        sys.executable,
        "-c",
        MADE_SMALL,
        "--devices",
        "1",
        "-m",
        "cupynet",
        "bench",
        "gpu=true",
        *SMALL,
        *arguments,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HYDRA_FULL_ERROR": "1"}
    return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)


# the stand-in computes as a GPU does, but not as fast: one of each
MADE_SMALL = """
import sys
from cupynet.bench import gpu as bench_gpu
from cupynet.bench import measure
from tests.standin.__main__ import main
measure.LARGE, bench_gpu.STEP_S = 8, 0.01
long = measure.timed
measure.timed = lambda work, backend, at_least_s=0.0: long(work, backend, 0.0)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.device_code
def test_every_figure_of_a_gpu_is_measured(tmp_path: Path) -> None:
    """Without PyTorch; every figure is there, or why it is not."""
    done = on_the_standin(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (tmp_path / "outputs" / "records").glob("gpu-made-up-device-20*.json")
    found = json.loads(file.read_text())
    assert found["device"]["name"] == "made-up device" and found["cuda"]["cupy"] == "14.2.0"
    assert found["environment"]["cores"] and found["dataset"] == "synthetic" and "commit" in found
    assert (found["dtype"], found["optimizer"], found["tf32"]) == ("float", "Nesterov", False)
    assert found["model"][3].split()[:2] == ["conv1", "Conv2D"]
    assert list(found["step"]) == ["float", "half"]
    for rates in found["step"].values():
        assert rates["cupynet"]["median"] > 0 and len(rates["cupynet"]["all"]) == 1
        if find_spec("torch") is None:
            assert [rates[name] for name in bench_gpu.PEERS] == [{"not_measured": "PyTorch is not installed"}] * 4
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
        "made-up device, synthetic, batch of 16, Nesterov",
        "cupynet, float  ",
        "cupynet, half  ",
        "conv2 + pool2 backward",
        "an epoch of 32 images",
        "99.0 % on the test images",
        "half   ",
    ):
        assert any(printed.startswith(line) for printed in done.stdout.splitlines()), line


def test_a_machine_without_a_gpu_is_not_measured_as_one(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, "gpu=true", "backend=numpy", command="bench", code=2)
    assert stderr.startswith("cupynet: gpu=true: no GPU is used: ")


def test_a_record_of_the_same_day_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        str(records.write({"device": {"name": "NVIDIA H200 (141GB)"}, "date": "2026-01-02", "turn": turn}))
        for turn in range(3)
    ]
    stem = "outputs/records/gpu-nvidia-h200-141gb-2026-01-02"
    assert names == [f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"]
    assert [json.loads(Path(name).read_text())["turn"] for name in names] == [0, 1, 2]


class Peers:
    """In place of the processes of PyTorch: what each was asked for. One that makes a graph of half fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[Any]] = []
        monkeypatch.setattr(measure, "peer_row", self.row)
        monkeypatch.setattr(bench_gpu, "find_spec", lambda name: object())
        monkeypatch.setattr(measure, "step_times", lambda one, *_: np.array([[0.001, STEP_S[one]]]))
        monkeypatch.setattr(bench_gpu, "_on_one_device", lambda settings, dtype: dtype)

    def row(self, *options: Any) -> dict[str, Any]:
        self.asked.append([*options])
        if "--graph" in options and "half" in options:
            raise ConfigError("peers=torch: PyTorch could not be measured: no graph")
        return {"version": "2.13.0", "cuda": "13.0", "cudnn": 91900, "images_per_s": 1000.0 * len(self.asked)}


STEP_S = {"float": 0.002, "half": 0.001, "double": 0.004}


def on_device(*overrides: str, **changes: Any) -> Any:
    """An experiment as it is on device 3, but that the processor computes; and its settings."""
    from cupynet.config.experiment import Experiment

    settings = settings_of("data=synthetic", "backend=numpy", *overrides)
    one = Experiment(settings)
    there: Any = SimpleNamespace(
        model=one.model, optimizer=one.optimizer, settings=settings, placement=SimpleNamespace(devices=[3])
    )
    base = {"batch_size": 128, "repeats": 2, "dtype": "float", "backend": SimpleNamespace(tf32=False)}
    return there, cast(Any, SimpleNamespace(**{**base, **changes}))


def test_peers_are_measured_in_turn_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Float beside float and half beside half, each in both layouts and as a graph; one that fails is told."""
    peers = Peers(monkeypatch)
    found, about = bench_gpu.steps(*on_device(), tmp_path)
    assert found["float"]["cupynet"]["all"] == [pytest.approx(64_000)] * 2
    assert found["half"]["cupynet"]["median"] == pytest.approx(128_000)
    assert found["float"]["torch"]["all"] == [1000.0, 9000.0] and found["float"]["torch"]["median"] == 5000.0
    for name in ("torch, CUDA graph", "torch channels_last, CUDA graph"):
        assert found["half"][name] == {"not_measured": "peers=torch: PyTorch could not be measured: no graph"}
    network = ["--network", tmp_path / "network.py", "--optimizer", "Nesterov", "--batch", 128]
    common = ["--device", "cuda", "--number", 3, *network]
    assert all(asked[: len(common)] == common and "--tf32" not in asked for asked in peers.asked)
    layouts = (["--layout", "contiguous"], ["--layout", "channels_last"])
    wanted = [[dtype, *how, *graph] for dtype in STEP_S for graph in ([], ["--graph"]) for how in layouts][:8]
    begins = len(common) + len(["--seconds", bench_gpu.STEP_S, "--dtype"])
    assert [asked[begins:] for asked in peers.asked[:8]] == wanted
    assert [asked[begins:] for asked in peers.asked[8:]] == wanted[:6]  # what failed once is not asked again
    versions = {"version": "2.13.0", "cuda": "13.0", "cudnn": 91900}
    assert about == {**versions, "tf32": False, "half": "autocast to float16 with a GradScaler"}


def test_the_peer_uses_tf32_if_the_backend_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = Peers(monkeypatch)
    _, about = bench_gpu.steps(*on_device(backend=SimpleNamespace(tf32=True), repeats=1), tmp_path)
    assert about["tf32"] and all(("--tf32" in asked) == ("float" in asked) for asked in peers.asked)


def test_the_peer_on_the_gpu_has_the_network_that_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = Peers(monkeypatch)
    one, settings = on_device("model=resnet8", "optimizer=adam")
    bench_gpu.steps(one, settings, tmp_path)
    assert (tmp_path / "network.py").read_text() == torch_source(one.model())
    assert all(asked[asked.index("--optimizer") + 1] == "Adam" for asked in peers.asked)


def test_the_record_says_why_pytorch_was_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = Peers(monkeypatch)
    found, about = bench_gpu.steps(*on_device("optimizer=lamb"), tmp_path)
    reason = found["float"]["torch"]["not_measured"]
    assert reason.startswith("peers=torch: PyTorch has no LAMB: ") and about == {"not_measured": reason}
    assert not peers.asked and found["half"]["cupynet"]["median"] > 0


def test_double_is_measured_without_pytorch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peers = Peers(monkeypatch)
    found, _ = bench_gpu.steps(*on_device(dtype="double", repeats=1), tmp_path)
    assert list(found) == ["float", "half", "double"] and found["double"]["cupynet"]["median"] == pytest.approx(32_000)
    assert found["double"]["torch"] == {"not_measured": "PyTorch is compared in float, half and bfloat16"}
    assert len(peers.asked) == 8


def test_the_table_has_speeds_relative_to_pytorch() -> None:
    rate = {"least": 1.0, "most": 9.0, "all": []}
    step = {"half": {"cupynet": {"median": 900.0, **rate}, "torch": {"median": 300.0, **rate}}}
    step["half"]["torch, CUDA graph"] = {"not_measured": "no graph"}
    result = {"step": step, "torch": {"version": "2.13.0", "tf32": False}}
    _, _, *lines = [line.split() for line in bench_gpu._step_table(result)]
    assert lines[0] == ["torch,", "half", "300", "1", "9", "3.00"]
    assert lines[1] == ["torch,", "CUDA", "graph,", "half", "no", "graph"]
    assert " ".join(lines[2]).startswith("PyTorch 2.13.0, floats without TF32, half as autocast")
