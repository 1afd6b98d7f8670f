"""Normalization of pixels by mean and standard deviation, on every backend."""

from typing import Any

import numpy as np
import pytest

from cupynet.backend import FRACTIONS, PixelScale, create_backend
from cupynet.data import Dataset, Loader, Synthetic, normalize
from cupynet.data.normalize import statistics
from tests.support.backends import every_backend

IMAGES = np.random.default_rng(0).integers(0, 200, (50, 6, 4, 3), np.uint8)


def test_statistics_are_the_mean_and_deviation_of_each_channel() -> None:
    images = IMAGES.copy()
    images[..., 1] = 7  # a constant channel
    mean, deviation = statistics(images)
    flat = images.reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, flat.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(deviation, [flat[:, 0].std(), 1, flat[:, 2].std()], rtol=1e-12)


def test_statistics_do_not_depend_on_the_order_or_the_images_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = statistics(IMAGES)
    assert statistics(np.roll(IMAGES, 25, axis=0)) == whole
    monkeypatch.setattr(normalize, "_AT_ONCE", 7 * IMAGES[0].nbytes)
    assert statistics(IMAGES) == whole


def test_normalize_auto_uses_the_training_images_only() -> None:
    data: Any = Synthetic(60, 20, normalize="auto", validation=10, limit=30).load()
    expected = PixelScale.of(*statistics(data.train.images))
    assert len(data.train) == 30 and expected != FRACTIONS
    assert data.train.pixels == data.validation.pixels == data.test.pixels == expected
    assert data.train.take(slice(3)).pixels == expected


@every_backend
@pytest.mark.parametrize("channels", [1, 3])
def test_normalized_batches_have_mean_0_and_deviation_1(name: str, channels: int) -> None:
    images, backend = IMAGES[..., :channels], create_backend(name, "double")
    pixels = PixelScale.of(*statistics(images))
    (batch,) = Loader(Dataset("some", images, np.zeros(50, int), 1, pixels), 50).epoch(0, backend)
    x = backend.to_host(batch.images)
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2)), 1, atol=1e-12)
    expected = (images[batch.samples] / 255 - np.array(pixels.mean)) / np.array(pixels.std)
    np.testing.assert_allclose(x, expected, atol=1e-12)
