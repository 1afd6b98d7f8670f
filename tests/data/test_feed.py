"""Batch feeds of a GPU, on the stand-in: batches equal those of the loader on every path to the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Shared, create_backend
from cupynet.backend.cuda import transfer
from cupynet.backend.cuda.transfer import Resident, Staging
from cupynet.core.errors import ConfigError
from cupynet.data import Batch, BatchFeed, Dataset, Loader, Prefetcher
from tests.standin import installed
from tests.standin.machine import active
from tests.standin.memory import DevicePool
from tests.standin.pinned import PinnedPool
from tests.standin.planted import together
from tests.support.data_errors import data_error
from tests.support.refusals import refused

pytestmark = pytest.mark.standin
WAYS = [(True, 0), (True, 3), (False, 0), (False, 1), (False, 3)]  # on the device or not, and how many ahead
every_way = pytest.mark.parametrize(("on_device", "ahead"), WAYS)


def pictures(samples: int = 43) -> Dataset:
    rng = np.random.default_rng(5)
    return Dataset(
        "pictures", rng.integers(0, 256, (samples, 5, 3, 2)).astype(np.uint8), rng.integers(0, 7, samples), 7
    )


def worker(dtype: str = "float", device: int = 0) -> Any:
    backend = create_backend("cupy", dtype, device)
    backend.activate()
    return backend


def seen(backend: Any, batches: Any) -> list[tuple[int, bytes, str, list[int], list[int]]]:
    """Return the contents of each batch as bits; rounds without a batch are left out."""
    found = []
    for batch in filter(None, batches):
        images = backend.to_host(batch.images)
        labels = backend.to_host(batch.labels)
        found.append((batch.index, images.tobytes(), images.dtype.name, labels.tolist(), batch.samples.tolist()))
    return found


def expected(loader: Loader, dtype: str, epoch: int, *deal: int) -> Any:
    backend = create_backend("numpy", dtype)
    return seen(backend, loader.epoch(epoch, backend, *deal))


@pytest.mark.parametrize(
    ("on_device", "ahead", "dtype"),
    [(True, 0, "half"), (True, 3, "float"), (False, 0, "double"), (False, 1, "float"), (False, 3, "half")],
)
def test_batches_equal_those_of_the_cpu_bit_for_bit(on_device: bool, ahead: int, dtype: str) -> None:
    """Including short batches, an epoch that starts in its middle, and one worker of several."""
    loader, backend = Loader(pictures(), 4, seed=2), worker(dtype)
    for rank, size in ((0, 1), (1, 3)):
        with BatchFeed(loader, backend, rank, size, prefetch=ahead, on_device=on_device) as feed:
            for epoch, start in ((0, 0), (1, 0), (1, 3), (2, 0)):
                with closing(feed.epoch(epoch, start)) as batches:
                    assert seen(backend, batches) == expected(loader, dtype, epoch, rank, size, start)


def computed(backend: Any, batch: Batch, total: Any) -> None:
    """Compute on the batch without waiting on the host."""
    backend.convert(batch.images, backend.workspace.borrow(batch.images.shape, batch.images.dtype))
    with backend.here():
        total += batch.images.sum()
        total += batch.labels.sum()


@every_way
def test_epochs_follow_each_other_while_the_worker_computes(on_device: bool, ahead: int) -> None:
    """Also after an interrupted epoch with batches prefetched in part; everything stays in order."""
    dataset, backend = pictures(), worker("double")
    loader, sums = Loader(dataset, 4, seed=2), []
    with backend.here():
        total = backend.xp.zeros(())
    with BatchFeed(loader, backend, prefetch=ahead, on_device=on_device) as feed:
        for epoch, most in ((0, 11), (1, 3), (2, 11), (3, 1), (4, 0), (5, 11)):
            for batch, _ in zip(feed.epoch(epoch), range(most), strict=False):
                assert batch is not None
                computed(backend, batch, total)
                sums.append(dataset.images[batch.samples].sum() / 255 + dataset.labels[batch.samples].sum())
    assert float(total) == pytest.approx(float(np.sum(sums)), rel=1e-12)


def test_a_stage_without_input_gets_labels_only() -> None:
    loader, backend = Loader(pictures(), 4, seed=2), worker()
    with BatchFeed(loader, backend, prefetch=3, images=False) as feed, closing(feed.epoch(1)) as batches:
        for batch, other in zip(batches, loader.epoch(1, create_backend("numpy")), strict=True):
            assert batch.images is None
            np.testing.assert_array_equal(backend.to_host(batch.labels), other.labels)


@pytest.mark.parametrize("upload", [1, 100])
def test_images_are_copied_to_a_device_in_parts(upload: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 bytes each."""
    monkeypatch.setattr(transfer, "UPLOAD", upload)
    loader, backend = Loader(pictures(), 4, seed=2), worker()
    with BatchFeed(loader, backend, on_device=True) as feed, closing(feed.epoch(0)) as batches:
        assert seen(backend, batches) == expected(loader, "float", 0)


