"""onnxruntime computes the same as the exported model."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from cupynet import ConfigError, export_onnx, export_torch, nn
from cupynet.backend import create_backend
from cupynet.config.instantiate import build_as
from cupynet.data import Synthetic
from cupynet.interop import BOUND, difference, onnx_graph
from tests.support.exported_networks import everything_as_model, images_for, logits, model_of
from tests.support.networks import Around
from tests.support.refusals import refused
from tests.support.settings import CHOICES, settings_of


class Subclass(nn.Dense):
    """A user's subclass may compute anything."""


def answers(content: bytes, images: Any) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return dict(zip([each.name for each in session.get_outputs()], session.run(None, {"images": images}), strict=True))


def check_graph(model: nn.Model) -> None:
    found = difference(onnx_graph(model), model, 5)
    assert found is not None and found <= BOUND


@pytest.mark.parametrize("name", [name for group, name in CHOICES if group == "model"])
def test_every_model_of_the_configuration_is_exported_to_onnx(name: str) -> None:
    settings = settings_of("data=synthetic", f"model={name}")
    check_graph(model_of(build_as(nn.Layer, settings.model, "model"), nn.Image(*Synthetic.image_shape), "float"))


@pytest.mark.parametrize("input", ["uint8", "float"])
def test_onnxruntime_gives_the_logits_and_probabilities_of_a_model_with_every_layer(input: str) -> None:
    model = everything_as_model()
    images = images_for(model)
    given = images if input == "uint8" else (images / 255).astype(np.float32)
    found = answers(onnx_graph(model, input=input), given)
    expected = logits(model, images)
    assert found["logits"].dtype == np.float32 and np.ptp(expected) > 0.5
    np.testing.assert_allclose(found["logits"], expected, atol=1e-5 * np.ptp(expected))
    np.testing.assert_allclose(found["probabilities"], model.predict(images), atol=1e-5)
    for few in (0, 1, 3):  # any number of images
        assert answers(onnx_graph(model, input=input), given[:few])["logits"].shape == (few, 5)


@pytest.mark.parametrize(
    ("loss", "known"), [(nn.BinaryCrossEntropy(), True), (nn.Hinge(), False)], ids=["logistic", "hinge"]
)
def test_the_onnx_graph_ends_in_probabilities_if_the_loss_makes_them(loss: nn.Loss, known: bool) -> None:
    model = model_of(nn.Sequential([nn.Dense(3)]), nn.Image(4, 5, 2), loss=loss)
    images = images_for(model)
    found = answers(onnx_graph(model), images)
    assert ("probabilities" in found) == known
    np.testing.assert_allclose(found["probabilities" if known else "logits"], model.predict(images), atol=1e-5)


@pytest.mark.parametrize(("channels", "side"), [(1, 4), (3, 1), (3, 4)])
def test_a_flattened_image_of_any_size_is_exported(channels: int, side: int) -> None:
    for layers in ([nn.Dense(3)], [nn.Flatten(), nn.Dense(3)]):
        check_graph(model_of(nn.Sequential(layers), nn.Image(side, side, channels)))


@pytest.mark.parametrize("name", ["pixels", "images", "logits", "network"])
def test_a_layer_may_have_the_name_of_an_onnx_node(name: str) -> None:
    inner = nn.Residual({name: nn.Conv2D(2, 1, activation="silu")})
    layers = {name: nn.BatchNorm(), "swish": nn.Activation("silu"), "inner": inner, "output": nn.Dense(3)}
    check_graph(model_of(nn.Sequential(layers), nn.Image(4, 4, 2)))


def test_the_epsilon_of_a_normalization_is_exported() -> None:
    check_graph(
        model_of(nn.Sequential([nn.BatchNorm(epsilon=0.5), nn.LayerNorm(epsilon=0.5), nn.Dense(3)]), nn.Image(4, 4, 2))
    )


def test_a_network_of_one_layer_for_vectors_is_exported() -> None:
    model = nn.Model(nn.Dense(3), nn.Flat(6), create_backend("numpy"), 1)
    x = np.random.default_rng(0).random((4, 6), np.float32)
    found = answers(onnx_graph(model, input="float"), x)["logits"]
    np.testing.assert_allclose(found, model.scores(x)[1], atol=1e-6)


def test_channels_of_an_exported_output_image_are_last() -> None:
    model = model_of(nn.Sequential([nn.Conv2D(4, 3)]), nn.Image(6, 6, 1), loss=nn.SoftmaxNLL())
    images = images_for(model)
    np.testing.assert_allclose(answers(onnx_graph(model), images)["probabilities"], model.predict(images), atol=1e-6)


def test_the_comparison_after_an_export_finds_a_wrong_graph() -> None:
    model, other = everything_as_model(), everything_as_model()
    weights = other.weights()
    other.load_weights({**weights, "norm4.mean": weights["norm4.mean"] + np.float32(1e-2)})
    found = difference(onnx_graph(other), model, 20)
    assert found is not None and found > BOUND


def test_an_onnx_file_is_reproducible_and_has_its_input_and_metadata(tmp_path: Path) -> None:
    model = everything_as_model()
    for name in ("a.onnx", "b.onnx"):
        export_onnx(model, tmp_path / name, metadata={"labels": json.dumps(["a"])})
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    file = onnx.load(tmp_path / "a.onnx")
    onnx.checker.check_model(file, full_check=True)
    assert file.opset_import[0].version == 20
    assert {each.key: each.value for each in file.metadata_props} == {"labels": '["a"]'}
    (images,) = file.graph.input
    shape = [each.dim_param or each.dim_value for each in images.type.tensor_type.shape.dim]
    assert (images.name, shape) == ("images", ["N", 13, 10, 2])
    assert images.type.tensor_type.elem_type == onnx.TensorProto.UINT8


def test_a_model_trained_on_floats_is_not_exported_for_bytes() -> None:
    """Their scaling is unknown."""
    model = everything_as_model()
    model.trained_on = "floats"
    with refused("input"):
        onnx_graph(model)
    assert onnx_graph(model, input="float")


@pytest.mark.parametrize("metadata", [{"epochs": 5}, {5: "epochs"}, ["epochs"]], ids=["value", "name", "list"])
def test_metadata_that_is_not_a_mapping_of_strings_is_refused(metadata: Any, tmp_path: Path) -> None:
    with refused("metadata"):
        export_onnx(everything_as_model(), tmp_path / "a.onnx", metadata=metadata)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("export", [export_onnx, export_torch])
@pytest.mark.parametrize("mine", [Around(nn.Dense(6)), Subclass(6)], ids=["another layer", "a subclass"])
def test_exports_of_user_defined_layers_are_refused_by_name(mine: nn.Layer, export: Any, tmp_path: Path) -> None:
    model = model_of(nn.Sequential({"flat": nn.Flatten(), "mine": mine, "output": nn.Dense(3)}), nn.Image(3, 2, 1))
    with pytest.raises(ConfigError, match="'mine'"):
        export(model, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_without_onnx_an_export_is_refused_and_without_onnxruntime_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = everything_as_model()
    content = onnx_graph(model)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert difference(content, model, 3) is None
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refused(""):
        onnx_graph(model)
