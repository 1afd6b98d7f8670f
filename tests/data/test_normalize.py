"""Normalization of pixels by mean and deviation, on every backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cupynet.backend import FRACTIONS, PixelScale, create_backend
from cupynet.data import Dataset, Loader, Synthetic, normalize
from cupynet.data.normalize import statistics
from tests.support.backends import every_backend
from tests.support.refusals import refused

FIXED = {"mean": [0.25], "deviation": [0.5]}


def small(**options: Any) -> Synthetic:
    return Synthetic(train=60, test=20, **options)


def test_mean_and_deviation_of_the_training_images() -> None:
    images = np.random.default_rng(0).integers(0, 200, (50, 6, 4, 3), np.uint8)
    images[..., 1] = 7
    mean, deviation = statistics(images)
    flat = images.reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, flat.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(deviation, [flat[:, 0].std(), 1, flat[:, 2].std()], rtol=1e-12)
    assert statistics(images[:0]) == ([0.0] * 3, [1.0] * 3)


def test_statistics_do_not_depend_on_the_order_or_on_the_images_counted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = np.random.default_rng(0).integers(0, 200, (50, 6, 4, 3), np.uint8)
    whole = statistics(images)
    assert statistics(np.concatenate([images[25:], images[:25]])) == whole
    monkeypatch.setattr(normalize, "_AT_ONCE", 7 * images[0].nbytes)
    assert statistics(images) == whole


def test_auto_uses_the_training_images_only() -> None:
    data: Any = small(normalize="auto", validation=10, limit=30).load()
    assert len(data.train) == 30
    expected = PixelScale.of(*statistics(data.train.images))
    assert data.train.pixels == data.validation.pixels == data.test.pixels == expected != FRACTIONS
    assert data.train.take(slice(3)).pixels == expected


@every_backend
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_have_mean_0_and_deviation_1(name: str, channels: int) -> None:
    images = np.random.default_rng(0).integers(20, 200, (64, 5, 5, channels), np.uint8)
    pixels = PixelScale.of(*statistics(images))
    dataset = Dataset("some", images, np.zeros(64, int), 1, pixels)
    backend = create_backend(name, "double")
    (batch,) = Loader(dataset, 64).epoch(0, backend)
    x = backend.to_host(batch.images)
    np.testing.assert_allclose(x.mean(axis=(0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(x.std(axis=(0, 1, 2)), 1, atol=1e-12)
    exact = (images[batch.samples] / 255 - np.array(pixels.mean)) / np.array(pixels.deviation)
    np.testing.assert_allclose(x, exact, atol=1e-12)


def test_signatures_differ_with_normalization() -> None:
    loaders = [Loader(small(normalize=asked).load().train, 4) for asked in (None, "auto", FIXED)]
    assert len({loader.signature for loader in loaders}) == 3
    assert loaders[0].signature == Loader(small().load().train, 4).signature


@pytest.mark.parametrize(
    "wrong",
    [
        *("Auto", 3, {}, {"mean": [0.5]}, {"mean": 0.5, "deviation": 0.5}, {"mean": "12", "deviation": "12"}),
        {"mean": [0.5], "deviation": [0]},
        {"mean": [math.nan], "deviation": [1]},
        {"mean": [0.5, 0.5], "deviation": [1]},
        {"mean": [0.5], "deviation": [1], "std": [1]},
    ],
    ids=str,
)
def test_bad_values_are_refused(wrong: Any) -> None:
    with refused("normalize"):
        small(normalize=wrong)


def test_normalization_needs_a_value_per_channel() -> None:
    with refused(""):
        small(normalize={"mean": [0, 0], "deviation": [1, 1]}).load()


@pytest.mark.parametrize(("mean", "deviation"), [(1e300, 1e-300), (0.1, 1e-40), (0.1, 1e300), (1e38, 0.1)])
def test_values_beyond_single_precision_are_refused(mean: float, deviation: float) -> None:
    with refused("normalize"):
        small(normalize={"mean": [mean], "deviation": [deviation]})