@pytest.mark.parametrize(("on_device", "ahead"), [(True, 0), (False, 3)])
def test_an_epoch_is_ordered_before_its_first_round(on_device: bool, ahead: int) -> None:
    """Otherwise the first round would include the time."""
    loader, ordered = Loader(pictures(), 4, seed=2), list[int]()
    order = loader.order
    loader.order = lambda epoch, *shard: (ordered.append(epoch), order(epoch, *shard))[1]  # type: ignore[method-assign]
    with BatchFeed(loader, worker(), prefetch=ahead, on_device=on_device) as feed, closing(feed.epoch(1)):
        assert ordered == [1]


@every_way
def test_a_round_without_a_batch_is_none(on_device: bool, ahead: int) -> None:
    """11 batches for 3 workers: the last has none in the fourth round."""
    loader, backend = Loader(pictures(), 4, seed=2), worker()
    with BatchFeed(loader, backend, 2, 3, prefetch=ahead, on_device=on_device) as feed:
        for start in range(4):
            batches = [None if batch is None else batch.index for batch in feed.epoch(0, start)]
            assert batches == [2, 5, 8, None][start:]


# memory ---------------------------------------------------------------------------------------------------------------


def used(device: int = 0) -> int:
    import cupy

    with cupy.cuda.Device(device):
        return int(cupy.get_default_memory_pool().used_bytes())


@every_way
def test_a_closed_feed_frees_its_memory(on_device: bool, ahead: int) -> None:
    backend, shared, before = worker(), Shared(), used()
    for _ in range(2):
        with BatchFeed(Loader(pictures(), 4), backend, prefetch=ahead, on_device=on_device, shared=shared) as feed:
            assert used() > before
            with closing(feed.epoch(0)) as batches:
                next(batches)
            del batches  # it holds the last batch
        assert used() == before and not [each for each in shared.kept.values() if isinstance(each, Resident)]
    assert active().pinned.used == {}
    held = active().taken(0)
    with BatchFeed(Loader(pictures(), 4), backend, prefetch=ahead, on_device=on_device, shared=shared):
        assert active().taken(0) == held  # what was freed is used again


def test_workers_of_a_device_share_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, upload = [], Resident.__init__

    def counted(self: Any, xp: Any, stream: Any, images: Any) -> None:
        uploads.append(xp.cuda.Device().id)
        upload(self, xp, stream, images)

    monkeypatch.setattr(Resident, "__init__", counted)
    loader, shared, size = Loader(pictures(), 4, seed=2), Shared(), 4
    open_ones = threading.Barrier(size)

    def task(rank: int) -> Any:
        backend = worker("float", rank % 2)
        with BatchFeed(loader, backend, rank, size, prefetch=2, on_device=True, shared=shared) as feed:
            open_ones.wait(20)
            with closing(feed.epoch(3)) as batches:
                return seen(backend, batches)

    found = together(*(lambda rank=rank: task(rank) for rank in range(size)))
    assert found == [expected(loader, "float", 3, rank, size) for rank in range(size)]
    assert sorted(uploads) == [0, 1] and used(0) == used(1) == 0


