"""Import of weights from files of Keras."""

from __future__ import annotations

import copy
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cupynet import ConfigError, import_keras, import_torch
from cupynet.backend import PixelScale, create_backend
from cupynet.nn import (
    Activation,
    AvgPool2D,
    BatchNorm,
    Concat,
    Conv2D,
    Dense,
    Dropout,
    GlobalAvgPool2D,
    Image,
    LayerNorm,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
)
from tests.support.data_errors import data_error
from tests.support.exported_networks import logits
from tests.support.imported_networks import (
    GOLDEN,
    NORMS,
    NORMS_NAMES,
    SMALL,
    SMALL_NAMES,
    normalized_model,
    small_model,
    torch_logits,
)
from tests.support.refusals import refused


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return torch_logits()


NUMBERS = {"weight": 0, "bias": 1, "scale": 0, "shift": 1, "mean": 2, "variance": 3}


def stored_as(source: Model, names: dict[str, str]) -> dict[str, Any]:
    """What Keras would save of these weights. names: our layer -> Keras's."""
    parts = ((*name.rpartition("."), weight) for name, weight in source.weights().items())
    return {f"layers/{names[layer]}/vars/{NUMBERS[own]}": weight for layer, _, own, weight in parts}


def variables(source: Model, renamed: dict[str, str] | None = None) -> dict[str, Any]:
    """What Keras would save of the small model."""
    names = {"conv1": "conv2d", "conv2": "conv2d_1", "dense1": "dense", "output": "dense_1"}
    return stored_as(source, names | (renamed or {}))


def check_same_weights(found: Model, source: Model) -> None:
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight, err_msg=name)


def write(path: Path, arrays: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array
        file.create_group("layers/flatten/vars")  # of layers without weights
        file.create_group("vars")
        file["optimizer/vars/0"] = 3
    return path


@pytest.mark.parametrize("archive", [False, True])
def test_imported_weights_give_the_same_logits(golden: Any, archive: bool, tmp_path: Path) -> None:
    source = small_model()
    import_torch(source, SMALL, SMALL_NAMES)
    path = write(tmp_path / "model.weights.h5", variables(source))
    if archive:
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as packed:
            packed.write(path, "model.weights.h5")
            packed.writestr("config.json", "{}")
        path = tmp_path / "a.keras"
    found = small_model()
    import_keras(found, path)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=1e-12)


def test_normalization_and_its_running_statistics_are_imported(golden: Any, tmp_path: Path) -> None:
    """gamma, beta, moving_mean, moving_variance, in this order; and dropout's random numbers, which are left."""
    source, found = normalized_model(), normalized_model()
    import_torch(source, NORMS, NORMS_NAMES)
    there = {"conv": "conv2d", "norm1": "batch_normalization", "norm2": "layer_normalization", "dense": "dense"}
    there |= {"norm3": "batch_normalization_1", "norm4": "batch_normalization_2", "output": "dense_1"}
    arrays = stored_as(source, there)
    arrays["layers/dropout/seed_generator/vars/0"] = np.array([1337, 0], np.uint32)
    import_keras(found, write(tmp_path / "a.weights.h5", arrays))
    np.testing.assert_allclose(logits(found, golden["images"]), golden["of_norms"], atol=1e-5)
    del arrays["layers/batch_normalization_1/vars/3"]  # of one without gamma, say
    with data_error("layers/batch_normalization_1/vars/3", "norm3.variance"):
        import_keras(normalized_model(), write(tmp_path / "b.weights.h5", arrays))


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    """Keras writes it as opaque pairs of bytes, with an attribute."""
    source, found = small_model(), small_model()
    halves = {name: (array.astype(np.float32).view(np.uint32) >> 16).astype("<u2").view("V2")
              for name, array in variables(source).items()}  # fmt: skip
    path = write(tmp_path / "a.weights.h5", halves)
    with h5py.File(path, "a") as file:
        for name in halves:
            file[name].attrs["dtype"] = "bfloat16"
    import_keras(found, path)
    for name, weight in source.weights().items():
        np.testing.assert_allclose(found.weights()[name], weight, rtol=1 / 128)


