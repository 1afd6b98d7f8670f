"""Loaders: each sample occurs once per epoch. Order and distribution depend only on seed and epoch."""

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.data import Augmentation, Batch, Dataset, HorizontalFlip, Loader, SampleRNG, as_loader
from tests.support.refusals import data_error, refused
from tests.support.shards import write_shards
from tests.support.training import numbered_dataset

few_examples = settings(max_examples=30, derandomize=True, deadline=None)


def batches_of(loader: Loader, epoch: int, rank: int = 0, size: int = 1, start: int = 0) -> list[Batch]:
    return list(loader.epoch(epoch, NumpyBackend("float"), rank, size, start=start))


def samples_of(batches: list[Batch]) -> list[list[int]]:
    return [batch.samples.tolist() for batch in batches]


class Applied(Augmentation):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, images: Any, draws: SampleRNG) -> Any:
        return self.function(images)


class Division(NamedTuple):
    samples: int
    batch_size: int
    size: int
    sharded: bool

    def loaded(self, root: Path) -> tuple[Loader, list[list[Batch]]]:
        """Return a loader and each worker's batches in the third epoch."""
        data, size = numbered_dataset(self.samples), min(self.size, self.samples) if self.sharded else self.size
        whole = write_shards(data, tempfile.mkdtemp(dir=root), size) if self.sharded else data
        loader = Loader(whole, self.batch_size, seed=5)
        return loader, [batches_of(loader, 2, rank, size) for rank in range(size)]


any_division = given(
    way=st.builds(Division, st.integers(1, 60), st.integers(1, 70), st.integers(1, 9), sharded=st.booleans())
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shards")


@few_examples
@any_division
def test_all_workers_together_see_every_sample_once(root: Path, way: Division) -> None:
    loader, of_workers = way.loaded(root)
    data, seen = numbered_dataset(way.samples), list[int]()
    for rank, batches in enumerate(of_workers):
        assert [batch.index for batch in batches] == [rank + len(of_workers) * number for number in range(len(batches))]
        for batch in batches:
            assert batch.epoch == 2
            np.testing.assert_array_equal(batch.labels, data.labels[batch.samples])
            np.testing.assert_allclose(batch.images * 255, data.images[batch.samples], rtol=1e-6)
            seen += batch.samples.tolist()
    assert sorted(seen) == list(range(way.samples))
    for part in of_workers if way.sharded else [sum(of_workers, [])]:
        *full, last = [len(batch) for batch in sorted(part, key=lambda batch: batch.index)]
        assert full == [way.batch_size] * len(full) and 0 < last <= way.batch_size


@few_examples
@any_division
def test_an_epoch_can_start_in_the_middle(root: Path, way: Division) -> None:
    loader, of_workers = way.loaded(root)
    for rank, whole in enumerate(of_workers):
        for start in (1, 3, 70):
            rest = batches_of(loader, 2, rank, len(of_workers), start)
            assert samples_of(rest) == samples_of(whole)[start:]
            assert [batch.index for batch in rest] == [batch.index for batch in whole[start:]]


@few_examples
@any_division
def test_numbers_of_rounds_and_of_their_images_match_the_batches(root: Path, way: Division) -> None:
    loader, of_workers = way.loaded(root)
    size = len(of_workers)
    assert loader.batches == sum(map(len, of_workers)) and loader.iterations(size) == max(map(len, of_workers))
    for number in range(loader.iterations(size) + 1):
        in_round = [len(batches[number]) for batches in of_workers if number < len(batches)]
        assert loader.images_of_iteration(number, size) == sum(in_round)


@few_examples
@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000), batch_size=st.integers(1, 70))
def test_the_order_of_samples_depends_on_seed_and_epoch_only(seed: int, epoch: int, batch_size: int) -> None:
    loader = Loader(numbered_dataset(60), batch_size, seed)
    batches_of(loader, epoch + 1)  # earlier requests have no influence
    key = np.array([seed, epoch], dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key)).permutation(60).tolist()
    assert sum(samples_of(batches_of(loader, epoch)), []) == expected


def test_each_shard_is_shuffled_in_its_own_order(tmp_path: Path) -> None:
    shards = write_shards(numbered_dataset(60), tmp_path, 3)
    loader = Loader(shards, 20)
    orders = set()
    for rank in range(3):
        (samples,) = samples_of(batches_of(loader, 0, rank, 3))
        orders.add(tuple(np.searchsorted(shards.samples[rank], samples)))
    assert len(orders) == 3


def test_arrays_and_data_sets_become_a_loader() -> None:
    images, labels = np.zeros((4, 3, 3), np.uint8), np.array([0, 6, 2, 2], np.uint8)
    for pair in ((images, labels), (images.tolist(), labels.tolist())):
        dataset = as_loader(pair).dataset
        assert isinstance(dataset, Dataset)
        assert (dataset.images.shape, dataset.classes, dataset.labels.tolist()) == ((4, 3, 3, 1), 7, [0, 6, 2, 2])
    loader = as_loader(dataset, 4, 7, False)
    assert (loader.dataset, loader.batch_size, loader.seed, loader.shuffle) == (dataset, 4, 7, False)
    assert as_loader(loader, batch_size=7, shuffle=True) is loader
    assert as_loader((images, labels), classes=10).dataset.classes == 10
    assert Loader((images, np.eye(9, dtype=int)[labels]), 2).dataset.classes == 9  # also if the last class is absent
    assert Loader((images, labels), 2).signature == as_loader((images, labels), 2, 0).signature
    with refused(""):
        as_loader((images, labels), classes=6)


def test_signatures_of_loaders_differ_with_all_that_batches_depend_on(tmp_path: Path) -> None:
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
    loaders += [Loader(write_shards(numbered_dataset(40), tmp_path / str(shards), shards), 4) for shards in (1, 2)]
    loaders += [made(augment=[HorizontalFlip()]), made(augment=[HorizontalFlip(0.25)])]
    assert made().signature == loaders[0].signature
    assert len({loader.signature for loader in loaders}) == len(loaders)


def test_signatures_do_not_depend_on_the_addresses_of_functions_in_augmentations() -> None:
    """They differ between processes."""
    loaders = [Loader(numbered_dataset(9), 4, augment=[Applied(function)]) for function in (lambda x: x, lambda x: x)]
    assert loaders[0].signature == loaders[1].signature


def test_the_identity_of_data_is_the_same_for_any_division_into_shards_and_batches(tmp_path: Path) -> None:
    data = numbered_dataset(30)
    loaders = [Loader(write_shards(data, tmp_path / str(shards), shards), 4) for shards in (1, 2, 3)]
    assert {loader.identity for loader in loaders} == {Loader(data, 7).identity}
    assert Loader(data, 7).identity != Loader(numbered_dataset(31), 7).identity


def test_images_that_cannot_be_read_during_training_are_a_data_error() -> None:
    """The system reports the same error for a disk that cannot be written to."""

    class Broken(NumpyBackend):
        def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Any:
            if 9 in samples:
                raise OSError(errno.EIO, "Input/output error", "images.npy")
            return super().load_images(images, samples, pixels)

    batches = Loader(numbered_dataset(20), 5, shuffle=False).epoch(0, Broken("float"))
    assert len(next(batches)) == 5
    with data_error("'numbered'", "images.npy"):
        next(batches)
