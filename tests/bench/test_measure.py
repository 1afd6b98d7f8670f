"""What the commands measure with. No time is asserted."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.bench import measure
from cupynet.config.experiment import Experiment
from cupynet.core.errors import ConfigError
from cupynet.data import Loader
from cupynet.interop import torch_source
from cupynet.optim import Nesterov
from cupynet.parallel import ParameterAveraging
from cupynet.training import Replica, Trainer
from cupynet.training.fit import Fit
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model


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


@pytest.mark.parametrize("loop", ["training", "measured"])
def test_a_step_computes_the_norm_of_the_gradient_once(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norms, replica = [], Replica(small_model("float"), Nesterov(0.01, max_grad_norm=1.0))
    squared_norm = type(replica.backend).squared_norm

    def counted(grad: Any) -> Any:
        norms.append(grad)
        return squared_norm(replica.backend, grad)

    monkeypatch.setattr(replica.backend, "squared_norm", counted)
    batches = Loader(small_dataset(24), 8)
    if loop == "training":
        Trainer(replica, synchronizer=ParameterAveraging(3), prefetch_buffer=0).fit(Fit(batches, 1))
    else:
        replica.optimizer.learning_rate.span(0, 3, epoch=3, epochs=1)
        for number, batch in enumerate(batches.epoch(0, replica.backend)):
            measure.one_step(replica, batch, number)
    assert len(norms) == 3


def test_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every function takes 2 ms."""

    def timed(backend: Any, *works: Any, at_least_s: float = 0.0) -> list[float]:
        for work in works:
            work()
        return [2.0] * len(works)

    monkeypatch.setattr(measure, "timed", timed)
    sizes = ("batch_size=10", "workers=1", "backend=numba")
    rows = measure.operations(Experiment(settings_of("data=synthetic", *sizes)), 50.0)
    found = {row["operation"]: row for row in rows}
    assert all(row["ms"] == 2.0 for row in rows)
    assert {"conv1 + pool1 forward", "output backward", "loss", "update", "load batch"} <= found.keys()
    mflop = 10 * 2 * 800 * 500 / 1e6
    assert found["dense1 forward"]["mflop"] == pytest.approx(mflop)
    assert found["dense1 backward"]["mflop"] == pytest.approx(2 * mflop)
    assert found["conv1 + pool1 backward"]["mflop"] == pytest.approx(10 * 2 * 24 * 24 * 25 * 20 / 1e6)  # no dx
    assert found["dense1 forward"]["gflop_per_s"] == pytest.approx(mflop / 2)
    assert found["dense1 forward"]["share_of_ceiling"] == pytest.approx(mflop / 2 / 50)


def test_a_step_of_two_workers(experiment: Experiment) -> None:
    assert measure.step_images_per_s(experiment, 2, seconds=0.05) > 0


def test_the_loop_counts_images(experiment: Experiment) -> None:
    assert measure.loop_images_per_s(experiment, experiment.load(), 2, 256) > 0


@pytest.mark.parametrize(("stderr", "reason"), [("Traceback\nImportError: no", "ImportError: no"), ("", "status -9")])
def test_a_peer_that_fails_says_why(
    stderr: str, reason: str, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=-9, stderr=stderr, stdout="")
    monkeypatch.setattr(measure.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=f"could not be measured: .*{reason}"):
        measure.torch_images_per_s(experiment, "--threads", 1)


def test_a_peer_that_hangs_is_not_waited_for(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "PEER_S", 0.01)
    with pytest.raises(ConfigError, match=r"^peers=torch: PyTorch takes more than 0.01 s$"):
        measure.torch_images_per_s(experiment, "--threads", 1)


def test_the_peer_has_the_network_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Experiment(settings_of("data=synthetic", "backend=numpy", "model=resnet8", "optimizer=adam", "batch_size=7"))
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        with open(command[command.index("--network") + 1], encoding="utf-8") as file:
            assert file.read() == torch_source(one.model())
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout="250.5\n")

    monkeypatch.setattr(measure.subprocess, "run", run)
    assert measure.torch_images_per_s(one, "--device", "cuda:3") == 250.5
    start = [sys.executable, "-m", "cupynet.bench.torch_peer", "--batch", "7", "--network"]
    assert asked[0][: len(start)] == start and asked[0][-4:] == ["--optimizer", "Adam", "--device", "cuda:3"]


@pytest.mark.parametrize(("override", "named"), [("optimizer=lamb", "LAMB"), ("loss=hinge", "Hinge")])
def test_networks_without_a_peer_are_refused(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^peers=torch: .*{named}"):
        measure.torch_network(Experiment(settings_of("data=synthetic", "backend=numpy", "model=mlp", override)))
