"""Averaging schedules: the iterations after which replicas are averaged."""

import math
from typing import Any

import pytest

from cupynet.parallel import Adaptive, AveragingSchedule, PostLocal
from cupynet.parallel.synchronizers.schedule import averaging_schedule
from tests.support.refusals import refused


def averages(schedule: AveragingSchedule, iterations: int, start: int = 0, drift: float = math.nan) -> list[int]:
    """Return the iterations, counted from 1, after which a schedule averages."""
    found = []
    for iteration in range(start, start + iterations):
        if schedule.after(iteration):
            schedule.averaged(drift)
            found.append(iteration + 1)
    return found


@pytest.mark.parametrize(
    ("frequency", "iterations", "moments"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7], ["evaluation", "fit"]),
        (3, [3, 6], ["evaluation", "fit"]),
        ("epoch", [], ["epoch", "evaluation", "fit"]),
        ("end", [], ["fit"]),
    ],
)
def test_averaging_frequency_determines_after_which_iterations_and_at_which_events_replicas_are_averaged(
    frequency: Any, iterations: list[int], moments: list[str]
) -> None:
    schedule = averaging_schedule(frequency)
    assert averages(schedule, 7) == iterations
    assert [moment for moment in ("epoch", "evaluation", "fit") if schedule.at(moment)] == moments


@pytest.mark.parametrize("end", ["epoch", "evaluation", "fit"])
def test_post_local_averages_in_every_iteration_of_its_epochs_and_counts_the_end_of_epoch_and_fit_once(
    end: Any,
) -> None:
    """A stop after a complete epoch ends first the epoch and then the fit."""
    schedule = PostLocal(2, 3)
    assert averages(schedule, 4) == [1, 2, 3, 4]
    schedule.ended("epoch")
    schedule.ended("fit")
    assert averages(schedule, 4, 4) == [5, 6, 7, 8]
    schedule.ended(end)
    assert averages(schedule, 7, 8) == [9, 12, 15]


def test_post_local_continues_with_any_schedule() -> None:
    assert PostLocal(0, "end").at("evaluation") is False
    assert PostLocal(1, "end").at("evaluation") is True
    nested = PostLocal(0, Adaptive(0.1, 2, 8))
    assert nested.measures and averages(nested, 16, drift=1e-9) == [2, 6, 14]


@pytest.mark.parametrize(
    ("schedule", "drift", "iterations"),
    [
        (Adaptive(0.10, 2, 20), 0.001, [2, 6, 14, 30, 50, 70]),  # far below the target: doubled up to the longest
        (Adaptive(0.10, 2, 20), 0.08, [2, 4, 7, 10, 14, 20, 27]),  # a little below: longer in proportion
        (Adaptive(0.10, 2, 20), math.nan, [2, 4, 6, 8, 10]),  # unknown: the same
        (Adaptive(0.10, 16, 64), 5.0, [16, 24, 28, 30, 31, 32]),  # far above: halved, but at least 1
    ],
)
def test_adaptive_averages_more_often_when_replicas_drift_apart(
    schedule: Adaptive, drift: float, iterations: list[int]
) -> None:
    assert averages(schedule, 80, drift=drift)[: len(iterations)] == iterations


def test_an_early_average_does_not_lengthen_the_adaptive_period() -> None:
    schedule = Adaptive(0.10, 10, 64)
    averages(schedule, 3)
    schedule.averaged(0.001)  # at the end of an epoch
    assert schedule.period == 10
    averages(schedule, 3)
    schedule.averaged(0.4)
    assert schedule.period == 5


def test_invalid_arguments_of_an_averaging_schedule_are_refused() -> None:
    wrong: list[Any] = [0, 2.5, "never"]
    for frequency in wrong:
        with refused("averaging_frequency"):
            averaging_schedule(frequency)
    with refused("epochs"):
        PostLocal(-1, 3)
    with refused("target"):
        Adaptive(0.0)
    with refused("initial_period"):
        Adaptive(0.1, 5, 4)