def test_layers_are_imported_by_name(tmp_path: Path) -> None:
    source, found = small_model(), small_model()
    source.load_weights({name: weight + 1 for name, weight in source.weights().items()})
    path = write(tmp_path / "a.weights.h5", variables(source, {"conv1": "conv2d_7", "output": "head"}))
    import_keras(found, path, {"conv1": "conv2d_7", "output": "head"} | {"conv2": "conv2d_1"})
    check_same_weights(found, source)


def depthwise(seed: int) -> Model:
    layers = {
        "conv1": Conv2D(4, kernel=3),
        "deep1": Conv2D(8, kernel=(3, 2), groups=4),
        "deep2": Conv2D(8, kernel=2, groups=8, bias=False),
        "conv2": Conv2D(6, kernel=2, groups=2),
        "output": Dense(3),
    }
    return Model(Sequential(layers), Image(9, 8, 3), create_backend("numpy", "double"), seed)


@pytest.mark.parametrize("own_layer", [True, False], ids=["DepthwiseConv2D", "Conv2D"])
def test_depthwise_convolutions_are_imported(own_layer: bool, tmp_path: Path) -> None:
    """As DepthwiseConv2D, whose kernel is (K_h, K_w, C, multiplier), or as Conv2D with groups, which are named."""
    source, found = depthwise(1), depthwise(2)
    deep = ("depthwise_conv2d", "depthwise_conv2d_1") if own_layer else ("conv2d_1", "conv2d_2")
    last = "conv2d_1" if own_layer else "conv2d_3"
    there = {"conv1": "conv2d", "deep1": deep[0], "deep2": deep[1], "conv2": last, "output": "dense"}
    arrays = stored_as(source, there)
    if own_layer:
        for name, shape in zip(deep, [(3, 2, 4, 2), (2, 2, 8, 1)], strict=True):
            arrays[f"layers/{name}/vars/0"] = arrays[f"layers/{name}/vars/0"].reshape(shape)
    import_keras(found, write(tmp_path / "a.weights.h5", arrays), {} if own_layer else there)
    check_same_weights(found, source)


DENSE = "layers/dense/vars/0"
BATCH_NORM = "layers/batch_normalization/vars/0"
OUTPUT = "layers/dense_1/vars/0"


def link(file: Any) -> None:
    del file[DENSE]
    file[DENSE] = h5py.ExternalLink("/etc/passwd", "/")


def elsewhere(file: Any) -> None:
    del file[DENSE]
    file.create_dataset(DENSE, (20, 6), "f8", external=[("/etc/passwd", 0, 960)])


def more(file: Any) -> None:
    file[BATCH_NORM] = np.zeros(4)


def turned(file: Any) -> None:
    weight = file[OUTPUT][()].T
    del file[OUTPUT]
    file[OUTPUT] = weight