def allocations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that ask for memory of a device, or for pinned memory, from now on."""
    asked: list[str] = []

    def watched(kind: type, name: str) -> None:
        method: Callable[..., Any] = getattr(kind, name)

        def asks(self: Any, *arguments: Any) -> Any:
            asked.append(threading.current_thread().name)
            return method(self, *arguments)

        monkeypatch.setattr(kind, name, asks)

    watched(DevicePool, "malloc")
    watched(PinnedPool, "_take")
    return asked


@every_way
def test_the_prefetch_thread_allocates_nothing(on_device: bool, ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the worker, once it has begun."""
    loader, backend, asked = Loader(pictures(), 4, seed=2), worker(), allocations(monkeypatch)
    with BatchFeed(loader, backend, prefetch=ahead, on_device=on_device) as feed:
        assert set(asked) == {"MainThread"}
        asked.clear()
        loads = set(active().loaded)
        for epoch in range(3):
            with closing(feed.epoch(epoch)) as batches:
                assert sum(map(len, batches)) == 43
        assert asked == [] and active().loaded == loads
    with Prefetcher(loader.epoch(0, backend), 3) as batches:  # each made anew: the memory of each is asked for
        list(batches)
    assert set(asked) == {"cupynet-prefetch"}


@pytest.mark.parametrize(
    ("limit", "on_device", "stay"),
    [(0, "auto", True), (7168, "auto", False), (8192, "auto", True), (7168, True, True), (0, False, False)],
)
def test_data_stay_on_a_device_with_four_times_their_size_free(limit: int, on_device: Any, stay: bool) -> None:
    import cupy

    # 1290 bytes of images, 688 of numbers: 7912 is four times that
    loader, backend = Loader(pictures(), 4, seed=2), worker()
    cupy.get_default_memory_pool().set_limit(size=limit)
    with BatchFeed(loader, backend, prefetch=1, on_device=on_device) as feed:
        assert feed._transfer.ahead is not stay
        with closing(feed.epoch(0)) as batches:
            assert seen(backend, batches) == expected(loader, "float", 0)


def test_data_that_do_not_fit_are_refused_or_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(devices=1, memory=30_000):
        loader, backend, shared = Loader(pictures(1000), 4), worker(), Shared()
        for _ in range(2):
            with refused("data_on_device"):
                BatchFeed(loader, backend, on_device=True, shared=shared)
        monkeypatch.setattr(transfer, "SHARE", 0)  # as if other programs had taken the memory meanwhile
        with BatchFeed(loader, backend, prefetch=1, shared=shared) as feed, closing(feed.epoch(0)) as batches:
            assert sum(map(len, batches)) == 1000
        assert used() == 0


# what cannot be -------------------------------------------------------------------------------------------------------


class Wrong(Loader):
    """Yields rows that are not valid."""

    rows = np.arange(0)

    def assigned(self, *_: Any) -> Any:
        return [(0, self.rows, self.rows)]


@every_way
def test_batches_that_no_kernel_could_take_are_refused(on_device: bool, ahead: int) -> None:
    loader, backend = Wrong(pictures(), 4), worker()
    with BatchFeed(loader, backend, prefetch=ahead, on_device=on_device) as feed:
        loader.rows = np.arange(5)
        with pytest.raises(ConfigError), closing(feed.epoch(0)) as batches:
            next(batches)
        for rows in ([0, 43], [-1, 5]):
            loader.rows = np.array(rows)
            with pytest.raises(IndexError), closing(feed.epoch(0)) as batches:
                next(batches)
        loader.rows = np.array([42, 42, 0])
        with closing(feed.epoch(0)) as batches:
            assert seen(backend, batches)[0][4] == [42, 42, 0]


@pytest.mark.parametrize("on_device", [True, False])
def test_images_that_cannot_be_read_are_an_error_of_the_data(on_device: bool) -> None:
    class Unreadable(Loader):
        def part(self, rank: int, size: int) -> Dataset:
            raise OSError(5, "Input/output error", "images.npy")

    before = used()
    with data_error("'pictures'"):
        BatchFeed(Unreadable(pictures(), 4), worker(), on_device=on_device)
    assert used() == before


def test_an_error_during_close_does_not_hide_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = worker()

    def fails(self: Any) -> None:
        backend.synchronize()
        raise RuntimeError("the device has failed")

    monkeypatch.setattr(Staging, "close", fails)
    feed = BatchFeed(Loader(pictures(), 4), backend, on_device=False)
    with pytest.raises(ValueError, match="^mine$"), feed:
        raise ValueError("mine")
    with pytest.raises(RuntimeError), feed:
        pass
