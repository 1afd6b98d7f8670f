"""Data that `fit` and `evaluate` accept, and the result of `fit`."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet import Callback, Dataset, LambdaCallback, Loader, Model, ParallelWrapper, Shift, Synthetic
from cupynet.backend import PixelScale
from cupynet.core.errors import ConfigError
from cupynet.data.dataset import split_views
from tests.support.refusals import refused
from tests.support.trainers import fitted
from tests.support.training import assert_close, fingerprint, on_backends, small_dataset, small_model

DATA = small_dataset(60)
X, Y = DATA.images, DATA.labels


def on_device(array: Any) -> Any:
    """Return an array like CuPy's, which NumPy must not convert silently."""
    return SimpleNamespace(__cuda_array_interface__={}, get=lambda: array)


def exchanged(array: Any) -> Any:
    """Return an array that only supports DLPack."""
    return SimpleNamespace(__dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__)


class MapStyle:
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return {"image": X[index], "label": Y[index]}


class Streamed(MapStyle):
    """Like an `IterableDataset` of PyTorch that knows its length."""

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def trained(*data: Any) -> Model:
    model = small_model()
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(*data, epochs=2, batch_size=8)
    return model


@pytest.mark.parametrize(
    "data",
    [
        (X[..., 0], Y.astype(np.uint8)),
        (X, Y[:, None]),
        (X, np.eye(3)[Y]),
        (X.tolist(), Y.tolist()),
        (on_device(X), on_device(Y)),
        (exchanged(X), exchanged(Y)),
        ((X, Y),),
        (DATA,),
        (Loader(DATA, 8, seed=12345),),
        (MapStyle(),),
        (Streamed(),),
        (zip(X, Y, strict=True),),
    ],
    ids=[
        *("gray", "column", "one-hot", "lists", "CuPy", "DLPack", "pair", "Dataset", "Loader", "map-style", "streamed"),
        "iterable",
    ],
)
def test_all_kinds_of_data_train_the_same_weights(data: tuple[Any, ...]) -> None:
    assert fingerprint(trained(*data)) == fingerprint(trained(X, Y))


def test_two_examples_in_dictionaries_are_not_taken_for_images_and_labels() -> None:
    examples = [{"image": image, "label": label} for image, label in zip(X[:2], Y[:2], strict=True)]
    assert fingerprint(trained(examples)) == fingerprint(trained(X[:2], Y[:2]))


@on_backends("numba", "cupy")
def test_floating_point_images_are_taken_as_scaled_on_every_backend(backend: str) -> None:
    model = fitted(small_model("float", backend), (X / 255, Y), batch_size=8)
    other = fitted(small_model("float"), (X, Y), batch_size=8)
    assert_close(model.weights(), other.weights(), 1e-5)


@on_backends("numpy", "numba", "cupy")
@pytest.mark.parametrize("images", [X, X / 255], ids=["pixels", "floats"])
def test_a_held_out_part_is_not_a_copy_but_trains_like_one(backend: str, images: Any) -> None:
    data, found = Dataset("x", images, Y, 3), []
    augment = [] if data.scaled else ["mixup"]
    parts = split_views(data, 0.25, 9)
    assert all(part.images.base is data.images for part in parts)
    for train, held_out in (parts, [replace(part, images=np.asarray(part.images)) for part in parts]):
        with ParallelWrapper(small_model("float", backend), 2) as wrapper:
            loader = Loader(train, 8, augment=augment)
            history = wrapper.fit(loader, epochs=2, validation_data=held_out)
            found.append((loader.signature, wrapper.model.weights(), history.epochs["validation_loss"]))
    assert found[0][::2] == found[1][::2]
    np.testing.assert_equal(found[0][1], found[1][1])


def test_mistakes_after_validation_split_have_their_indices_in_the_whole_data() -> None:
    with ParallelWrapper(small_model(), 2) as wrapper:
        wrapper.fit(X, Y, validation_split=0.25)
        assert wrapper.trainer.evaluation is not None
        mistakes = wrapper.trainer.evaluation.mistakes
        guesses = wrapper.predict(X).argmax(axis=1)
        part = DATA.subset(np.arange(30, 60))
        of_part = wrapper.evaluate(part).mistakes
    assert mistakes and all((each.label, each.guess) == (Y[each.sample], guesses[each.sample]) for each in mistakes)
    assert of_part and all(each.label == part.labels[each.sample] for each in of_part)  # in the data set as passed


