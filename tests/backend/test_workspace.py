"""The workspace lends buffers and takes them back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cupynet.backend import Backend, create_backend
from tests.support.backends import every_backend, every_dtype

FLOAT = np.dtype(np.float32)


def numpy_backend() -> Backend:
    return create_backend("numpy", "float")


@every_backend
@every_dtype
def test_a_loan_has_the_shape_the_dtype_and_the_alignment(name: str, dtype: str) -> None:
    backend = create_backend(name, dtype)
    for shape in [(3,), (5, 7), (1, 3, 3, 1), (2, 1)]:
        array = backend.borrow(shape)
        assert (array.shape, array.dtype) == (shape, backend.policy.storage)
        assert backend.address(array) % 64 == 0 and array.flags.c_contiguous
    assert backend.borrow((4,), np.dtype(np.uint8)).dtype == np.uint8
    assert backend.workspace.on_loan == 5


@every_backend
def test_returned_buffers_are_lent_again(name: str) -> None:
    backend = create_backend(name)
    first = backend.borrow((4, 3))
    backend.give_back(first)
    again = backend.borrow((4, 3))
    assert backend.address(again) == backend.address(first)
    assert backend.workspace.allocated_bytes == 4 * 3 * 4
    assert backend.address(backend.borrow((4, 3))) != backend.address(first)
    assert backend.workspace.allocated_bytes == 2 * 4 * 3 * 4


def test_a_view_may_come_back_in_place_of_the_loan() -> None:
    backend = numpy_backend()
    array = backend.borrow((4, 6))
    backend.give_back(array.reshape(2, 2, 6).reshape(-1))
    assert backend.workspace.on_loan == 0
    assert backend.borrow((4, 6)).shape == (4, 6)
    assert backend.workspace.allocated_bytes == 4 * 6 * 4


def test_arrays_that_were_not_borrowed_and_none_are_left_alone() -> None:
    backend = numpy_backend()
    loan = backend.borrow((2, 2))
    backend.give_back(None, np.zeros((2, 2), np.float32), loan, loan)
    assert backend.workspace.on_loan == 0
    one, two = backend.borrow((2, 2)), backend.borrow((2, 2))
    assert backend.address(one) != backend.address(two), "one buffer was taken back twice"


def test_a_short_batch_uses_the_buffers_of_a_full_one() -> None:
    backend = numpy_backend()
    full = backend.borrow((8, 3))
    backend.give_back(full)
    short = backend.borrow((5, 3))
    assert short.shape == (5, 3) and short.flags.c_contiguous
    assert backend.address(short) == backend.address(full)
    backend.give_back(short)
    assert backend.borrow((8, 3)).shape == (8, 3)
    assert backend.workspace.allocated_bytes == 8 * 3 * 4


def test_a_long_buffer_is_kept_for_a_request_that_needs_it() -> None:
    """Products (F, O) and logits (N, O) share a width: the first request must not take the longer one."""
    backend = numpy_backend()
    short, long = backend.borrow((4, 3)), backend.borrow((9, 3))
    backend.give_back(short, long)
    assert backend.address(backend.borrow((4, 3))) == backend.address(short)
    assert backend.address(backend.borrow((9, 3))) == backend.address(long)
    assert backend.workspace.allocated_bytes == (4 + 9) * 3 * 4


def test_the_most_recently_returned_buffer_is_lent_first() -> None:
    backend = numpy_backend()
    loans = [backend.borrow((4, 3)) for _ in range(3)]
    backend.give_back(loans[1], loans[2], loans[0])
    assert backend.address(backend.borrow((4, 3))) == backend.address(loans[0])


def test_dtypes_and_widths_do_not_mix() -> None:
    backend = numpy_backend()
    backend.give_back(backend.borrow((4, 4)))
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
    def give_back(self, which: int, flat: bool) -> None:
        if self.loans:
            array, _ = self.loans.pop(which % len(self.loans))
            self.backend.give_back(array.reshape(-1) if flat else array)

    @invariant()
    def every_loan_is_untouched(self) -> None:
        assert self.backend.workspace.on_loan == len(self.loans)
        assert all((array == written).all() for array, written in self.loans)


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=30, stateful_step_count=30, deadline=None, derandomize=True, database=None)


@every_backend
def test_an_exception_returns_the_buffers_borrowed_meanwhile(name: str) -> None:
    backend = create_backend(name)
    before, loans = backend.borrow((2, 2)), backend.loans()
    with loans:
        first = backend.borrow((3, 3))
    between = backend.borrow((4, 4))
    assert backend.workspace.on_loan == 3, "nothing went wrong"
    backend.give_back(first)
    again = backend.borrow((3, 3))  # the same buffer, lent again
    assert backend.address(again) == backend.address(first)
    with pytest.raises(KeyError), loans:
        backend.borrow((5, 5))
        raise KeyError
    assert backend.workspace.on_loan == 3
    backend.give_back(before, between, again)
    assert backend.workspace.on_loan == 0
    with pytest.raises(KeyError), loans:
        raise KeyError
    assert backend.workspace.on_loan == 0


def test_replicas_have_workspaces_of_their_own() -> None:
    one, two = numpy_backend(), numpy_backend()
    one.give_back(one.borrow((4, 3)))
    two.borrow((4, 3))
    assert (one.workspace.on_loan, two.workspace.on_loan) == (0, 1)
    assert two.workspace.allocated_bytes == 48


@pytest.mark.parametrize("dtype", ["half", "float"])
def test_a_product_keeps_nothing(dtype: str) -> None:
    backend = create_backend("numpy", dtype)
    a = np.ones((3, 4), backend.policy.storage)
    backend.give_back(backend.matmul(a, a, transpose_a=True))
    assert backend.workspace.on_loan == 0