def enormous(file: Any) -> None:
    del file[DENSE]
    file.create_dataset(DENSE, (1 << 40, 6), "f8", chunks=(1 << 10, 6), compression="gzip")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (link, DENSE), (elsewhere, DENSE), (lambda file: file.pop(DENSE), DENSE), (more, BATCH_NORM), (turned, OUTPUT),
        (enormous, DENSE),
    ],
    ids=["link", "elsewhere", "lacking", "more", "turned", "enormous"],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(spoil: Callable[[Any], object], named: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights.h5", variables(small_model()))
    with h5py.File(path, "a") as file:
        spoil(file)
    with data_error(path, named):
        import_keras(small_model(), path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.weights.h5"
    with h5py.File(path, "w") as file:
        file["model_weights/dense/dense/kernel:0"] = np.zeros(3)  # of Keras 2
    with data_error(path):
        import_keras(small_model(), path)
    path.write_text("text")
    with data_error(path):
        import_keras(small_model(), path)
    path.unlink()
    os.mkfifo(path)  # which is not waited for
    with data_error(path):
        import_keras(small_model(), path)


# settings of layers ---------------------------------------------------------------------------------------------------


def convolutional(**changes: Any) -> Model:
    """A network like `ARCHIVED`, with some settings changed."""
    own = {"stride": 1, "padding": "same", "dilation": 1, "activation": "relu", "epsilon": 1e-3, "pool": 2, "step": 2}
    own |= {"slope": 0.3, "norm": 1e-3, "after": Activation("relu"), "last": "identity"} | changes
    layers: Any = {
        "conv": Conv2D(4, 3, own["stride"], own["padding"], own["activation"], dilation=own["dilation"]),
        "norm": BatchNorm(epsilon=own["epsilon"]),
        "relu": own["after"],
        "pool": MaxPool2D(own["pool"], own["step"]),
        "leaky": Activation("leaky_relu", own["slope"]),
        "mean": GlobalAvgPool2D(),
        "layernorm": LayerNorm(epsilon=own["norm"]),
        "drop": Dropout(0.5),
        "output": Dense(3, own["last"]),
    }
    return Model(Sequential(layers), Image(9, 8, 2), create_backend("numpy", "double"), seed=3)


def of_keras(**changes: Any) -> Model:
    """The network of tests/golden/make_keras.py, with some settings changed."""
    own = {"stride": (2, 1), "epsilon": 1e-3, "slope": 0.3, "second": 0.2, "padding": 1, "pool": "same"} | changes
    layers = [
        Conv2D(4, 3, own["stride"], "same", "relu"),
        BatchNorm(epsilon=own["epsilon"]),
        Activation("relu"),
        MaxPool2D(2),
        Conv2D(8, 2, groups=4),
        Activation("leaky_relu", own["slope"]),
        Conv2D(6, 3, 2, own["padding"]),
        Activation("leaky_relu", own["second"]),
        Activation("elu"),
        AvgPool2D(2, 1, own["pool"]),
        LayerNorm("channels", 1e-3),
        GlobalAvgPool2D(),
        Dense(5, bias=False),
        Activation("gelu"),
        Dense(3),
    ]
    return Model(Sequential(layers), Image(12, 10, 3), create_backend("numpy", "double"))


def test_a_file_that_keras_wrote() -> None:
    model, path = of_keras(), GOLDEN / "keras.keras"
    import_keras(model, path)
    with np.load(path.with_suffix(".npz"), allow_pickle=False) as file:
        np.testing.assert_allclose(model.predict(file["images"]), file["probabilities"], atol=1e-6)
    for change in ({"stride": 1}, {"epsilon": 1e-5}, {"slope": 0.2}, {"second": 0.01}, {"padding": "same"}):
        with data_error(path):
            import_keras(of_keras(**change), path)
    model.pixels = PixelScale.of([0.5], [0.5])
    with data_error(path, "Rescaling"):
        import_keras(model, path)


def keras_layer(kind: str, **settings: Any) -> dict[str, Any]:
    return {"module": "keras.layers", "class_name": kind, "config": {"trainable": True, **settings}}


CONV = {"kernel_size": [3, 3], "strides": [1, 1], "padding": "same", "dilation_rate": [1, 1], "groups": 1}
POOL = {"pool_size": [2, 2], "strides": [2, 2], "padding": "valid", "data_format": "channels_last"}
ARCHIVED = {
    "input": keras_layer("InputLayer", batch_shape=[None, 9, 8, 2]),
    "flip": keras_layer("RandomFlip", mode="horizontal"),
    "conv": keras_layer("Conv2D", filters=4, activation="relu", data_format="channels_last", use_bias=True, **CONV),
    "norm": keras_layer("BatchNormalization", axis=-1, momentum=0.99, epsilon=0.001, center=True, scale=True),
    "relu": keras_layer("ReLU", max_value=None, negative_slope=0.0, threshold=0.0),
    "pool": keras_layer("MaxPooling2D", **POOL),
    "leaky": keras_layer("LeakyReLU", negative_slope=0.3),
    "mean": keras_layer("GlobalAveragePooling2D", data_format="channels_last", keepdims=False),
    "layernorm": keras_layer("LayerNormalization", axis=[-1], epsilon=0.001, rms_scaling=False),
    "drop": keras_layer("Dropout", rate=0.3),
    "output": keras_layer("Dense", units=3, activation="softmax", use_bias=True),
}


def archive(path: Path, source: Model, layers: Any) -> Path:
    """Write the weights of `source` as Keras does, with these layers in config.json."""
    kinds = {"conv": "conv2d", "norm": "batch_normalization", "layernorm": "layer_normalization", "output": "dense"}
    arrays = stored_as(source, kinds)
    config = {"class_name": "Sequential", "config": {"name": "sequential", "layers": list(layers)}}
    with zipfile.ZipFile(path, "w") as packed:
        packed.write(write(path.with_suffix(".h5"), arrays), "model.weights.h5")
        packed.writestr("config.json", layers if isinstance(layers, str) else json.dumps(config))
    return path


def changed(name: str, **settings: Any) -> list[Any]:
    """Return the layers of `ARCHIVED`, one of them with other settings."""
    layers = copy.deepcopy(ARCHIVED)
    layers[name]["config"] |= settings
    return list(layers.values())


def test_an_archive_of_the_same_settings_is_imported(tmp_path: Path) -> None:
    source = convolutional()
    padded = [keras_layer("ZeroPadding2D", padding=[[1, 1], [1, 1]]), *changed("conv", padding="valid")]
    reshaped = [keras_layer("Reshape", target_shape=[9, 8, 2]), *ARCHIVED.values()]
    for layers in (ARCHIVED.values(), reshaped, changed("output", activation="linear"), padded):
        found = convolutional()
        import_keras(found, archive(tmp_path / "a.keras", source, layers))
        np.testing.assert_array_equal(found.weights()["conv.weight"], source.weights()["conv.weight"])
    for nothing in ([], "{}", '{"config": {"any": 1}}'):
        import_keras(convolutional(epsilon=0.1), archive(tmp_path / "a.keras", source, nothing))


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"stride": (2, 1), "padding": 1}, "strides"),
        ({"padding": 0}, "padding"),
        ({"dilation": (1, 2)}, "dilation_rate"),
        ({"activation": "tanh"}, "activation"),
        ({"epsilon": 1e-5}, "epsilon"),
        ({"pool": 3}, "pool_size"),
        ({"slope": 0.01}, "negative_slope"),
        ({"after": Activation("silu")}, "silu"),
        ({"last": "tanh"}, "tanh"),
    ],
)
def test_a_network_of_other_settings_is_refused(changes: Any, setting: str, tmp_path: Path) -> None:
    found = convolutional(**changes)
    before = {name: weight.copy() for name, weight in found.weights().items()}
    source = convolutional()
    source.load_weights({name: weight + 1 for name, weight in source.weights().items()})
    path = archive(tmp_path / "a.keras", source, ARCHIVED.values())
    with data_error(path, setting):
        import_keras(found, path)
    for name, weight in before.items():
        np.testing.assert_array_equal(found.weights()[name], weight)


