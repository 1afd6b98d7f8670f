"""Wrong arguments of sources, loaders and augmentations are refused by name."""

import math
from typing import Any

import numpy as np
import pytest

from cupynet import data
from tests.support.refusals import refused
from tests.support.training import numbered_dataset

RIGHT: dict[Any, dict[str, Any]] = {
    data.Dataset: {"name": "x", "images": np.zeros((2, 4, 4), np.uint8), "labels": [0, 1], "classes": 2},
    data.Loader: {"dataset": numbered_dataset(3), "batch_size": 4},
    data.Prefetcher: {"iterable": []},
    data.ShardedFiles: {"folder": "shards"},
}


WRONG: dict[Any, dict[str, list[Any]]] = {
    data.Dataset: {"pixels": [1 / 255]},
    data.MNIST: {
        "fallback": ["cifar"],
        "folder": ["a\0b", 3],
        "timeout_s": [0, math.nan],
        "limit": [0],
        "validation": [60_000],
    },
    data.Synthetic: {"limit": ["5", 0], "validation": [-1], "seed": [2**64], "train": [0], "test": [1.5]},
    data.ImageFolder: {"channels": [2], "size": [[0, 3]], "folder": [3], "class_names": ["a", 3]},
    data.ShardedFiles: {"normalize": ["auto"]},  # would have to read all shards
    data.Loader: {"batch_size": [0, 12.0], "seed": [None], "shuffle": ["yes"]},
    data.Prefetcher: {"capacity": [-1, True]},
    data.Shift: {"pixels": [0]},
    data.Cutout: {"size": [0]},
    data.HorizontalFlip: {"probability": [1.5]},
    data.Rotate: {"degrees": [0]},
    data.Elastic: {"alpha": [0]},
    data.CutMix: {"alpha": [0, 500]},
}


@pytest.mark.parametrize(("kind", "setting"), [(kind, setting) for kind in WRONG for setting in WRONG[kind]])
def test_wrong_arguments_of_data_sets_loaders_and_augmentations_are_refused_by_name(kind: Any, setting: str) -> None:
    for value in WRONG[kind][setting]:
        with refused(setting):
            made = kind(**RIGHT.get(kind, {}) | {setting: value})
            assert isinstance(made, data.Source)
            made.check()


@pytest.mark.parametrize(
    "wrong",
    [
        "Auto",
        {"mean": [0.5]},
        {"mean": 0.5, "std": 0.5},
        {"mean": [0.5], "std": [0]},
        {"mean": [math.nan], "std": [1]},
        {"mean": [0.5, 0.5], "std": [1]},
        {"mean": [0.5], "std": [1], "deviation": [1]},
        {"mean": [1e300], "std": [1e-300]},
        {"mean": [0.1], "std": [1e-40]},
        {"mean": [0.1], "std": [1e300]},
    ],
    ids=str,
)
def test_a_wrong_normalization_is_refused(wrong: Any) -> None:
    with refused("normalize"):
        data.Synthetic(train=60, test=20, normalize=wrong)


@pytest.mark.parametrize("given", ["lihgt", ["light"], 5, [5], {"shift": 2}, ["mixup", "cutmix"]], ids=str)
def test_unknown_augmentations_and_two_ways_of_mixing_are_refused(given: Any) -> None:
    with refused("augment"):
        data.Synthetic(10, 10, augment=given)
