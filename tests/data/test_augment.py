"""Augmentations: their effect on images, which depends only on seed, epoch and sample."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Shared, create_backend
from cupynet.data import (
    Augmentation,
    BatchFeed,
    CutOut,
    Dataset,
    Draws,
    Elastic,
    HorizontalFlip,
    Loader,
    Rotate,
    Shift,
    Synthetic,
)
from tests.support.refusals import refused
from tests.support.shards import write_shards

PARTS: list[Augmentation] = [Shift(2), HorizontalFlip(), CutOut(5), Rotate(20), Elastic(20, 3)]
every_part = pytest.mark.parametrize("part", PARTS, ids=repr)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(1, 256, (40, 11, 9, 3), np.uint8)


def through(part: Augmentation, images: Any = IMAGES, seed: int = 1, epoch: int = 2, samples: Any = None) -> Any:
    samples = np.arange(len(images)) if samples is None else np.asarray(samples)
    return part(images, Draws(seed, epoch, samples, 0))


@every_part
def test_the_result_depends_on_seed_epoch_and_sample_only(part: Augmentation) -> None:
    before = IMAGES.copy()
    whole = through(part)
    assert whole.shape == IMAGES.shape and whole.dtype == np.uint8
    np.testing.assert_array_equal(IMAGES, before)
    some = [31, 4, 4, 0]
    np.testing.assert_array_equal(through(part, IMAGES[some], samples=some), whole[some])
    np.testing.assert_array_equal(through(part, IMAGES[:1]), whole[:1])
    for other in ({"seed": 2}, {"epoch": 3}, {"samples": np.arange(1, 41)}):
        assert not np.array_equal(through(part, **other), whole)
    assert not np.array_equal(whole, IMAGES)


def test_draws_are_uniform_and_apart() -> None:
    draws = Draws(2**64 - 1, 0, np.arange(2000), 1)
    numbers = draws.uniform(-1, 3, 7, 5)
    assert numbers.shape == (2000, 7, 5) and numbers.dtype == np.float32
    assert numbers.min() >= -1 and numbers.max() < 3
    assert abs(numbers.mean() - 1) < 0.02 and abs(numbers.var() - 16 / 12) < 0.02
    flat = numbers.reshape(2000, -1)
    assert np.abs(np.corrcoef(flat.T) - np.eye(35)).max() < 0.1  # one number and another of an image
    assert np.abs(np.corrcoef(flat[:100]) - np.eye(100)).max() < 0.75  # one image and another, 35 numbers each
    assert np.isin(draws.uniform(-1, 3, 7, 5), numbers).mean() < 0.05


def test_integers_are_drawn_evenly() -> None:
    counted = np.bincount(Draws(1, 0, np.arange(6000), 0).integers(-1, 1) + 1, minlength=3)
    assert counted.sum() == 6000 and counted.min() > 1800


def test_draws_differ_by_seed_epoch_and_place() -> None:
    draws = [Draws(*each, np.arange(5), place).uniform(0, 1, 3) for each in ((1, 2), (2, 1)) for place in (0, 1)]
    assert len({each.tobytes() for each in draws}) == 4


def test_draws_are_those_of_splitmix64() -> None:
    """A key of 0 gives the first outputs of Vigna's reference from state 0."""
    draws = Draws(1, 2, np.arange(1), 0)
    draws._keys = np.zeros(1, np.uint64)
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    expected = [first >> 40, first >> 8 & 0xFFFFFF, second >> 40, second >> 8 & 0xFFFFFF]
    np.testing.assert_array_equal(draws.uniform(0, 1 << 24, 4)[0], expected)


def test_shift() -> None:
    found, seen = through(Shift(2)), set()
    for image, shifted in zip(IMAGES, found, strict=True):
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)))
        places = [(y, x) for y in range(5) for x in range(5) if np.array_equal(padded[y : y + 11, x : x + 9], shifted)]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) > 15


def test_horizontal_flip() -> None:
    flipped = [np.array_equal(new, old[:, ::-1]) for old, new in zip(IMAGES, through(HorizontalFlip()), strict=True)]
    same = [np.array_equal(new, old) for old, new in zip(IMAGES, through(HorizontalFlip()), strict=True)]
    assert all(one != other for one, other in zip(flipped, same, strict=True)) and 10 < sum(flipped) < 30
    np.testing.assert_array_equal(through(HorizontalFlip(1)), IMAGES[:, :, ::-1])
    np.testing.assert_array_equal(through(HorizontalFlip(0)), IMAGES)


def test_cut_out() -> None:
    found = through(CutOut(4))
    areas = []
    for image, cut in zip(IMAGES, found, strict=True):
        gone = (cut == 0).all(axis=2)
        np.testing.assert_array_equal(cut[~gone], image[~gone])
        rows, columns = np.flatnonzero(gone.any(axis=1)), np.flatnonzero(gone.any(axis=0))
        assert gone.sum() == len(rows) * len(columns) and np.ptp(rows) < 4 and np.ptp(columns) < 4
        areas.append(int(gone.sum()))
    assert max(areas) == 16 and min(areas) < 16


def test_rotate() -> None:
    class Quarter(Draws):
        def uniform(self, low: float, high: float, *shape: int) -> Any:
            return np.full((40, *shape), high, np.float32)

    square = IMAGES[:, :9]
    turned = Rotate(90)(square, Quarter(0, 0, np.arange(40), 0))
    expected = np.rot90(square, -1, axes=(1, 2))
    assert np.abs(turned.astype(int) - expected).max() <= 1
    still = Rotate(1e-6)(IMAGES, Quarter(0, 0, np.arange(40), 0))
    assert np.abs(still.astype(int) - IMAGES).max() <= 1


