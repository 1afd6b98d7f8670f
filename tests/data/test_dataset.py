"""Data sets, and what the sources share: validation, limit, refusals by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.data import MNIST, Data, Dataset, Synthetic
from cupynet.errors import ConfigError


def numbered(samples: int = 20) -> Dataset:
    images = np.zeros((samples, 2, 2, 1), np.uint8)
    images[:, 0, 0, 0] = np.arange(samples)
    return Dataset("numbered", images, np.arange(samples) % 10, 10)


def test_take_keeps_images_and_labels_together() -> None:
    taken = numbered().take([13, 2])
    assert (len(taken), taken.name, taken.classes) == (2, "numbered", 10)
    assert taken.images[:, 0, 0, 0].tolist() == [13, 2] and taken.labels.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (
            np.zeros((3, 4, 4), np.uint8),
            np.zeros(3, np.int64),
            r"images must be .* \(S, H, W, C\) of uint8, got \(3, 4, 4\)",
        ),
        (np.zeros((3, 4, 4, 1), np.float32), np.zeros(3, np.int64), r"got \(3, 4, 4, 1\) of float32"),
        ([1], np.zeros(1, np.int64), "got list"),
        (
            np.zeros((3, 4, 4, 1), np.uint8),
            np.zeros(2, np.int64),
            r"labels must be .* \(3,\) of int64, .* got \(2,\) of int64",
        ),
        (np.zeros((3, 4, 4, 1), np.uint8), np.zeros(3, np.uint8), r"got \(3,\) of uint8"),
        (
            np.zeros((3, 4, 4, 1), np.uint8),
            np.array([0, 10, 1]),
            r"labels must lie in 0 .. 9 for 10 classes, got 0 .. 10",
        ),
        (np.zeros((3, 4, 4, 1), np.uint8), np.array([0, -1, 1]), r"got -1 .. 1"),
    ],
)
def test_a_data_set_that_cannot_be(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Dataset("x", images, labels, 10)


def load(**settings: Any) -> Data:
    return Synthetic(train=60, test=40, **settings).load()


def rows(dataset: Dataset | None) -> list[bytes]:
    assert dataset is not None
    return [image.tobytes() for image in dataset.images]


def test_validation_is_taken_out_of_training() -> None:
    whole, divided = load(), load(validation=15)
    assert whole.validation is None and divided.validation is not None
    assert (len(divided.train), len(divided.validation), len(divided.test)) == (45, 15, 40)
    assert sorted(rows(divided.train) + rows(divided.validation)) == sorted(rows(whole.train))
    assert [row for row in rows(whole.train) if row in set(rows(divided.train))] == rows(divided.train)  # file order
    assert rows(divided.validation) != rows(whole.train)[-15:]  # drawn, not cut off
    assert rows(divided.validation) == rows(load(validation=15).validation)


def test_validation_grows_with_its_number_and_follows_from_the_seed() -> None:
    few, many = load(validation=5).validation, load(validation=15).validation
    assert set(rows(few)) < set(rows(many))
    labels = np.arange(100) % 10
    images = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1)
    train = Dataset("x", images, labels, 10)
    first, again, other = (Synthetic(10, 10, seed, 8)._divided("x", train, train) for seed in (1, 1, 2))
    assert rows(first.validation) == rows(again.validation) != rows(other.validation)


def test_limit_applies_after_validation() -> None:
    full, quick = load(validation=15), load(validation=15, limit=10)
    assert rows(quick.train) == rows(full.train)[:10]
    assert rows(quick.validation) == rows(full.validation)
    assert rows(quick.test) == rows(full.test)[:10]
    assert rows(load(limit=10).train) == rows(load().train)[:10]
    assert (len(load(limit=1000).train), len(load(limit=1000).test)) == (60, 40)


@pytest.mark.parametrize("source", [MNIST, Synthetic])
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"limit": 0}, r"limit must be a whole number >= 1 or null \(no limit\), got 0"),
        ({"limit": 10.0}, r"limit must be .*, got 10.0"),
        ({"limit": True}, r"limit must be .*, got True"),
        ({"limit": "5"}, r"limit must be .*, got '5'"),
        ({"validation": -1}, "validation must be a whole number >= 0, got -1"),
        ({"validation": None}, "validation must be a whole number >= 0, got None"),
        ({"validation": False}, "validation must be a whole number >= 0, got False"),
        ({"validation": 60_000}, "validation must be smaller than the .*, of which it takes its share, got 60000"),
        ({"seed": -1}, "seed must be a whole number >= 0, got -1"),
        ({"seed": 2**64}, r"seed must be below 2\*\*64, got 18446744073709551616"),
    ],
)
def test_arguments_are_refused_by_name(source: Any, setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(**setting)


@pytest.mark.parametrize("setting", [{"train": 0}, {"train": 1.5}, {"test": 0}, {"test": True}])
def test_synthetic_sizes(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} must be a whole number >= 1"):
        Synthetic(**setting)


def test_shapes_are_known_without_loading() -> None:
    for source in (MNIST("/nowhere"), Synthetic()):
        assert (source.image_shape, source.classes, source.seed) == ((28, 28, 1), 10, 12345)


def test_numpy_integers_are_whole_numbers() -> None:
    source = Synthetic(train=np.int32(30), limit=np.int64(4), seed=np.uint64(2**64 - 1))
    assert type(source.limit) is int and len(source.load().train) == 4
