"""Data sets, and the options shared by all sources: validation, limit, seed."""

from typing import Any

import numpy as np
import pytest

from cupynet.data import Data, Dataset, Synthetic
from cupynet.data.dataset import hold_out, in_turns
from tests.support.refusals import data_error, refused
from tests.support.training import numbered_dataset


def pixels(*shape: int) -> Any:
    return np.zeros(shape, np.uint8)


def rows(dataset: Any) -> list[bytes]:
    return [image.tobytes() for image in dataset.images]


@pytest.mark.parametrize(
    ("images", "labels"),
    [
        (pixels(3, 16), [0] * 3),
        (pixels(3, 2, 2, 2, 1), [0] * 3),
        (np.full((3, 4, 4, 1), np.nan), [0] * 3),
        (np.full((3, 4, 4, 1), 1e300), [0] * 3),
        (pixels(3, 4, 4, 1), np.eye(3)),
        (np.zeros((3, 4, 4), bool), [0] * 3),
        ([[[256]]], [0]),
        (None, [0]),
        ((each for each in pixels(3, 4, 4, 1)), [0] * 3),
        (pixels(3, 4, 4, 1), np.zeros(2, np.int64)),
        (pixels(3, 4, 4, 1), np.zeros(3)),
        (pixels(1, 4, 4, 1), np.array([2**64 - 1], np.uint64)),
        (pixels(3, 4, 4, 1), 7),
        (pixels(3, 4, 4, 1), np.array([0, 10, 1])),
        (pixels(3, 4, 4, 1), np.array([0, -1, 1], np.int8)),
    ],
)
def test_bad_images_and_labels_are_refused(images: Any, labels: Any) -> None:
    with refused(""):
        Dataset("x", images, labels, 10)


def test_names_of_classes_may_be_an_array_or_none() -> None:
    names, labels = np.unique(["cat", "dog", "cat"], return_inverse=True)
    assert Dataset("x", pixels(3, 4, 4, 1), labels, 2, class_names=names).class_names == ("cat", "dog")
    assert Dataset("x", pixels(3, 4, 4, 1), labels, 2, class_names=None).class_names == ()


def test_images_are_copied_only_if_they_are_not_contiguous() -> None:
    whole = pixels(6, 4, 5, 3)
    assert Dataset("x", whole, [0] * 6, 10).images is whole
    assert np.shares_memory(Dataset("x", whole, [0] * 6, 10).take(slice(1, 3)).images, whole)
    assert Dataset("x", whole[::2], [0] * 3, 10).images.flags.c_contiguous


@pytest.mark.parametrize("kind", ["u1", ">i8", "u8"])
def test_a_dataset_does_not_depend_on_the_memory_layout_and_type_of_its_arrays(kind: str) -> None:
    x = np.random.default_rng(1).integers(0, 256, (6, 3, 4, 2)).astype(kind)
    labels = np.arange(6).astype(kind)
    for view in (x[::-1].copy()[::-1], np.repeat(x, 2, axis=3)[..., ::2], np.asfortranarray(x)):
        dataset = Dataset("x", view, np.repeat(labels, 2)[::2], 6)
        assert (dataset.images.dtype, dataset.labels.dtype) == (np.uint8, np.int64)
        np.testing.assert_array_equal(dataset.images, x)
        np.testing.assert_array_equal(dataset.labels, labels)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 60, 20), (4, 5, 7)])
def test_images_with_channels_first_are_refused(shape: tuple[int, int, int]) -> None:
    images = pixels(6, *shape)
    with refused(""):
        Dataset("x", images, [0] * 6, 10)
    assert Dataset("x", images.transpose(0, 2, 3, 1), [0] * 6, 10).image_shape == (*shape[1:], shape[0])
    for other in ((1, 500, 12), (3, 9, 3), (4, 4, 4)):  # channels last
        assert Dataset("x", pixels(6, *other), [0] * 6, 10).image_shape == other


@pytest.mark.parametrize(
    ("count", "chosen"), [(1, [4]), (2, [0, 4]), (3, [0, 4, 6]), (5, [0, 1, 4, 5, 6]), (9, list(range(8)))]
)
def test_a_limited_choice_takes_classes_in_turns(count: int, chosen: list[int]) -> None:
    labels = np.array([2, 2, 2, 2, 0, 0, 7, 0])
    assert np.arange(8)[in_turns(labels, count)].tolist() == chosen


