"""Weights that were trained elsewhere evaluate here to the same logits, or are refused in one line."""

from __future__ import annotations

import copy
import sys
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupynet import (
    Activation,
    BatchNorm,
    Concat,
    ConfigError,
    Conv2D,
    DataError,
    Dense,
    Dropout,
    Flatten,
    Image,
    LayerNorm,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
    create_backend,
    import_keras,
    import_torch,
)

GOLDEN = Path(__file__).parents[1] / "golden"
NAMES = {"conv1": "0", "conv2": "3", "dense1": "5", "output": "7"}


def model(*, flatten: bool = False, dtype: str = "double", backend: str = "numba") -> Model:
    layers: dict[str, Any] = {
        "conv1": Conv2D(4, kernel=(3, 2), activation="relu"),
        "pool1": MaxPool2D(2),
        "conv2": Conv2D(5, kernel=2, bias=False),
        **({"flat": Flatten(), "again": Activation("identity")} if flatten else {}),
        "dense1": Dense(6, activation="relu"),
        "output": Dense(3),
    }
    return Model(Sequential(layers), Image(9, 8, 3), create_backend(backend, dtype), seed=1)


def logits(of: Model, images: Any) -> Any:
    x = of.backend.load_images(images, np.arange(len(images)))
    return of.scores(x)[1]


@pytest.fixture(scope="module")
def golden() -> Any:
    with np.load(GOLDEN / "torch_logits.npz", allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("double", 1e-12), ("float", 1e-5)])
def test_pytorch(golden: Any, flatten: bool, dtype: str, bound: float) -> None:
    found = model(flatten=flatten, dtype=dtype)
    import_torch(found, GOLDEN / "torch_small.safetensors", NAMES)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=bound)


def test_single_weights_by_name_and_names_that_are_the_same(golden: Any, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "torch_small.safetensors")
    same = {name: there for name, there in NAMES.items() if name != "conv1"}
    renamed = {
        f"{name}.{own}": tensors[f"{there}.{own}"]
        for name, there in same.items()
        for own in ("weight", "bias")
        if f"{there}.{own}" in tensors
    }
    renamed |= {"first": tensors["0.weight"], "second": tensors["0.bias"], "bn.num_batches_tracked": np.array(3)}
    save_file(renamed, tmp_path / "a.safetensors")
    found = model()
    import_torch(found, tmp_path / "a.safetensors", {"conv1.weight": "first", "conv1.bias": "second"})
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=1e-12)


def test_layers_within_layers(golden: Any) -> None:
    inner = Sequential({"a": Conv2D(4, kernel=(3, 2), activation="relu"), "b": MaxPool2D(2)})
    rest = {"conv2": Conv2D(5, kernel=2, bias=False), "dense1": Dense(6, activation="relu"), "output": Dense(3)}
    outer = Sequential({"block": inner, **rest})
    found = Model(outer, Image(9, 8, 3), create_backend("numba", "double"))
    names = {"block.a": "0", "conv2": "3", "dense1": "5", "output": "7"}
    import_torch(found, GOLDEN / "torch_small.safetensors", names)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=1e-12)


OF_NORMS = {"conv": "0", "norm1": "1", "norm2": "4", "norm3": "6", "dense": "7", "norm4": "8", "output": "10"}


def normalised(backend: str = "numba") -> Model:
    layers: dict[str, Any] = {
        "conv": Conv2D(6, kernel=3, bias=False),
        "norm1": BatchNorm(epsilon=1e-3),
        "relu1": Activation("relu"),
        "pool": MaxPool2D(2),
        "norm2": LayerNorm(),
        "flat": Flatten(),
        "drop": Dropout(0.5),
        "norm3": BatchNorm(),
        "dense": Dense(5),
        "norm4": BatchNorm(),
        "relu2": Activation("relu"),
        "output": Dense(3),
    }
    return Model(Sequential(layers), Image(9, 8, 3), create_backend(backend, "float"), seed=1)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_normalisation_of_pytorch_and_its_running_statistics(golden: Any, backend: str) -> None:
    found = normalised(backend=backend)
    import_torch(found, GOLDEN / "torch_norms.safetensors", OF_NORMS)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["of_norms"], atol=1e-5)
    tensors = load_file(GOLDEN / "torch_norms.safetensors")
    np.testing.assert_array_equal(found.weights()["norm1.mean"], tensors["1.running_mean"])
    np.testing.assert_array_equal(found.weights()["norm1.variance"], tensors["1.running_var"])


