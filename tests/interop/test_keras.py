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
from cupynet.backend import PixelScale, create_backend
from tests.support.imported_networks import GOLDEN, small_model
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


def check_same_weights(found: nn.Model, source: nn.Model) -> None:
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight, err_msg=name)


def test_bfloat16_is_widened(tmp_path: Path) -> None:
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
def test_a_missing_or_hostile_array_is_named(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights.h5", variables(small_model(), SMALL_KERAS_NAMES))
    with h5py.File(path, "a") as file:
        del file[DENSE]
        HOSTILE[kind](file)
    with data_error(path, DENSE):
        import_keras(small_model(), path)


def test_a_transposed_array_and_one_too_many_are_named(tmp_path: Path) -> None:
    arrays = variables(small_model(), SMALL_KERAS_NAMES)
    with data_error(OUTPUT):
        import_keras(small_model(), write(tmp_path / "a.weights.h5", arrays | {OUTPUT: arrays[OUTPUT].T}))
    more = "layers/batch_normalization/vars/0"
    with data_error(more):
        import_keras(small_model(), write(tmp_path / "b.weights.h5", arrays | {more: np.zeros(4)}))


def test_files_of_keras_2_and_other_files_are_refused(tmp_path: Path) -> None:
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


def of_keras(
    *, stride: Any = (2, 1), epsilon: float = 1e-3, pool: int = 2, slope: float = 0.3, padding: Any = 1,
    second: float = 0.2, mean: int = 2, smooth: str = "gelu",
) -> nn.Model:  # fmt: skip
    """Return the network of tests/golden/make_keras.py."""
    layers = [
        nn.Conv2D(4, 3, stride, "same", "relu"),
        nn.BatchNorm(epsilon=epsilon),
        nn.Activation("relu"),
        nn.MaxPool2D(pool, 2),
        nn.Conv2D(8, 2, groups=4),
        nn.Activation("leaky_relu", slope),
        nn.Conv2D(6, 3, 2, padding),
        nn.Activation("leaky_relu", second),
        nn.Activation("elu"),
        nn.AvgPool2D(mean, 1, "same"),
        nn.LayerNorm("channels", 1e-3),
        nn.GlobalAvgPool2D(),
        nn.Dense(5, bias=False),
        nn.Activation(smooth),
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


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"stride": 1}, "strides"),
        ({"padding": "same"}, "padding"),
        ({"epsilon": 1e-5}, "epsilon"),
        ({"pool": 3}, "pool_size"),
        ({"mean": 3}, "pool_size"),
        ({"slope": 0.2}, "negative_slope"),
        ({"second": 0.01}, "negative_slope"),
        ({"smooth": "silu"}, "silu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_a_network_of_other_settings_is_refused(changes: dict[str, Any], setting: str) -> None:
    found = of_keras(**changes)
    before = {name: weight.copy() for name, weight in found.weights().items()}
    with data_error(KERAS, setting):
        import_keras(found, KERAS)
    for name, weight in before.items():
        np.testing.assert_array_equal(found.weights()[name], weight)


def keras_layer(kind: str, **settings: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": {"trainable": True, **settings}}


def edited(path: Path, edit: Callable[[list[Any]], object] | str) -> Path:
    """Copy Keras's file with a changed list of layers, or with other text instead of its settings."""
    with zipfile.ZipFile(KERAS) as source, zipfile.ZipFile(path, "w") as copy:
        config = json.loads(source.read("config.json"))
        if not isinstance(edit, str):
            edit(config["config"]["layers"])
        copy.writestr("config.json", edit if isinstance(edit, str) else json.dumps(config))
        copy.writestr("model.weights.h5", source.read("model.weights.h5"))
    return path


def setting(number: int, **changes: Any) -> Callable[[list[Any]], object]:
    return lambda layers: layers[number]["config"].update(changes)


def inserted(number: int, kind: str, **settings: Any) -> Callable[[list[Any]], object]:
    return lambda layers: layers.insert(number, keras_layer(kind, **settings))


RESCALING, CONV, NORM, RELU, LAYER_NORM, OUTPUT_LAYER = 1, 3, 4, 5, 13, 19


@pytest.mark.parametrize(
    "edit",
    [
        setting(OUTPUT_LAYER, activation="linear"),
        inserted(1, "Reshape", target_shape=[12, 10, 3]),
        "{}",
        '{"config": {"any": 1}}',
    ],
    ids=["logits", "same shape", "no settings", "other settings"],
)
def test_an_archive_of_equal_or_no_settings_is_imported(
    edit: Callable[[list[Any]], object] | str, tmp_path: Path
) -> None:
    source, found = of_keras(), of_keras()
    import_keras(source, KERAS)
    import_keras(found, edited(tmp_path / "a.keras", edit))
    check_same_weights(found, source)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (setting(NORM, axis=1), "axis"),
        (setting(LAYER_NORM, rms_scaling=True), "rms_scaling"),
        (setting(CONV, data_format="channels_first"), "data_format"),
        (setting(CONV, dilation_rate=[1, 2]), "dilation_rate"),
        (setting(CONV, activation="tanh"), "activation"),
        (setting(RELU, max_value=6.0), "re_lu"),
        (setting(OUTPUT_LAYER, activation="tanh"), "tanh"),
        (inserted(20, "Softmax", axis=-1), "softmax"),
        (setting(RESCALING, scale=1 / 127.5, offset=-1.0), "Rescaling"),
        (inserted(4, "Rescaling", scale=2.0), "Rescaling"),
        (inserted(1, "Reshape", target_shape=[10, 12, 3]), "Reshape"),
        (inserted(CONV, "ZeroPadding2D", padding=[[1, 1], [1, 1]]), "ZeroPadding2D"),
        ("text", "config.json"),
        ('{"config": {"layers": [3]}}', "config.json"),
        (setting(RESCALING, scale="x"), "config.json"),
    ],
    ids=lambda value: None if isinstance(value, str) else "edit",
)
def test_an_archive_of_other_settings_is_refused(
    edit: Callable[[list[Any]], object] | str, named: str, tmp_path: Path
) -> None:
    path = edited(tmp_path / "a.keras", edit)
    with data_error(path, named):
        import_keras(of_keras(), path)


