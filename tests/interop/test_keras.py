"""Import of weights from files of Keras."""

from __future__ import annotations

import copy
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cupynet import ConfigError, DataError, import_keras, import_torch
from cupynet.backend import create_backend
from cupynet.nn import Concat, Conv2D, Dense, Image, Model, Residual, Sequential
from tests.support.exported_networks import logits
from tests.support.imported_networks import (
    NORMS,
    NORMS_NAMES,
    SMALL,
    SMALL_NAMES,
    normalized_model,
    small_model,
    torch_logits,
)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return torch_logits()


def variables(source: Model, renamed: dict[str, str] | None = None) -> dict[str, Any]:
    """What Keras would save of these weights: by class and count, kernel and bias by number."""
    names = {"conv1": "conv2d", "conv2": "conv2d_1", "dense1": "dense", "output": "dense_1"} | (renamed or {})
    numbers = {"weight": 0, "bias": 1}
    return {
        f"layers/{names[layer]}/vars/{numbers[own]}": weight
        for (layer, own), weight in ((name.split("."), weight) for name, weight in source.weights().items())
    }


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
    numbers = {"weight": 0, "bias": 1, "scale": 0, "shift": 1, "mean": 2, "variance": 3}
    arrays = {
        f"layers/{there[layer]}/vars/{numbers[own]}": weight
        for (layer, own), weight in ((name.split("."), weight) for name, weight in source.weights().items())
    }
    arrays["layers/dropout/seed_generator/vars/0"] = np.array([1337, 0], np.uint32)
    import_keras(found, write(tmp_path / "a.weights.h5", arrays))
    np.testing.assert_allclose(logits(found, golden["images"]), golden["of_norms"], atol=1e-5)
    del arrays["layers/batch_normalization_1/vars/3"]  # of one without gamma, say
    with pytest.raises(DataError, match="lacks 'layers/batch_normalization_1/vars/3', for weight 'norm3.variance'"):
        import_keras(normalized_model(), write(tmp_path / "b.weights.h5", arrays))


def test_layers_are_imported_by_name(tmp_path: Path) -> None:
    source, found = small_model(), small_model()
    source.load_weights({name: weight + 1 for name, weight in source.weights().items()})
    path = write(tmp_path / "a.weights.h5", variables(source, {"conv1": "conv2d_7", "output": "head"}))
    import_keras(found, path, {"conv1": "conv2d_7", "output": "head"} | {"conv2": "conv2d_1"})
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight)


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
    arrays = {
        f"layers/{there[layer]}/vars/{number}": source.weights()[f"{layer}.{own}"]
        for layer in there
        for number, own in enumerate(("weight", "bias"))
        if f"{layer}.{own}" in source.weights()
    }
    if own_layer:
        for name, shape in zip(deep, [(3, 2, 4, 2), (2, 2, 8, 1)], strict=True):
            arrays[f"layers/{name}/vars/0"] = arrays[f"layers/{name}/vars/0"].reshape(shape)
    import_keras(found, write(tmp_path / "a.weights.h5", arrays), {} if own_layer else there)
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight)


def linked(path: Path) -> str:
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = h5py.ExternalLink("/etc/passwd", "/")
    return "layers/dense/vars/0 is a link, which is not followed"


def elsewhere(path: Path) -> str:
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/1"]
        file.create_dataset("layers/dense/vars/1", (6,), "f8", external=[("/etc/passwd", 0, 48)])
    return "layers/dense/vars/1 is in another file, which is not read"


def lacking(path: Path) -> str:
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/1"]
    return "lacks 'layers/dense/vars/1', for weight 'dense1.bias'"


def more(path: Path) -> str:
    with h5py.File(path, "a") as file:
        file["layers/batch_normalization/vars/0"] = np.zeros(4)
    return "'layers/batch_normalization/vars/0' belongs to no layer"


def turned(path: Path) -> str:
    with h5py.File(path, "a") as file:
        weight = file["layers/dense_1/vars/0"][()].T
        del file["layers/dense_1/vars/0"]
        file["layers/dense_1/vars/0"] = weight
    return r"weight output.weight of 'layers/dense_1/vars/0': its shape \(3, 6\) does not fit the \(6, 3\)"


def enormous(path: Path) -> str:
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/0"]
        file.create_dataset("layers/dense/vars/0", (1 << 40, 6), "f8", chunks=(1 << 10, 6), compression="gzip")
    return r"its shape \(1099511627776, 6\) does not fit the \(20, 6\)"


def text(path: Path) -> str:
    path.write_text("text")
    return "cannot be read as .weights.h5 or .keras of Keras 3"


def old(path: Path) -> str:
    with h5py.File(path, "w") as file:
        file["model_weights/dense/dense/kernel:0"] = np.zeros(3)
    return "cannot be read as .weights.h5 or .keras of Keras 3"


@pytest.mark.parametrize("spoil", [linked, elsewhere, lacking, more, turned, enormous, text, old])
def test_files_that_do_not_fit_are_refused(spoil: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights.h5", variables(small_model()))
    expected = spoil(path)
    with pytest.raises(DataError, match=expected) as caught:
        import_keras(small_model(), path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"Keras files need h5py, .*: pip install 'cupynet\[keras\]'"):
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
    arrays = source.weights()
    first, second, third = (f"ways.branch{way}.conv2d{n}" for way, n in ((1, 1), (2, 1), (2, 2)))
    there = {first: "conv2d_1", second: "conv2d", third: "conv2d_2", "output": "dense"}
    stored = {f"layers/{there[layer]}/vars/{number}": arrays[f"{layer}.{own}"]
              for layer in there for number, own in enumerate(("weight", "bias"))}  # fmt: skip
    path = write(tmp_path / "a.weights.h5", stored)
    named = {first: "conv2d_1", second: "conv2d", third: "conv2d_2"}
    for missing in named:
        with pytest.raises(ConfigError, match=rf"^layer '{missing}' is in one of several branches"):
            import_keras(found, path, {name: place for name, place in named.items() if name != missing})
    import_keras(found, path, named)
    for name, weight in arrays.items():
        np.testing.assert_array_equal(found.weights()[name], weight)


def test_a_residual_around_nothing_needs_no_names(tmp_path: Path) -> None:
    layers = {"block": Residual([Conv2D(2, 3, padding="same"), Conv2D(2, 3, padding="same")])}
    source, found = (Model(Sequential({**copy.deepcopy(layers), "output": Dense(3)}), Image(6, 6, 2),
                           create_backend("numpy"), seed) for seed in (1, 2))  # fmt: skip
    names = [name for name in source.weights() if name.endswith(".weight")]
    there = dict(zip(names, ("conv2d", "conv2d_1", "dense"), strict=True))
    stored = {f"layers/{there[name]}/vars/{number}": source.weights()[name.replace("weight", own)]
              for name in names for number, own in enumerate(("weight", "bias"))}  # fmt: skip
    import_keras(found, write(tmp_path / "a.weights.h5", stored))
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="names: this model has no layer or weight 'conv9', but conv1.weight, "):
        import_keras(small_model(), SMALL, {"conv9": "0"})


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "w.weights.h5")
    with pytest.raises(DataError, match="w.weights.h5: must be a plain file"):
        import_keras(small_model(), tmp_path / "w.weights.h5")
