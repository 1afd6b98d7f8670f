"""Models loaded from a run's folder and from its checkpoints, and folders without a model."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupynet
from cupynet import ConfigError, DataError, Model, Run, load, load_weights, save_weights
from cupynet.config.load_model import LoadedRun
from cupynet.data import Synthetic
from cupynet.runs.checkpoints import read
from tests.support.commands import summary_of
from tests.support.refusals import data_error, refused
from tests.support.resumed_runs import trained
from tests.support.training import fingerprint
from tests.support.user_files import deny

SMALL = ["data=synthetic", "data.train=300", "data.test=100", "batch_size=32", "callbacks.progress.style=lines"]
SIZES = ["model.layers.dense1.units=20", "model.layers.conv1.filters=6", "model.layers.conv2.filters=4"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two replicas with running statistics, normalized pixels and a mid-epoch checkpoint."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    kept = ["callbacks.checkpoint.every_iterations=2", "callbacks.checkpoint.keep_last=9"]
    trained(folder, *SMALL, "model=lenet_norm", *SIZES, *kept, "data.normalize=auto", "workers=2", "epochs=2")
    return folder


@pytest.fixture(scope="module")
def model(finished: Path) -> Model:
    return load(finished, "numba")


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@cache
def images() -> Any:
    return Synthetic(300, 100).load().test


def test_a_model_loaded_from_a_run_predicts_as_the_run_did(finished: Path, model: Model) -> None:
    test, summary = images(), Run(finished).summary()
    predicted = model.predict(test.images)
    assert (predicted.argmax(1) == test.labels).mean() == pytest.approx(summary.scores.test_accuracy)
    assert -np.log(predicted[np.arange(100), test.labels]).mean() == pytest.approx(summary.scores.test_loss, rel=1e-5)
    assert model.pixels.normalization() == summary.setup.normalize is not None
    assert model.weights()["norm1.mean"].any() and model.class_names == ()


def test_a_run_is_loaded_from_its_folder_or_a_checkpoint_and_on_any_backend(finished: Path, model: Model) -> None:
    test, steps = images().images, finished / "checkpoints"
    expected = model.predict(test)
    for path in (Run(finished), steps / "step-00000010"):
        np.testing.assert_array_equal(load(path, "numba").predict(test), expected)
    for place, dtype in ((str(finished), "double"), (steps, "float64")):  # the newest checkpoint was written at the end
        found = load(place, "numpy", dtype)
        assert found.backend.policy.name == "double"
        np.testing.assert_allclose(found.predict(test), expected, atol=1e-5)


def test_a_mid_epoch_checkpoint_is_loaded_as_the_mean_of_its_replicas_weighted_by_samples(finished: Path) -> None:
    stored = read(finished / "checkpoints" / "step-00000004")  # the last average came after iteration 3
    own = [stored.arrays["weights"][f"output.weight@{rank}"] for rank in (0, 1)]
    assert not np.array_equal(*own)
    samples = [each["numbers"]["synchronizer"]["tally"]["samples"] for each in stored.state["workers"]]
    expected = sum(each * count for each, count in zip(own, samples, strict=True)) / sum(samples)
    found = load(finished / "checkpoints" / "step-00000004").weights()
    np.testing.assert_allclose(found["output.weight"], expected, atol=1e-7)


def test_a_checkpoint_of_an_unfinished_run_is_loaded_with_its_normalization(copied: Path, model: Model) -> None:
    for name in ("summary.json", "weights.safetensors"):
        (copied / name).unlink()
    found = load(copied / "checkpoints", "numba").predict(images().images)
    np.testing.assert_array_equal(found, model.predict(images().images))
    with pytest.raises(ConfigError):
        load(copied)


def test_the_stages_of_a_pipeline_are_loaded_as_one_model(tmp_path: Path) -> None:
    stages = ["model=mlp", "parallel=hybrid", "parallel.pipeline.stages=2", "workers=2", "epochs=1"]
    trained(tmp_path / "run", *SMALL, *stages)
    expected, found = load(tmp_path / "run"), load(tmp_path / "run" / "checkpoints")
    assert found.weights().keys() == expected.weights().keys()
    np.testing.assert_array_equal(found.predict(images().images), expected.predict(images().images))


def changed(folder: Path, old: str, new: str) -> None:
    path = folder / ".hydra" / "config.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def spoilt(folder: Path, *, missing: bool) -> None:
    weights = load_weights(folder / "weights.safetensors")
    weights["conv1.weight"][0] = np.inf
    if missing:
        del weights["conv1.weight"]
    save_weights(folder / "weights.safetensors", weights)


SPOILT: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no weights": (lambda run: (run / "weights.safetensors").unlink(), DataError, "weights.safetensors"),
    "another network": (lambda run: spoilt(run, missing=True), DataError, "conv1.weight"),
    "not finite": (lambda run: spoilt(run, missing=False), DataError, "conv1.weight"),
    "no settings": (lambda run: shutil.rmtree(run / ".hydra"), ConfigError, "config.yaml"),
    "no image": (lambda run: summary_of(run, image_shape=["a"]), DataError, ""),
    "a class name": (lambda run: summary_of(run, class_names=["cat"]), DataError, "class_names"),
    "trust": (lambda run: changed(run, "cupynet.nn.Dense", "mine.Dense"), ConfigError, "trusted_modules"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_run_with_missing_or_damaged_files_is_refused_by_load_which_names_the_fault(name: str, copied: Path) -> None:
    spoil, kind, named = SPOILT[name]
    spoil(copied)
    with pytest.raises(kind) as caught:
        load(copied)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_load_names_a_run_that_may_not_be_read(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deny(finished / ".hydra", monkeypatch)
    with data_error(finished / ".hydra"):
        load(finished)


def test_a_path_without_a_run_is_refused_by_load(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    nowhere: list[Any] = ["nobody", "a\0b", "x" * 300, tmp_path, tmp_path / "checkpoints", None, 3]
    for folder in nowhere:
        with pytest.raises(ConfigError):
            load(folder)


@pytest.mark.parametrize("name", ["checkpoints", "step-00000001"])
def test_a_checkpoint_written_in_python_is_refused_by_load_which_names_restore(name: str, tmp_path: Path) -> None:
    images, labels = np.zeros((4, 2, 2, 1), np.float32), np.zeros(4, int)
    with cupynet.ParallelWrapper(Model([cupynet.Dense(2)], (2, 2), "numpy"), 1) as wrapper:
        wrapper.fit(images, labels)
        path = wrapper.checkpoint(tmp_path / "checkpoints")
        with pytest.raises(ConfigError) as caught:
            load(path if name == path.name else path.parent)
        eval(str(caught.value).rpartition("call ")[2], {"wrapper": wrapper})


def test_a_run_in_python_is_refused_by_commands_with_a_message_that_names_load(tmp_path: Path) -> None:
    with cupynet.ParallelWrapper(Model([cupynet.Dense(2)], (2, 2), "numpy"), 1, run=tmp_path) as wrapper:
        wrapper.fit(np.zeros((4, 2, 2, 1), np.float32), np.zeros(4, int))
    with pytest.raises(ConfigError) as caught:
        LoadedRun(tmp_path, ())
    loaded = eval(str(caught.value).rpartition(": ")[2], {"cupynet": cupynet})
    assert fingerprint(loaded) == fingerprint(wrapper.model)


@pytest.fixture
def small() -> Model:
    layers = {"flat": cupynet.Flatten(), "output": cupynet.Dense(3)}
    return Model(cupynet.Sequential(layers), cupynet.Image(4, 5, 1), cupynet.create_backend("numpy"), 1)


SOME = np.random.default_rng(1).integers(0, 256, (7, 4, 5, 1), np.uint8)


def test_classify_returns_the_most_probable_classes_and_their_probabilities(small: Model) -> None:
    scores = small.predict(SOME)
    best = small.classify(SOME, top=2)
    assert [row[0][0] for row in best] == scores.argmax(1).tolist()
    assert [[score for _, score in row] for row in best] == [sorted(row, reverse=True)[:2] for row in scores.tolist()]
    with refused("top", "4"):
        small.classify(SOME, top=4)


def test_classify_returns_equal_classes_in_their_order_by_name(small: Model) -> None:
    small.class_names = np.array(["cat", "dog", "eel"])
    small.load_weights({name: 0 * weight for name, weight in small.weights().items()})
    other = small.replicate(cupynet.create_backend("numpy"))
    assert [name for name, _ in other.classify(SOME[0], 3)[0]] == ["cat", "dog", "eel"]


@pytest.mark.parametrize("names", [["cat"], ["cat", "dog", "eel", "fox"], "cat", 5, np.array(3)])
def test_a_model_needs_one_class_name_for_each_output(names: Any, small: Model) -> None:
    small.class_names = np.arange(3)
    with refused("class_names", repr(names)):
        small.class_names = names
    assert small.class_names == ("0", "1", "2")
    small.class_names = None
    assert small.class_names == ()


@pytest.mark.parametrize("layer", [cupynet.Dense(1), cupynet.Conv2D(3, 3)], ids=["one output", "image"])
def test_classify_is_refused_by_a_model_without_one_output_per_class(layer: cupynet.Layer) -> None:
    model = Model([layer], (4, 5, 1), "numpy", loss="mean_squared_error")
    with refused(""):
        model.classify(SOME)
