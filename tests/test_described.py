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
from cupynet.described import described
from cupynet.errors import ConfigError
from cupynet.experiment import Experiment
from cupynet.nn import Dense, Image, LayerNorm, Model, Sequential
from cupynet.optim import Nesterov
from cupynet.peer import NETWORK
from tests.test_conf_files import settings_of

MODELS = ("lenet", "lenet_norm", "keras_cnn", "mlp", "simple_cnn", "resnet8", "twin_convolutions")
ROOT = Path(__file__).resolve().parents[1]


def words(model: str) -> dict:
    experiment = Experiment(settings_of("data=synthetic", f"model={model}", "backend=numpy"))
    return described(experiment.model(), experiment.optimizer)


def test_the_tutorials_network_is_what_the_peer_measures_by_itself() -> None:
    assert json.loads(json.dumps(words("lenet"))) == NETWORK


@pytest.mark.parametrize("model", MODELS)
def test_every_model_can_be_said_in_words(model: str) -> None:
    found = words(model)
    assert found["input"] == [28, 28, 1] and json.loads(json.dumps(found))["layers"]


def test_what_has_no_equivalent_is_named() -> None:
    model = Model(Sequential({"norm": LayerNorm(), "output": Dense(3)}), Image(8, 8, 1), create_backend("numpy"), 1)
    with pytest.raises(ConfigError, match="^peers=torch: layer 'norm' is a LayerNorm, for which nothing is known"):
        described(model, Nesterov(0.1))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("model", MODELS)
def test_the_peer_trains_it(model: str, tmp_path: Path) -> None:
    (tmp_path / "net.json").write_text(json.dumps(words(model)))
    command = [sys.executable, "-m", "cupynet.peer", "--network", tmp_path / "net.json", "--seconds", "0.05"]
    done = subprocess.run(
        [*command, "--batch", "4"], cwd=ROOT, capture_output=True, text=True, timeout=200, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images_per_s"] > 0
