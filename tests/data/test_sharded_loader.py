"""Sharded loaders: each worker reads its own shard, in an order that depends on seed, epoch and shard."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.data import Batch, Loader, Shards
from tests.support.loaders import RawBackend, numbered_dataset
from tests.support.refusals import refused
from tests.support.shards import write_shards


def cut(samples: int, shards: int, folder: Path | str) -> Shards:
    return write_shards(numbered_dataset(samples), folder, shards)


def batches_of(loader: Loader, epoch: int, rank: int, size: int, start: int = 0) -> list[Batch]:
    backend: Any = RawBackend()
    return list(loader.epoch(epoch, backend, rank, size, start=start))


def samples_of(batches: list[Batch]) -> list[int]:
    return [int(sample) for batch in batches for sample in batch.samples]


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 30),
    size=st.integers(1, 7),
    epoch=st.integers(0, 1000),
    start=st.integers(0, 12),
    shuffle=st.booleans(),
)
def test_all_workers_together_see_every_sample_once(
    samples: int, batch_size: int, size: int, epoch: int, start: int, shuffle: bool
) -> None:
    size, dataset = min(size, samples), numbered_dataset(samples)
    with tempfile.TemporaryDirectory() as folder:
        loader = Loader(cut(samples, size, folder), batch_size, 5, shuffle)
        per_rank = [batches_of(loader, epoch, rank, size) for rank in range(size)]
        rests = [samples_of(batches_of(loader, epoch, rank, size, start)) for rank in range(size)]
    for rank, batches in enumerate(per_rank):
        assert [batch.index for batch in batches] == [number * size + rank for number in range(len(batches))]
        assert all(len(batch) == batch_size for batch in batches[:-1]) and all(map(len, batches))
        for batch in batches:
            np.testing.assert_array_equal(batch.labels, dataset.labels[batch.samples])
            np.testing.assert_array_equal(batch.images, dataset.images[batch.samples])
        assert rests[rank] == samples_of(batches[start:])
    assert sorted(sample for batches in per_rank for sample in samples_of(batches)) == list(range(samples))
    assert loader.batches == sum(map(len, per_rank)) and loader.rounds(size) == max(map(len, per_rank))
    for number in range(loader.rounds(size) + 1):
        in_round = [len(batches[number]) for batches in per_rank if number < len(batches)]
        assert loader.images_of_round(number, size) == sum(in_round)


def test_the_order_follows_from_seed_epoch_and_shard(tmp_path: Path) -> None:
    shards = cut(60, 3, tmp_path)

    def samples(seed: int, epoch: int, rank: int, batch_size: int = 4) -> list[int]:
        return samples_of(batches_of(Loader(Shards(tmp_path), batch_size, seed), epoch, rank, 3))

    assert samples(1, 0, 0) == samples(1, 0, 0, batch_size=7)
    assert len({tuple(samples(*each)) for each in ((1, 0, 0), (1, 1, 0), (2, 0, 0))}) == 3
    places = {tuple(np.searchsorted(shards.samples[rank], samples(1, 0, rank))) for rank in range(3)}
    assert len(places) == 3, "each shard has an order of its own"


def test_one_shard_is_a_loader(tmp_path: Path) -> None:
    sharded, plain = Loader(cut(30, 1, tmp_path), 4, seed=9), Loader(numbered_dataset(30), 4, seed=9)
    assert (sharded.batches, sharded.rounds(1), sharded.deal(1)) == (plain.batches, plain.rounds(1), plain.deal(1))
    assert samples_of(batches_of(sharded, 3, 0, 1)) == samples_of(batches_of(plain, 3, 0, 1))


def test_as_many_workers_as_shards(tmp_path: Path) -> None:
    loader = Loader(cut(30, 3, tmp_path), 4)
    with refused(""):
        loader.rounds(2)
    with refused(""):
        batches_of(loader, 0, 0, 4)


def test_signatures_differ_with_shards_and_order(tmp_path: Path) -> None:
    two, three = cut(30, 2, tmp_path / "a"), cut(30, 3, tmp_path / "b")
    loaders = [
        Loader(two, 4),
        Loader(three, 4),
        Loader(two, 5),
        Loader(two, 4, seed=1),
        Loader(numbered_dataset(30), 4),
    ]
    assert len({loader.signature for loader in loaders}) == len(loaders)
    assert Loader(Shards(tmp_path / "a"), 4).signature == loaders[0].signature


def test_the_identity_of_the_data_is_the_same_for_any_division(tmp_path: Path) -> None:
    loaders = [Loader(cut(30, shards, tmp_path / str(shards)), 4) for shards in (1, 2, 3)]
    whole = Loader(numbered_dataset(30), 7)
    assert {loader.identity for loader in loaders} == {whole.identity}
    assert whole.identity != Loader(numbered_dataset(31), 7).identity
