"""Averaging schedules: after which iterations replicas are averaged."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cupynet.parallel import Adaptive, AveragingSchedule, PostLocal
from cupynet.parallel.synchronizers.schedule import averaging_schedule
from tests.support.refusals import refused


def averages(when: AveragingSchedule, rounds: int, start: int = 0, divergence: float = math.nan) -> list[int]:
    """Return the iterations, counted from 1, after which a schedule averages."""
    found = []
    for iteration in range(start, start + rounds):
        if when.after(iteration):
            when.averaged(divergence)
            found.append(iteration + 1)
    return found


@pytest.mark.parametrize(
    ("frequency", "found", "moments"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7], ["evaluation", "fit"]),
        (3, [3, 6], ["evaluation", "fit"]),
        ("epoch", [], ["epoch", "evaluation", "fit"]),
        ("end", [], ["fit"]),
    ],
)
def test_numbers_and_names(frequency: Any, found: list[int], moments: list[str]) -> None:
    when = averaging_schedule(frequency)
    assert averages(when, 7) == found
    assert [m for m in ("epoch", "evaluation", "fit") if when.at(m)] == moments
    assert (when.averaging_frequency, when.measures) == (frequency, False)
    assert averaging_schedule(when) is when


@pytest.mark.parametrize("wrong", [0, 2.5, None, "never", PostLocal])
def test_bad_schedules_are_refused(wrong: Any) -> None:
    with refused("averaging_frequency"):
        averaging_schedule(wrong)


def test_post_local_changes_at_the_end_of_an_epoch() -> None:
    when = PostLocal(2, 3)
    assert averages(when, 5) == [1, 2, 3, 4, 5]
    when.ended("epoch")
    assert averages(when, 5, 5) == [6, 7, 8, 9, 10]
    when.ended("evaluation")
    assert averages(when, 5, 10) == [12, 15]


def test_post_local_counts_a_fit_that_ends_with_its_epoch_once() -> None:
    """A stop after a complete epoch tells of the epoch, and then of the fit."""
    when = PostLocal(2, 10)
    for moment in ("epoch", "fit"):
        averages(when, 4 if moment == "epoch" else 0)
        when.ended(moment)
    assert averages(when, 4, 4) == [5, 6, 7, 8]
    when.ended("fit")
    assert averages(when, 4, 8) == [10]


def test_post_local_hands_over_to_any_rule() -> None:
    assert PostLocal(0, "end").at("evaluation") is False
    assert PostLocal(1, "end").at("evaluation") is True
    nested = PostLocal(0, Adaptive(0.1, 2, 8))
    assert nested.measures and averages(nested, 16, divergence=1e-9) == [2, 6, 14]


@pytest.mark.parametrize(
    ("divergence", "found"),
    [
        (0.001, [2, 6, 14, 30, 50, 70]),  # far below the target: twice as long each time, to the longest
        (0.10, [2, 4, 6, 8, 10]),  # on it: as it was
        (0.08, [2, 4, 7, 10, 14, 20, 27]),  # a little below: in proportion
    ],
)
def test_adaptive_periods_grow_towards_the_target(divergence: float, found: list[int]) -> None:
    assert averages(Adaptive(0.10, 2, 20), 80, divergence=divergence)[: len(found)] == found


def test_adaptive_periods_shrink_by_half_at_most_and_never_to_nothing() -> None:
    when = Adaptive(0.10, 16, 64)
    assert averages(when, 32, divergence=5.0) == [16, 24, 28, 30, 31, 32]
    assert when.period == 1.0


def test_an_average_without_divergence_keeps_the_adaptive_period() -> None:
    when = Adaptive(0.10, 4, 64)
    assert averages(when, 16, divergence=math.nan) == [4, 8, 12, 16] and when.period == 4


def test_an_early_average_does_not_lengthen_the_period() -> None:
    when = Adaptive(0.10, 10, 64)
    averages(when, 3)
    when.averaged(0.001)  # the end of an epoch
    assert when.period == 10
    averages(when, 3)
    when.averaged(0.4)
    assert when.period == 5


@pytest.mark.parametrize("make", [lambda: PostLocal(1, 3), lambda: PostLocal(0, Adaptive(0.1, 2, 9))])
def test_a_schedule_resumes_from_its_state(make: Any) -> None:
    whole, first = make(), make()
    for when in (whole, first):
        averages(when, 4, divergence=0.05)
        when.ended("epoch")
        averages(when, 2, 4, divergence=0.05)
    second = make()
    second.restore(first.state())
    assert averages(second, 20, 6, divergence=0.05) == averages(whole, 20, 6, divergence=0.05)


def test_invalid_arguments_are_refused() -> None:
    with refused("epochs"):
        PostLocal(-1, 3)
    with refused("target"):
        Adaptive(0.0)
    with refused("first"):
        Adaptive(0.1, 5, 4)
