"""The workspace lends buffers, which return automatically."""

import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cpu.numpy_backend import Slabs
from tests.support.backends import every_backend, every_dtype

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


@every_backend
@every_dtype
def test_a_borrowed_buffer_has_the_shape_the_dtype_and_the_alignment(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    shapes = [(3,), (5, 7), (1, 3, 3, 1), (2, 1), (0, 3)]
    arrays = [backend.borrow(shape) for shape in shapes]
    assert [array.shape for array in arrays] == shapes
    for array in arrays[:-1]:
        assert array.dtype == backend.policy.storage
        assert backend.data_ptr(array) % 64 == 0 and array.flags.c_contiguous


@every_backend
def test_returned_buffers_are_lent_again(name: str) -> None:
    backend = create_backend(name)
    address = backend.data_ptr(backend.borrow((4, 3)))
    again = backend.borrow((4, 3))
    assert backend.data_ptr(again) == address
    assert backend.workspace.allocated_bytes == 4 * 3 * 4
    assert backend.data_ptr(backend.borrow((4, 3))) != address
    assert backend.workspace.allocated_bytes == 2 * 4 * 3 * 4


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda a: a[2:, 1:],
    "a view of a view": lambda a: a.reshape(2, 2, 6)[1].reshape(-1)[3:],
    "transposed": lambda a: a.T,
}


@every_backend
@pytest.mark.parametrize("kind", VIEWS)
def test_a_buffer_returns_after_its_last_view(name: str, kind: str) -> None:
    backend = create_backend(name)
    array = backend.borrow((4, 6))
    array[...] = 1
    view = VIEWS[kind](array)
    del array
    backend.borrow((4, 6))[...] = 2
    assert backend.workspace.on_loan == 1 and bool((view == 1).all())
    del view
    assert backend.workspace.on_loan == 0


@every_backend
def test_a_short_batch_uses_the_buffers_of_a_full_one(name: str) -> None:
    backend = create_backend(name)
    address = backend.data_ptr(backend.borrow((8, 3)))
    short = backend.borrow((5, 3))
    assert short.shape == (5, 3) and short.flags.c_contiguous
    assert backend.data_ptr(short) == address
    del short
    assert backend.borrow((8, 3)).shape == (8, 3)


def test_a_long_buffer_is_kept_for_a_request_that_needs_it() -> None:
    """Products (F, O) and logits (N, O) have the same width. The first request must not take the longer buffer."""
    backend = create_backend("numpy")
    both = [backend.borrow((4, 3)), backend.borrow((9, 3))]
    addresses = [backend.data_ptr(each) for each in both]
    both.clear()
    both = [backend.borrow((4, 3)), backend.borrow((9, 3))]
    assert [backend.data_ptr(each) for each in both] == addresses


def test_buffers_of_other_dtypes_and_widths_are_not_lent() -> None:
    backend = create_backend("numpy", "float")
    backend.borrow((4, 4))
    assert backend.borrow((4, 4), np.dtype(np.int32)).dtype == np.int32
    assert backend.borrow((4, 2, 2)).shape == (4, 2, 2)
    assert backend.workspace.allocated_bytes == 3 * 4 * 4 * 4


def in_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@every_backend
def test_an_array_that_another_thread_drops_returns_to_the_pool_that_lent_it(name: str) -> None:
    backend, found = create_backend(name), []
    held = [backend.borrow((4, 3))]
    address = backend.data_ptr(held[0])

    def work() -> None:
        held.clear()
        other = backend.borrow((4, 3))
        found.append((backend.data_ptr(other) == address, backend.workspace.on_loan))

    in_another_thread(work)
    assert found == [(False, 1)] and backend.workspace.on_loan == 0
    assert backend.data_ptr(backend.borrow((4, 3))) == address


@every_backend
def test_a_capture_is_lent_no_buffer_that_another_thread_dropped(name: str) -> None:
    """That thread may have used it on another stream."""
    backend = create_backend(name)
    held = [backend.borrow((4, 3))]
    address = backend.data_ptr(held[0])
    in_another_thread(held.clear)
    with backend.workspace.capturing():
        own = backend.data_ptr(backend.borrow((4, 3)))
        assert own != address
        assert backend.data_ptr(backend.borrow((4, 3))) == own
    both = [backend.borrow((4, 3)), backend.borrow((4, 3))]
    assert address in map(backend.data_ptr, both)


@every_backend
def test_a_growing_batch_seldom_outgrows_its_buffers(name: str) -> None:
    backend = create_backend(name)
    for rows in range(1, 300):
        assert backend.borrow((rows, 5, 2)).shape == (rows, 5, 2)
    assert backend.workspace.allocated_bytes < 4 * backend.borrow((300, 5, 2)).nbytes


def test_slabs_for_few_small_arrays_take_little_memory() -> None:
    assert Slabs().allocate((8,), np.uint8).base.nbytes < 2 << 20


def test_arrays_in_slabs_are_aligned_and_apart_and_keep_their_slab_alive() -> None:
    slabs = Slabs()
    sizes = (1, 63, 64, 65, 0, 1000, Slabs.SIZE // 2, Slabs.SIZE // 2, Slabs.SIZE, Slabs.SIZE + 1)
    arrays = [slabs.allocate((size,), np.uint8) for size in sizes]
    ranges = sorted((array.ctypes.data, array.ctypes.data + array.nbytes) for array in arrays if array.size)
    assert all(start % 64 == 0 for start, _ in ranges)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    first = weakref.ref(arrays[0].base)
    del arrays[1:], slabs
    assert first() is not None
    del arrays
    assert first() is None