def test_data_of_another_image_size_or_with_more_classes_are_refused() -> None:
    train, test = numbered_dataset(20), Dataset("others", pixels(4, 3, 3, 1), [0] * 4, 10)
    Data("x", train, None, train).check((2, 2, 1), 10)
    for data in (Data("x", train, None, test), Data("x", test, None, train), Data("x", train, test, train)):
        with data_error("'others'", (2, 2, 1), (3, 3, 1)):
            data.check((2, 2, 1), 10)
    with data_error("'numbered'", 9):
        Data("x", train, None, train).check((2, 2, 1), 9)


def load(**settings: Any) -> Data:
    return Synthetic(train=60, test=40, **settings).load()


def test_validation_images_follow_from_the_seed_and_a_larger_choice_keeps_them() -> None:
    assert set(rows(load(validation=5).validation)) < set(rows(load(validation=15).validation))
    train = numbered_dataset(60)
    first, again, other = (Synthetic(10, 10, seed=seed, validation=8)._divided("x", train, train) for seed in (1, 1, 2))
    assert rows(first.validation) == rows(again.validation) != rows(other.validation)


def test_the_limit_applies_after_validation_images_are_held_out() -> None:
    full, quick = load(validation=15), load(validation=15, limit=10)
    assert rows(quick.train) == rows(full.train)[:10]
    assert rows(quick.validation) == rows(full.validation)
    assert rows(quick.test) == rows(full.test)[:10]


def test_a_fraction_is_held_out_of_each_class_depending_on_the_seed() -> None:
    labels = np.repeat([3, 1, 0], [70, 25, 5])
    kept, held_out = hold_out(labels, 0.2, 5, "validation")
    assert np.bincount(labels[held_out]).tolist() == [1, 5, 0, 14]
    np.testing.assert_array_equal(np.sort(np.concatenate([kept, held_out])), np.arange(100))
    other, same = hold_out(labels, 0.2, 6, "validation")[1], hold_out(labels, 0.2, 5, "validation")[1]
    assert np.array_equal(same, held_out) and not np.array_equal(other, held_out)


@pytest.mark.parametrize("indices", [np.arange(6) % 3 == 1, [1, 4], slice(1, 5, 3), np.array([1, -2])], ids=repr)
def test_a_subset_is_chosen_like_elements_of_an_array(indices: Any) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(6, 2, 2, 1)
    whole = Dataset("six", images, np.arange(6), 6, weights=np.arange(6))
    chosen = whole.subset(indices)
    np.testing.assert_array_equal(np.asarray(chosen.images), images[[1, 4]])
    assert chosen.labels.tolist() == [1, 4] and np.asarray(chosen.weights).tolist() == [1, 4]


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.99])
def test_every_class_keeps_a_sample_to_train_on(fraction: float) -> None:
    labels = np.concatenate([np.arange(39) % 20, np.zeros(61, int)])  # most classes have two samples, one has one
    kept, held_out = hold_out(labels, fraction, 1, "validation")
    assert set(labels[kept].tolist()) == set(range(20))
    assert len(held_out) == min(round(100 * fraction), 80)


def test_a_number_of_images_is_held_out_regardless_of_their_classes() -> None:
    kept, held_out = hold_out(np.zeros(10), 3, 1, "validation")
    assert (len(kept), len(held_out)) == (7, 3)
    for part in (0, 10, 0.01):
        with refused("validation", str(part)):
            hold_out(np.zeros(10), part, 1, "validation")


def test_single_images_of_all_classes_cannot_be_split() -> None:
    with refused("validation", "0.5"):
        hold_out(np.arange(4), 0.5, 1, "validation")


@pytest.mark.parametrize("place", ["images", "labels", "weights"])
def test_masked_images_labels_and_weights_are_refused(place: str) -> None:
    arrays: dict[str, Any] = {"images": np.zeros((3, 8, 8), np.uint8), "labels": np.arange(3), "weights": np.ones(3)}
    whole = np.ma.array(arrays[place])
    Dataset(name="whole", classes=3, **arrays | {place: whole})
    whole[1] = np.ma.masked
    with refused(""):
        Dataset(name="masked", classes=3, **arrays | {place: whole})
