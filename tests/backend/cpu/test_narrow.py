"""half and bfloat16 in compiled loops: the same numbers and rounding as in NumPy and ml_dtypes."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from cupynet.backend.cpu.kernels import narrow
from cupynet.backend.policy import stored_dtype
from tests.support.backends import needs_bfloat16

KINDS = [
    pytest.param("float16", True, marks=pytest.mark.skipif(not narrow.converts_half(), reason="not this processor")),
    pytest.param("float16", False),
    pytest.param("bfloat16", True, marks=needs_bfloat16),
]
every_kind = pytest.mark.parametrize(("name", "converts"), KINDS)


def compiled(monkeypatch: pytest.MonkeyPatch, *, converts: bool) -> Callable[..., Any]:
    """Return a kernel that copies numbers, for a processor that can or cannot convert half."""
    monkeypatch.setattr(narrow, "converts_half", lambda: converts)

    @numba.njit(fastmath={"contract", "reassoc", "nsz", "arcp"})  # type: ignore[untyped-decorator]
    def copy(source: Any, target: Any) -> None:
        source, target = narrow.reals(source), narrow.reals(target)
        for i in range(source.size):
            target[i] = source[i]

    found: Callable[..., Any] = copy
    return found


def assert_same(found: Any, expected: Any) -> None:
    """Assert that bits are equal, except that any NaN equals any other."""
    nan = np.isnan(expected.astype(np.float32))
    assert np.isnan(found[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(*(a[~nan].view(f"u{a.itemsize}") for a in (found, expected)))


@every_kind
def test_half_and_bfloat16_numbers_are_read_exactly(monkeypatch: pytest.MonkeyPatch, name: str, converts: bool) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16).view(stored_dtype(name))
    found = np.empty(stored.size, np.float32)
    compiled(monkeypatch, converts=converts)(narrow.bits(stored), found)
    assert_same(found, stored.astype(np.float32))


@every_kind
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_half_and_bfloat16_are_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch, name: str, converts: bool) -> None:
    """Inputs are all halfway cases, their neighbors, and random bits. Overflow gives infinity; NaN stays NaN."""
    stored = np.arange(1 << 16, dtype=np.uint16).view(stored_dtype(name)).astype(np.float64)
    halfway = ((stored[:-1] + stored[1:]) / 2).astype(np.float32)
    around = [np.nextafter(halfway, np.float32(end)) for end in (-np.inf, np.inf)]
    drawn = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20).astype(np.uint32).view(np.float32)
    numbers = np.concatenate([halfway, *around, drawn])
    found = np.empty(numbers.size, stored_dtype(name))
    compiled(monkeypatch, converts=converts)(numbers, narrow.bits(found))
    assert_same(found, numbers.astype(found.dtype))


@pytest.mark.skipif(not narrow.converts_half(), reason="the processor has no instruction for it")
def test_half_is_converted_by_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    copy: Any = compiled(monkeypatch, converts=True)
    copy(np.zeros(8, np.uint16), np.zeros(8, np.float32))
    assembly = next(iter(copy.inspect_asm().values()))
    assert re.search("vcvtph2ps.*%[yz]mm|fcvtl", assembly)
