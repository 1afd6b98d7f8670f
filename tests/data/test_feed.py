"""Batch feeds for a GPU, on the stand-in: batches equal the loader's on every path to the device."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from cupynet.backend import Shared, create_backend
from cupynet.backend.cuda import transfer
from cupynet.backend.cuda.transfer import Resident
from cupynet.data import BatchFeed, Dataset, Loader
from tests.standin import installed
from tests.standin.machine import active
from tests.support.refusals import refused

pytestmark = pytest.mark.standin
every_way = pytest.mark.parametrize(("on_device", "ahead"), [(True, 0), (True, 3), (False, 0), (False, 1), (False, 3)])
Contents = tuple[int, bytes, str, list[int], list[int]]


def pictures(samples: int = 43) -> Dataset:
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (samples, 5, 3, 2)).astype(np.uint8)
    return Dataset("pictures", images, rng.integers(0, 7, samples), 7)


@pytest.fixture
def loader() -> Loader:
    """Return a loader with 11 batches, the last of which is short."""
    return Loader(pictures(), 4, seed=2)


def worker(dtype: str = "float") -> Any:
    backend = create_backend("cupy", dtype)
    backend.activate()
    return backend


def contents(backend: Any, batches: Any) -> list[Contents]:
    """Return the contents of each batch as bits; rounds without a batch are left out."""
    found = []
    for batch in filter(None, batches):
        images, labels = backend.to_host(batch.images), backend.to_host(batch.labels)
        found.append((batch.index, images.tobytes(), images.dtype.name, labels.tolist(), batch.samples.tolist()))
    return found


def fed(feed: BatchFeed, backend: Any, epoch: int = 0, start: int = 0) -> list[Contents]:
    with closing(feed.epoch(epoch, start)) as batches:
        return contents(backend, batches)


def expected(loader: Loader, dtype: str = "float", epoch: int = 0, *deal: int) -> list[Contents]:
    backend = create_backend("numpy", dtype)
    return contents(backend, loader.epoch(epoch, backend, *deal))


def used() -> int:
    import cupy

    return int(cupy.get_default_memory_pool().used_bytes())


@pytest.mark.parametrize(
    ("on_device", "ahead", "dtype", "upload"),
    [(True, 0, "half", 1), (True, 3, "float", 100), (True, 0, "double", 1 << 20)]
    + [(False, 0, "double", 0), (False, 1, "float", 0), (False, 3, "half", 0)],
)
def test_batches_on_a_device_equal_batches_on_the_cpu_however_many_are_prefetched_or_copied_at_once(
    loader: Loader, on_device: bool, ahead: int, dtype: str, upload: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes short batches, an epoch that starts in the middle, and one worker of several.

    An image has 30 bytes, so it is copied to the device alone, with two others, or with all.
    """
    monkeypatch.setattr(transfer, "UPLOAD", upload)
    backend = worker(dtype)
    for rank, size in ((0, 1), (1, 3)):
        with BatchFeed(loader, backend, rank, size, prefetch=ahead, on_device=on_device) as feed:
            for epoch, start in ((0, 0), (1, 0), (1, 3), (2, 0)):
                assert fed(feed, backend, epoch, start) == expected(loader, dtype, epoch, rank, size, start)


@every_way
def test_a_batch_stays_valid_while_the_worker_computes_on_it(loader: Loader, on_device: bool, ahead: int) -> None:
    """Batches stay valid even after an interrupted epoch with some prefetched batches. The host never waits."""
    backend, data, sums = worker("double"), loader.dataset, []
    assert isinstance(data, Dataset)
    with backend.activated():
        total = backend.xp.zeros(())
    with BatchFeed(loader, backend, prefetch=ahead, on_device=on_device) as feed:
        for epoch, most in enumerate((11, 3, 11, 1, 0, 11)):
            for batch, _ in zip(feed.epoch(epoch), range(most), strict=False):
                assert batch is not None
                backend.convert(batch.images, backend.workspace.borrow(batch.images.shape, batch.images.dtype))
                with backend.activated():
                    total += batch.images.sum() + batch.labels.sum()
                sums.append(data.images[batch.samples].sum() / 255 + data.labels[batch.samples].sum())
    assert float(total) == pytest.approx(float(np.sum(sums)), rel=1e-12)


@every_way
def test_a_closed_feed_frees_its_memory_on_the_device(loader: Loader, on_device: bool, ahead: int) -> None:
    backend, shared, before = worker(), Shared(), used()

    def opened() -> BatchFeed:
        return BatchFeed(loader, backend, prefetch=ahead, on_device=on_device, shared=shared)

    with opened() as feed:
        assert used() > before
        fed(feed, backend)
    assert used() == before and active().pinned.used == {}
    assert not any(isinstance(each, Resident) for each in shared.kept.values())
    held = active().taken(0)
    with opened():
        assert active().taken(0) == held  # freed memory is used again


@pytest.mark.parametrize(
    ("limit", "on_device", "stay"),
    [(0, "auto", True), (7168, "auto", False), (8192, "auto", True), (7168, True, True), (0, False, False)],
)
def test_data_stay_on_a_device_with_four_times_their_size_free(
    loader: Loader, limit: int, on_device: bool | str, stay: bool
) -> None:
    """Images take 1290 bytes; labels and sample numbers take 688. Four times their sum is 7912."""
    import cupy

    backend = worker()
    cupy.get_default_memory_pool().set_limit(size=limit)
    with BatchFeed(loader, backend, prefetch=1, on_device=on_device) as feed:
        assert feed._transfer.ahead is not stay
        assert fed(feed, backend) == expected(loader)


def test_data_that_do_not_fit_on_a_device_are_refused_or_sent_batch_by_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(devices=1, memory=30_000):
        loader, backend, shared = Loader(pictures(1000), 4), worker(), Shared()
        for _ in range(2):
            with refused("data_on_device"):
                BatchFeed(loader, backend, on_device=True, shared=shared)
        monkeypatch.setattr(transfer, "SHARE", 0)  # simulates that other programs have taken the memory
        with BatchFeed(loader, backend, prefetch=1, shared=shared) as feed:
            assert len(fed(feed, backend)) == 250
        assert used() == 0


def test_an_error_during_close_does_not_hide_the_users_error(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("the device has failed")

    feed = BatchFeed(loader, create_backend("numpy"))
    monkeypatch.setattr(feed, "close", fails)
    with pytest.raises(ZeroDivisionError), feed:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError), feed:
        pass
