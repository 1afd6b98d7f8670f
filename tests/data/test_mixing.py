"""MixUp and CutMix: images and labels are mixed in the same way, depending only on seed, epoch and sample."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from cupynet import CutMix, Loader, MixUp, Model, ParallelWrapper
from cupynet.backend import create_backend
from cupynet.data import Augmentation, BatchFeed, Dataset, HorizontalFlip, SampleRNG, Shift
from cupynet.data.augment import Mixing
from cupynet.nn import Dense, Loss
from cupynet.optim import SGD
from cupynet.training.graph_replica import GraphReplica
from tests.support.refusals import refused
from tests.support.training import on_backends, small_dataset, small_model

LEVELS = np.arange(50) % 5
PLAIN = Dataset("plain", np.broadcast_to(40 * LEVELS[:, None, None], (50, 8, 6)).astype(np.uint8), LEVELS, 5)
DATA = small_dataset(50)
every_part = pytest.mark.parametrize("part", [MixUp(0.4), CutMix()], ids=repr)


class OfNumbers(Loss):
    """A user-defined loss, which takes class indices only."""


def batches(data: Any, *augment: Augmentation, backend: str = "numpy") -> Any:
    """Return the images and labels of an epoch in sample order."""
    loader, found, where = Loader(data, 12, seed=7, augment=augment), dict[int, Any](), create_backend(backend, "float")
    with BatchFeed(loader, where, prefetch=2) as feed, closing(feed.epoch(2)) as made:
        for batch in filter(None, made):
            images, labels = where.to_host(batch.images).copy(), where.to_host(batch.labels).copy()
            found |= dict(zip(batch.samples.tolist(), zip(images, labels, strict=True), strict=True))
    where.deactivate()
    return [np.stack([found[sample][kind] for sample in sorted(found)]) for kind in range(2)]


@every_part
@on_backends("numba", "cupy")
def test_mixed_batches_are_the_same_on_every_backend(part: Mixing, backend: str) -> None:
    (images, labels), (expected, same) = batches(DATA, part, backend=backend), batches(DATA, part)
    np.testing.assert_allclose(images, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(labels, same)


@every_part
def test_mixup_and_cutmix_mix_labels_like_images(part: Mixing) -> None:
    """The mean of an image of one color identifies its class."""
    images, labels = batches(PLAIN, part)
    assert labels.dtype == np.float32 and labels.shape == (50, 5) and labels.min() >= 0
    np.testing.assert_allclose(labels.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(255 * images.mean(axis=(1, 2, 3)), labels @ (40.0 * np.arange(5)), atol=0.51)
    assert (labels.max(axis=1) < 0.95).sum() > 10


def test_cutmix_replaces_a_whole_rectangle_by_one_of_another_image() -> None:
    images, labels = batches(PLAIN, CutMix())
    for image, label, level in zip(np.rint(255 * images[..., 0]), labels, LEVELS, strict=True):
        other = image != 40 * level
        rows, columns = other.any(axis=1), other.any(axis=0)
        np.testing.assert_array_equal(other, rows[:, None] & columns)
        assert label[level] >= 1 - other.mean() - 1e-6 and len({*image[other].tolist()}) <= 1


@every_part
def test_both_mixed_images_are_changed_by_the_augmentations_before(part: Mixing) -> None:
    flipped = Dataset("flipped", DATA.images[:, :, ::-1], DATA.labels, 3)
    found, expected = batches(DATA, Shift(), HorizontalFlip(1.0), part), batches(DATA, Shift(), part)
    assert not np.array_equal(found[0], expected[0])
    found, expected = batches(DATA, HorizontalFlip(1.0), part), batches(flipped, HorizontalFlip(0.0), part)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_mixup_mixes_targets_and_weights_too() -> None:
    numbers = np.random.default_rng(0).normal(0, 1, (50, 2)).astype(np.float32)
    weighted = Dataset("numbers", PLAIN.images, numbers, 2, weights=40 * LEVELS)
    images, labels = batches(weighted, MixUp(1.0))
    assert labels.shape == (50, 3)
    np.testing.assert_allclose(255 * images.mean(axis=(1, 2, 3)), labels[:, 2], atol=0.51)


@every_part
def test_a_mixed_image_of_weight_0_gives_no_label_to_another(part: Mixing) -> None:
    weighted = Dataset("weighted", PLAIN.images, LEVELS, 5, weights=(LEVELS != 3).astype(np.float32))
    _, labels = batches(weighted, part)
    assert not labels[:, 3].any() and (labels[:, 5] < 1).any()
    np.testing.assert_allclose(labels[labels[:, 5] > 0, :5].sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 1.0, 3.0, 100.0, 499.0])
def test_shares_of_mixup_have_the_moments_of_the_beta_distribution(alpha: float) -> None:
    shares = MixUp(alpha).drawn(SampleRNG(1, 2, np.arange(20000), 0), 20000, (1, 1, 1))[1][:, 0, 0]
    assert shares.mean() == pytest.approx(0.5, abs=0.01)
    assert shares.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


@every_part
@on_backends("numba", "cupy")
def test_mixed_images_train_the_same_weights_with_any_number_of_workers(part: Mixing, backend: str) -> None:
    weights = []
    for workers, name in ((1, "numpy"), (2, backend), (4, "numpy")):
        model = small_model("float" if name == "cupy" else "double", name)
        with ParallelWrapper(model, workers, 1, optimizer=SGD(0.05)) as wrapper:
            wrapper.fit(Loader(DATA, 8 // workers, seed=3, augment=[part]), epochs=2)
            replica = wrapper.trainer.replica
            assert not isinstance(replica, GraphReplica) or replica.graphs.refused == ""
        weights.append(model.weights())
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, atol=1e-5 if backend == "cupy" else 1e-12)
        np.testing.assert_allclose(weights[2][name], weight, atol=1e-12)


def test_mixing_with_a_loss_of_class_indices_is_refused() -> None:
    model = Model([Dense(3)], (8, 8, 1), "numpy", loss=OfNumbers())
    with ParallelWrapper(model, 1) as wrapper, refused(""):
        wrapper.fit(Loader(DATA, 8, augment="cutmix"))


def test_rectangles_of_cutmix_have_the_drawn_area_if_they_are_inside() -> None:
    draws = SampleRNG(1, 2, np.arange(2000), 0)
    share = CutMix().share(np.full(2000, 0.75), draws, 40, 60).mean(axis=(1, 2))
    assert share.min() == pytest.approx(0.75, abs=1e-6)  # other rectangles are cut off at the border
    assert (abs(share - 0.75) < 1e-6).mean() == pytest.approx(0.25, abs=0.03)
