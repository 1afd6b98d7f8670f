"""PyTorch takes exported weights with `load_state_dict` and computes the same logits, live and as it did once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from cupynet import ConfigError, DataError, export_torch, import_torch
from cupynet.config.instantiate import build_as
from cupynet.data import Synthetic
from cupynet.interop import torch_source
from cupynet.interop.torch import LAYERS, from_torch, orders, to_torch
from cupynet.nn import (
    Activation,
    BatchNorm,
    Concat,
    Conv2D,
    Dense,
    Flatten,
    GlobalAvgPool2D,
    Image,
    Layer,
    LayerNorm,
    Model,
    Residual,
    Sequential,
)
from tests.support.exported_networks import everything_as_model, images_for, logits, model_of
from tests.support.networks import Around
from tests.support.settings import CHOICES, settings_of

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = [name for group, name in CHOICES if group == "model"]
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")


def imported(model: Model, folder: Path) -> ModuleType:
    """The module that was written, as Python reads it."""
    (folder / "written.py").write_text(torch_source(model), "utf-8")
    spec = importlib.util.spec_from_file_location("written", folder / "written.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def of_torch(model: Model, images: Any, folder: Path) -> Any:
    """The logits of the written module with the written weights, in double."""
    import torch

    module = imported(model, folder)
    export_torch(model, folder / "a.safetensors")
    net = module.network()
    tensors = {name: torch.from_numpy(array) for name, array in load_file(folder / "a.safetensors").items()}
    net.load_state_dict(tensors)
    net.eval().double()
    with torch.no_grad():
        return net(module.prepared(torch.from_numpy(images)).double()).numpy()


@needs_torch
@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_configuration(name: str, tmp_path: Path) -> None:
    settings = settings_of("data=synthetic", f"model={name}")
    model = model_of(build_as(Layer, settings.model, "model"), Image(*Synthetic.image_shape))
    images = images_for(model, 3)
    np.testing.assert_allclose(of_torch(model, images, tmp_path), logits(model, images), atol=1e-5)


@needs_torch
def test_every_layer(tmp_path: Path) -> None:
    model = everything_as_model()
    images = images_for(model)
    found, expected = of_torch(model, images, tmp_path), logits(model, images)
    np.testing.assert_allclose(found, expected, atol=1e-6 * np.ptp(expected))


@needs_torch
@pytest.mark.parametrize("layer", [Residual([Conv2D(2, 1)]), Conv2D(3, 2)], ids=["residual", "convolution"])
def test_a_network_of_one_layer(layer: Layer, tmp_path: Path) -> None:
    model = model_of(Sequential({"0": layer, "1": Dense(3)}), Image(4, 4, 2))
    images = images_for(model)
    np.testing.assert_allclose(of_torch(model, images, tmp_path), logits(model, images), atol=1e-6)
    alone = model_of(Dense(3), Image(1, 1, 2))
    with pytest.raises(ConfigError, match="Put it into a Sequential"):
        torch_source(alone)


def test_as_pytorch_took_it_once(tmp_path: Path) -> None:
    """tests/golden/make_exporting.py had these tensors loaded by the module that this text makes."""
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


def test_there_and_back(tmp_path: Path) -> None:
    model = everything_as_model()
    export_torch(model, tmp_path / "a.safetensors")
    other = Model(everything_as_model()._description, model.input, model.backend, 9)
    import_torch(other, tmp_path / "a.safetensors")
    for name, weight in model.weights().items():
        np.testing.assert_array_equal(other.weights()[name], weight, err_msg=name)


@pytest.mark.parametrize("layer", [Conv2D, Dense, LayerNorm], ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("shape", [(3, 4, 5, 2), (4, 5, 2), (30, 7), (30,)], ids=str)
def test_layouts_are_inverted(layer: type[Layer], shape: tuple[int, ...]) -> None:
    weight, axes = np.random.default_rng(1).random(shape), LAYERS[layer].axes
    order = np.random.default_rng(2).permutation(30)
    for each in (None, order if shape[0] == 30 else None):
        np.testing.assert_array_equal(from_torch(to_torch(weight, axes, each), axes, each), weight)
    if shape[0] == 30:
        assert not np.array_equal(to_torch(weight, axes, order), to_torch(weight, axes))


def test_each_branch_is_fed_the_flattened_image() -> None:
    """Of both the rows are in PyTorch's order, whatever the other one begins with."""
    ways = Concat({"first": [Dense(3), Dense(2)], "second": [Activation("relu"), Dense(4)], "mean": [Flatten()]})
    layers = {"flat": Flatten(), "ways": ways, "norm": BatchNorm(), "output": Dense(2)}
    model = model_of(Sequential(layers), Image(3, 2, 2))
    found = {layer.path: orders(model.network).get(id(layer)) for layer in model.network.walk()}
    expected = np.arange(12).reshape(3, 2, 2).transpose(2, 0, 1).reshape(-1)
    for name in ("ways.first.dense1", "ways.second.dense1"):
        np.testing.assert_array_equal(found[name], expected)
    assert found["ways.first.dense2"] is None
    for name in ("norm", "output"):
        np.testing.assert_array_equal(found[name], [*range(6), *(6 + expected)])


def test_images_of_one_channel_are_flattened_the_same_way() -> None:
    for image in (Image(3, 4, 1), Image(1, 1, 5)):
        assert orders(model_of(Sequential([Flatten(), Dense(2)]), image).network) == {}
    pooled = model_of(Sequential([GlobalAvgPool2D(), Dense(2)]), Image(3, 4, 5))
    assert orders(pooled.network) == {}


def test_two_orders_are_not_added_up(tmp_path: Path) -> None:
    layers = {"flat": Flatten(), "block": Residual([Dense(12)]), "output": Dense(2)}
    model = model_of(Sequential(layers), Image(3, 2, 2))
    for way in (lambda: export_torch(model, tmp_path / "a"), lambda: torch_source(model)):
        with pytest.raises(ConfigError, match="^Residual 'block': adds a flattened image"):
            way()
    plain = model_of(Sequential(layers), Image(12, 1, 1))  # of one channel there is but one order
    export_torch(plain, tmp_path / "a")


def test_unknown_layers_are_refused(tmp_path: Path) -> None:
    model = model_of(Sequential({"flat": Flatten(), "mine": Around(Dense(6)), "output": Dense(3)}), Image(3, 2, 1))
    for way in (lambda: export_torch(model, tmp_path / "a"), lambda: torch_source(model)):
        with pytest.raises(ConfigError, match="layer 'mine' is an Around of tests.support.networks"):
            way()
    assert not list(tmp_path.iterdir())


def test_weights_of_another_network_do_not_fit(tmp_path: Path) -> None:
    export_torch(everything_as_model(), tmp_path / "a")
    with pytest.raises(DataError, match="belongs to no layer|its shape .* does not fit|lacks"):
        import_torch(model_of(Sequential({"output": Dense(3)}), Image(3, 2, 1)), tmp_path / "a")
