"""A network with weights: copies, weights by name, predictions, summary, refusals."""

from __future__ import annotations

import copy
import re
from typing import Any

import numpy as np
import pytest

from cupynet.backend import PixelScale, create_backend
from cupynet.core.errors import ConfigError
from cupynet.nn import (
    INFERENCE,
    Activation,
    Context,
    Conv2D,
    Dense,
    Flat,
    Flatten,
    Image,
    MaxPool2D,
    Model,
    Params,
    Sequential,
    SoftmaxNLL,
    check_output,
)
from cupynet.optim import SGD
from tests.support.backends import every_backend, every_dtype
from tests.support.networks import SMALL, examples, lenet, small_networks, train_step
from tests.support.refusals import refused


def small(name: str = "numpy", dtype: str = "float", seed: int = 123) -> Model:
    return Model(small_networks()["lenet"], SMALL, create_backend(name, dtype), seed)


def equal(one: Model, other: Model) -> bool:
    return all((value == other.weights()[name]).all() for name, value in one.weights().items())


# copies ---------------------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
def test_a_replica_is_equal_and_independent(name: str, dtype: str) -> None:
    model = small(name, dtype)
    optimizer = SGD(0.1)
    optimizer.init(model.params, model.backend)
    train_step(model, *examples(model.backend, 3), optimizer)  # no longer what the seed gives
    model.pixels, model.class_names = PixelScale.of([0.5], [0.5]), ("a", "b", "c")
    replica = model.replicate(create_backend(name, dtype))
    assert equal(model, replica)
    assert replica.loss is model.loss and replica.network is not model.network
    assert (replica.pixels, replica.class_names) == (model.pixels, ("a", "b", "c"))
    x, labels = examples(model.backend, 3)
    np.testing.assert_array_equal(model.scores(x)[0], replica.scores(x)[0])
    optimizer.init(replica.params, replica.backend)
    before = model.weights()
    train_step(replica, x, labels, optimizer)
    assert not equal(model, replica)
    assert all((before[parameter] == value).all() for parameter, value in model.weights().items())
    assert equal(replica.replicate(model.backend), replica)


def test_a_description_stays_unbuilt_and_may_be_used_again() -> None:
    description = small_networks()["nested"]
    before = copy.deepcopy(description)
    one, two = (Model(description, SMALL, create_backend("numpy")) for _ in range(2))
    assert equal(one, two) and one.params.master is not two.params.master

    def attributes(layer: Any) -> Any:
        children = {n: attributes(child) for n, child in layer} if isinstance(layer, Sequential) else None
        return sorted(vars(layer)), children

    assert attributes(description) == attributes(before)


# weights by name ------------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
def test_weights_are_exported_and_loaded(name: str, dtype: str) -> None:
    model, other = small(name, dtype, seed=1), small(name, dtype, seed=2)
    weights = model.weights()
    assert list(weights) == [parameter for parameter, _ in model.params.named()]
    assert all(type(value) is np.ndarray for value in weights.values())
    other.load_weights(weights)
    assert equal(model, other)
    x, _ = examples(model.backend, 3)
    np.testing.assert_array_equal(model.scores(x)[0], other.scores(x)[0])
    weights["conv1.weight"][...] = 7  # copies: neither model sees it
    assert equal(model, other)


def test_weights_of_another_network_are_refused_and_change_nothing() -> None:
    model = small()
    before, weights = model.weights(), model.weights()
    moved = {("extra.bias" if name == "output.bias" else name): value + 1 for name, value in weights.items()}
    with pytest.raises(ConfigError, match=r"output\.bias.*extra\.bias"):
        model.load_weights(moved)
    wrong = {name: value + 1 for name, value in weights.items()}
    wrong["output.weight"] = np.zeros((3, 6), np.float32)
    with pytest.raises(ConfigError, match=r"output\.weight"):
        model.load_weights(wrong)
    assert all((before[name] == value).all() for name, value in model.weights().items())


# predictions ----------------------------------------------------------------------------------------------------------


@every_backend
@every_dtype
def test_predictions_of_pixels_and_of_fractions_are_probabilities(name: str, dtype: str) -> None:
    model = small(name, dtype)
    images = np.random.default_rng(0).integers(0, 256, (5, *SMALL.shape), np.uint8)
    scores = model.predict(images)
    assert type(scores) is np.ndarray and scores.shape == (5, 3)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=5e-3 if dtype == "half" else 1e-5)
    fractions = (images / 255).astype(np.float64)
    np.testing.assert_allclose(model.predict(fractions), scores, atol=2e-3 if dtype == "half" else 1e-6)
    np.testing.assert_array_equal(model.predict(images[2:3])[0].argmax(), scores[2].argmax())
    assert model.backend.workspace.on_loan == 0