def test_elastic_moves_as_far_as_the_paper_says() -> None:
    """A ramp shows how far: with alpha 34 and sigma 4 about 34 · 0.577 / (2 sqrt(pi) · 4) = 1.4 pixels."""
    ramp = np.broadcast_to(np.arange(60, dtype=np.uint8)[None, None, :, None] * 4, (60, 60, 60, 1))
    moved = through(Elastic(), np.ascontiguousarray(ramp)).astype(float)
    inside = slice(15, 45)
    apart = (moved - ramp)[:, inside, inside, 0] / 4
    assert 1.2 < apart.std() < 1.6
    smooth = np.diff(apart, axis=2)
    assert smooth.std() < 0.5  # neighbours move alike


def numbered(samples: int = 50) -> Dataset:
    return Dataset("numbered", RNG.integers(1, 256, (samples, 8, 8, 1), np.uint8), np.arange(samples) % 10, 10)


DATA = numbered()


def of(loader: Any, epoch: int, size: int, start: int = 0) -> dict[int, bytes]:
    """Sample -> its image in that epoch, from all workers."""
    backend, found = create_backend("numpy"), {}
    for rank in range(size):
        for batch in loader.epoch(epoch, backend, rank, size, start=start):
            found |= {int(s): image.tobytes() for s, image in zip(batch.samples, batch.images, strict=True)}
    return found


def test_any_number_of_workers_and_any_beginning() -> None:
    loader = Loader(DATA, 8, seed=3, augment=PARTS)
    first = of(loader, 4, 1)
    assert len(first) == 50
    assert of(loader, 4, 3) == of(Loader(DATA, 5, seed=3, augment=PARTS), 4, 2) == first
    rest = of(loader, 4, 2, start=2)
    assert 0 < len(rest) < 50 and rest.items() <= first.items()
    assert not set(first.items()) & set(of(loader, 5, 1).items())
    assert first != of(Loader(DATA, 8, seed=3), 4, 1)


def test_equal_augmentations_draw_different_numbers() -> None:
    """Two flips by the same numbers would undo each other."""
    plain, twice = Loader(DATA, 8), Loader(DATA, 8, augment=[HorizontalFlip(), HorizontalFlip()])
    assert of(plain, 0, 1) != of(twice, 0, 1)


def test_shards_are_augmented_by_the_number_of_the_sample(tmp_path: Path) -> None:
    shards = write_shards(DATA, tmp_path, 2)
    assert of(Loader(shards, 7, seed=9, augment=[Shift(3)]), 1, 2) == of(
        Loader(DATA, 7, seed=9, augment=[Shift(3)]), 1, 1
    )


@pytest.mark.parametrize(("name", "ahead"), [("numpy", 0), ("numba", 3)])
def test_feeds_yield_the_same_augmented_images(name: str, ahead: int) -> None:
    loader, backend = Loader(DATA, 8, seed=3, augment=PARTS), create_backend(name)
    check_fed(loader, backend, ahead)


@pytest.mark.standin
@pytest.mark.parametrize(("ahead", "on_device"), [(3, "auto"), (0, False)])
def test_feeds_of_a_gpu_yield_the_same_augmented_images(ahead: int, on_device: Any) -> None:
    check_fed(Loader(DATA, 8, seed=3, augment=PARTS), create_backend("cupy"), ahead, on_device)


def check_fed(loader: Loader, backend: Any, ahead: int, on_device: Any = "auto") -> None:
    reference = of(loader, 1, 1)
    with BatchFeed(loader, backend, prefetch=ahead, on_device=on_device, shared=Shared()) as feed:
        found = {}
        with closing(feed.epoch(1)) as batches:
            for batch in batches:
                images = np.array(backend.to_host(batch.images))
                found |= {int(s): image.tobytes() for s, image in zip(batch.samples, images, strict=True)}
    assert found == reference


@pytest.mark.standin
def test_images_that_must_stay_on_a_gpu_are_not_augmented() -> None:
    with refused("data_on_device"):
        BatchFeed(Loader(DATA, 8, augment=PARTS), create_backend("cupy"), on_device=True)


def test_signatures_differ_with_augmentation() -> None:
    loaders = [Loader(DATA, 8, augment=parts) for parts in ([], [Shift(1)], [Shift(2)], PARTS, PARTS[::-1])]
    assert len({loader.signature for loader in loaders}) == 5


@pytest.mark.parametrize("wrong", ["Shift", [3], [Shift]], ids=str)
def test_objects_of_another_type_are_refused(wrong: Any) -> None:
    for make in (lambda: Synthetic(augment=wrong), lambda: Loader(DATA, 8, augment=wrong)):
        with refused("augment"):
            make()


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Shift(0), "pixels"),
        (lambda: CutOut(0), "size"),
        (lambda: HorizontalFlip(1.5), "probability"),
        (lambda: Rotate(0), "degrees"),
        (lambda: Elastic(0, 1), "alpha"),
    ],
)
def test_wrong_arguments(make: Any, name: str) -> None:
    with refused(name):
        make()


def test_an_augmentation_that_changes_the_size_is_refused() -> None:
    class Crop(Augmentation):
        def __call__(self, images: Any, draws: Draws) -> Any:
            return images[:, 1:]

    with refused(""):
        of(Loader(DATA, 8, augment=[Crop()]), 0, 1)


@pytest.mark.parametrize(
    ("part", "name"),
    [(Shift(9), "pixels"), (Shift(2**31 - 1), "pixels"), (Elastic(20, 12), "sigma")],
    ids=repr,
)
def test_an_augmentation_that_would_lose_the_image_is_refused(part: Augmentation, name: str) -> None:
    with refused(name):
        through(part)
