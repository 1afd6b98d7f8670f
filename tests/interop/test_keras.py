"""Import of weights from Keras files."""

import json
import os
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cupynet import ConfigError, import_keras, nn
from cupynet.backend import create_backend
from tests.support.imported_networks import GOLDEN, check_same_weights, small_model
from tests.support.refusals import data_error

NUMBERS = {"weight": 0, "bias": 1, "scale": 0, "shift": 1, "mean": 2, "variance": 3}
SMALL_KERAS_NAMES = {"conv1": "conv2d", "conv2": "conv2d_1", "dense1": "dense", "output": "dense_1"}
DENSE, OUTPUT = "layers/dense/vars/0", "layers/dense_1/vars/0"


def variables(source: nn.Model, names: dict[str, str]) -> dict[str, Any]:
    """Return the arrays that Keras would save for a model. names: our layer -> Keras's layer."""
    found = {}
    for name, weight in source.weights().items():
        layer, _, kind = name.rpartition(".")
        found[f"layers/{names[layer]}/vars/{NUMBERS[kind]}"] = weight
    return found


def write(path: Path, arrays: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        file.create_group("layers/flatten/vars")  # for a layer without weights
        file.create_group("vars")
        file["optimizer/vars/0"] = 3
    return path


def test_keras_weights_in_bfloat16_are_widened(tmp_path: Path) -> None:
    """Keras writes bfloat16 as opaque pairs of bytes, with an attribute."""
    source, found = small_model(), small_model()
    path = tmp_path / "a.weights.h5"
    with h5py.File(path, "w") as file:
        for name, array in variables(source, SMALL_KERAS_NAMES).items():
            file[name] = (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view("V2")
            file[name].attrs["dtype"] = "bfloat16"
    import_keras(found, path)
    for name, weight in source.weights().items():
        np.testing.assert_allclose(found.weights()[name], weight, rtol=1 / 128)


HOSTILE: dict[str, Callable[[Any], object]] = {
    "nothing": lambda file: None,
    "a link": lambda file: file.__setitem__(DENSE, h5py.ExternalLink("/etc/passwd", "/")),
    "data of another file": lambda file: file.create_dataset(DENSE, (20, 6), "f8", external=[("/etc/passwd", 0, 960)]),
    "enormous": lambda file: file.create_dataset(DENSE, (1 << 40, 6), "f8", chunks=(1 << 10, 6), compression="gzip"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_missing_or_hostile_array_in_a_keras_file_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights.h5", variables(small_model(), SMALL_KERAS_NAMES))
    with h5py.File(path, "a") as file:
        del file[DENSE]
        HOSTILE[kind](file)
    with data_error(path, DENSE):
        import_keras(small_model(), path)


def test_a_transposed_array_and_one_too_many_in_a_keras_file_are_refused_by_name(tmp_path: Path) -> None:
    arrays = variables(small_model(), SMALL_KERAS_NAMES)
    with data_error(OUTPUT):
        import_keras(small_model(), write(tmp_path / "a.weights.h5", arrays | {OUTPUT: arrays[OUTPUT].T}))
    more = "layers/batch_normalization/vars/0"
    with data_error(more):
        import_keras(small_model(), write(tmp_path / "b.weights.h5", arrays | {more: np.zeros(4)}))


def test_import_keras_refuses_files_of_keras_2_and_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["model_weights/dense/dense/kernel:0"] = np.zeros((3, 2))
    with data_error(path, "legacy"):
        import_keras(small_model(), path)
    path.write_text("text")
    with data_error(path):
        import_keras(small_model(), path)
    path.unlink()
    os.mkfifo(path)  # must not be waited for
    with data_error(path):
        import_keras(small_model(), path)


KERAS = GOLDEN / "keras.keras"


def of_keras(epsilon: float = 1e-3) -> nn.Model:
    """Return the network of tests/golden/make_keras.py with a LayerNorm epsilon."""
    layers = [
        nn.Conv2D(4, 3, (2, 1), "same", "relu"),
        nn.BatchNorm(epsilon=1e-3),
        nn.Activation("relu"),
        nn.MaxPool2D(2, 2),
        nn.Conv2D(8, 2, groups=4),
        nn.Activation("leaky_relu", 0.3),
        nn.Conv2D(6, 3, 2, 1),
        nn.Activation("leaky_relu", 0.2),
        nn.Activation("elu"),
        nn.AvgPool2D(2, 1, "same"),
        nn.LayerNorm("channels", epsilon),
        nn.GlobalAvgPool2D(),
        nn.Dense(5, bias=False),
        nn.Activation("gelu"),
        nn.Dense(3),
    ]
    return nn.Model(nn.Sequential(layers), nn.Image(12, 10, 3), create_backend("numpy", "double"))


@pytest.mark.parametrize("archive", [True, False])
def test_a_file_that_keras_wrote_gives_the_probabilities_of_keras(archive: bool, tmp_path: Path) -> None:
    """Weights-only files have the layout of `save_weights`."""
    model, path = of_keras(), KERAS
    if not archive:
        with zipfile.ZipFile(KERAS) as packed:
            path = Path(packed.extract("model.weights.h5", tmp_path))
    import_keras(model, path)
    with np.load(KERAS.with_suffix(".npz"), allow_pickle=False) as file:
        np.testing.assert_allclose(model.predict(file["images"]), file["probabilities"], atol=1e-6)


def test_a_keras_file_with_another_epsilon_is_refused_and_changes_nothing() -> None:
    found = of_keras(1e-5)
    before = {name: weight.copy() for name, weight in found.weights().items()}
    with data_error(KERAS, "'layernorm1'", "1e-05", "0.001"):
        import_keras(found, KERAS)
    check_same_weights(found, before)


@pytest.mark.parametrize("text", ["text", "[]", '{"config": {"layers": [3]}}', "[" * 100_000])
def test_a_damaged_config_json_in_a_keras_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(KERAS) as source, zipfile.ZipFile(tmp_path / "a.keras", "w") as copy:
        copy.writestr("model.weights.h5", source.read("model.weights.h5"))
        copy.writestr("config.json", text)
    with data_error(tmp_path / "a.keras", "config.json"):
        import_keras(of_keras(), tmp_path / "a.keras")


def test_keras_layers_are_numbered_within_a_nested_model(tmp_path: Path) -> None:
    layers = {"inner": nn.Sequential([nn.BatchNorm()]), "norm": nn.BatchNorm(), "output": nn.Dense(3)}
    source, found = (
        nn.Model(nn.Sequential(layers), nn.Image(2, 2, 1), create_backend("numpy"), seed) for seed in (1, 2)
    )
    names = {"inner.batchnorm1": "functional/layers/batch_normalization", "norm": "batch_normalization"}
    path = write(tmp_path / "a.h5", variables(source, {**names, "output": "dense"}))

    def description(of_norm: float, of_inner: float) -> str:
        norm, inner = ({"class_name": "BatchNormalization", "config": {"epsilon": x}} for x in (of_norm, of_inner))
        nested = {"class_name": "Functional", "config": {"layers": [inner]}}
        return json.dumps({"config": {"layers": [nested, norm, {"class_name": "Dense", "config": {}}]}})

    for text, expected in ((description(1e-5, 1e-5), nullcontext()), (description(1e-5, 1e-3), data_error("inner"))):
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as packed:
            packed.write(path, "model.weights.h5")
            packed.writestr("config.json", text)
        with expected:
            import_keras(found, tmp_path / "a.keras", names)
            check_same_weights(found, source.weights())


def test_keras_layers_in_branches_need_names(tmp_path: Path) -> None:
    """Keras numbers them by their distance from the output, and the file does not tell which is which."""
    ways = nn.Concat([[nn.Conv2D(4, 1)], [nn.Conv2D(4, 1), nn.Conv2D(4, 3, padding="same")]])
    layers = {"ways": ways, "output": nn.Dense(3)}
    source, found = (
        nn.Model(nn.Sequential(layers), nn.Image(6, 6, 2), create_backend("numpy"), seed) for seed in (1, 2)
    )
    first, second, third = (f"ways.branch{way}.conv2d{n}" for way, n in ((1, 1), (2, 1), (2, 2)))
    named = {first: "conv2d_1", second: "conv2d", third: "conv2d_2"}
    path = write(tmp_path / "a.weights.h5", variables(source, {**named, "output": "dense"}))
    for missing in named:
        with pytest.raises(ConfigError, match=f"'{missing}'"):
            import_keras(found, path, {name: place for name, place in named.items() if name != missing})
    import_keras(found, path, named)
    check_same_weights(found, source.weights())
    with pytest.raises(ConfigError, match=f"{first}.weight"):
        import_keras(found, path, {**named, f"{first}.weight": "conv2d"})
