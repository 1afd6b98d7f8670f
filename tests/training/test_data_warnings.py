"""Warnings about data that are valid, but probably a mistake."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import Dataset, Dense, Loader, Model, ParallelWrapper, Shards
from cupynet.backend import FRACTIONS, PixelScale
from cupynet.training.data_warnings import warn_of_classes, warn_of_pixels
from tests.support.backends import every_backend
from tests.support.shards import save, write_shards

NORMALIZED = PixelScale.of([0.02], [0.015])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    caplog.clear()
    return found


def up_to(largest: int, pixels: PixelScale = FRACTIONS, samples: int = 12) -> Dataset:
    images = np.zeros((samples, 4, 4, 1), np.uint8)
    images[-1, 2, 1] = largest  # in the last image
    return Dataset("dark", images, np.arange(samples) % 3, 3, pixels)


def of_classes(labels: Any, classes: int) -> Dataset:
    return Dataset("classes", np.full((len(labels), 2, 2), 255, np.uint8), labels, classes)


def model(backend: str = "numpy") -> Model:
    return Model([Dense(3)], (4, 4, 1), backend)


@pytest.mark.parametrize(
    ("largest", "pixels", "warned"),
    [
        (16, FRACTIONS, True),
        (100, FRACTIONS, False),
        (16, NORMALIZED, False),
        (16, PixelScale.of([0.1307], [0.3081]), True),
        (255, PixelScale.of([33], [79]), True),
    ],
)
def test_images_whose_pixels_are_all_dark_cause_a_warning(
    largest: int, pixels: PixelScale, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = up_to(largest, pixels)
    for each in (dataset, write_shards(dataset, tmp_path, 2)):
        assert warn_of_pixels(each) == warned
        assert len(warnings_of(caplog)) == warned


def test_fit_and_evaluate_warn_about_the_same_images_once(caplog: pytest.LogCaptureFixture) -> None:
    dark, bright = up_to(16), up_to(255)
    with ParallelWrapper(model(), 2) as wrapper:
        wrapper.fit(Loader(dark, 4), evaluate_on=Loader(dark, 4, shuffle=False))
        wrapper.evaluate(dark)
        assert len(warnings_of(caplog)) == 1
        wrapper.fit((bright.images, bright.labels), batch_size=4)
        assert warnings_of(caplog) == []
        for images in (dark.images, bright.images.astype(np.float32)):
            wrapper.evaluate((images, bright.labels))
            assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("validates", [False, True])
def test_integer_images_after_floats_cause_a_warning(validates: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = up_to(255)
    with ParallelWrapper(model(), 1) as wrapper:
        wrapper.evaluate(data)  # before training, any scale is right
        floats = data.images / np.float32(255), data.labels
        wrapper.fit(floats, evaluate_on=data if validates else floats)
        assert len(warnings_of(caplog)) == validates
        wrapper.evaluate(data)
        assert len(warnings_of(caplog)) == (not validates)
        for images, count in ((floats[0], 0), (data.images, 1)):
            wrapper.model.predict(images)
            assert len(warnings_of(caplog)) == count


def test_images_of_another_scale_than_in_the_last_fit_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    images, labels = up_to(255).images, up_to(255).labels
    with ParallelWrapper(model(), 1) as wrapper:
        for data, warned in (
            (up_to(255, NORMALIZED), False),
            ((images, labels), False),
            (Loader((images, labels), 4), True),
            (Loader((images, labels), 4), False),
            ((images / np.float32(255), labels), False),  # as before
            ((images, labels), True),  # the scale of the floats is unknown
        ):
            wrapper.fit(data)
            assert len(warnings_of(caplog)) == warned


def test_metrics_without_validation_data_cause_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bright = up_to(255)
    with ParallelWrapper(model(), 1, metrics=["auc"]) as wrapper:
        for count in (1, 0):
            wrapper.fit(bright, batch_size=4)
            assert len(warnings_of(caplog)) == count
        wrapper.fit(bright, batch_size=4, evaluate_on=bright)
        assert "test_auc" in wrapper.history and warnings_of(caplog) == []


@pytest.mark.parametrize(("samples", "shift", "missing"), [(100, 0, "(9)"), (100, 1, "(0)"), (99, 0, "")])
def test_a_missing_class_causes_a_warning(
    samples: int, shift: int, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer than ten images per class, a class may be missing by chance."""
    warn_of_classes(of_classes(np.arange(samples) % 9 + shift, 10))
    assert [missing in text for text in warnings_of(caplog)] == [True] * bool(missing)


def test_shards_that_are_sorted_by_class_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = of_classes(np.repeat(np.arange(4), 50), 4)
    warn_of_classes(write_shards(dataset, tmp_path / "mixed", 2))
    assert warnings_of(caplog) == []
    for number, part in enumerate(np.split(np.arange(200), 2)):
        save(tmp_path / "sorted" / str(number), images=dataset.images[part], labels=dataset.labels[part], samples=part)
    warn_of_classes(Shards(tmp_path / "sorted"))
    assert len(warnings_of(caplog)) == 1


@every_backend
def test_predictions_of_images_of_another_range_cause_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 4, 4, 1), np.uint8)
    fractions = (pixels / 255).astype(np.float32)

    def warned(images: Any, *, scale: PixelScale = FRACTIONS, trained: bool = True) -> bool:
        found = model(name)
        found.trained_on, found.pixels = "pixels" if trained else "", scale
        for _ in range(2):
            found.classify(images)
        assert len(caplog.records) <= 1, "once"
        return bool(warnings_of(caplog))

    binary = (pixels > 99).astype(np.uint8)
    for far in (pixels.astype(np.float32), fractions * 3, fractions - 1.5, fractions / 255, binary):
        assert warned(far)
    for near in (pixels, fractions, fractions * 1.9, fractions * 2 - 1, fractions[:0], fractions * np.nan):
        assert not warned(near)
    assert not warned(pixels.astype(np.float32), trained=False), "of imported weights nothing is known"
    assert not warned((fractions - np.float32(0.02)) / np.float32(0.015), scale=NORMALIZED)
    assert not warned(pixels, scale=PixelScale.of([33], [79])), "already warned of in fit"


@pytest.mark.parametrize("shift", [0, 1])
def test_other_labels_on_resume_cause_a_warning(shift: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = up_to(255, samples=24)
    other = Dataset("other", data.images, (data.labels + shift) % 3, 3)
    with ParallelWrapper(model(), 1) as wrapper:
        wrapper.fit(Loader(data, 4), epochs=1)
        wrapper.checkpoint(tmp_path)
    with ParallelWrapper(model(), 1) as wrapper:
        wrapper.restore(tmp_path)
        wrapper.trainer.plan.start = 0  # as if saved in the middle of a fit
        warnings_of(caplog)
        wrapper.fit(Loader(other, 4), epochs=1)
    assert len(warnings_of(caplog)) == shift
