"""Augmentations: their effect on images depends only on seed, epoch and sample."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import (
    Augmentation,
    BatchFeed,
    ColorJitter,
    Cutout,
    Dataset,
    Elastic,
    HorizontalFlip,
    Loader,
    Rotate,
    SampleRNG,
    Scale,
    Shift,
    Synthetic,
)
from cupynet.data.augment import augmentations
from tests.support.refusals import refused
from tests.support.shards import write_shards
from tests.support.training import small_dataset

PARTS: list[Augmentation] = [Shift(2), HorizontalFlip(), Cutout(5), Rotate(20), Elastic(20, 3)]
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(1, 256, (40, 11, 9, 3), np.uint8)
DATA = Dataset("numbered", RNG.integers(1, 256, (50, 8, 8, 1), np.uint8), np.arange(50) % 10, 10)


def through(part: Augmentation, images: Any = IMAGES, seed: int = 1, epoch: int = 2, samples: Any = None) -> Any:
    samples = np.arange(len(images)) if samples is None else np.asarray(samples)
    return part(images, SampleRNG(seed, epoch, samples, 0))


@pytest.mark.parametrize("part", [*PARTS, Scale(), ColorJitter()], ids=repr)
def test_augmented_images_depend_on_seed_epoch_and_sample_only(part: Augmentation) -> None:
    before = IMAGES.copy()
    whole = through(part)
    assert whole.shape == IMAGES.shape and whole.dtype == np.uint8 and not np.array_equal(whole, IMAGES)
    np.testing.assert_array_equal(IMAGES, before)
    some = [31, 4, 4, 0]
    np.testing.assert_array_equal(through(part, IMAGES[some], samples=some), whole[some])
    for other in ({"seed": 2}, {"epoch": 3}, {"samples": np.arange(1, 41)}):
        assert not np.array_equal(through(part, **other), whole)


def test_random_numbers_of_augmentations_match_splitmix64() -> None:
    """With key 0, draws are the first outputs of Vigna's reference from state 0."""
    draws = SampleRNG(1, 2, np.arange(1), 0)
    draws._keys = np.zeros(1, np.uint64)
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    expected = [first >> 40, first >> 8 & 0xFFFFFF, second >> 40, second >> 8 & 0xFFFFFF]
    np.testing.assert_array_equal(draws.uniform(0, 1 << 24, 4)[0], expected)


def test_shift_moves_an_image_by_up_to_the_given_pixels() -> None:
    seen = set()
    for image, shifted in zip(IMAGES, through(Shift(2)), strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        places = [(y, x) for y in range(5) for x in range(5) if np.array_equal(padded[y : y + 11, x : x + 9], shifted)]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) > 15


def test_horizontal_flip_mirrors_images_with_its_probability() -> None:
    mirrored = IMAGES[:, :, ::-1]
    found = through(HorizontalFlip())
    flipped = (found == mirrored).all(axis=(1, 2, 3))
    np.testing.assert_array_equal(found, np.where(flipped[:, None, None, None], mirrored, IMAGES))
    assert 10 < flipped.sum() < 30
    np.testing.assert_array_equal(through(HorizontalFlip(1)), mirrored)
    np.testing.assert_array_equal(through(HorizontalFlip(0)), IMAGES)


def test_cutout_blackens_a_square_that_the_border_may_cut_off() -> None:
    areas = []
    for image, cut in zip(IMAGES, through(Cutout(4)), strict=True):
        gone = (cut == 0).all(axis=2)
        np.testing.assert_array_equal(cut[~gone], image[~gone])
        rows, columns = np.flatnonzero(gone.any(axis=1)), np.flatnonzero(gone.any(axis=0))
        assert gone.sum() == len(rows) * len(columns) and np.ptp(rows) < 4 and np.ptp(columns) < 4
        areas.append(int(gone.sum()))
    assert max(areas) == 16 and min(areas) < 16


def test_rotate_turns_an_image_about_its_center() -> None:
    class Highest(SampleRNG):
        def uniform(self, low: float, high: float, *shape: int) -> Any:
            return np.full((40, *shape), high, np.float32)

    square, draws = IMAGES[:, :9], Highest(0, 0, np.arange(40), 0)
    quarter = Rotate(90)(square, draws)
    assert np.abs(quarter.astype(int) - np.rot90(square, -1, axes=(1, 2))).max() <= 1
    still = Rotate(1e-6)(IMAGES, draws)
    assert np.abs(still.astype(int) - IMAGES).max() <= 1


