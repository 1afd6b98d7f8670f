"""A network with weights: copies, weights by name, predictions, summary."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import PixelScale, create_backend
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import save_weights
from cupynet.data import Dataset
from cupynet.optim import SGD
from tests.support.backends import every_backend, every_dtype
from tests.support.networks import SMALL, examples, lenet, small_networks, train_step
from tests.support.refusals import refused


def small(name: str = "numpy", dtype: str = "float", seed: int = 123) -> nn.Model:
    return nn.Model(small_networks()["lenet"], SMALL, create_backend(name, dtype), seed)


def pixels(count: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (count, *SMALL.shape), np.uint8)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all((value == other[name]).all() for name, value in one.items())


@every_backend
@every_dtype
def test_a_replica_is_equal_and_independent(name: str, dtype: str) -> None:
    model, optimizer = small(name, dtype), SGD(0.1)
    optimizer.init(model.params, model.backend)
    x, labels = examples(model.backend, 3)
    train_step(model, x, labels, optimizer)  # the weights are no longer the seed's
    model.pixels, model.class_names = PixelScale.of([0.5], [0.5]), ("a", "b", "c")
    before, scores = model.weights(), model.scores(x)[0]
    replica = model.replicate(create_backend(name, dtype))
    assert (replica.pixels, replica.class_names) == (model.pixels, ("a", "b", "c"))
    np.testing.assert_array_equal(replica.scores(x)[0], scores)
    optimizer.init(replica.params, replica.backend)
    train_step(replica, x, labels, optimizer)
    assert equal(model.weights(), before) and not equal(replica.weights(), before)


@every_backend
@every_dtype
def test_weights_are_returned_as_copies_and_loaded_by_name(name: str, dtype: str) -> None:
    model, other = small(name, dtype, seed=1), small(name, dtype, seed=2)
    weights = model.weights()
    assert {type(value) for value in weights.values()} == {np.ndarray}
    other.load_weights(weights)
    weights["conv1.weight"][...] = 7  # `weights` holds copies, so neither model changes
    assert equal(model.weights(), other.weights())
    x, _ = examples(model.backend, 3)
    np.testing.assert_array_equal(model.scores(x)[0], other.scores(x)[0])


class Unconverted:
    """A tensor like PyTorch's with requires_grad, which refuses to be converted to NumPy."""

    def __init__(self, array: Any) -> None:
        self.shape, self.dtype = array.shape, array.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise RuntimeError("use tensor.detach()")


def test_weights_of_another_network_are_refused_and_change_nothing() -> None:
    model = small()
    before = model.weights()
    changed = {name: value + 1 for name, value in before.items()}
    renamed = {("extra.bias" if name == "output.bias" else name): value for name, value in changed.items()}
    weight = changed["output.weight"]
    for wrong in (
        renamed,
        {**changed, "output.weight": np.zeros((3, 6))},
        {**changed, "output.weight": weight * np.array(np.inf, np.float32)},
        {**changed, "output.weight": weight.astype(float) + 1e300},
        {**changed, "output.weight": weight + 1j},
        {**changed, "output.weight": Unconverted(weight)},
        {**changed, "output.weight": [[1.0], [2.0, 3.0]]},
    ):
        with pytest.raises(ConfigError, match=r"output\."):
            model.load_weights(wrong)
        assert equal(model.weights(), before)


def test_weights_that_fit_are_loaded_and_the_others_are_listed(tmp_path: Path) -> None:
    old = nn.Model([nn.Dense(4), nn.BatchNorm(), nn.Dense(3)], (2, 2), seed=1)
    model = nn.Model([nn.Dense(4), nn.Dense(2), nn.Dense(3)], (2, 2))
    old.save(tmp_path / "model.safetensors")
    before, known = model.weights(), old.weights()
    unmatched = model.load_weights(tmp_path / "model.safetensors", strict=False)
    assert unmatched.missing == ["dense2.bias", "dense2.weight", "dense3.bias", "dense3.weight"]
    assert {"dense2.weight", "batchnorm1.mean"} < {*unmatched.unexpected} and "dense1.bias" not in unmatched.unexpected
    for name, weight in model.weights().items():
        assert np.array_equal(weight, (known if name.startswith("dense1") else before)[name]), name


