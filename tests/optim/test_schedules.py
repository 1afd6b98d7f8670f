"""Learning rates: where a cycle begins, peaks and ends, whatever its length."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.data import Loader
from cupynet.errors import ConfigError
from cupynet.optim import SGD, Constant, OneCycle, Scaled, Schedule, scale_factor
from cupynet.training import Callback, ParallelWrapper
from tests.training.conftest import small_dataset, small_model


def rates(iterations: int, **arguments: Any) -> list[float]:
    schedule = OneCycle(0.5, **arguments)
    schedule.span(0, iterations)
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
    schedule.span(0, 10)
    assert schedule(9) == schedule(10) == schedule(1000) == pytest.approx(0.5 / 1000)


def test_a_cycle_needs_to_know_its_length() -> None:
    with pytest.raises(RuntimeError, match="call span"):
        OneCycle(0.5)(0)


def test_a_new_span_is_a_new_cycle() -> None:
    schedule = OneCycle(0.5)
    schedule.span(0, 10)
    schedule.span(0, 100)
    assert schedule(99) == pytest.approx(0.5 / 1000) and schedule(9) > schedule(0)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(first=st.integers(1, 500), second=st.integers(1, 100), warmup=st.floats(0, 0.99))
def test_a_second_fit_is_a_cycle_of_its_own(first: int, second: int, warmup: float) -> None:
    schedule = OneCycle(0.5, warmup=warmup)
    schedule.span(0, first)
    assert [schedule(i) for i in range(first)] == rates(first, warmup=warmup)
    schedule.span(first, first + second)
    assert [schedule(i) for i in range(first, first + second)] == rates(second, warmup=warmup)


def test_a_fit_that_is_resumed_keeps_its_start() -> None:
    resumed = OneCycle(0.5)
    resumed.span(100, 110)  # what was told before iteration 104 was the last one
    whole = OneCycle(0.5)
    whole.span(100, 110)
    before = [whole(i) for i in range(100, 104)]
    assert before + [resumed(i) for i in range(104, 110)] == rates(10)


def test_before_its_span_the_rate_is_the_first() -> None:
    schedule = OneCycle(0.5)
    schedule.span(50, 60)
    assert schedule(0) == schedule(49) == schedule(50) == pytest.approx(0.5 / 25)


def test_a_span_of_nothing_has_a_rate() -> None:
    schedule = OneCycle(0.5)
    schedule.span(7, 7)
    assert schedule(7) == pytest.approx(0.5 / 25)


def test_a_constant_is_constant() -> None:
    schedule = Constant(0.1)
    schedule.span(0, 3)
    schedule.span(3, 9)
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
    with pytest.raises(
        ConfigError,
        match=rf"OneCycle warmup={value!r}: must be a number of at least 0 and below 1, the fraction of training",
    ):
        OneCycle(0.1, warmup=value)


def test_numpy_numbers_are_taken() -> None:
    schedule = OneCycle(np.float32(0.5), warmup=np.float64(0.25), start_divisor=np.int64(10), end_divisor=np.int8(100))
    schedule.span(np.int64(0), np.int64(11))  # type: ignore[arg-type]
    assert schedule(0) == pytest.approx(0.05)
    for value in (schedule.peak, schedule.warmup, schedule.start_divisor, Constant(np.float32(0.1)).value):
        assert type(value) is float


def test_every_fit_of_a_wrapper_is_a_cycle() -> None:
    class Rates(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_report(self, trainer: Any, report: Any) -> None:
            self.rates.append(report.learning_rate)

    loader, seen = Loader(small_dataset(20), 4), Rates()
    optimizer = SGD(OneCycle(0.5))
    with ParallelWrapper(small_model(), 1, optimizer=optimizer, callbacks=[seen], report_every=1) as wrapper:
        wrapper.fit(loader, 1)
        wrapper.fit(loader, 2)
    assert seen.rates == rates(5) + rates(10)


# The learning rate as workers grow -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "factor"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0), (1.2, 1.2), (np.float32(0.5), 0.5), (2, 2.0)]
)
def test_rules_for_the_learning_rate_as_workers_grow(scale: Any, factor: float) -> None:
    assert scale_factor(scale, 9) == factor
    assert scale_factor("linear", 1) == scale_factor("sqrt", 1) == 1.0


@pytest.mark.parametrize("wrong", ["liner", 0, -1.0, True, None, math.inf, math.nan])
def test_what_is_no_such_rule_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="learning_rate_scale=.*: must be a number above 0, or one of none, linear"):
        scale_factor(wrong, 4)


def test_a_scaled_schedule_is_the_other_one_times_a_factor() -> None:
    scaled, other = Scaled(OneCycle(0.5), 3.0), OneCycle(0.5)
    for schedule in (scaled, other):
        schedule.span(5, 25)
    assert [scaled(i) for i in range(30)] == [3.0 * other(i) for i in range(30)]
    with pytest.raises(ConfigError, match="Scaled factor=0: must be a number above 0"):
        Scaled(other, 0)


@pytest.mark.parametrize(("scale", "rate"), [("linear", 0.08), ("sqrt", 0.04), (1.5, 0.03)])
def test_the_wrapper_scales_the_learning_rate_and_says_so(scale: Any, rate: float, caplog: Any) -> None:
    optimizer, data = SGD(0.02), small_dataset(40)
    with (
        caplog.at_level("INFO"),
        ParallelWrapper(small_model(), 4, optimizer=optimizer, learning_rate_scale=scale) as scaled,
    ):
        scaled.fit(data, 1, batch_size=4).warm_up(4)
        assert scaled.trainer.replica.optimizer.learning_rate(0) == rate
    assert f"learning rate x {rate / 0.02:g}: learning_rate_scale={scale}, workers=4" in caplog.messages
    with ParallelWrapper(small_model(), 4, optimizer=SGD(rate)) as plain:
        plain.fit(data, 1, batch_size=4)
    np.testing.assert_array_equal(scaled.model.params.master, plain.model.params.master)
    assert optimizer.learning_rate(0) == 0.02, "the user's own stays as it is"


def test_the_wrapper_scales_nothing_by_itself(caplog: Any) -> None:
    optimizer = SGD(0.02)
    with caplog.at_level("INFO"), ParallelWrapper(small_model(), 4, optimizer=optimizer) as wrapper:
        assert wrapper.optimizer is optimizer and not caplog.messages


def test_warming_up_leaves_a_scaled_cycle_where_it_is() -> None:
    with ParallelWrapper(small_model(), 2, optimizer=SGD(OneCycle(0.1)), learning_rate_scale=2.0) as wrapper:
        wrapper.fit(small_dataset(40), 2, batch_size=4)
        rate = wrapper.trainer.replica.optimizer.learning_rate
        before = [rate(i) for i in range(10)]
        wrapper.warm_up(4)
        assert [rate(i) for i in range(10)] == before and max(before) > 0.15
