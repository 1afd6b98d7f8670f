"""Nothing is lost and nothing is seen twice, and who trains on what follows from (seed, epoch) alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupynet.data import Dataset, Loader
from cupynet.errors import ConfigError


def numbered(samples: int) -> Dataset:
    images = (np.arange(samples * 4) % 251).astype(np.uint8).reshape(samples, 2, 2, 1)
    return Dataset("numbered", images, np.arange(samples) % 10, 10)


class Recorder:
    """A backend that hands everything back."""

    def load_images(self, images: Any, samples: Any) -> Any:
        return images[samples]

    def asarray(self, a: Any, dtype: Any = None) -> Any:
        return np.asarray(a, dtype)


@given(
    samples=st.integers(0, 60),
    batch_size=st.integers(1, 70),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
)
def test_all_workers_together_see_every_sample_once(
    samples: int, batch_size: int, size: int, shuffle: bool, seed: int, epoch: int
) -> None:
    dataset = numbered(samples)
    loader = Loader(dataset, batch_size, seed, shuffle)
    per_rank = [list(loader.epoch(epoch, Recorder(), rank, size)) for rank in range(size)]
    for rank, batches in enumerate(per_rank):
        assert [batch.index for batch in batches] == list(range(rank, loader.batches, size))
    batches = sorted((batch for batches in per_rank for batch in batches), key=lambda batch: batch.index)
    assert len(batches) == loader.batches == -(-samples // batch_size)
    assert all(len(batch) == batch_size for batch in batches[:-1]) and all(len(batch) > 0 for batch in batches)
    seen = [int(sample) for batch in batches for sample in batch.samples]
    assert sorted(seen) == list(range(samples)) and seen == loader.order(epoch).tolist()
    for batch in batches:
        assert batch.samples.dtype == batch.labels.dtype == np.int64
        np.testing.assert_array_equal(batch.labels, dataset.labels[batch.samples])
        np.testing.assert_array_equal(batch.images, dataset.images[batch.samples])


@given(
    samples=st.integers(1, 60),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 1000),
    batch_size=st.integers(1, 70),
)
def test_the_order_depends_on_seed_and_epoch_only(samples: int, seed: int, epoch: int, batch_size: int) -> None:
    key = np.array([seed, epoch], dtype=np.uint64)
    expected = np.random.Generator(np.random.Philox(key=key)).permutation(samples)
    loader = Loader(numbered(samples), batch_size, seed)
    list(loader.epoch(epoch + 1, Recorder()))  # what was asked before does not matter
    np.testing.assert_array_equal(loader.order(epoch), expected)


def test_epochs_and_seeds_differ() -> None:
    loader, dataset = Loader(numbered(50), 10, seed=3), numbered(50)
    orders = [loader.order(0), loader.order(1), Loader(dataset, 10, seed=4).order(0)]
    assert len({order.tobytes() for order in orders}) == 3


def test_without_shuffling_the_order_is_the_files(backend: Any) -> None:
    loader = Loader(numbered(10), 4, shuffle=False)
    assert [batch.samples.tolist() for batch in loader.epoch(7, backend)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_worker_may_have_no_batch(backend: Any) -> None:
    assert list(Loader(numbered(10), 10).epoch(0, backend, rank=3, size=4)) == []


def test_images_go_through_the_backend(backend: Any) -> None:
    dataset = numbered(10)
    (batch,) = Loader(dataset, 10, shuffle=False).epoch(0, backend)
    assert batch.images.dtype == np.float32
    np.testing.assert_allclose(batch.images, dataset.images / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number >= 1, got 0"),
        ({"batch_size": 12.0}, "batch_size must be a whole number >= 1, got 12.0"),
        ({"batch_size": True}, "batch_size must be a whole number >= 1, got True"),
        ({"batch_size": 4, "seed": None}, "seed must be a whole number >= 0, got None"),
        ({"batch_size": 4, "shuffle": "yes"}, "shuffle must be true or false, got 'yes'"),
    ],
)
def test_arguments_are_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(numbered(3), **arguments)


@pytest.mark.parametrize(
    ("rank", "size", "message"),
    [
        (2, 2, "rank must be below size, the number of workers, got rank 2 of 2"),
        (-1, 2, "rank must"),
        (0, 0, "size must"),
    ],
)
def test_a_wrong_rank_is_refused_at_once(backend: Any, rank: int, size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Loader(numbered(3), 1).epoch(0, backend, rank, size)
