"""Sharded loaders: each worker reads its own shard, in an order that depends on seed, epoch and shard."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.data import Loader, Shards
from tests.support.data_errors import data_error
from tests.support.loaders import RawBackend, numbered_dataset
from tests.support.refusals import refused
from tests.support.shards import write_shards


def cut(samples: int, shards: int, folder: Path | str) -> Shards:
    return write_shards(numbered_dataset(samples), folder, shards)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 30),
    size=st.integers(1, 7),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
    start=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_all_workers_together_see_every_sample_once(
    samples: int, batch_size: int, size: int, seed: int, epoch: int, start: int, shuffle: bool
) -> None:
    size, dataset = min(size, samples), numbered_dataset(samples)
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(cut(samples, size, folder), batch_size, seed, shuffle)
        per_rank = [list(loader.epoch(epoch, RawBackend(), rank, size)) for rank in range(size)]
        seen: list[int] = []
        for rank, batches in enumerate(per_rank):
            assert [batch.index for batch in batches] == [number * size + rank for number in range(len(batches))]
            assert all(len(batch) == batch_size for batch in batches[:-1]) and all(map(len, batches))
            for batch in batches:
                assert batch.epoch == epoch and batch.samples.dtype == batch.labels.dtype == np.int64
                np.testing.assert_array_equal(batch.labels, dataset.labels[batch.samples])
                np.testing.assert_array_equal(batch.images, dataset.images[batch.samples])
                seen += batch.samples.tolist()
            rest = loader.epoch(epoch, RawBackend(), rank, size, start=start)
            assert [batch.samples.tolist() for batch in rest] == [batch.samples.tolist() for batch in batches[start:]]
        assert sorted(seen) == list(range(samples))
        assert loader.batches == sum(map(len, per_rank)) and loader.rounds(size) == max(map(len, per_rank))
        for number in range(loader.rounds(size) + 1):
            found = sum(len(batch) for batches in per_rank for batch in batches[number : number + 1])
            assert loader.images_of_round(number, size) == found
        del per_rank, loader, batches, batch, rest


def test_the_order_follows_from_seed_epoch_and_shard(tmp_path: Path) -> None:
    shards = cut(60, 3, tmp_path)

    def samples(seed: int, epoch: int, rank: int, batch_size: int = 4) -> list[int]:
        loader = Loader(Shards(tmp_path), batch_size, seed)
        return [int(sample) for batch in loader.epoch(epoch, RawBackend(), rank, 3) for sample in batch.samples]

    assert samples(1, 0, 0) == samples(1, 0, 0) == samples(1, 0, 0, batch_size=7)
    assert len({tuple(samples(*each)) for each in ((1, 0, 0), (1, 1, 0), (2, 0, 0))}) == 3
    places = [np.searchsorted(shards.samples[rank], samples(1, 0, rank)).tolist() for rank in range(3)]
    assert places[0] != places[1] != places[2] != places[0], "each shard has an order of its own"


def test_one_shard_is_a_loader(tmp_path: Path) -> None:
    sharded, plain = Loader(cut(30, 1, tmp_path), 4, seed=9), Loader(numbered_dataset(30), 4, seed=9)
    assert (sharded.batches, sharded.rounds(1), sharded.deal(1)) == (plain.batches, plain.rounds(1), plain.deal(1))
    for mine, theirs in zip(sharded.epoch(3, RawBackend()), plain.epoch(3, RawBackend()), strict=True):
        assert mine.index == theirs.index and mine.samples.tolist() == theirs.samples.tolist()
        np.testing.assert_array_equal(mine.images, theirs.images)


def test_a_worker_opens_its_own_shard_only(tmp_path: Path) -> None:
    cut(30, 3, tmp_path)
    for other in (0, 2):
        (tmp_path / str(other) / "images.npy").unlink()
    loader = Loader(Shards(tmp_path), 4)
    assert sum(len(batch) for batch in loader.epoch(0, RawBackend(), 1, 3)) == 10
    with data_error(tmp_path / "2" / "images.npy"):
        loader.epoch(0, RawBackend(), 2, 3)


def test_as_many_workers_as_shards(tmp_path: Path) -> None:
    loader = Loader(cut(30, 3, tmp_path), 4)
    for use in (lambda: loader.rounds(2), lambda: loader.epoch(0, RawBackend(), 0, 4)):
        with refused(""):
            use()


def test_signatures_differ_with_shards_and_order(tmp_path: Path) -> None:
    one = cut(30, 2, tmp_path / "a")
    loaders = [Loader(one, 4), Loader(cut(30, 3, tmp_path / "b"), 4), Loader(one, 5)]
    loaders += [
        Loader(one, 4, seed=1),
        Loader(cut(31, 2, tmp_path / "c"), 4),
        Loader(numbered_dataset(30), 4),
    ]
    assert len({loader.signature for loader in loaders}) == len(loaders)
    assert Loader(Shards(tmp_path / "a"), 4).signature == loaders[0].signature


def test_the_identity_of_the_data_is_the_same_for_any_division(tmp_path: Path) -> None:
    loaders = [Loader(cut(30, shards, tmp_path / str(shards)), 4) for shards in (1, 2, 3)]
    whole = Loader(numbered_dataset(30), 7)
    assert {loader.identity for loader in loaders} == {whole.identity}
    assert whole.identity != Loader(numbered_dataset(31), 7).identity
