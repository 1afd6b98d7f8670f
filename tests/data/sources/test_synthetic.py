"""Synthetic digits: reproducible, and others for each seed and part."""

from typing import Any

import numpy as np
import pytest

from cupynet.data import Dataset, Synthetic

GOLDEN_LABELS = [3, 6, 2, 9, 7, 0, 5, 8, 4, 1, 6, 8, 2, 0, 4, 9, 1, 7, 3, 5]
# the means of 4 x 4 pixels of the first image
GOLDEN_IMAGE = np.array(
    [
        [7.8, 6.0, 21.8, 5.4, 3.9, 7.4, 11.4],
        [2.8, 31.6, 124.1, 105.2, 5.6, 8.4, 4.1],
        [7.0, 4.8, 3.7, 85.8, 65.3, 7.6, 4.1],
        [8.4, 6.9, 24.5, 171.6, 47.4, 4.8, 7.6],
        [3.7, 35.3, 20.1, 40.6, 108.5, 2.6, 4.8],
        [7.6, 29.1, 113.1, 129.6, 66.1, 6.9, 6.6],
        [3.9, 8.1, 6.7, 5.6, 4.8, 5.8, 3.9],
    ]
)
Parts = tuple[Dataset, Dataset]


@pytest.fixture(scope="module")
def digits() -> Parts:
    data: Any = Synthetic().load()
    return data.train, data.test


def test_the_synthetic_digits_never_change(digits: Parts) -> None:
    """Published results depend on these digits. (Another machine's exp may change a gray level.)"""
    train, _ = digits
    assert train.labels[:20].tolist() == GOLDEN_LABELS
    coarse = train.images[0, ..., 0].reshape(7, 4, 7, 4).mean(axis=(1, 3))
    np.testing.assert_allclose(coarse, GOLDEN_IMAGE, atol=0.6)


def test_synthetic_classes_are_equally_large_and_all_images_differ(digits: Parts) -> None:
    for dataset, samples in zip(digits, (10_000, 2_000), strict=True):
        assert dataset.images.shape == (samples, 28, 28, 1)
        assert np.bincount(dataset.labels).tolist() == [samples // 10] * 10
    other: Any = Synthetic(train=100, test=1, seed=2).load().train
    train, test = digits
    labels = [train.labels[:100], train.labels[100:200], test.labels[:100], other.labels]
    assert len({each.tobytes() for each in labels}) == 4
    assert len({image.tobytes() for dataset in digits for image in dataset.images}) == 12_000


@pytest.mark.parametrize("samples", [1, 101])
def test_a_synthetic_image_does_not_depend_on_the_number_of_images(digits: Parts, samples: int) -> None:
    data: Any = Synthetic(train=samples, test=samples).load()
    for few, many in zip((data.train, data.test), digits, strict=True):
        np.testing.assert_array_equal(few.images, many.images[:samples])
        np.testing.assert_array_equal(few.labels, many.labels[:samples])
