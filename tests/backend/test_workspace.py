"""The workspace lends buffers, which return by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cupynet.backend import Backend, create_backend
from tests.support.backends import every_backend, every_dtype

FLOAT = np.dtype(np.float32)

pytestmark = pytest.mark.usefixtures("no_garbage_collector")


def numpy_backend() -> Backend:
    return create_backend("numpy", "float")


@every_backend
@every_dtype
def test_a_loan_has_the_shape_the_dtype_and_the_alignment(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    arrays = [backend.borrow(shape) for shape in [(3,), (5, 7), (1, 3, 3, 1), (2, 1)]]
    for array in arrays:
        assert array.dtype == backend.policy.storage
        assert backend.address(array) % 64 == 0 and array.flags.c_contiguous
    assert [array.shape for array in arrays] == [(3,), (5, 7), (1, 3, 3, 1), (2, 1)]
    assert backend.borrow((0, 3)).shape == (0, 3)
    assert backend.borrow((4,), np.dtype(np.uint8)).dtype == np.uint8
    assert backend.workspace.on_loan == 4


@every_backend
def test_returned_buffers_are_lent_again(name: str) -> None:
    backend = create_backend(name)
    first = backend.borrow((4, 3))
    address = backend.address(first)
    del first
    again = backend.borrow((4, 3))
    assert backend.address(again) == address
    assert backend.workspace.allocated_bytes == 4 * 3 * 4
    assert backend.address(backend.borrow((4, 3))) != address
    assert backend.workspace.allocated_bytes == 2 * 4 * 3 * 4


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda a: a[2:, 1:],
    "a view of a view": lambda a: a.reshape(2, 2, 6)[1].reshape(-1)[3:],
    "transposed": lambda a: a.T,
    "of one row": lambda a: a[0][None],
}


@every_backend
@pytest.mark.parametrize("kind", VIEWS)
def test_a_buffer_returns_after_its_last_view(name: str, kind: str) -> None:
    backend = create_backend(name)
    array = backend.borrow((4, 6))
    array[...] = 1
    view = VIEWS[kind](array)
    del array
    other = backend.borrow((4, 6))
    other[...] = 2
    assert backend.workspace.on_loan == 2 and bool((view == 1).all())
    del view
    assert backend.workspace.on_loan == 1


@every_backend
def test_a_short_batch_uses_the_buffers_of_a_full_one(name: str) -> None:
    backend = create_backend(name)
    address = backend.address(backend.borrow((8, 3)))
    short = backend.borrow((5, 3))
    assert short.shape == (5, 3) and short.flags.c_contiguous
    assert backend.address(short) == address
    del short
    assert backend.borrow((8, 3)).shape == (8, 3)
    assert backend.workspace.allocated_bytes == 8 * 3 * 4


def test_a_long_buffer_is_kept_for_a_request_that_needs_it() -> None:
    """Products (F, O) and logits (N, O) share a width: the first request must not take the longer one."""
    backend = numpy_backend()
    both = [backend.borrow((4, 3)), backend.borrow((9, 3))]
    addresses = [backend.address(each) for each in both]
    both.clear()
    both = [backend.borrow((4, 3)), backend.borrow((9, 3))]
    assert [backend.address(each) for each in both] == addresses
    assert backend.workspace.allocated_bytes == (4 + 9) * 3 * 4


def test_the_most_recently_returned_buffer_is_lent_first() -> None:
    backend = numpy_backend()
    loans = {i: backend.borrow((4, 3)) for i in range(3)}
    address = backend.address(loans[0])
    for i in (1, 2, 0):
        del loans[i]
    assert backend.address(backend.borrow((4, 3))) == address


def test_dtypes_and_widths_do_not_mix() -> None:
    backend = numpy_backend()
    backend.borrow((4, 4))
    assert backend.borrow((4, 4), np.dtype(np.int32)).dtype == np.int32
    assert backend.borrow((4, 2, 2)).shape == (4, 2, 2)
    assert backend.workspace.allocated_bytes == 3 * 4 * 4 * 4


class Lending(RuleBasedStateMachine):
    """Any sequence of loans and returns: what is lent never overlaps, and holds what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.backend, self.loans, self.written = numpy_backend(), [], 0

    loans: list[tuple[Any, int]]

    @rule(rows=st.integers(1, 4), width=st.integers(1, 2))
    def borrow(self, rows: int, width: int) -> None:
        self.written += 1
        array = self.backend.borrow((rows, width), FLOAT)
        assert array.shape == (rows, width)
        array[...] = self.written
        self.loans.append((array, self.written))

    @rule(which=st.integers(0, 10), flat=st.booleans())
    def drop(self, which: int, flat: bool) -> None:
        if self.loans:
            array, written = self.loans.pop(which % len(self.loans))
            if flat:
                self.loans.append((array.reshape(-1)[:1], written))

    @invariant()
    def every_loan_is_untouched(self) -> None:
        assert self.backend.workspace.on_loan == len(self.loans)
        assert all((array == written).all() for array, written in self.loans)


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True, database=None)


# threads --------------------------------------------------------------------------------------------------------------


def in_another_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@every_backend
def test_an_array_that_another_thread_drops_returns_to_the_pool_that_lent_it(name: str) -> None:
    backend = create_backend(name)
    held, found = [backend.borrow((4, 3))], []
    address = backend.address(held[0])

    def work() -> None:
        held.clear()
        other = backend.borrow((4, 3))
        found.append((backend.address(other) == address, backend.workspace.on_loan))

    in_another_thread(work)
    assert found == [(False, 1)] and backend.workspace.on_loan == 0
    assert backend.address(backend.borrow((4, 3))) == address


@every_backend
def test_a_capture_is_lent_no_buffer_that_another_thread_dropped(name: str) -> None:
    """That thread may have used it on another stream."""
    backend = create_backend(name)
    held = [backend.borrow((4, 3))]
    address = backend.address(held[0])
    in_another_thread(held.clear)
    with backend.workspace.capturing():
        own = backend.borrow((4, 3))
        assert backend.address(own) != address
        its = backend.address(own)
        del own
        assert backend.address(backend.borrow((4, 3))) == its
    both = [backend.borrow((4, 3)), backend.borrow((4, 3))]
    assert address in map(backend.address, both)


def test_an_array_outlives_its_thread() -> None:
    backend, held = numpy_backend(), []

    def work() -> None:
        held.append(backend.borrow((4, 3)))
        held[0][...] = 7

    in_another_thread(work)
    backend.borrow((4, 3))[...] = 1
    assert (held[0] == 7).all()


# exceptions -----------------------------------------------------------------------------------------------------------


@every_backend
def test_an_exception_keeps_arrays_as_long_as_its_traceback(name: str) -> None:
    backend, kept = create_backend(name), []

    def work() -> None:
        array = backend.borrow((3, 3))
        raise KeyError(array.shape)

    try:
        work()
    except KeyError as error:
        kept.append(error)
    assert backend.workspace.on_loan == 1
    assert backend.address(backend.borrow((3, 3))) != 0 and backend.workspace.allocated_bytes == 2 * 9 * 4
    kept.clear()
    assert backend.workspace.on_loan == 0
