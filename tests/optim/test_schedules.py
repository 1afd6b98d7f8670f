"""Learning rates: where a cycle begins, peaks and ends, whatever its length."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.errors import ConfigError
from cupynet.optim import Constant, OneCycle, Schedule


def rates(iterations: int, **arguments: Any) -> list[float]:
    schedule = OneCycle(0.5, **arguments)
    schedule.span(iterations)
    return [schedule(i) for i in range(iterations)]


def test_a_cycle_begins_peaks_and_ends_where_it_says() -> None:
    cycle = rates(11, warmup=0.3, start_divisor=10, end_divisor=100)
    assert cycle[0] == pytest.approx(0.05)
    assert cycle[3] == pytest.approx(0.5) == max(cycle)
    assert cycle[10] == pytest.approx(0.005)
    halfway = rates(21, warmup=0.2, start_divisor=10, end_divisor=100)
    assert halfway[2] == pytest.approx((0.05 + 0.5) / 2)  # half a cosine passes the middle half way
    assert halfway[12] == pytest.approx((0.5 + 0.005) / 2)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(iterations=st.integers(2, 300), warmup=st.floats(0, 0.99), start=st.floats(1, 100), end=st.floats(1, 1e4))
def test_every_cycle_rises_then_falls_to_its_end(iterations: int, warmup: float, start: float, end: float) -> None:
    cycle = rates(iterations, warmup=warmup, start_divisor=start, end_divisor=end)
    top = cycle.index(max(cycle))
    tiny = 1e-12
    assert all(a <= b + tiny for a, b in pairwise(cycle[: top + 1]))
    assert all(a >= b - tiny for a, b in pairwise(cycle[top:]))
    assert all(0 < rate <= 0.5 + tiny for rate in cycle)
    assert cycle[-1] == pytest.approx(0.5 / end)
    assert cycle[0] == pytest.approx(0.5 / start if warmup * (iterations - 1) > 0 else 0.5)
    if min(start, end) > 1.1:
        assert abs(top - warmup * (iterations - 1)) < 1 + 1e-9


def test_short_cycles() -> None:
    assert rates(1) == [pytest.approx(0.5 / 25)]
    assert rates(1, warmup=0.0) == [0.5]
    assert rates(2) == [pytest.approx(0.5 / 25), pytest.approx(0.5 / 1000)]
    assert rates(2, warmup=0.0) == [0.5, pytest.approx(0.5 / 1000)]


def test_after_the_end_the_rate_stays() -> None:
    schedule = OneCycle(0.5)
    schedule.span(10)
    assert schedule(9) == schedule(10) == schedule(1000) == pytest.approx(0.5 / 1000)


def test_a_cycle_needs_to_know_its_length() -> None:
    with pytest.raises(RuntimeError, match="call span"):
        OneCycle(0.5)(0)


def test_a_new_span_is_a_new_cycle() -> None:
    schedule = OneCycle(0.5)
    schedule.span(10)
    schedule.span(100)
    assert schedule(99) == pytest.approx(0.5 / 1000) and schedule(9) > schedule(0)


def test_a_constant_is_constant() -> None:
    schedule = Constant(0.1)
    schedule.span(3)
    assert [schedule(i) for i in (0, 2, 99)] == [0.1] * 3
    assert isinstance(schedule, Schedule)


BAD: list[Any] = [0, -1, math.nan, math.inf, "1", None, True]


@pytest.mark.parametrize("value", BAD)
def test_arguments_are_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"Constant value={value!r}: must be a number above 0"):
        Constant(value)
    with pytest.raises(ConfigError, match=rf"OneCycle peak={value!r}: must be a number above 0"):
        OneCycle(value)
    with pytest.raises(ConfigError, match=rf"OneCycle start_divisor={value!r}: must be a number of at least 1"):
        OneCycle(0.1, start_divisor=value)
    with pytest.raises(ConfigError, match=rf"OneCycle end_divisor={value!r}: must be a number of at least 1"):
        OneCycle(0.1, end_divisor=value)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, math.nan, "0.3", None, True])
def test_a_warmup_is_a_fraction(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"OneCycle warmup={value!r}: must be a fraction of training"):
        OneCycle(0.1, warmup=value)
