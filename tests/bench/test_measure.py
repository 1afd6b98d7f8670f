"""The commands' measuring functions. No time is asserted."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.bench import measure
from cupynet.config.experiment import Experiment
from cupynet.core.errors import ConfigError
from cupynet.interop import torch_source
from tests.support.refusals import refused
from tests.support.settings import settings_of


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(settings_of("data=synthetic", "data.train=256", "batch_size=16", "workers=2"))


def test_medians_are_measured_in_turn() -> None:
    order: list[str] = []

    def work(name: str, values: list[float]) -> Any:
        def measured() -> float:
            order.append(name)
            return values.pop()

        return measured

    found = measure.medians({"a": work("a", [1.0, 9.0, 2.0]), "b": work("b", [5.0, 5.0, 7.0])}, 3)
    assert found == {"a": 2.0, "b": 5.0} and order == ["a", "b"] * 3


def test_the_median_of_the_steps_after_a_warm_up_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = 0.0, []
    steps = iter([9.0] * measure.WARM_UP + [1.0, 7.0, 2.0, 90.0])

    def work() -> None:
        nonlocal clock
        clock += next(steps)

    monkeypatch.setattr("cupynet.bench.measure.time.perf_counter", lambda: clock)
    backend: Any = SimpleNamespace(synchronize=lambda: waited.append(clock))
    assert measure.timed(work, backend, 20.0) == 4.5
    assert len(waited) == 5  # after the warm-up, and after each step


@pytest.mark.parametrize(("model", "backend"), [("lenet", "numba"), ("resnet8", "numpy")])
def test_every_operation_is_timed_and_counted_once(model: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arithmetic is counted once, including that within blocks and fused layers."""
    monkeypatch.setattr(measure, "PROFILED", 2)
    one = Experiment(settings_of("data=synthetic", "batch_size=2", "workers=1", f"backend={backend}", f"model={model}"))
    rows = {row["operation"]: row for row in measure.operations(one, 50.0)}
    assert all(row["ms"] > 0 for row in rows.values()) and {"output backward", "update"} <= rows.keys()

    def counted(kind: str) -> float:
        return sum(float(row.get("mflop", 0)) for name, row in rows.items() if name.endswith(kind))

    layers = [layer for layer in one.model().network.walk() if layer.multiply_adds()]
    forward = sum(4e-6 * layer.multiply_adds() for layer in layers)
    of_inputs = sum(4e-6 * layer.multiply_adds() for layer in layers if layer.needs_dx)
    assert (counted("forward"), counted("backward")) == pytest.approx((forward, forward + of_inputs))
    row = rows["output forward"]
    assert row["gflop_per_s"] == pytest.approx(row["mflop"] / row["ms"])
    assert row["share_of_ceiling"] == pytest.approx(row["gflop_per_s"] / 50)


@pytest.mark.parametrize(("stderr", "reason"), [("Traceback\nImportError: no", "ImportError: no"), ("", "status -9")])
def test_a_pytorch_peer_that_fails_is_reported_with_the_reason(
    stderr: str, reason: str, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=-9, stderr=stderr, stdout="")
    monkeypatch.setattr("cupynet.bench.measure.subprocess.run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=reason):
        measure.torch_images_per_s(experiment, "--threads", 1)


def test_a_pytorch_peer_that_hangs_is_not_waited_for(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PEER_S", 0.01)
    with refused("peers", "torch"):
        measure.torch_images_per_s(experiment, "--threads", 1)


def test_the_pytorch_peer_has_the_measured_network_batch_size_and_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Experiment(settings_of("data=synthetic", "backend=numpy", "model=resnet8", "optimizer=adam", "batch_size=7"))
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        with open(command[command.index("--network") + 1], encoding="utf-8") as file:
            assert file.read() == torch_source(one.model())
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout="250.5\n")

    monkeypatch.setattr("cupynet.bench.measure.subprocess.run", run)
    assert measure.torch_images_per_s(one, "--device", "cuda:3") == 250.5
    start = [sys.executable, "-m", "cupynet.bench.torch_peer", "--batch", "7", "--network"]
    assert asked[0][: len(start)] == start and asked[0][-4:] == ["--optimizer", "Adam", "--device", "cuda:3"]


def test_a_network_that_pytorch_cannot_express_has_no_peer() -> None:
    with refused("peers", "torch"):
        measure.torch_network(Experiment(settings_of("data=synthetic", "backend=numpy", "model=mlp", "loss=hinge")))
