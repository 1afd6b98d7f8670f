"""Augmentations by name, and those of colours and sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.data import Augmentation, ColorJitter, Loader, Scale, Synthetic
from cupynet.data.augment import augmentations, augmented
from tests.support.refusals import refused
from tests.support.training import small_dataset

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 11, 9, 3)).astype(np.uint8)


def changed(part: Augmentation, images: Any = IMAGES) -> Any:
    return augmented([part], images, 5, 1, np.arange(len(images)))


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("light", ["Shift"]),
        ("standard", ["Shift", "Rotate", "Scale"]),
        ("flip", ["HorizontalFlip"]),
        (["cutout", Scale(0.5, 2)], ["Cutout", "Scale"]),
        ([], []),
        (None, []),
    ],
)
def test_augmentations_have_names(given: Any, kinds: list[str]) -> None:
    assert [type(each).__name__ for each in augmentations(given)] == kinds
    assert [type(each).__name__ for each in Synthetic(10, 10, augment=given).augment or ()] == kinds
    assert len(Loader(small_dataset(4), 2, augment=given).augment) == len(kinds)


@pytest.mark.parametrize("given", ["lihgt", ["light"], 5, [5], {"shift": 2}])
def test_other_names_are_refused(given: Any) -> None:
    with refused("augment"):
        augmentations(given)


@pytest.mark.parametrize("part", [Scale(1, 1), ColorJitter(0, 0, 0)])
def test_nothing_changes_at_factors_of_one(part: Augmentation) -> None:
    np.testing.assert_array_equal(changed(part), IMAGES)


def test_an_image_is_enlarged_about_its_center() -> None:
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 3:6, 3:6] = 200
    np.testing.assert_array_equal(changed(Scale(3, 3), image)[0, 1:8, 1:8], 200)
    assert changed(Scale(1 / 3, 1 / 3), image).sum() == 200


def test_brightness_multiplies_all_pixels() -> None:
    dim = np.full((40, 4, 4, 3), 100, np.uint8)
    factors = changed(ColorJitter(0.5, 0, 0), dim)[:, 0, 0, 0] / 100
    assert 0.5 <= factors.min() < 0.7 and 1.3 < factors.max() <= 1.5
    assert np.ptp(changed(ColorJitter(0.5, 0.9, 0.9), dim), axis=(1, 2, 3)).max() == 0  # gray, and without contrast


def test_contrast_and_saturation_keep_the_mean() -> None:
    middle = (IMAGES // 4 + 96).astype(np.uint8)
    for part in (ColorJitter(0, 0.5, 0), ColorJitter(0, 0, 0.5)):
        found = changed(part, middle)
        assert (found != middle).any()
        gray = np.array([0.299, 0.587, 0.114]) if part.saturation else np.ones(3) / 3
        np.testing.assert_allclose((found @ gray).mean(axis=(1, 2)), (middle @ gray).mean(axis=(1, 2)), atol=1)


def test_an_image_changes_the_same_way_in_any_batch() -> None:
    for part in (Scale(), ColorJitter()):
        alone = augmented([part], IMAGES[4:5], 5, 1, np.array([4]))
        np.testing.assert_array_equal(alone, changed(part)[4:5])
