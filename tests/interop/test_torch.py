"""Export to PyTorch and import from it, compared with results from PyTorch itself."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from cupynet import ConfigError, export_torch, import_torch
from cupynet.interop import torch_source
from cupynet.interop.torch import orders
from cupynet.nn import Activation, BatchNorm, Concat, Dense, Flatten, Image, Layer, Residual, Sequential
from tests.support.exported_networks import everything_as_model, images_for, logits, model_of
from tests.support.imported_networks import GOLDEN, SMALL, SMALL_NAMES, check_same_weights, small_model, torch_logits
from tests.support.refusals import data_error, refused


def test_exports_equal_those_that_pytorch_loaded(tmp_path: Path) -> None:
    """In tests/golden/make_exporting.py, PyTorch loaded these tensors into the module that this source defines."""
    model = everything_as_model()
    export_torch(model, tmp_path / "a.safetensors")
    found, expected = load_file(tmp_path / "a.safetensors"), load_file(GOLDEN / "torch_exported.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
        assert found[name].dtype == tensor.dtype
    assert torch_source(model) == (GOLDEN / "torch_module.txt").read_text("utf-8")
    with np.load(GOLDEN / "torch_exported.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["images"], images_for(model))
        np.testing.assert_allclose(logits(model, file["images"]), file["logits"], atol=1e-6 * np.ptp(file["logits"]))


def test_the_exported_module_scales_bytes_but_not_floats() -> None:
    model = everything_as_model()
    model.trained_on = "floats"
    assert "255" in torch_source(everything_as_model()) and "255" not in torch_source(model)


def test_rows_after_a_flattened_image_are_in_the_order_of_pytorch_in_every_branch() -> None:
    ways: dict[str, Any] = {"first": [Dense(3), Dense(2)], "second": [Activation("relu"), Dense(4)]}
    layers = {"flat": Flatten(), "norm": BatchNorm(), "ways": Concat(ways), "output": Dense(2)}
    model = model_of(Sequential(layers), Image(3, 2, 2))
    found = {layer.path: orders(model.network).get(id(layer)) for layer in model.network.walk()}
    expected = np.arange(12).reshape(3, 2, 2).transpose(2, 0, 1).reshape(-1)
    for name in ("norm", "ways.first.dense1", "ways.second.dense1"):
        np.testing.assert_array_equal(found[name], expected)
    assert found["ways.first.dense2"] is None and found["output"] is None


@pytest.mark.parametrize("network", [{"half": Dense(2)}, {"block": Concat({"train": [Dense(12)]}), "output": Dense(2)}])
def test_a_module_with_a_layer_named_like_an_attribute_of_pytorch_modules_is_refused(network: dict[str, Layer]) -> None:
    with pytest.raises(ConfigError, match="half|block.train"):
        torch_source(model_of(Sequential({"dense": Dense(4), **network}), Image(3, 2, 2)))


@pytest.mark.parametrize("block", [Residual([Dense(12)]), Concat([[Flatten()], [Dense(3)]])], ids=["sum", "concat"])
def test_exports_of_branches_that_end_in_a_flattened_image_are_refused(block: Layer, tmp_path: Path) -> None:
    layers = {"flat": Flatten(), "block": block, "output": Dense(2)}
    model = model_of(Sequential(layers), Image(3, 2, 2))
    with pytest.raises(ConfigError, match="'block'"):
        torch_source(model)
    plain = model_of(Sequential(layers), Image(12, 1, 1))  # with one channel, there is only one order
    export_torch(plain, tmp_path / "a")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return torch_logits()


@pytest.mark.parametrize(("flatten", "dtype", "bound"), [(False, "float", 1e-5), (True, "double", 1e-12)])
def test_imported_weights_give_the_logits_of_pytorch(golden: Any, flatten: bool, dtype: str, bound: float) -> None:
    found = small_model(flatten=flatten, dtype=dtype)
    import_torch(found, SMALL, SMALL_NAMES)
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=bound)


def test_single_pytorch_weights_are_imported_by_name(golden: Any, tmp_path: Path) -> None:
    tensors = load_file(SMALL)
    tensors["bn.num_batches_tracked"] = np.array(3)
    tensors["first"] = tensors.pop("0.weight")
    save_file(tensors, tmp_path / "a.safetensors")
    found = small_model()
    layers = {name: there for name, there in SMALL_NAMES.items() if name != "conv1"}
    import_torch(found, tmp_path / "a.safetensors", {**layers, "conv1.weight": "first", "conv1.bias": "0.bias"})
    np.testing.assert_allclose(logits(found, golden["images"]), golden["logits"], atol=1e-12)


def test_pytorch_weights_and_running_statistics_of_every_layer_are_imported() -> None:
    source, found = everything_as_model(), everything_as_model()
    found.load_weights({name: 0 * weight for name, weight in found.weights().items()})
    import_torch(found, GOLDEN / "torch_exported.safetensors")
    check_same_weights(found, source.weights())


@pytest.mark.parametrize(
    ("name", "tensor", "shapes"),
    [
        ("5.bias", None, ()),
        ("9.bias", np.zeros(3), ()),
        ("0.weight", np.zeros((4, 3, 2, 3)), ()),
        ("7.weight", np.zeros((6, 3)), ((6, 3), (3, 6))),  # with the axes of the file
    ],
    ids=["lacking", "more", "a kernel turned", "transposed"],
)
def test_pytorch_weights_that_do_not_fit_are_refused_by_name_and_change_nothing(
    name: str, tensor: Any, shapes: tuple[Any, ...], tmp_path: Path
) -> None:
    path, tensors = tmp_path / "a.safetensors", load_file(SMALL) | {name: tensor}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    found = small_model()
    before = {own: weight.copy() for own, weight in found.weights().items()}
    with data_error(path, name, *shapes):
        import_torch(found, path, SMALL_NAMES)
    check_same_weights(found, before)


def test_numbers_narrower_than_16_bits_are_refused_with_a_remedy(tmp_path: Path) -> None:
    header = json.dumps({"0.weight": {"dtype": "F8_E4M3", "shape": [2, 3], "data_offsets": [0, 6]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(6))
    with data_error("float()"):
        import_torch(small_model(), tmp_path / "a.safetensors")


def test_import_torch_refuses_unknown_names_and_a_state_dict() -> None:
    with pytest.raises(ConfigError, match="'conv9'"):
        import_torch(small_model(), SMALL, {"conv9": "0"})
    with refused("path"):
        import_torch(small_model(), load_file(SMALL))  # type: ignore[arg-type]


@pytest.mark.parametrize("content", [b"text", b"PK\x03\x04" + bytes(100)], ids=["text", "zip"])
def test_files_of_torch_save_and_other_files_are_refused_with_a_remedy(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(content)
    with data_error(tmp_path / "text", "save_file"):
        import_torch(small_model(), tmp_path / "text")
