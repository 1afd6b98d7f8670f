"""The benchmark's PyTorch peer: it trains the module that is exported, in every way that is measured."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.bench import torch_peer as peer
from cupynet.bench.measure import peer_network, peer_options
from cupynet.bench.torch_peer import OPTIMIZERS
from cupynet.config.experiment import Experiment
from cupynet.core.errors import ConfigError
from tests.support.settings import settings_of

MODELS = ("lenet", "lenet_norm", "keras_cnn", "mlp", "simple_cnn", "resnet8", "twin_convolutions", "mnist_speedrun")
ROOT = Path(__file__).resolve().parents[2]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def experiment(*overrides: str) -> Experiment:
    return Experiment(settings_of("data=synthetic", "backend=numpy", *overrides))


def written(folder: Path, *overrides: str) -> list[object]:
    """The peer's options for a network, whose module is written to `folder`."""
    measured = experiment(*overrides)
    return peer_options(measured, peer_network(measured), folder)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_module(model: str, tmp_path: Path) -> None:
    options = written(tmp_path, f"model={model}", "optimizer=adam", "batch_size=16")
    assert options == ["--network", tmp_path / "network.py", "--optimizer", "Adam", "--batch", 16]
    assert "INPUT_SHAPE, OUTPUTS = (28, 28, 1), 10" in (tmp_path / "network.py").read_text()


@pytest.mark.parametrize(("override", "named"), [("optimizer=lamb", "LAMB"), ("loss=hinge", "Hinge")])
def test_layers_without_a_pytorch_equivalent_are_named(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^peers=torch: .*{named}"):
        peer_network(experiment("model=mlp", override))


@needs_torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peer_has_the_optimizer(optimizer: str) -> None:
    """On the GPU those that count their steps do so on the device, or PyTorch refuses to capture them."""
    import torch

    weights = [torch.nn.Parameter(torch.ones(3))]
    (weights[0] ** 2).sum().backward()
    plain = peer.create_optimizer(optimizer, weights)
    plain.step()
    assert float(weights[0].detach().max()) < 1 and not plain.defaults.get("capturable", False)
    assert peer.create_optimizer(optimizer, weights, capturable=True).defaults.get("capturable", True)


@needs_torch
@pytest.mark.parametrize("model", MODELS)
def test_the_peer_trains_it(model: str, tmp_path: Path) -> None:
    options = map(str, written(tmp_path, f"model={model}"))
    step = peer.training_step(peer.parse([*options, "--batch", "4"]))
    before = [each.detach().clone() for each in step.network.parameters()]
    step()
    assert any(bool((a != b).any()) for a, b in zip(step.network.parameters(), before, strict=True))


@needs_torch
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command_prints_what_it_measured(processes: int, tmp_path: Path) -> None:
    done = run_peer(*written(tmp_path, "model=mlp", "batch_size=4"), "--processes", processes)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_s"] > 0


@needs_torch
@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_the_peer_trains_in_16_bits_with_weights_in_float(dtype: str, tmp_path: Path) -> None:
    """Under autocast, and half with a scaled loss: small gradients would be lost."""
    import torch
    from torch import nn

    written(tmp_path, "model=mlp")
    options = ["--network", str(tmp_path / "network.py"), "--batch", "4", "--dtype", dtype]
    step = peer.training_step(peer.parse(options))
    seen = set()
    for module in step.network.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    before = [each.detach().clone() for each in step.network.parameters()]
    step.gradient()
    scaled = max(float(each.grad.abs().max()) for each in step.network.parameters())
    step.update()
    assert seen == {torch.float16 if dtype == "half" else torch.bfloat16}
    assert {each.dtype for each in step.network.parameters()} == {torch.float32}
    assert (scaled > 100) == (dtype == "half")
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(step.network.parameters(), before, strict=True))
    assert 0 < moved < 1


@needs_torch
@pytest.mark.parametrize(("optimizer", "dtype", "whole"), [
    ("SGD", "half", True), ("AMSGrad", "half", True), ("AdamW", "float", True),
    ("RMSProp", "half", False), ("RMSProp", "float", True), ("Nadam", "bfloat16", True),
])  # fmt: skip
def test_the_whole_step_is_captured_unless_the_host_reads_the_gradients(
    optimizer: str, dtype: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused optimizer reads a GradScaler's finding on the device; for any other the host reads it."""
    import torch

    weights = [torch.nn.Parameter(torch.zeros(3))]
    fused = OPTIMIZERS[optimizer]["name"] in peer.FUSED
    made = peer.create_optimizer(optimizer, weights, "cuda" if fused else "cpu")
    assert bool(getattr(made, "_step_supports_amp_scaling", False)) == fused
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(peer, "training_step", lambda *_, capturable: told.update(step=capturable))
    monkeypatch.setattr(peer, "captured_step", lambda step, *, whole: told.update(graph=whole))
    monkeypatch.setattr(peer, "median_of", lambda *_: 0.5)
    options = ["--network", "network.py", "--optimizer", optimizer, "--dtype", dtype, "--device", "cuda", "--graph"]
    peer.measure_on_gpu(peer.parse(options))
    assert told == {"step": whole, "graph": whole}


@needs_torch
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_is_captured_after_a_warm_up_on_another_stream(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is part of the graph, or follows each replay."""
    import torch

    told: list[str] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: told.append(f"{name} waits for {other.name}"), name=name)

    @contextmanager
    def within(what: SimpleNamespace) -> Iterator[None]:
        told.append(f"on {what.name}")
        yield
        told.append(f"off {what.name}")

    main, graph = stream("main"), SimpleNamespace(name="graph", replay=lambda: told.append("replay"))
    for name, part in {"Stream": lambda: stream("side"), "current_stream": lambda: main, "stream": within}.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", within)
    parts = {name: lambda name=name: told.append(name) for name in ("clear", "gradient", "update")}
    replay = peer.captured_step(peer.Step(None, **parts), whole=whole)
    once, update = ["clear", "gradient", "update"], ["update"]
    warm = ["side waits for main", "on side", *once * 5, "off side", "main waits for side"]
    assert told == [*warm, "clear", "on graph", "gradient", *update * whole, "off graph"]
    told.clear()
    replay()
    assert told == ["replay", *update * (not whole)]


@needs_torch
def test_without_a_gpu_none_is_measured() -> None:
    done = run_peer("--network", "network.py", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and done.stderr.strip().endswith("finds no GPU"), done.stderr


def run_peer(*options: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupynet.bench.torch_peer", "--seconds", "0.05", *map(str, options)]
    environment = {**os.environ, **more}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)
