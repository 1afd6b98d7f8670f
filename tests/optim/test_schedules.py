"""Learning-rate schedules: formulas, lengths, plateaus, warm-up, scaling with workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.optim import (
    SGD,
    Constant,
    Cosine,
    Exponential,
    Inverse,
    Map,
    OneCycle,
    Polynomial,
    ReduceOnPlateau,
    Scaled,
    Schedule,
    Sigmoid,
    Step,
    Warmup,
    scale_factor,
)
from cupynet.training import Callback, ParallelWrapper
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


def rates(iterations: int, **arguments: Any) -> list[float]:
    schedule = OneCycle(0.5, **arguments)
    schedule.span(0, iterations)
    return [schedule(i) for i in range(iterations)]


def test_a_cycle_begins_peaks_and_ends_at_the_given_rates() -> None:
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


def test_outside_its_span_a_cycle_has_its_first_or_last_rate() -> None:
    schedule = OneCycle(0.5)
    schedule.span(50, 60)
    assert schedule(0) == schedule(49) == schedule(50) == pytest.approx(0.5 / 25)
    assert schedule(59) == schedule(60) == schedule(1000) == pytest.approx(0.5 / 1000)
    schedule.span(7, 7)
    assert schedule(7) == pytest.approx(0.5 / 25)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(first=st.integers(1, 500), second=st.integers(1, 100), warmup=st.floats(0, 0.99))
def test_a_second_fit_starts_a_new_cycle(first: int, second: int, warmup: float) -> None:
    schedule = OneCycle(0.5, warmup=warmup)
    schedule.span(0, first)
    assert [schedule(i) for i in range(first)] == rates(first, warmup=warmup)
    schedule.span(first, first + second)
    assert [schedule(i) for i in range(first, first + second)] == rates(second, warmup=warmup)


def test_numpy_numbers_are_taken() -> None:
    schedule = OneCycle(np.float32(0.5), warmup=np.float64(0.25), start_divisor=np.int64(10), end_divisor=np.int8(100))
    schedule.span(np.int64(0), np.int64(11))  # type: ignore[arg-type]
    assert schedule(0) == pytest.approx(0.05)
    for value in (schedule.peak, schedule.warmup, schedule.start_divisor, Constant(np.float32(0.1)).value):
        assert type(value) is float


# Schedules of other kinds --------------------------------------------------------------------------------------------

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "optim.npz")
SCHEDULES: dict[str, Schedule] = {
    "step": Step(0.05, 0.5, 7),
    "map": Map({0: 0.05, 5: 0.005, 20: 0.0005}),
    "exponential": Exponential(0.05, 0.9),
    "polynomial": Polynomial(0.05, 2.0),
    "cosine": Cosine(0.05, 0.01),
    "restarts": Cosine(0.05, 0.01, 10, 2),
    "warmup": Warmup(10, Exponential(0.05, 0.9)),
    "one cycle": OneCycle(0.05, 10 / 49, 25, 1000),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_pytorch(name: str) -> None:
    schedule, expected = SCHEDULES[name], GOLDEN[f"schedule/{name}"]
    schedule.span(0, len(expected))
    np.testing.assert_allclose([schedule(i) for i in range(len(expected))], expected, rtol=1e-12, atol=1e-16)


def test_every_golden_schedule_is_compared() -> None:
    assert {name.partition("/")[2] for name in GOLDEN if name.startswith("schedule/")} == SCHEDULES.keys()


def test_schedules_that_pytorch_lacks_follow_their_formulas() -> None:
    """Deeplearning4j's InverseSchedule and SigmoidSchedule."""
    inverse, sigmoid = Inverse(0.5, 0.1, 0.75), Sigmoid(0.4, -0.2, 10)
    assert [inverse(i) for i in (0, 10)] == pytest.approx([0.5, 0.5 / 2**0.75])
    assert [sigmoid(i) for i in (0, 10, 20)] == pytest.approx([0.4 / (1 + math.exp(-2)), 0.2, 0.4 / (1 + math.exp(2))])
    assert Sigmoid(0.4, 1.0, 10)(10**6) == 0.4 and 0 <= Sigmoid(0.4, -1.0, 10)(10**6) < 1e-300


