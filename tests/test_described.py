"""A network in words, from which the peer builds its equivalent."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

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


def train(network: dict, folder: Path) -> None:
    (folder / "net.json").write_text(json.dumps(network))
    command = [sys.executable, "-m", "cupynet.peer", "--network", folder / "net.json", "--seconds", "0.05"]
    done = subprocess.run(
        [*command, "--batch", "4"], cwd=ROOT, capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_s"] > 0