def test_functions_of_a_lambda_callback_receive_events_and_unknown_events_are_refused() -> None:
    seen: list[float] = []
    printing = LambdaCallback(on_epoch_end=lambda trainer, record: seen.append(record.loss))
    with ParallelWrapper(small_model(), 2, callbacks=[printing]) as wrapper:
        history = wrapper.fit(X, Y, epochs=2, batch_size=8)
    assert history["loss"] == history.epochs["loss"] == seen and len(seen) == 2
    for define in (LambdaCallback, lambda **events: type("Mine", (Callback,), events)):
        with refused("event", "on_epoch_begin"):
            define(on_epoch_begin=print)
    type("Mine", (Callback,), {"on_gpu": True, "on_cpu": property(str)})  # these are not methods
    with refused("on_epoch_end", "None"):
        LambdaCallback(on_epoch_end=None)  # type: ignore[arg-type]


def test_fit_returns_its_own_history_whose_columns_name_the_evaluated_data() -> None:
    with ParallelWrapper(small_model(), 1) as wrapper:
        first = wrapper.fit(X, Y, validation_data=(X[:9], Y[:9])).epochs
        second = wrapper.fit(X, Y, evaluate_on=(X[:9], Y[:9])).epochs
        third = wrapper.fit(X, Y, validation_split=0.25).epochs
        assert wrapper.history.epochs["epoch"] == [1, 2, 3]
        assert wrapper.trainer.evaluation is not None and wrapper.trainer.evaluation.samples == 15
    assert "validation_loss" in first and "test_loss" not in first
    assert "test_loss" in second and second["epoch"] == [2]
    assert "validation_loss" in third and third["samples"] == [45]


def test_sample_weights_of_evaluation_data_weight_the_loss_but_not_the_accuracy() -> None:
    weighted = X, Y, np.arange(60) < 9
    with ParallelWrapper(small_model(), 2) as wrapper:
        history = wrapper.fit(X, Y, validation_data=weighted)
        expected = wrapper.evaluate(X[:9], Y[:9]).loss * 9 / 60
        assert wrapper.evaluate(weighted).loss == pytest.approx(expected) == pytest.approx(history["val_loss"][0])
        assert history["val_accuracy"] == [wrapper.evaluate(X, Y).accuracy]


def test_evaluation_data_are_not_augmented_and_floats_cannot_be() -> None:
    augmented = Loader(DATA, 8, augment=["shift", "mixup"])
    with ParallelWrapper(small_model(), 1) as wrapper:
        history = wrapper.fit(X, Y, batch_size=8, validation_data=augmented)
        losses = [wrapper.evaluate(DATA).loss, wrapper.evaluate(augmented).loss]
    assert losses == pytest.approx(history["val_loss"] * 2)
    with refused("augment"):
        Loader(Dataset("floats", X / 255, Y, 3), 8, augment=[Shift(1)])


def test_the_first_image_or_target_that_is_not_finite_is_named() -> None:
    spoilt = X / 255
    spoilt[[7, 40]] = np.nan
    with pytest.raises(ConfigError, match=r"image 7 .*\(2 "):
        Dataset("floats", spoilt, Y, 3)
    with pytest.raises(ConfigError, match="target 4 "):
        Dataset("floats", X, np.where(np.arange(60) == 4, np.inf, 1.0), 1)