def test_images_that_do_not_fit_are_refused() -> None:
    model = small()
    for wrong in (np.zeros((2, 8, 9, 2), np.uint8), np.zeros((2, *SMALL.shape), np.int64), "a.png", None):
        with pytest.raises(ConfigError):
            model.predict(wrong)
    assert model.predict(np.zeros((0, *SMALL.shape), np.uint8)).shape == (0, 3)


def layouts(x: Any) -> dict[str, Any]:
    """The same values (8, 9, 8, 2) in arrays of other layouts."""
    read_only = x.copy()
    read_only.flags.writeable = False
    return {
        "backwards": x[::-1].copy()[::-1],
        "every second": np.repeat(x, 2, axis=0)[::2],
        "columns": np.repeat(x, 2, axis=2)[:, :, ::2],
        "Fortran": np.asfortranarray(x),
        "channels moved": np.ascontiguousarray(x.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
        "read-only": read_only,
        "big-endian": x.astype(x.dtype.newbyteorder(">")),
        "subclass": np.ma.MaskedArray(x),
        "list": x.tolist() if x.dtype == np.float64 else x,
    }


@every_backend
@every_dtype
def test_layout_and_type_of_images_do_not_matter(name: str, dtype: str) -> None:
    network = Sequential([Conv2D(4, 3), MaxPool2D(2), Dense(3)])  # the first kernel reads the images themselves
    model = Model(network, SMALL, create_backend(name, dtype))
    pixels = np.random.default_rng(2).integers(0, 256, (8, *SMALL.shape), np.uint8)
    for kind in (np.uint8, np.float16, np.float32, np.float64, np.longdouble):
        images = pixels if kind is np.uint8 else (pixels / 255).astype(kind)
        expected = model.predict(images)
        np.testing.assert_allclose(expected, model.predict(pixels), atol=5e-3)
        for layout, view in layouts(images).items():
            np.testing.assert_array_equal(model.predict(view), expected, layout)
        for view in (np.broadcast_to(images[3], images.shape), np.asfortranarray(images[3])):
            np.testing.assert_array_equal(model.predict(view), model.predict(view.copy(order="C")))
        assert model.classify(images[::-1]) == model.classify(images[::-1].copy())


@every_backend
def test_predictions_are_made_in_batches(name: str) -> None:
    model = small(name, "double")
    images = np.random.default_rng(1).random((200, *SMALL.shape))
    whole = model.predict(images, batch_size=200)
    small_at_a_time, other = small(name, "double"), small(name, "double")
    for batch_size in (1, 3, 64):
        np.testing.assert_allclose(small_at_a_time.predict(images, batch_size), whole, rtol=1e-12)
        x = small_at_a_time.backend.asarray(images)
        scores, logits = small_at_a_time.scores(x, batch_size=batch_size)
        np.testing.assert_allclose(scores, whole, rtol=1e-12)
        assert logits.shape == (200, 3)
    other.predict(images[:64])
    assert small_at_a_time.backend.workspace.allocated_bytes <= other.backend.workspace.allocated_bytes * 1.1
    assert model.backend.workspace.allocated_bytes > 2 * other.backend.workspace.allocated_bytes
    for wrong in (0, 2.0, True):
        with refused("batch_size"):
            model.predict(images, wrong)  # type: ignore[arg-type]


def test_channels_first_is_named() -> None:
    model, grey = small(), Model(Sequential([Dense(3)]), Image(9, 8, 1), create_backend("numpy"))
    for of, shape, axes in ((model, (4, 2, 9, 8), "0, 2, 3, 1"), (model, (2, 9, 8), "1, 2, 0")):
        with pytest.raises(ConfigError, match=rf"transpose\({axes}\)"):
            of.predict(np.zeros(shape, np.uint8))
    assert grey.predict(np.zeros((1, 9, 8))).shape == (1, 3), "one image without its channel"


def test_grey_images_may_lack_their_axis_of_channels() -> None:
    grey = Model(Sequential([Conv2D(2, 3), Dense(3)]), Image(5, 4, 1), create_backend("numpy"))
    images = np.random.default_rng(1).integers(0, 256, (6, 5, 4), np.uint8)
    expected = grey.predict(images[..., None])
    for given in (images, images.tolist(), images / 255):
        taken = np.asarray(given, np.uint8) if isinstance(given, list) else given
        np.testing.assert_allclose(grey.predict(taken), expected, rtol=1e-5)
    with pytest.raises(ConfigError):
        small().predict(np.zeros((6, 9, 8), np.uint8))


@every_backend
def test_a_batch_of_another_size_is_refused(name: str) -> None:
    """Compiled code would read beyond the images: garbage, or the end of the process."""
    model = small(name)
    for shape in ((4, 9, 8, 3), (4, 9, 8, 1), (4, 8, 9, 2), (4, 9, 8), (4, 10, 8, 2)):
        x = model.backend.asarray(np.ones(shape, np.float32))
        for context in (INFERENCE, Context(train=True)):
            with pytest.raises(ConfigError, match=re.escape(str(shape))):
                model.forward(x, context)
    assert model.backend.workspace.on_loan == 0


# summary --------------------------------------------------------------------------------------------------------------


def test_the_summary_of_lenet() -> None:
    summary = Model(lenet(), Image(28, 28, 1), create_backend("numpy")).summary()
    conv, pool = "filters, stride (1, 1), identity", "kernel (2, 2), stride (2, 2)"
    assert [re.split(" {2,}", line) for line in summary.splitlines()] == [
        ["layer", "kind", "settings", "output", "bytes", "parameters", "multiply-adds"],
        ["-" * 123],
        ["input", "Image(28, 28, 1)", "3,136"],
        ["conv1", "Conv2D", f"kernel (5, 5), 20 {conv}", "Image(24, 24, 20)", "46,080", "520", "288,000"],
        ["pool1", "MaxPool2D", pool, "Image(12, 12, 20)", "11,520", "0", "0"],
        ["conv2", "Conv2D", f"kernel (5, 5), 50 {conv}", "Image(8, 8, 50)", "12,800", "25,050", "1,600,000"],
        ["pool2", "MaxPool2D", pool, "Image(4, 4, 50)", "3,200", "0", "0"],
        ["dense1", "Dense", "500 units, relu", "Flat(500)", "2,000", "400,500", "400,000"],
        ["output", "Dense", "10 units, identity", "Flat(10)", "40", "5,010", "5,000"],
        ["total 431,080 parameters, 2,293,000 multiply-adds (4.59 MFLOP) per example"],
    ]
    assert len({len(line) for line in summary.splitlines()[3:9]}) == 1  # numbers are aligned right


# refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "network",
    [
        Sequential({"a": Dense(4), "output": Dense(3, activation="softmax")}),
        Sequential({"a": Dense(4), "output": Activation("softmax")}),
        Sequential({"a": Dense(4), "head": Sequential({"output": Dense(3, activation="softmax")})}),
        Sequential({"flat": Flatten(), "head": Sequential({"b": Dense(3), "output": Activation("softmax")})}),
    ],
    ids=["dense", "activation", "dense in a block", "activation in a block"],
)
def test_softmax_is_not_applied_twice(network: Sequential) -> None:
    with pytest.raises(ConfigError):
        Model(network, SMALL, create_backend("numpy"))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("seed", None),
        ("seed", -1),
        ("seed", 2**64),
        ("loss", SoftmaxNLL),
        ("network", Dense),
        ("network", [Dense(3)]),
        ("input", (28, 28, 1)),
        ("backend", "numba"),
    ],
)
def test_arguments_are_checked(setting: str, value: Any) -> None:
    arguments = {"network": Dense(3), "input": Flat(4), "backend": create_backend("numpy"), setting: value}
    with refused(setting):
        Model(**arguments)