def test_a_plateau_is_found_as_in_pytorch() -> None:
    schedule = ReduceOnPlateau(0.05, 0.5, patience=3, min_improvement=0.02, cooldown=2, least=0.004)
    again = ReduceOnPlateau(0.05, 0.5, patience=3, min_improvement=0.02, cooldown=2, least=0.004)
    found = []
    for loss in GOLDEN["losses"]:
        schedule.learn(float(loss))
        found.append(schedule(0))
        again.restore(schedule.state())  # a checkpoint after each
        schedule, again = again, schedule
    np.testing.assert_allclose(found, GOLDEN["plateau"], rtol=1e-12)
    assert len(set(found)) > 3


def test_accuracy_is_better_when_it_is_higher_and_no_number_is_no_improvement() -> None:
    schedule = ReduceOnPlateau(1.0, 0.5, patience=1, monitor="accuracy")
    rates = []
    for accuracy in (0.5, 0.6, 0.7, 0.6, 0.7, math.nan, 0.8):
        schedule.learn(accuracy)
        rates.append(schedule(0))
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("make", [lambda by: Step(1.0, 0.5, 1, by), lambda by: Map({0: 1.0, 1: 0.5, 2: 0.25}, by)])
def test_epochs_are_counted_from_the_end_of_the_fit(make: Any) -> None:
    """7 iterations are left of an epoch of 10 that was broken off; there were 5 others, of another length, before."""
    schedule = make("epoch")
    schedule.span(100, 127, 10, 3)
    assert [schedule(i) for i in (100, 106, 107, 116, 117, 126)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    by_iteration = make("iteration")
    by_iteration.span(0, 3)
    assert [by_iteration(i) for i in range(3)] == [1, 0.5, 0.25]


def test_a_warmup_runs_once_before_its_schedule() -> None:
    schedule = Warmup(4, OneCycle(0.5, warmup=0.0, end_divisor=10), start=0.2)
    schedule.span(0, 15)
    assert [schedule(i) for i in (0, 2, 4, 14)] == pytest.approx([0.1, 0.3, 0.5, 0.05])
    schedule.span(15, 26)
    assert [schedule(i) for i in (15, 25)] == pytest.approx([0.5, 0.05])
    short = Warmup(10, Cosine(0.5))
    short.span(0, 5)
    assert [short(i) for i in (0, 4)] == pytest.approx([0.05, 0.05 + 0.45 * 0.4])
    by_epoch = Warmup(3, Step(1.0, 0.5, 1, "epoch"))
    by_epoch.span(0, 20, 10, 2)
    assert [by_epoch(i) for i in (3, 9, 10, 19)] == [1, 1, 0.5, 0.5]


def test_epochs_are_counted_from_the_end_of_a_warmup() -> None:
    """In epochs of 100: the line leads to the first rate of what follows, however many epochs it takes."""
    for steps, ends in ((150, (199, 200, 300)), (100, (199, 200, 300)), (3, (99, 100, 200))):
        schedule = Warmup(steps, Step(0.1, 0.1, 1, "epoch"), start=0.5)
        schedule.span(0, 500, 100, 5)
        found = [schedule(i) for i in (0, steps, *ends)]
        assert found == pytest.approx([0.05, 0.1, 0.1, 0.01, 0.001]), steps
    longer = Warmup(1000, Step(0.1, 0.1, 1, "epoch"))
    longer.span(0, 500, 100, 5)
    assert [longer(i) for i in (0, 499)] == pytest.approx([0.01, 0.1 * (0.1 + 0.9 * 0.499)])
    schedule = Warmup(15, Step(0.1, 0.5, 1, "epoch"))
    schedule.span(0, 50, 10, 5)
    resumed = Warmup(15, Step(0.1, 0.5, 1, "epoch"))
    resumed.restore(schedule.state())
    for each in (schedule, resumed):
        each.span(50, 250, 100, 7)  # a further fit, of longer epochs
        assert [each(i) for i in (50, 149, 150, 249)] == pytest.approx([0.1 / 2**4] * 2 + [0.1 / 2**5] * 2)


def test_wrapping_schedules_pass_on_losses_and_state() -> None:
    schedule = Scaled(Warmup(1, ReduceOnPlateau(1.0, 0.5, patience=0)), 2.0)
    assert schedule.monitor == "loss" and schedule.needs_validation
    schedule.learn(1.0)
    schedule.learn(1.0)
    assert schedule(5) == 1.0
    other = Scaled(Warmup(1, ReduceOnPlateau(1.0, 0.5, patience=0)), 2.0)
    other.restore(schedule.state())
    assert other(5) == 1.0


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: Constant(0), "value"),
        (lambda: OneCycle(math.inf), "peak"),
        (lambda: OneCycle(0.1, warmup=1), "warmup"),
        (lambda: OneCycle(0.1, start_divisor=0.5), "start_divisor"),
        (lambda: OneCycle(0.1, end_divisor=0), "end_divisor"),
        (lambda: Map({}), "rates"),
        (lambda: Map({3: 0.1}), "rates"),
        (lambda: Map({0: -1.0}), "rates"),
        (lambda: Step(0.1, 0.5, 0), "every"),
        (lambda: Step(0.1, 0.5, 1, "round"), "by"),
        (lambda: Cosine(0.1, 0.2), "end"),
        (lambda: Cosine(0.1, growth=0), "growth"),
        (lambda: Cosine(0.1, growth=2), "growth"),
        (lambda: Polynomial(0.1, 0), "power"),
        (lambda: Polynomial(0.1, end=1), "end"),
        (lambda: ReduceOnPlateau(0.1, 1.0), "factor"),
        (lambda: ReduceOnPlateau(0.1, monitor="f1"), "monitor"),
        (lambda: ReduceOnPlateau(0.01, least=1), "least"),
        (lambda: Warmup(0, 0.1), "steps"),
        (lambda: Warmup(5, "fast"), "learning_rate"),
        (lambda: Scaled(Constant(0.1), 0), "factor"),
    ],
)
def test_invalid_arguments_are_refused(make: Callable[[], Schedule], setting: str) -> None:
    with refused(setting):
        make()


