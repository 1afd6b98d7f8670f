"""A network in words, from which the peer builds its equivalent."""

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

from cupynet.backend import create_backend
from cupynet.described import OPTIMIZERS, described
from cupynet.errors import ConfigError
from cupynet.experiment import Experiment
from cupynet.nn import Activation, Dense, Flatten, Hinge, Image, LayerNorm, Loss, Model, Sequential
from cupynet.nn.activation import ACTIVATIONS
from cupynet.optim import LAMB, Nesterov
from cupynet.peer import NETWORK
from tests.test_conf_files import settings_of

MODELS = ("lenet", "lenet_norm", "keras_cnn", "mlp", "simple_cnn", "resnet8", "twin_convolutions", "mnist_speedrun")
ROOT = Path(__file__).resolve().parents[1]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def words(model: str) -> dict:
    experiment = Experiment(settings_of("data=synthetic", f"model={model}", "backend=numpy"))
    return described(experiment.model(), experiment.optimizer)


def test_the_tutorials_network_is_what_the_peer_measures_by_itself() -> None:
    assert json.loads(json.dumps(words("lenet"))) == NETWORK


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_said_in_words(model: str) -> None:
    found = words(model)
    assert (found["input"], found["outputs"]) == ([28, 28, 1], 10) and json.loads(json.dumps(found))["layers"]


def test_what_has_no_equivalent_is_named() -> None:
    def model(loss: Loss | None = None, axis: str = "features") -> Model:
        layers = {"norm": LayerNorm(axis), "output": Dense(3)}
        return Model(Sequential(layers), Image(8, 8, 2), create_backend("numpy"), 1, loss)

    with pytest.raises(ConfigError, match="^peers=torch: layer 'norm' is a LayerNorm, for which nothing is known"):
        described(model(axis="channels"), Nesterov(0.1))
    with pytest.raises(ConfigError, match="^peers=torch: PyTorch has no LAMB: choose one of SGD, .*, or peers=null$"):
        described(model(), LAMB(0.1))
    with pytest.raises(ConfigError, match="^peers=torch: .* not with Hinge: leave out loss="):
        described(model(Hinge()), Nesterov(0.1))
    assert described(model(), Nesterov(0.1))["layers"][0] == {"kind": "layer_norm", "shape": [2, 8, 8], "epsilon": 1e-5}


@needs_torch
def test_the_peer_has_the_activations_and_the_norm(tmp_path: Path) -> None:
    layers = {"norm": LayerNorm(), "flat": Flatten(), "leaky": Activation("leaky_relu", 0.3)}
    layers |= {f"dense{i}": Dense(4, name) for i, name in enumerate(sorted(ACTIVATIONS))}
    layers["output"] = Dense(3)  # the last, and of fewer classes than digits
    model = Model(Sequential(layers), Image(6, 5, 2), create_backend("numpy"), 1)
    train(described(model, Nesterov(0.1)), tmp_path)


@needs_torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_peer_has_the_optimizer(optimizer: str, tmp_path: Path) -> None:
    train({**words("mlp"), "optimizer": OPTIMIZERS[optimizer]}, tmp_path)


@needs_torch
@pytest.mark.parametrize("model", MODELS)
def test_the_peer_trains_it(model: str, tmp_path: Path) -> None:
    train(words(model), tmp_path)


@needs_torch
@pytest.mark.parametrize("dtype", ["half", "bfloat16"])
def test_the_peer_trains_in_few_bits_with_weights_in_float(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast, and half with a scaled loss: the gradients of a small one would be lost."""
    import torch
    from torch import nn

    from cupynet import peer

    monkeypatch.setattr(peer, "NETWORK", words("mlp"))
    step = peer.same_step(1, 4, "channels_last", dtype=dtype)
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_that_is_recorded_counts_on_the_device(optimizer: str) -> None:
    """Where it can: PyTorch refuses to record those that could and were not told."""
    import torch

    from cupynet import peer

    weights = [torch.nn.Parameter(torch.zeros(3))]
    made = peer._optimizer(OPTIMIZERS[optimizer], weights, recorded=True)
    assert made.defaults.get("capturable", True) and not peer._optimizer(OPTIMIZERS[optimizer], weights).defaults.get(
        "capturable", False
    )


@needs_torch
@pytest.mark.parametrize(("optimizer", "dtype", "recorded"), [
    ("SGD", "half", True), ("Adam", "half", True), ("AdamW", "float", True),
    ("RMSprop", "half", False), ("RMSprop", "float", True), ("NAdam", "bfloat16", True),
])  # fmt: skip
def test_all_of_a_step_is_recorded_that_nobody_on_the_host_waits_in(
    optimizer: str, dtype: str, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the optimizer is one kernel where PyTorch has it so; else a GradScaler's host looks in the middle."""
    import torch

    from cupynet import peer

    weights = [torch.nn.Parameter(torch.zeros(3))]
    made = peer._optimizer({"name": optimizer, "lr": 0.1}, weights, "cuda" if optimizer in peer.FUSED else "cpu")
    assert bool(getattr(made, "_step_supports_amp_scaling", False)) == (optimizer in peer.FUSED)
    told: dict[str, Any] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.setattr(peer, "NETWORK", {"optimizer": {"name": optimizer}})
    monkeypatch.setattr(peer, "same_step", lambda *_, recorded: told.update(step=recorded))
    monkeypatch.setattr(peer, "recorded_step", lambda step, *, whole: told.update(graph=whole))
    monkeypatch.setattr(peer, "median_of", lambda *_: 0.5)
    peer.measure_on_gpu(4, 1.0, peer.Kind("contiguous", dtype, graph=True))
    assert told == {"step": recorded, "graph": recorded}


@needs_torch
@pytest.mark.parametrize("whole", [True, False])
def test_a_step_is_recorded_after_a_warm_up_on_another_stream(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is part of it, or is made after each replay: where a GradScaler's host looks at the gradients."""
    import torch

    from cupynet import peer

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
    replay = peer.recorded_step(peer.Step(None, **parts), whole=whole)
    once, update = ["clear", "gradient", "update"], ["update"]
    warm = ["side waits for main", "on side", *once * 5, "off side", "main waits for side"]
    assert told == [*warm, "clear", "on graph", "gradient", *update * whole, "off graph"]
    told.clear()
    replay()
    assert told == ["replay", *update * (not whole)]


@needs_torch
@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--graph"], "--graph, --tf32: are for --device cuda"),
        (["--processes", "2", "--dtype", "half"], "--processes: are measured on the CPU, in float"),
        (["--device", "cuda"], "finds no GPU"),
    ],
)
def test_what_the_peer_cannot_measure_is_refused(options: list[str], line: str) -> None:
    done = peer_with(*options, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0 and done.stderr.strip().endswith(line), done.stderr


def peer_with(*options: object, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cupynet.peer", "--seconds", "0.05", "--batch", "4", *map(str, options)]
    environment = {**os.environ, **more}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, env=environment)


def train(network: dict, folder: Path) -> None:
    (folder / "net.json").write_text(json.dumps(network))
    done = peer_with("--network", folder / "net.json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_s"] > 0