@pytest.mark.parametrize(
    ("layers", "setting"),
    [
        (changed("norm", axis=1), "axis"),
        (changed("layernorm", rms_scaling=True), "rms_scaling"),
        (changed("conv", data_format="channels_first"), "data_format"),
        (changed("relu", max_value=6.0), "max_value"),
        ([*ARCHIVED.values(), keras_layer("Softmax", axis=-1)], "softmax"),
        ([keras_layer("Rescaling", scale=1 / 127.5, offset=-1.0), *ARCHIVED.values()], "Rescaling"),
        ([*list(ARCHIVED.values())[:3], keras_layer("Rescaling", scale=2.0), *list(ARCHIVED.values())[3:]], "Resc"),
        ([keras_layer("Reshape", target_shape=[8, 9, 2]), *ARCHIVED.values()], "Reshape"),
        ([keras_layer("ZeroPadding2D", padding=[[1, 1], [1, 1]]), *ARCHIVED.values()], "ZeroPadding2D"),
        ("text", "config.json"),
        ('{"config": {"layers": [3]}}', "config.json"),
        ([keras_layer("Rescaling", scale="x"), *ARCHIVED.values()], "config.json"),
    ],
)
def test_an_archive_of_other_settings_is_refused(layers: Any, setting: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "a.keras", convolutional(), layers)
    with data_error(path, setting):
        import_keras(convolutional(), path)