def test_elastic_moves_as_far_as_the_paper_says() -> None:
    """A ramp shows the distance: with alpha 34 and sigma 4, about 34 · 0.577 / (2 sqrt(pi) · 4) = 1.4 pixels."""
    ramp = np.tile(np.arange(60, dtype=np.uint8)[None, None, :, None] * 4, (60, 60, 1, 1))
    moved = through(Elastic(), ramp).astype(float)
    inside = slice(15, 45)
    distance = (moved - ramp)[:, inside, inside, 0] / 4
    assert 1.2 < distance.std() < 1.6
    assert np.diff(distance, axis=2).std() < 0.5  # neighbors move by similar distances


def of(loader: Loader, epoch: int, size: int = 1, start: int = 0) -> dict[int, bytes]:
    """Return the images of all workers by sample."""
    backend = create_backend("numpy")
    return {
        int(sample): image.tobytes()
        for rank in range(size)
        for batch in loader.epoch(epoch, backend, rank, size, start=start)
        for sample, image in zip(batch.samples, batch.images, strict=True)
    }


def test_augmented_images_are_the_same_for_any_number_of_workers_and_any_start() -> None:
    loader = Loader(DATA, 8, seed=3, augment=PARTS)
    first = of(loader, 4)
    assert len(first) == 50
    assert of(loader, 4, 3) == of(Loader(DATA, 5, seed=3, augment=PARTS), 4, 2) == first
    rest = of(loader, 4, 2, start=2)
    assert 0 < len(rest) < 50 and rest.items() <= first.items()
    assert not set(first.items()) & set(of(loader, 5).items())


def test_equal_augmentations_draw_different_numbers() -> None:
    """Two flips with the same numbers would undo each other."""
    plain, twice = Loader(DATA, 8), Loader(DATA, 8, augment=[HorizontalFlip(), HorizontalFlip()])
    assert of(plain, 0) != of(twice, 0)


def test_shards_are_augmented_like_the_whole_data_set(tmp_path: Path) -> None:
    sharded = Loader(write_shards(DATA, tmp_path, 2), 7, seed=9, augment=[Shift(3)])
    assert of(sharded, 1, 2) == of(Loader(DATA, 7, seed=9, augment=[Shift(3)]), 1)


@pytest.mark.standin
def test_augmentation_of_data_that_must_stay_on_a_gpu_is_refused() -> None:
    with refused("data_on_device"):
        BatchFeed(Loader(DATA, 8, augment=PARTS), create_backend("cupy"), on_device=True)


class Crop(Augmentation):
    def __call__(self, images: Any, draws: SampleRNG) -> Any:
        return images[:, 1:]


@pytest.mark.parametrize(("part", "name"), [(Shift(9), "pixels"), (Crop(), "")], ids=str)
def test_an_augmentation_that_loses_the_image_or_changes_its_size_is_refused(part: Augmentation, name: str) -> None:
    with refused(name):
        of(Loader(DATA, 8, augment=[part]), 0)


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
def test_augmentations_can_be_given_by_name(given: Any, kinds: list[str]) -> None:
    assert [type(each).__name__ for each in augmentations(given)] == kinds
    assert [type(each).__name__ for each in Synthetic(10, 10, augment=given).augment or ()] == kinds
    assert len(Loader(small_dataset(4), 2, augment=given).augment) == len(kinds)


@pytest.mark.parametrize("part", [Scale(1, 1), ColorJitter(0, 0, 0)])
def test_augmentations_with_factors_of_one_change_nothing(part: Augmentation) -> None:
    np.testing.assert_array_equal(through(part), IMAGES)


def test_scale_enlarges_and_shrinks_an_image_about_its_center() -> None:
    image = np.zeros((1, 9, 9, 1), np.uint8)
    image[0, 3:6, 3:6] = 200
    np.testing.assert_array_equal(through(Scale(3, 3), image)[0, 1:8, 1:8], 200)
    assert through(Scale(1 / 3, 1 / 3), image).sum() == 200


def test_color_jitter_of_brightness_multiplies_all_pixels() -> None:
    dim = np.full((40, 4, 4, 3), 100, np.uint8)
    factors = through(ColorJitter(0.5, 0, 0), dim)[:, 0, 0, 0] / 100
    assert 0.5 <= factors.min() < 0.7 and 1.3 < factors.max() <= 1.5
    assert np.ptp(through(ColorJitter(0.5, 0.9, 0.9), dim), axis=(1, 2, 3)).max() == 0  # gray and without contrast


def test_color_jitter_of_contrast_and_saturation_keeps_the_mean() -> None:
    middle = (IMAGES // 4 + 96).astype(np.uint8)
    for part in (ColorJitter(0, 0.5, 0), ColorJitter(0, 0, 0.5)):
        found = through(part, middle)
        assert (found != middle).any()
        gray = np.array([0.299, 0.587, 0.114]) if part.saturation else np.ones(3) / 3
        np.testing.assert_allclose((found @ gray).mean(axis=(1, 2)), (middle @ gray).mean(axis=(1, 2)), atol=1)
