"""The bench: what it prints follows from what it measured. No time is asserted."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from cupynet import bench
from cupynet.errors import ConfigError
from tests.test_train import run

RESULT = {
    "batch_size": 100,
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
    }


def test_the_table_has_a_line_for_everything() -> None:
    lines = bench.table(
        {**RESULT, "ratios": bench.ratios(SimpleNamespace(placement=SimpleNamespace(workers=2)), RESULT)}
    )
    for name in (*RESULT["images_per_s"], "conv forward", "update"):  # type: ignore[misc]
        assert any(line.startswith(name) for line in lines)
    assert any(line.split() == ["sum", "6.500"] for line in lines)


def test_arithmetic_is_counted_by_layer() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Image, Model
    from tests.training.test_trainer import lenet

    for name in ("numpy", "numba"):
        model = Model(lenet(), Image(28, 28, 1), create_backend(name))
        flop = {step: count for step, _, count in bench.network_steps(model)}
        assert sum(flop.values()) == 2 * (24 * 24 * 25 * 20 + 8 * 8 * 500 * 50 + 800 * 500 + 500 * 10)
        assert ("conv1 + pool1" in flop) == (name == "numba")


def test_arithmetic_within_blocks_is_counted() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Conv2D, Dense, Image, MaxPool2D, Model, Sequential
    from tests.nn.networks import Residual

    for name in ("numpy", "numba"):
        block = Sequential([Conv2D(3, (3, 5), padding="same"), MaxPool2D(2), Residual(Sequential([Conv2D(3, 1)]))])
        model = Model(Sequential({"block": block, "output": Dense(10)}), Image(8, 6, 2), create_backend(name))
        flop = {step: count for step, _, count in bench.network_steps(model)}
        assert flop == {"block": 2 * (8 * 6 * 15 * 2 * 3 + 4 * 3 * 3 * 3), "output": 2 * 36 * 10}


def test_an_unknown_peer_is_refused(tmp_path) -> None:
    _, stderr = run(tmp_path, "peers=torhc", command="bench", code=2)
    assert stderr == "cupynet: peers=torhc: must be torch, or null for none\n" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("stderr", "reason"), [("Traceback\nImportError: no", "ImportError: no"), ("", "status -9")])
def test_a_peer_that_fails_says_why(stderr: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done = SimpleNamespace(returncode=-9, stderr=stderr, stdout="")
    monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=f"could not be measured: .*{reason}"):
        bench.peer(1, "contiguous", 128)


@pytest.mark.slow
def test_a_bench_measures_and_writes(tmp_path) -> None:
    stdout, _ = run(tmp_path, "repeats=1", "images=2000", "data.train=2000", "workers=2", command="bench")
    (file,) = tmp_path.glob("outputs/bench/*/*/bench.json")
    result = json.loads(file.read_text())
    assert all(rate > 0 for rate in result["images_per_s"].values()) and "conv2 + pool2 backward" in stdout