def test_weights_of_which_none_fits_and_damaged_files_are_refused(tmp_path: Path) -> None:
    model = small()
    with refused(""):
        model.load_weights({"other": np.zeros(3)}, strict=False)
    with refused("weights"):
        model.load_weights([np.zeros(3)])  # type: ignore[arg-type]
    save_weights(tmp_path / "weights.safetensors", model.weights())
    content = bytearray((tmp_path / "weights.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "weights.safetensors").write_bytes(content)
    with pytest.raises(DataError):
        model.load_weights(tmp_path / "weights.safetensors", strict=False)


def test_a_model_with_a_replaced_layer_still_computes_the_gradient_of_its_input() -> None:
    model = nn.Model([nn.Conv2D(2, 3), nn.Dense(3)], SMALL, create_backend("numpy"), needs_dx=True)
    x = np.ones((2, *SMALL.shape), np.float32)
    logits, backward = model.replace(dense1=nn.Dense(4)).forward(x, nn.Context(train=True))
    dx = backward(np.ones_like(logits))
    assert dx is not None and dx.shape == x.shape


def test_a_model_with_a_replaced_layer_has_a_loss_scale_of_its_own() -> None:
    model = nn.Model([nn.Conv2D(2, 3), nn.Dense(3)], SMALL, create_backend("numpy", "half"))
    scale = model.backend.loss_scale
    model.replace(dense1=nn.Dense(4)).backend.loss_scale /= 2
    assert model.backend.loss_scale == scale


def test_a_replaced_layer_is_new_and_the_others_keep_their_weights_and_are_trainable() -> None:
    model = nn.Model(nn.Sequential([nn.Conv2D(2, 3), nn.Dense(4, "relu"), nn.Dense(3)]), SMALL, create_backend("numpy"))
    model.params.master += 1
    model.pixels, model.class_names = PixelScale.of([0.1], [0.3]), list("abc")
    model.freeze("conv*")
    before = {name: weights.copy() for name, weights in model.weights().items()}
    mine = model.replace(dense2=nn.Dense(5))
    found = mine.weights()
    assert equal(model.weights(), before)
    assert (model.params.frozen, mine.params.frozen) == (["conv2d1.weight", "conv2d1.bias"], [])
    assert found["dense2.weight"].shape == (4, 5) and mine.pixels == model.pixels and mine.class_names == ()
    assert equal({name: found[name] for name in found if "dense2" not in name},
                 {name: before[name] for name in before if "dense2" not in name})  # fmt: skip
    assert model.replace(conv2d1=nn.Conv2D(2, 3)).class_names == ("a", "b", "c")
    same_size = model.replace(dense2=nn.Dense(3)).weights()
    assert not np.array_equal(same_size["dense2.weight"], before["dense2.weight"])
    for wrong in ({"output": nn.Dense(5)}, {"conv2d1": nn.Conv2D(3, 3)}):  # dense1's weights are for two channels
        with refused("layers"):
            model.replace(**wrong)


def test_layers_of_another_model_are_refused() -> None:
    network = small().network
    for built in (network, dict(network.children())):
        with refused("network"):
            nn.Model(built, SMALL)


def test_training_methods_of_keras_are_missing_with_a_remedy() -> None:
    model = small()
    for name in ("compile", "fit", "train_on_batch", "evaluate"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match="ParallelWrapper"):
            getattr(model, name)
    for owner in (model, nn.Dense(3)):
        with pytest.raises(AttributeError, match="freeze"):
            owner.trainable = False


@every_backend
@every_dtype
def test_predictions_of_pixels_and_of_fractions_are_probabilities(name: str, dtype: str) -> None:
    model, images = small(name, dtype), pixels(5)
    scores = model.predict(images)
    assert type(scores) is np.ndarray and scores.shape == (5, 3)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(model.predict(images / 255), scores, atol=2e-3 if dtype == "half" else 1e-6)
    assert model.backend.workspace.on_loan == 0


@every_backend
@pytest.mark.parametrize("layer", [nn.Flatten(), nn.Dropout(), nn.Activation("identity")])
def test_a_prediction_does_not_overwrite_the_images(name: str, layer: Any) -> None:
    model, images = nn.Model([layer], nn.Flat(4), create_backend(name)), np.arange(12, dtype=np.float32).reshape(3, 4)
    for scores in (model.predict(images), model.scores(images)[0]):
        np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-6)
        scores[...] = 7
        np.testing.assert_array_equal(images.reshape(-1), range(12))


@every_backend
def test_predictions_are_made_in_batches(name: str) -> None:
    one_batch, small_batches = small(name, "double"), small(name, "double")
    images = np.random.default_rng(1).random((200, *SMALL.shape))
    whole = one_batch.predict(images, batch_size=200)
    for batch_size in (1, 3, 64):
        np.testing.assert_allclose(small_batches.predict(images, batch_size), whole, rtol=1e-12)
        scores, logits = small_batches.scores(small_batches.backend.asarray(images), batch_size=batch_size)
        np.testing.assert_allclose(scores, whole, rtol=1e-12)
        assert logits.shape == (200, 3)
    allocated = [model.backend.workspace.allocated_bytes for model in (small_batches, one_batch)]
    assert 2 * allocated[0] < allocated[1]
    with refused("batch_size"):
        one_batch.predict(images, 0)


def layouts(x: Any) -> dict[str, Any]:
    """Return the same values (8, 9, 8, 2) in arrays with other layouts."""
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "backwards": x[::-1].copy()[::-1],
        "columns": np.repeat(x, 2, axis=2)[:, :, ::2],
        "Fortran": np.asfortranarray(x),
        "channels moved": np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
        "read-only": read_only,
        "big-endian": x.astype(x.dtype.newbyteorder(">")),
        "subclass": np.ma.MaskedArray(x),
    }


