"""A model of a run's folder, of its checkpoints, and of folders that hold none."""

from __future__ import annotations

import json
import shutil
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynet
from cupynet import ConfigError, DataError, Model, Run, load_model, load_weights, save_weights
from cupynet.config.load_model import Trained
from cupynet.data import Synthetic
from cupynet.runs.checkpoints import read
from tests.support.resumed_runs import trained

SMALL = ["data=synthetic", "data.train=300", "data.test=100", "batch_size=32", "callbacks.progress.style=lines"]
NETWORK = [
    "model=lenet_norm",
    "model.layers.dense1.units=20",
    "model.layers.conv1.filters=6",
    "model.layers.conv2.filters=8",
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two replicas with running statistics and normalised pixels, and its checkpoint in mid-epoch."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    kept = ["callbacks.checkpoint.every_iterations=2", "callbacks.checkpoint.keep_last=9"]
    trained(folder, *SMALL, *NETWORK, *kept, "data.normalize=auto", "workers=2", "epochs=2")
    return folder


@pytest.fixture(scope="module")
def model(finished: Path) -> Model:
    """The model of that run."""
    return load_model(finished, "numba")


@cache
def images() -> Any:
    return Synthetic(300, 100).load().test


def test_a_loaded_model_predicts_as_the_run_did(finished: Path, model: Model) -> None:
    test, summary = images(), Run(finished).summary()
    predicted = model.predict(test.images)
    assert (predicted.argmax(1) == test.labels).mean() == pytest.approx(summary.scores.test_accuracy)
    assert -np.log(predicted[np.arange(100), test.labels]).mean() == pytest.approx(summary.scores.test_loss, rel=1e-5)
    assert model.pixels.normalization() == summary.setup.normalize is not None
    assert model.weights()["norm1.mean"].any() and model.class_names == ()
    assert summary.setup.image_shape == [28, 28, 1]


def test_a_run_is_loaded_by_any_path_and_on_any_backend(finished: Path, model: Model) -> None:
    test, steps = images().images, finished / "checkpoints"
    expected = model.predict(test)
    assert model.backend.policy.name == "float"
    for path in (Run(finished), steps / "step-00000010"):
        np.testing.assert_array_equal(load_model(path, "numba").predict(test), expected)
    for path, dtype in ((str(finished), "double"), (steps, "float64")):  # the newest checkpoint, at the end
        found = load_model(path, "numpy", dtype)
        assert found.backend.policy.name == "double"
        np.testing.assert_allclose(found.predict(test), expected, atol=1e-5)


def test_replicas_of_a_mid_epoch_checkpoint_are_weighted_as_in_their_next_average(finished: Path, model: Model) -> None:
    stored = read(finished / "checkpoints" / "step-00000004")  # the last average was after the third
    own = [stored.arrays["weights"][f"output.weight@{rank}"] for rank in (0, 1)]
    assert not np.array_equal(*own)
    found = load_model(finished / "checkpoints" / "step-00000004").weights()
    samples = [each["numbers"]["synchronizer"]["tally"]["samples"] for each in stored.state["workers"]]
    expected = sum(each * count for each, count in zip(own, samples, strict=True)) / sum(samples)
    np.testing.assert_allclose(found["output.weight"], expected, atol=1e-7)
    assert found.keys() == model.weights().keys()


def test_a_checkpoint_of_an_unfinished_run_restores_its_normalization(
    finished: Path, model: Model, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    (folder / "summary.json").unlink()
    (folder / "weights.safetensors").unlink()
    test = images().images
    found = load_model(folder / "checkpoints", "numba").predict(test)
    np.testing.assert_array_equal(found, model.predict(test))
    with pytest.raises(
        ConfigError,
        match=r"copy: is not a finished run, .*: name a run's folder under outputs/, or one of its checkpoints$",
    ):
        load_model(folder)


def test_stages_are_joined(tmp_path: Path) -> None:
    quick = [*SMALL, "model=mlp", "parallel=hybrid", "parallel.pipeline.stages=2", "workers=2", "epochs=1"]
    trained(tmp_path / "run", *quick)
    expected = load_model(tmp_path / "run")
    found = load_model(tmp_path / "run" / "checkpoints")
    assert found.weights().keys() == expected.weights().keys()
    np.testing.assert_array_equal(found.predict(images().images), expected.predict(images().images))


@pytest.mark.standin
@pytest.mark.parametrize(("dtype", "tf32"), [(None, True), ("float", False), ("double", False)])
def test_float_disables_tf32(dtype: str | None, tf32: bool, finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text()
    assert "tf32: false" in text
    path.write_text(text.replace("tf32: false", "tf32: true"))
    assert load_model(folder, "cupy", dtype).backend.options["tf32"] == tf32


def rewritten(folder: Path, **changes: Any) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed(folder: Path, old: str, new: str) -> None:
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def without(folder: Path, name: str) -> None:
    weights = load_weights(folder / "weights.safetensors")
    del weights[name]
    save_weights(folder / "weights.safetensors", weights)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


SPOILT = {
    "no weights": (lambda run: (run / "weights.safetensors").unlink(), DataError, "weights.safetensors: cannot be re"),
    "damaged weights": (lambda run: flipped(run / "weights.safetensors"), DataError, "damaged weights, expected SHA"),
    "another network": (
        lambda run: without(run, "conv1.weight"),
        DataError,
        "these weights belong to another network: ",
    ),
    "no settings": (lambda run: shutil.rmtree(run / ".hydra"), ConfigError, "is not the folder of a run: there is no"),
    "no JSON": (lambda run: (run / "summary.json").write_text("{"), DataError, "summary.json: cannot be read"),
    "no image": (lambda run: rewritten(run, image_shape=["a"]), DataError, "description of images is not valid"),
    "trust": (
        lambda run: (run / ".hydra" / "config.yaml").write_text(
            (run / ".hydra" / "config.yaml").read_text().replace("cupynet.nn.Dense", "mine.Dense")
        ),
        ConfigError,
        "list 'mine' in trusted_modules if it is yours",
    ),
}


@pytest.mark.parametrize("name", SPOILT)
def test_missing_files_of_a_run_are_named(name: str, finished: Path, tmp_path: Path) -> None:
    spoil, kind, expected = SPOILT[name]
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    spoil(folder)
    with pytest.raises(kind) as caught:
        load_model(folder)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_wrong_description_of_images_is_refused(finished: Path) -> None:
    """Invalid normalization, and a summary that does not match the network."""
    run, invalid = Trained(finished), "description of images is not valid"
    summary = Run(finished).summary()
    assert run.source.image_shape == (28, 28, 1)  # reads the settings once; the copies share them
    for changes, said in (
        ({"normalize": {"mean": [0]}}, invalid),
        ({"normalize": {"mean": ["a"], "deviation": [1]}}, invalid),
        ({"normalize": {"mean": [0], "deviation": [0]}}, invalid),
        ({"normalize": {"mean": [0, 1], "deviation": [1]}}, invalid),
        ({"normalize": {"mean": [0, 1], "deviation": [1, 1]}}, "belong to another network"),
        ({"class_names": ["cat"]}, "belong to another network"),
    ):
        other = copy(run)
        other.summary = replace(summary, setup=replace(summary.setup, **changes))
        with pytest.raises(DataError, match=said) as caught:
            other.model()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["nobody", "a\0b", "x" * 300])
def test_a_missing_folder_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no such folder. The folders of runs are in outputs/"):
        load_model(name)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a finished run, it has no summary.json: name a run"):
        load_model(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="checkpoints: there is no checkpoint"):
        load_model(tmp_path / "checkpoints")


def test_user_classes_are_built_if_the_caller_trusts_them(
    finished: Path, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text().replace("cupynet.nn.Dense", "mine_of_test.Thick")
    path.write_text(text.replace("trusted_modules: []", "trusted_modules: [mine_of_test]"))
    (tmp_path / "mine_of_test.py").write_text("from cupynet.nn import Dense\nclass Thick(Dense):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="list 'mine_of_test' in trusted_modules"):
        load_model(folder)
    found = load_model(folder, "numba", trusted_modules=["mine_of_test"])
    assert any(type(layer).__name__ == "Thick" for layer in found.network.walk())
    np.testing.assert_array_equal(found.predict(images().images), model.predict(images().images))


def small() -> Model:
    layers = {"flat": cupynet.Flatten(), "output": cupynet.Dense(3)}
    return Model(cupynet.Sequential(layers), cupynet.Image(4, 5, 1), cupynet.create_backend("numpy"), 1)


def test_classify_returns_the_likeliest_classes() -> None:
    model, some = small(), np.random.default_rng(1).integers(0, 256, (7, 4, 5, 1), np.uint8)
    scores = model.predict(some)
    best = model.classify(some, top=2)
    assert [row[0][0] for row in best] == scores.argmax(1).tolist()
    assert [[score for _, score in row] for row in best] == [sorted(row, reverse=True)[:2] for row in scores.tolist()]
    model.class_names = ("cat", "dog", "eel")
    assert model.classify(some)[0][0][0] == model.class_names[scores[0].argmax()]
    assert model.replicate(cupynet.create_backend("numpy")).class_names == model.class_names
    with pytest.raises(ConfigError, match="top=4: must be at most 3: there are 3 classes"):
        model.classify(some, top=4)
    model.load_weights({name: 0 * weight for name, weight in model.weights().items()})
    assert [name for name, _ in model.classify(some[0], 3)[0]] == ["cat", "dog", "eel"]  # all alike


@pytest.mark.parametrize("shape", [(4, 5, 1), (4, 5), (1, 4, 5), (1, 4, 5, 1)], ids=str)
def test_a_single_image_is_classified(shape: tuple[int, ...]) -> None:
    model, some = small(), np.random.default_rng(1).integers(0, 256, (7, 4, 5, 1), np.uint8)
    np.testing.assert_array_equal(model.predict(some[0].reshape(shape)), model.predict(some)[:1])


def test_weights_that_are_not_finite_are_refused(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    weights = load_weights(folder / "weights.safetensors")
    weights["conv1.weight"][0] = np.nan
    save_weights(folder / "weights.safetensors", weights)
    with pytest.raises(DataError, match="weights conv1.weight are not finite"):
        load_model(folder)