def test_a_normalisation_without_running_statistics_is_named(tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "torch_norms.safetensors")
    del tensors["8.running_var"]
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=r"lacks '8\.running_var', for weight 'norm4\.variance'"):
        import_torch(normalised(), tmp_path / "a.safetensors", OF_NORMS)


def test_single_weights_of_a_normalisation_by_name(golden: Any, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "torch_norms.safetensors")
    tensors["mu"] = tensors.pop("1.running_mean")
    save_file(tensors, tmp_path / "a.safetensors")
    found = normalised()
    import_torch(found, tmp_path / "a.safetensors", OF_NORMS | {"norm1.mean": "mu"})
    np.testing.assert_allclose(logits(found, golden["images"]), golden["of_norms"], atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_pytorch_itself(seed: int) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(2, 6, 3), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(6 * 3 * 4, 5)
    ).double()
    found = Model(
        Sequential({"0": Conv2D(6, kernel=3), "1": MaxPool2D(2), "3": Dense(5)}),
        Image(8, 10, 2),
        create_backend("numba", "double"),
    )
    found_weights = {name: value.numpy() for name, value in net.state_dict().items()}
    images = np.random.default_rng(seed).normal(size=(4, 8, 10, 2))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cupynet.interop.torch.load_tensors", lambda path: found_weights)
        import_torch(found, "nowhere")
    with torch.no_grad():
        expected = net(torch.from_numpy(images).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(found.scores(images)[1], expected, atol=1e-12)


SPOILT = [
    ({"5.bias": None}, "lacks '5.bias', for weight 'dense1.bias'"),
    ({"9.bias": np.zeros(3)}, "'9.bias' belongs to no layer"),
    ({"0.weight": np.zeros((4, 3, 2, 3))}, "weight conv1.weight of '0.weight': its shape (4, 3, 2, 3) does not fit"),
    ({"7.weight": np.zeros((3, 7))}, "weight output.weight of '7.weight': its shape (3, 7) does not fit the (6, 3)"),
    ({"7.weight": np.zeros((6, 3))}, "weight output.weight of '7.weight': its shape (6, 3) does not fit the (6, 3)"),
]


@pytest.mark.parametrize(("change", "expected"), SPOILT, ids=[text for _, text in SPOILT])
def test_what_does_not_fit_is_named(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "torch_small.safetensors") | change
    path = tmp_path / "a.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    found = model()
    before = found.weights()
    with pytest.raises(DataError) as caught:
        import_torch(found, path, NAMES)
    assert str(caught.value).startswith(f"{path}: {expected}") and "\n" not in str(caught.value)
    for name, weight in found.weights().items():
        np.testing.assert_array_equal(weight, before[name])


def test_names_of_nothing(tmp_path: Path) -> None:
    for into in (import_torch, import_keras):
        with pytest.raises(ConfigError, match="names: this model has no layer or weight 'conv9', but conv1.weight, "):
            into(model(), GOLDEN / "torch_small.safetensors", {"conv9": "0"})
    (tmp_path / "text").write_text("text")
    with pytest.raises(DataError, match="text: cannot be read as weights"):
        import_torch(model(), tmp_path / "text")


@pytest.mark.parametrize("start", [b"PK\x03\x04", b"\x80\x02\x8a"], ids=["zip", "pickle"])
def test_a_file_of_torch_save_is_refused_with_the_way_out(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "net.pt").write_bytes(start + bytes(100))
    with pytest.raises(DataError, match=r"net\.pt: .*safetensors\.torch\.save_file\(net\.state_dict\(\), path\)"):
        import_torch(model(), tmp_path / "net.pt")


# Keras --------------------------------------------------------------------------------------------------------------


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
def test_keras(golden: Any, archive: bool, tmp_path: Path) -> None:
    source = model()
    import_torch(source, GOLDEN / "torch_small.safetensors", NAMES)
    path = write(tmp_path / "model.weights.h5", variables(source))
    if archive:
        with zipfile.ZipFile(tmp_path / "a.keras", "w") as packed:
            packed.write(path, "model.weights.h5")
            packed.writestr("config.json", "{}")
        path = tmp_path / "a.keras"
    found = model()
    import_keras(found, path)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=1e-12)


