"""Warnings about data that are valid, but probably a mistake."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import FRACTIONS, PixelScale, create_backend
from cupynet.data import Dataset, Loader, Shards
from cupynet.nn import Dense, Image, Model, Sequential
from cupynet.training import ParallelWrapper
from cupynet.training.data_warnings import warn_of_classes, warn_of_pixels
from tests.support.backends import every_backend
from tests.support.shards import write_shards

NORMALIZED = PixelScale.of([0.02], [0.015])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return found


def up_to(largest: int, pixels: PixelScale = FRACTIONS, samples: int = 12) -> Dataset:
    images = np.zeros((samples, 4, 4, 1), np.uint8)
    images[-1, 2, 1] = largest  # the last image
    return Dataset("dark", images, np.arange(samples) % 3, 3, pixels)


@pytest.mark.parametrize(
    ("largest", "pixels", "warned"),
    [
        (0, FRACTIONS, True),
        (16, FRACTIONS, True),
        (100, FRACTIONS, False),
        (16, NORMALIZED, False),
        (16, PixelScale.of([0.1307], [0.3081]), True),
    ],
)
def test_dark_images(largest: int, pixels: PixelScale, warned: bool, tmp_path: Path, caplog: Any) -> None:
    dataset = up_to(largest, pixels)
    for each in (dataset, write_shards(dataset, tmp_path / "shards", 2)):
        assert warn_of_pixels(each) == warned
        found = warnings_of(caplog)
        assert len(found) == warned and all(str(largest) in text for text in found)


def model(features: int = 3) -> Model:
    return Model(Sequential([Dense(features)]), Image(4, 4, 1), create_backend("numpy"))


def test_a_fit_and_an_evaluation_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    dark, bright = up_to(16), up_to(255)
    with ParallelWrapper(model(), 2, progress="none") as wrapper:
        wrapper.fit(Loader(dark, 4), evaluate_on=Loader(dark, 4, shuffle=False))
        wrapper.evaluate(dark)
        assert ["16" in text for text in warnings_of(caplog)] == [True]
        wrapper.fit(Loader(dark, 4))
        wrapper.fit((bright.images, bright.labels), batch_size=4)
        assert warnings_of(caplog) == []
        wrapper.evaluate((dark.images, dark.labels))
        assert ["16" in text for text in warnings_of(caplog)] == [True]


def test_classes_without_images(caplog: pytest.LogCaptureFixture) -> None:
    labels = np.arange(100) % 9
    for shift, missing in ((0, "9"), (1, "0")):
        warn_of_classes(Dataset("x", np.zeros((100, 2, 2), np.uint8), labels + shift, 10))
        (text,) = warnings_of(caplog)
        assert f"1 of 10 classes ({missing})" in text
    few = Dataset("x", np.zeros((99, 2, 2), np.uint8), labels[:99], 10)
    warn_of_classes(few)  # a class may be missing by chance
    assert warnings_of(caplog) == []


def test_shards_that_are_sorted_by_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = np.repeat(np.arange(4), 50)
    dataset = Dataset("x", np.full((200, 2, 2), 255, np.uint8), labels, 4)
    warn_of_classes(write_shards(dataset, tmp_path / "mixed", 2))
    assert warnings_of(caplog) == []
    for number, part in enumerate((slice(0, 100), slice(100, 200))):
        folder = tmp_path / "sorted" / str(number)
        folder.mkdir(parents=True)
        for name, array in (("images", dataset.images), ("labels", labels), ("samples", np.arange(200))):
            np.save(folder / f"{name}.npy", array[part])
    warn_of_classes(Shards(tmp_path / "sorted"))
    (text,) = warnings_of(caplog)
    assert "shard 0 has images of 2 of 4 classes" in text


@every_backend
def test_predictions_of_images_of_another_range(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 1), np.uint8)
    fractions = (pixels / 255).astype(np.float32)

    def warned(images: Any, *, scale: PixelScale = FRACTIONS, trained: bool = True) -> bool:
        found = Model(Sequential([Dense(3)]), Image(4, 4, 1), create_backend(name))
        found.trained_on_pixels, found.pixels = trained, scale
        for _ in range(2):
            found.classify(images)
        assert len(caplog.records) <= 1, "once"
        return bool(warnings_of(caplog))

    assert warned(pixels.astype(np.float32)) and warned(fractions * 3) and warned(fractions - 1.5)
    assert warned(fractions / 255) and warned((pixels > 99).astype(np.uint8))
    for near in (pixels, fractions, fractions * 1.9, fractions * 2 - 1, fractions[:0], fractions * 0):
        assert not warned(near)
    assert not warned(pixels.astype(np.float32), trained=False), "of imported weights nothing is known"
    normal = (fractions - 0.02) / 0.015
    assert not warned(normal.astype(np.float32), scale=NORMALIZED)
    assert warned(pixels.astype(np.float32), scale=NORMALIZED) == (2 * normal.max() - normal.min() < 255)
    assert not warned(np.full((1, 4, 4, 1), np.nan))


def test_a_model_knows_that_it_was_trained_on_pixels(caplog: pytest.LogCaptureFixture) -> None:
    data, trained = up_to(255), model()
    assert not trained.trained_on_pixels
    with ParallelWrapper(trained, 1, progress="none") as wrapper:
        wrapper.fit(data, batch_size=4)
    warnings_of(caplog)
    trained.replicate(create_backend("numpy")).predict(data.images.astype(np.float32))
    assert len(warnings_of(caplog)) == 1


def test_other_data_in_a_restored_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = up_to(255, samples=24)
    other = Dataset("other", data.images, (data.labels + 1) % 3, 3)
    with ParallelWrapper(model(), 1, progress="none") as wrapper:
        wrapper.fit(Loader(data, 4), epochs=1)
        path = wrapper.checkpoint(tmp_path)
    for used, warned in ((data, False), (other, True)):
        with ParallelWrapper(model(), 1, progress="none") as wrapper:
            wrapper.restore(path)
            wrapper.trainer.plan.start = 0  # as if saved in the middle of a fit
            warnings_of(caplog)
            wrapper.fit(Loader(used, 4), epochs=1)
            assert bool(warnings_of(caplog)) == warned