def test_a_rescaling_must_equal_the_scale_of_pixels(tmp_path: Path) -> None:
    layers = [keras_layer("Rescaling", scale=1 / 255, offset=0.0), *ARCHIVED.values()]
    import_keras(convolutional(), archive(tmp_path / "a.keras", convolutional(), layers))
    layers[0] = keras_layer("Rescaling", scale=1 / 127.5, offset=-1)
    found = convolutional()
    found.pixels = PixelScale.of([0.5], [0.5])
    import_keras(found, archive(tmp_path / "a.keras", convolutional(), layers))


def test_settings_in_branches_are_compared_in_any_order(tmp_path: Path) -> None:
    def residual(kernel: int) -> Model:
        inner = [Conv2D(2, kernel, padding="same", activation="relu"), AvgPool2D(3, 1, "same")]
        return Model(
            Sequential({"block": Residual(inner), "output": Dense(3)}), Image(6, 6, 2), create_backend("numpy")
        )

    source = residual(3)
    arrays = dict(zip(("conv2d/vars/0", "conv2d/vars/1", "dense/vars/0", "dense/vars/1"), source.weights().values(),
                      strict=True))  # fmt: skip
    pool = {"pool_size": [3, 3], "strides": [1, 1], "padding": "same"}
    layers = [keras_layer("Conv2D", activation="relu", **CONV), keras_layer("AveragePooling2D", **pool),
              *map(keras_layer, ("Add", "Flatten")), keras_layer("Dense", units=3, activation="linear")]  # fmt: skip
    for each, accepted in (({}, True), ({"pool_size": [2, 2]}, False), ({"padding": "valid"}, False)):
        layers[1] = keras_layer("AveragePooling2D", **pool | each)
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as packed:
            stored = {f"layers/{name}": array for name, array in arrays.items()}
            packed.write(write(tmp_path / "a.h5", stored), "model.weights.h5")
            packed.writestr("config.json", json.dumps({"class_name": "Functional", "config": {"layers": layers}}))
        if accepted:
            import_keras(residual(3), tmp_path / "a.keras")
            continue
        with data_error(*each):
            import_keras(residual(3), tmp_path / "a.keras")


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with refused(""):
        import_keras(small_model(), tmp_path / "a.weights.h5")


def branched(*ways: Any) -> Model:
    return Model(
        Sequential({"ways": Concat(list(ways)), "output": Dense(3)}), Image(6, 6, 2), create_backend("numpy"), 1
    )


def test_layers_in_branches_need_names(tmp_path: Path) -> None:
    """Keras counts them by how far they are from the output: which is which the file does not say."""
    ways: Any = [Conv2D(4, 1)], [Conv2D(4, 1), Conv2D(4, 3, padding="same")]
    source, found = branched(*ways), branched(*ways)
    source.load_weights({name: weight + 1 for name, weight in source.weights().items()})
    first, second, third = (f"ways.branch{way}.conv2d{n}" for way, n in ((1, 1), (2, 1), (2, 2)))
    named = {first: "conv2d_1", second: "conv2d", third: "conv2d_2"}
    path = write(tmp_path / "a.weights.h5", stored_as(source, {**named, "output": "dense"}))
    for missing in named:
        with pytest.raises(ConfigError, match=f"'{missing}'"):
            import_keras(found, path, {name: place for name, place in named.items() if name != missing})
    import_keras(found, path, named)
    check_same_weights(found, source)


def test_a_residual_around_nothing_needs_no_names(tmp_path: Path) -> None:
    layers = {"block": Residual([Conv2D(2, 3, padding="same"), Conv2D(2, 3, padding="same")])}
    source, found = (
        Model(Sequential({**copy.deepcopy(layers), "output": Dense(3)}), Image(6, 6, 2), create_backend("numpy"), seed)
        for seed in (1, 2)
    )
    names = [name.rpartition(".")[0] for name in source.weights() if name.endswith(".weight")]
    there = dict(zip(names, ("conv2d", "conv2d_1", "dense"), strict=True))
    import_keras(found, write(tmp_path / "a.weights.h5", stored_as(source, there)))
    check_same_weights(found, source)