def test_normalisation_of_keras_and_its_running_statistics(golden: Any, tmp_path: Path) -> None:
    """gamma, beta, moving_mean, moving_variance, in this order; and dropout's random numbers, which are left."""
    source, found = normalised(), normalised()
    import_torch(source, GOLDEN / "torch_norms.safetensors", OF_NORMS)
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
        import_keras(normalised(), write(tmp_path / "b.weights.h5", arrays))


def test_layers_of_keras_by_name(tmp_path: Path) -> None:
    source, found = model(), model()
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


@pytest.mark.parametrize("as_keras_has_them", [True, False])
def test_depthwise_convolutions_of_keras(as_keras_has_them: bool, tmp_path: Path) -> None:
    """As DepthwiseConv2D, whose kernel is (K_h, K_w, C, multiplier), or as Conv2D with groups."""
    source, found = depthwise(1), depthwise(2)
    deep = ("depthwise_conv2d", "depthwise_conv2d_1") if as_keras_has_them else ("conv2d_1", "conv2d_2")
    last = "conv2d_1" if as_keras_has_them else "conv2d_3"
    there = {"conv1": "conv2d", "deep1": deep[0], "deep2": deep[1], "conv2": last, "output": "dense"}
    arrays = {
        f"layers/{there[layer]}/vars/{number}": source.weights()[f"{layer}.{own}"]
        for layer in there
        for number, own in enumerate(("weight", "bias"))
        if f"{layer}.{own}" in source.weights()
    }
    if as_keras_has_them:
        for name, shape in zip(deep, [(3, 2, 4, 2), (2, 2, 8, 1)], strict=True):
            arrays[f"layers/{name}/vars/0"] = arrays[f"layers/{name}/vars/0"].reshape(shape)
    import_keras(found, write(tmp_path / "a.weights.h5", arrays))
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
    return "layers/dense/vars/1 lies in another file, which is not read"


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
def test_files_of_keras_that_do_not_fit(spoil: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights.h5", variables(model()))
    expected = spoil(path)
    with pytest.raises(DataError, match=expected) as caught:
        import_keras(model(), path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_without_h5py(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match=r"files of Keras need h5py, .*: pip install 'cupynet\[keras\]'"):
        import_keras(model(), tmp_path / "a.weights.h5")


def branched(*ways: Any) -> Model:
    return Model(
        Sequential({"ways": Concat(list(ways)), "output": Dense(3)}), Image(6, 6, 2), create_backend("numpy"), 1
    )


def test_layers_of_keras_in_branches_are_named(tmp_path: Path) -> None:
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
    for names in ({}, {first: "conv2d_1"}):
        line = rf"^layers '{first}' and '{second}' have the same size, in two branches"
        with pytest.raises(ConfigError, match=line):
            import_keras(found, path, names)
    import_keras(found, path, {first: "conv2d_1", second: "conv2d"})
    for name, weight in arrays.items():
        np.testing.assert_array_equal(found.weights()[name], weight)


def test_layers_of_keras_that_only_fit_one_way_need_no_names(tmp_path: Path) -> None:
    layers = {"block": Residual([Conv2D(2, 3, padding="same"), Conv2D(2, 3, padding="same")], Conv2D(2, 1))}
    source, found = (Model(Sequential({**copy.deepcopy(layers), "output": Dense(3)}), Image(6, 6, 2),
                           create_backend("numpy"), seed) for seed in (1, 2))  # fmt: skip
    names = [name for name in source.weights() if name.endswith(".weight")]
    there = dict(zip(names, ("conv2d", "conv2d_1", "conv2d_2", "dense"), strict=True))
    stored = {f"layers/{there[name]}/vars/{number}": source.weights()[name.replace("weight", own)]
              for name in names for number, own in enumerate(("weight", "bias"))}  # fmt: skip
    import_keras(found, write(tmp_path / "a.weights.h5", stored))
    for name, weight in source.weights().items():
        np.testing.assert_array_equal(found.weights()[name], weight)
