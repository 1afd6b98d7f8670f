"""Loaders: every sample once per epoch, in an order and a distribution that depend only on seed and epoch."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.data import Batch, BatchFeed, Data, Dataset, HorizontalFlip, Loader, Synthetic, as_loader
from tests.support.data_errors import data_error
from tests.support.loaders import HostBackend, RawBackend, numbered_dataset
from tests.support.refusals import refused

few_examples = settings(max_examples=30, derandomize=True, deadline=None)


def batches_of(loader: Loader, epoch: int, rank: int = 0, size: int = 1, start: int = 0) -> list[Batch]:
    backend: Any = RawBackend()
    return list(loader.epoch(epoch, backend, rank, size, start=start))


def samples_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.samples.tolist() for batch in batches]


@few_examples
@given(
    samples=st.integers(0, 60),
    batch_size=st.integers(1, 70),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    epoch=st.integers(0, 1000),
)
def test_all_workers_together_see_every_sample_once(
    samples: int, batch_size: int, size: int, shuffle: bool, epoch: int
) -> None:
    dataset = numbered_dataset(samples)
    loader = Loader(dataset, batch_size, 5, shuffle)
    found = [batch for rank in range(size) for batch in batches_of(loader, epoch, rank, size)]
    assert [batch.index for batch in found] == [i for rank in range(size) for i in range(rank, loader.batches, size)]
    found.sort(key=lambda batch: batch.index)
    assert [len(batch) for batch in found[:-1]] == [batch_size] * (loader.batches - 1)
    seen = sum(samples_of(found), [])
    assert sorted(seen) == list(range(samples)) and seen == loader.order(epoch).tolist()
    for batch in found:
        assert len(batch) > 0 and batch.epoch == epoch
        np.testing.assert_array_equal(batch.labels, dataset.labels[batch.samples])
        np.testing.assert_array_equal(batch.images, dataset.images[batch.samples])


@few_examples
@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000), batch_size=st.integers(1, 70))
def test_the_order_depends_on_seed_and_epoch_only(seed: int, epoch: int, batch_size: int) -> None:
    loader = Loader(numbered_dataset(60), batch_size, seed)
    batches_of(loader, epoch + 1)  # what was asked before does not matter
    key = np.array([seed, epoch], dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key)).permutation(60)
    np.testing.assert_array_equal(loader.order(epoch), expected)


def test_without_shuffling_the_order_is_that_of_the_data_set() -> None:
    loader = Loader(numbered_dataset(10), 4, shuffle=False)
    assert samples_of(batches_of(loader, 7)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@few_examples
@given(samples=st.integers(0, 60), batch_size=st.integers(1, 20), size=st.integers(1, 5), start=st.integers(0, 70))
def test_an_epoch_can_start_in_its_middle(samples: int, batch_size: int, size: int, start: int) -> None:
    loader = Loader(numbered_dataset(samples), batch_size, seed=1)
    for rank in range(size):
        whole, rest = batches_of(loader, 2, rank, size), batches_of(loader, 2, rank, size, start)
        assert samples_of(rest) == samples_of(whole)[start:]
        assert [batch.index for batch in rest] == list(range(start * size + rank, loader.batches, size))


def test_rounds_and_their_images_match_the_batches() -> None:
    for samples, batch_size, size in ((60, 7, 3), (5, 7, 3), (42, 7, 3), (0, 4, 2), (1, 1, 4)):
        loader = Loader(numbered_dataset(samples), batch_size)
        per_rank = [batches_of(loader, 0, rank, size) for rank in range(size)]
        assert loader.rounds(size) == max(map(len, per_rank))
        for number in range(loader.rounds(size)):
            in_round = [len(batches[number]) for batches in per_rank if number < len(batches)]
            assert loader.images_of_round(number, size) == sum(in_round)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_feed_continues_an_epoch_from_a_round(ahead: int) -> None:
    loader = Loader(numbered_dataset(50), 4, seed=1)
    with BatchFeed(loader, NumpyBackend(), 1, 2, prefetch=ahead) as feed:
        found = [None if batch is None else batch.samples.tolist() for batch in feed.epoch(2, start=3)]
    rest = samples_of(batches_of(loader, 2, 1, 2, start=3))
    assert found == [*rest, None]  # 13 batches: the second worker has none in the last round


def test_labels_without_images() -> None:
    class Blind(NumpyBackend):
        load_images = None  # type: ignore[assignment]

    loader = Loader(numbered_dataset(10), 4, seed=1)
    feed = BatchFeed(loader, Blind(), images=False)
    for whole, blind in zip(batches_of(loader, 2), feed.epoch(2), strict=True):
        assert blind is not None and blind.images is None and blind.index == whole.index
        np.testing.assert_array_equal(blind.labels, whole.labels)
        np.testing.assert_array_equal(blind.samples, whole.samples)


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch_size", 0), ("batch_size", 12.0), ("batch_size", True), ("seed", None), ("shuffle", "yes")],
)
def test_arguments_are_refused_by_name(name: str, value: Any) -> None:
    with refused(name):
        Loader(numbered_dataset(3), **{"batch_size": 4, name: value})


def test_a_data_set_becomes_a_loader() -> None:
    dataset = numbered_dataset(10)
    loader = as_loader(dataset, 4, 7, False)
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.seed, loader.shuffle) == (4, 7, False)
    assert as_loader(loader, batch_size=7, shuffle=False) is loader


def test_arrays_become_a_loader() -> None:
    images, labels = np.zeros((4, 3, 3), np.uint8), np.array([0, 6, 2, 2], np.uint8)
    for pair in ((images, labels), (images.tolist(), labels.tolist())):
        dataset = as_loader(pair).dataset
        assert isinstance(dataset, Dataset)
        assert (dataset.images.shape, dataset.classes, dataset.labels.tolist()) == ((4, 3, 3, 1), 7, [0, 6, 2, 2])
    assert as_loader((images, labels), classes=10).dataset.classes == 10
    with refused(""):
        as_loader((images, labels), classes=6)


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 3, 3)),
        (np.zeros((4, 3, 3)),),
        (np.zeros((4, 3, 3)), [0, 1, 2, 3]),
        Data("x", numbered_dataset(3), None, numbered_dataset(2)),
        Synthetic(10, 10),
    ],
    ids=["array", "one array", "fractions", "Data", "source"],
)
def test_objects_of_another_type_are_refused(data: Any) -> None:
    with refused(""):
        as_loader(data)
    with refused(""):
        Loader(data, 4)


def test_signatures_differ_with_all_that_batches_depend_on() -> None:
    def made(change: str = "", samples: int = 40, pixels: PixelScale = FRACTIONS, **options: Any) -> Loader:
        dataset = numbered_dataset(samples)
        if change == "label":
            dataset.labels[7] += 1
        elif change == "pixel":
            dataset.images[7, 0, 1, 0] ^= 1
        dataset = Dataset("numbered", dataset.images, dataset.labels, 11, pixels)
        return Loader(dataset, **{"batch_size": 4, "seed": 1, **options})

    loaders = [made(), made("label"), made("pixel"), made(samples=41)]
    loaders += [made(batch_size=5), made(seed=2), made(shuffle=False), made(pixels=PixelScale.of([0.25], [0.5]))]
    loaders += [made(augment=[HorizontalFlip()]), made(augment=[HorizontalFlip(0.25)])]
    assert made().signature == loaders[0].signature
    assert len({loader.signature for loader in loaders}) == len(loaders)


def test_a_file_that_cannot_be_read_is_a_data_error() -> None:
    """The system says the same of a disk that cannot be written to."""

    class Broken(HostBackend):
        def load_images(self, images: Any, samples: Any, pixels: Any) -> Any:
            if 9 in samples:
                raise OSError(errno.EIO, "Input/output error", "images.npy")
            return super().load_images(images, samples, pixels)

    broken: Any = Broken()
    batches = Loader(numbered_dataset(20), 5, shuffle=False).epoch(0, broken)
    assert len(next(batches)) == 5
    with data_error("'numbered'", "images.npy"):
        next(batches)