@pytest.mark.parametrize("wrong", [28.0, "28", 0])
def test_sizes_of_inputs_are_whole_and_positive(wrong: Any) -> None:
    for name in ("height", "width", "channels"):
        with refused(name):
            Image(**{"height": 2, "width": 2, "channels": 2, name: wrong})
    with refused("features"):
        Flat(wrong)


def test_one_logit_for_each_class() -> None:
    image, backend = Image(1, 1, 3), create_backend("numpy")
    network = Sequential({"head": Sequential({"fc": Dense(10)})})
    network.build(image, Params().scope(), backend)
    check_output(network, 10)
    with pytest.raises(ConfigError):
        check_output(network, 3)
    conv = Sequential({"conv": Conv2D(3, 1)})
    conv.build(image, Params().scope(), backend)
    with pytest.raises(ConfigError):
        check_output(conv, 3)


# parts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", small_networks())
def test_parts_one_after_the_other_are_the_whole_network(name: str) -> None:
    whole = Model(small_networks()[name], SMALL, create_backend("numpy", "double"), 5)
    whole.load_weights({key: weight + 0.5 for key, weight in whole.weights().items()})
    parts = [whole.part([layer], create_backend("numpy", "double")) for layer, _ in whole.network.children()]
    assert [key for part in parts for key in part.weights()] == list(whole.weights())
    assert [part.network.needs_dx for part in parts] == [False] + [True] * (len(parts) - 1)
    x, _ = examples(whole.backend, 4)
    expected, _ = whole.forward(x, INFERENCE)
    for part in parts:
        x, _ = part.forward(x, INFERENCE)
    np.testing.assert_allclose(x, expected, rtol=1e-12)


def test_only_the_last_part_has_the_loss_and_copies_stay_parts() -> None:
    network = Sequential({"a": Dense(4, "softmax"), "b": Dense(3)})  # softmax is no ending here
    whole = Model(network, Flat(6), create_backend("numpy"))
    first, last = (whole.part([name], whole.backend) for name in ("a", "b"))
    assert isinstance(last.loss, SoftmaxNLL) and not isinstance(first.loss, SoftmaxNLL)
    assert last.replicate(whole.backend).network.needs_dx and not first.replicate(whole.backend).network.needs_dx