def test_a_plateau_is_seen_in_training_and_needs_validation_images() -> None:
    class Rates(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_report(self, trainer: Any, report: Any) -> None:
            self.rates.append(report.learning_rate)

    data, seen = small_dataset(24), Rates()
    optimizer = SGD(ReduceOnPlateau(1e-9, 0.5, patience=0, min_improvement=10.0))  # nothing is ever better
    with ParallelWrapper(
        small_model(), 2, optimizer=optimizer, callbacks=[seen], report_every=3, averaging_frequency="epoch"
    ) as wrapper:
        wrapper.fit(data, 3, batch_size=4, evaluate_on=data, split="validation")
        assert seen.rates == [1e-9, 1e-9, 0.5e-9]
        rates = [trainer.replica.optimizer.learning_rate(0) for trainer in wrapper._trainers]  # type: ignore[union-attr]
        assert rates == [0.25e-9] * 2 and optimizer.learning_rate(0) == 1e-9
        for arguments in ({"evaluate_on": data}, {}):  # as test images, or not at all
            with refused("optimizer.learning_rate"):
                wrapper.fit(data, 1, batch_size=4, **arguments)


# The learning rate as workers grow -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "factor"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0), (1.2, 1.2), (np.float32(0.5), 0.5), (2, 2.0)]
)
def test_rules_for_the_learning_rate_as_workers_grow(scale: Any, factor: float) -> None:
    assert scale_factor(scale, 9) == factor
    assert scale_factor("linear", 1) == scale_factor("sqrt", 1) == 1.0