@every_backend
@every_dtype
def test_predictions_do_not_depend_on_the_memory_layout_and_type_of_images(name: str, dtype: str) -> None:
    network = nn.Sequential(
        [nn.Conv2D(4, 3), nn.MaxPool2D(2), nn.Dense(3)]
    )  # the first kernel reads the images themselves
    model, images = nn.Model(network, SMALL, create_backend(name, dtype)), pixels(8)
    expected = model.predict(images)
    np.testing.assert_array_equal(model.predict(images.astype(np.int64)), expected)
    for kind in (np.uint8, np.float16, np.float64, np.longdouble):
        given = images if kind is np.uint8 else (images / 255).astype(kind)
        as_given = model.predict(given)
        np.testing.assert_allclose(as_given, expected, atol=5e-3)
        for layout, view in layouts(given).items():
            np.testing.assert_array_equal(model.predict(view), as_given, layout)
        broadcast = np.broadcast_to(given[3], given.shape)
        np.testing.assert_array_equal(model.predict(broadcast), model.predict(broadcast.copy()))


NO_IMAGES = {
    "turned": np.zeros((2, 8, 9, 2), np.uint8),
    "without channels": np.zeros((6, 9, 8), np.uint8),
    "channels first": np.zeros((2, 2, 9, 8), np.uint8),
    "int64": np.full((2, *SMALL.shape), 256),
    "text": "a.png",
    "none": None,
    "masked": np.ma.masked_equal(np.zeros((2, *SMALL.shape), np.uint8), 0),
    "images and labels": (np.zeros((2, *SMALL.shape), np.uint8), np.zeros(2, int)),
    "a data set": Dataset("images", np.zeros((2, *SMALL.shape), np.uint8), np.zeros(2, int), 3),
}


@pytest.mark.parametrize("wrong", NO_IMAGES.values(), ids=NO_IMAGES)
def test_predict_refuses_what_is_not_an_image(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        small().predict(wrong)


def test_one_image_may_lack_its_first_axis_and_gray_images_their_last() -> None:
    np.testing.assert_array_equal(small().predict(pixels(1)[0]), small().predict(pixels(1)))
    gray = nn.Model(nn.Sequential([nn.Conv2D(2, 3), nn.Dense(3)]), nn.Image(5, 4, 1), create_backend("numpy"))
    images = np.random.default_rng(1).integers(0, 256, (6, 5, 4), np.uint8)
    np.testing.assert_array_equal(gray.predict(images), gray.predict(images[..., None]))


@every_backend
@pytest.mark.parametrize("shape", [(4, 9, 8, 3), (4, 9, 8, 1), (4, 8, 9, 2), (4, 9, 8)], ids=str)
def test_a_batch_of_another_size_is_refused(name: str, shape: tuple[int, ...]) -> None:
    """Compiled code would read beyond the images, and give garbage or crash."""
    model = small(name)
    x = model.backend.asarray(np.ones(shape, np.float32))
    for context in (nn.INFERENCE, nn.Context(train=True)):
        with pytest.raises(ConfigError):
            model.forward(x, context)
    assert model.backend.workspace.on_loan == 0


def test_the_summary_shows_bytes_parameters_and_multiply_adds_of_each_layer() -> None:
    rows = [
        line.split() for line in nn.Model(lenet(), nn.Image(28, 28, 1), create_backend("numpy")).summary().splitlines()
    ]
    figures = {row[0]: row[-3:] for row in rows if len(row) > 3}  # bytes, parameters, multiply-adds
    assert figures["conv1"] == ["46,080", "520", "288,000"]
    assert figures["pool1"] == ["11,520", "0", "0"]
    assert figures["conv2"] == ["12,800", "25,050", "1,600,000"]
    assert figures["dense1"] == ["2,000", "400,500", "400,000"]
    assert figures["output"] == ["40", "5,010", "5,000"]
    assert {"431,080", "2,293,000"} <= set(rows[-1])


def test_a_network_needs_one_output_for_each_class() -> None:
    dense = nn.Model(nn.Sequential({"fc": nn.Dense(10)}), nn.Flat(3), create_backend("numpy")).network
    nn.check_output(dense, 10)
    with pytest.raises(ConfigError):
        nn.check_output(dense, 3)
    image = nn.Model([nn.Conv2D(3, 3)], nn.Image(8, 8, 1), create_backend("numpy")).network
    with pytest.raises(ConfigError) as caught:
        nn.check_output(image, image.output.features)
    assert str(image.output.features) not in str(caught.value)