@pytest.mark.parametrize(
    ("data", "options", "setting"),
    [
        ((X,), {}, ""),
        ((DATA.take(slice(0)),), {}, ""),
        ((X, Y), {"epochs": 1.5}, "epochs"),
        ((X, Y), {"evaluate_every": 0}, "evaluate_every"),
        ((X, Y), {"batch_size": 0}, "batch_size"),
        ((X, Y), {"validation_split": 1.0}, "validation_split"),
        ((X, Y), {"validation_split": 0.001}, "validation_split"),
        ((X, Y), {"validation_split": 0.5, "validation_data": DATA}, "validation_data"),
        ((X, Y), {"validation_data": DATA, "evaluate_on": DATA}, "evaluate_on"),
        ((X, np.eye(3)[Y] / 2), {}, ""),
        ((X + 1000.0 * 1j, Y), {}, ""),
        ((X.astype(np.int32) - 300, Y), {}, ""),
        (([1, 2, 3],), {}, ""),
        (([(X[0], 0), (X[0, :4], 1)] * 2,), {}, ""),
        ((X, np.eye(4)[Y]), {}, ""),
        ((Loader(DATA, 8),), {"batch_size": 9}, "batch_size"),
        ((DATA, Y), {}, "y"),
        ((X, Y), {"validation_data": (X, Y, np.ones(3))}, "validation_data"),
        ((X, Y), {"validation_data": X}, "validation_data"),
        ((X, Y), {"validation_data": (X,)}, "validation_data"),
        ((X, Y), {"evaluate_on": (X, None)}, "evaluate_on"),
        (((X, None),), {}, ""),
        (((X, Y, np.ones(60)),), {}, "x"),
        ((iter(()),), {}, ""),
        (([(X[0], 0), (X[1] / 255, 1)],), {}, ""),
        (({"image": X, "label": Y},), {}, ""),
        (([[1, 2], [3]], [0, 1]), {}, ""),
        ((X.reshape(60, -1) / 255, Y), {}, ""),
    ],
)
def test_invalid_data_and_arguments_of_fit_are_refused_before_anything_changes(
    data: tuple[Any, ...], options: dict[str, Any], setting: str
) -> None:
    model = small_model()
    before = fingerprint(model)
    with ParallelWrapper(model, 2) as wrapper, refused(setting):
        wrapper.fit(*data, **options)
    assert fingerprint(model) == before


def fail(trainer: Any) -> None:
    raise ConfigError("refused")


@pytest.mark.parametrize("stopped", [False, True], ids=["refused by a callback", "stopped before it begins"])
def test_the_model_describes_the_data_of_its_last_training_and_not_of_a_fit_without_iterations(stopped: bool) -> None:
    model = trained(replace(DATA, class_names=["ant", "bee", "cat"], pixels=PixelScale.of([0.2], [0.4])))
    before = model.pixels, model.class_names, model.trained_on
    with ParallelWrapper(model, 2, callbacks=[] if stopped else [LambdaCallback(on_fit_start=fail)]) as wrapper:
        if stopped:
            wrapper.stop()
        with nullcontext() if stopped else refused(""):
            wrapper.fit(replace(DATA, images=X / np.float32(255), class_names=["dog", "elk", "fox"]))
    assert (model.pixels, model.class_names, model.trained_on) == before


def test_evaluation_data_with_other_class_names_than_the_training_data_are_refused() -> None:
    """Their labels would mean other classes. Data without names have the classes of the training data."""
    train, other = (replace(DATA, class_names=names) for names in (["ant", "bee", "cat"], ["bee", "cat", "dog"]))
    with ParallelWrapper(small_model(), 1) as wrapper:
        with refused("validation_data"):
            wrapper.fit(train, validation_data=other)
        for data in (train, DATA, (X, Y)):
            wrapper.fit(train, validation_data=data)
            wrapper.evaluate(data)
        with refused(""):
            wrapper.evaluate(other)
        wrapper.fit(other, validation_data=other)


def test_the_model_takes_the_class_names_of_the_training_data() -> None:
    model = trained(replace(DATA, class_names=["ant", "bee", "cat"]))
    assert model.classify(X[:1], top=1)[0][0][0] in ("ant", "bee", "cat")
    fitted(model, (X, Y))
    assert model.class_names == ("ant", "bee", "cat")
    with refused(""):
        replace(DATA, class_names=["ant", "bee"])


def test_a_whole_source_is_refused_with_a_message_that_names_its_training_part() -> None:
    source = Synthetic(train=20, test=10)
    for given in (source, source.load()):
        with ParallelWrapper(small_model()) as wrapper, pytest.raises(ConfigError, match=r"\.train"):
            wrapper.fit(given)


def test_pictures_with_a_palette_are_refused() -> None:
    pillow, model = pytest.importorskip("PIL.Image"), small_model()
    pictures = [pillow.fromarray(image[..., 0]).convert("P") for image in X]
    with ParallelWrapper(model, 1) as wrapper, refused(""):
        wrapper.fit(zip(pictures, Y, strict=True))
    for images, setting in ((pictures[0], ""), (pictures, "images")):
        with refused(setting):
            model.predict(images)


def test_floats_normalized_by_the_user_are_evaluated_like_normalized_pixels() -> None:
    normalized = replace(DATA, pixels=PixelScale.of([0.2], [0.4]))
    with ParallelWrapper(small_model(), 1) as wrapper:
        wrapper.fit(normalized)
        loss = wrapper.evaluate((X / 255 - 0.2) / 0.4, Y).loss
        assert loss == pytest.approx(wrapper.evaluate(normalized).loss, rel=1e-5)