def test_an_unknown_rule_is_refused() -> None:
    wrong: list[Any] = ["liner", 0, True, None, math.inf]
    for value in wrong:
        with refused("learning_rate_scale"):
            scale_factor(value, 4)


def test_a_scaled_schedule_is_the_other_one_times_a_factor() -> None:
    scaled, other = Scaled(OneCycle(0.5), 3.0), OneCycle(0.5)
    for schedule in (scaled, other):
        schedule.span(5, 25)
    assert [scaled(i) for i in range(30)] == [3.0 * other(i) for i in range(30)]


@pytest.mark.parametrize(("scale", "rate"), [("linear", 0.08), (1.5, 0.03)])
def test_the_wrapper_scales_the_learning_rate(scale: Any, rate: float) -> None:
    optimizer, data = SGD(0.02), small_dataset(40)
    with ParallelWrapper(small_model(), 4, optimizer=optimizer, learning_rate_scale=scale) as scaled:
        scaled.fit(data, 1, batch_size=4).warm_up(4)
        assert scaled.trainer.replica.optimizer.learning_rate(0) == rate
    with ParallelWrapper(small_model(), 4, optimizer=SGD(rate)) as plain:
        plain.fit(data, 1, batch_size=4)
    np.testing.assert_array_equal(scaled.model.params.master, plain.model.params.master)
    assert optimizer.learning_rate(0) == 0.02, "the user's own stays as it is"


def test_warming_up_leaves_a_scaled_cycle_where_it_is() -> None:
    with ParallelWrapper(small_model(), 2, optimizer=SGD(OneCycle(0.1)), learning_rate_scale=2.0) as wrapper:
        wrapper.fit(small_dataset(40), 2, batch_size=4)
        rate = wrapper.trainer.replica.optimizer.learning_rate
        before = [rate(i) for i in range(10)]
        wrapper.warm_up(4)
        assert [rate(i) for i in range(10)] == before and max(before) > 0.15


def test_warming_up_needs_no_epochs_of_a_schedule_that_counts_them() -> None:
    """A run makes its kernels ready before it knows how long an epoch is."""
    with ParallelWrapper(small_model(), 2, optimizer=SGD(Warmup(2, Step(0.1, 0.5, 1, "epoch")))) as wrapper:
        assert wrapper.warm_up(4) > 0
        wrapper.fit(small_dataset(40), 2, batch_size=4)
        assert wrapper.trainer.replica.optimizer.learning_rate(wrapper.trainer.iteration - 1) == 0.05


@pytest.mark.parametrize(
    ("make", "same"),
    [
        (lambda: Constant(0.1), True),
        (lambda: Step(0.1, 0.5, 1, by="epoch"), True),
        (lambda: Map({0: 0.1, 3: 0.01}, by="epoch"), True),
        (lambda: Exponential(0.1, 0.9), True),
        (lambda: Inverse(0.1, 0.1), True),
        (lambda: Sigmoid(0.1, -0.5, 2, by="epoch"), True),
        (lambda: ReduceOnPlateau(0.1), True),
        (lambda: Cosine(0.1, cycle=7), True),
        (lambda: Warmup(4, Step(0.1, 0.5, 3)), True),
        (lambda: Warmup(4, Step(0.1, 0.5, 1, by="epoch")), True),
        (lambda: OneCycle(0.1), False),
        (lambda: Cosine(0.1), False),
        (lambda: Polynomial(0.1), False),
        (lambda: Warmup(4, OneCycle(0.1)), False),
    ],
)
def test_which_rates_do_not_depend_on_the_length_of_training(make: Any, same: bool) -> None:
    """These are listed in training/README.md: training further gives the same result as training at once."""
    short, long = make(), make()
    short.span(0, 20, 10, 2)
    long.span(0, 40, 10, 4)
    assert ([short(each) for each in range(20)] == [long(each) for each in range(20)]) == same