def test_a_rescaling_must_equal_the_scale_of_pixels(tmp_path: Path) -> None:
    found = of_keras()
    found.pixels = PixelScale.of([0.5], [0.5])
    import_keras(found, edited(tmp_path / "a.keras", setting(RESCALING, scale=1 / 127.5, offset=-1.0)))
    with data_error("Rescaling"):
        import_keras(found, KERAS)


def residual(kernel: int, seed: int = 1) -> nn.Model:
    inner = [nn.Conv2D(2, kernel, padding="same", activation="relu"), nn.AvgPool2D(3, 1, "same")]
    layers = {"block": nn.Residual(inner), "output": nn.Dense(3)}
    return nn.Model(nn.Sequential(layers), nn.Image(6, 6, 2), create_backend("numpy"), seed)


@pytest.mark.parametrize("change", [{}, {"pool_size": [2, 2]}, {"padding": "valid"}], ids=["same", "size", "padding"])
def test_settings_in_branches_are_compared_in_any_order(change: dict[str, Any], tmp_path: Path) -> None:
    source, found = residual(3), residual(3, seed=2)
    conv = {"kernel_size": [3, 3], "strides": [1, 1], "padding": "same", "dilation_rate": [1, 1], "groups": 1}
    layers = [
        keras_layer("AveragePooling2D", **{"pool_size": [3, 3], "strides": [1, 1], "padding": "same"} | change),
        keras_layer("Conv2D", activation="relu", **conv),
        keras_layer("Add"),
        keras_layer("Flatten"),
        keras_layer("Dense", units=3, activation="linear"),
    ]
    arrays = variables(source, {"block.conv2d1": "conv2d", "output": "dense"})
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as packed:
        packed.write(write(tmp_path / "a.h5", arrays), "model.weights.h5")
        packed.writestr("config.json", json.dumps({"class_name": "Functional", "config": {"layers": layers}}))
    with data_error(*change) if change else nullcontext():
        import_keras(found, tmp_path / "a.keras")
        check_same_weights(found, source)


def test_layers_in_branches_need_names(tmp_path: Path) -> None:
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
    check_same_weights(found, source)
