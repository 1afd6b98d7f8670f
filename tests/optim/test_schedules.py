"""Learning-rate schedules: formulas, lengths, plateaus, warm-up, scaling with workers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import optim
from cupynet.core.errors import ConfigError
from cupynet.training import ParallelWrapper
from tests.guides.extending.lion import Lion
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "optim.npz")
SCHEDULES: dict[str, optim.Schedule] = {
    "step": optim.StepDecay(0.05, 0.5, 7),
    "map": optim.PiecewiseConstant({0: 0.05, 5: 0.005, 20: 0.0005}),
    "exponential": optim.ExponentialDecay(0.05, 0.9),
    "polynomial": optim.Polynomial(0.05, 2.0),
    "cosine": optim.Cosine(0.05, 0.01),
    "restarts": optim.Cosine(0.05, 0.01, 10, 2),
    "warmup": optim.Warmup(10, optim.ExponentialDecay(0.05, 0.9)),
    "one cycle": optim.OneCycle(0.05, 10 / 49, 25, 1000),
}


@pytest.mark.parametrize("name", [name.removeprefix("schedule/") for name in GOLDEN if name.startswith("schedule/")])
def test_schedules_give_the_learning_rates_of_pytorch(name: str) -> None:
    schedule, expected = SCHEDULES[name], GOLDEN[f"schedule/{name}"]
    schedule.begin_fit(0, len(expected))
    np.testing.assert_allclose([schedule(i) for i in range(len(expected))], expected, rtol=1e-12, atol=1e-16)


def test_schedules_that_pytorch_lacks_follow_their_formulas() -> None:
    """Deeplearning4j has them as InverseSchedule and SigmoidSchedule."""
    inverse, sigmoid = optim.InverseTimeDecay(0.5, 0.1, 0.75), optim.SigmoidDecay(0.4, -0.2, 10)
    assert [inverse(i) for i in (0, 10)] == pytest.approx([0.5, 0.5 / 2**0.75])
    assert [sigmoid(i) for i in (0, 10, 20)] == pytest.approx([0.4 / (1 + math.exp(-2)), 0.2, 0.4 / (1 + math.exp(2))])
    assert 0 <= optim.SigmoidDecay(0.4, -1.0, 10)(10**6) < 1e-300


@pytest.mark.parametrize(
    ("iterations", "warmup", "rates"),
    [(0, 0.3, [0.02]), (1, 0.3, [0.02]), (1, 0.0, [0.5]), (2, 0.3, [0.02, 0.0005]), (2, 0.0, [0.5, 0.0005])],
)
def test_one_cycle_fits_into_few_iterations(iterations: int, warmup: float, rates: list[float]) -> None:
    schedule = optim.OneCycle(0.5, warmup)
    schedule.begin_fit(0, iterations)
    assert [schedule(i) for i in range(len(rates))] == pytest.approx(rates)


def test_a_plateau_is_found_as_in_pytorch() -> None:
    """After each evaluation, the state is moved to another schedule, as in a resumed run."""
    one, other = (
        optim.ReduceOnPlateau(0.05, 0.5, patience=3, min_delta=0.02, cooldown=2, least=0.004) for _ in range(2)
    )
    found = []
    for loss in GOLDEN["losses"]:
        one.on_evaluation(float(loss))
        found.append(one(0))
        other.restore(one.state())
        one, other = other, one
    np.testing.assert_allclose(found, GOLDEN["plateau"], rtol=1e-12)


def test_a_plateau_ends_when_accuracy_rises_and_nan_is_not_an_improvement() -> None:
    schedule = optim.ReduceOnPlateau(1.0, 0.5, patience=1, monitor="val_accuracy")
    rates = []
    for accuracy in (0.5, 0.6, 0.7, 0.6, 0.7, math.nan, 0.8):
        schedule.on_evaluation(accuracy)
        rates.append(schedule(0))
    assert rates == [1, 1, 1, 1, 0.5, 0.5, 0.5]


def test_reduce_on_plateau_lowers_the_rate_in_training_and_needs_validation_images() -> None:
    data, schedule = small_dataset(24), optim.ReduceOnPlateau(1e-9, 0.5, patience=0, min_delta=10.0)
    with ParallelWrapper(small_model(), 2, optimizer=optim.SGD(schedule), averaging_frequency="epoch") as wrapper:
        wrapper.fit(data, epochs=3, batch_size=4, validation_data=data)
        rates = [trainer.replica.optimizer.learning_rate(0) for trainer in wrapper._trainers if trainer]
        assert rates == [0.25e-9] * 2 and schedule(0) == 1e-9
        for images in (data, None):  # given as test images, or not at all
            with refused("optimizer.learning_rate"):
                wrapper.fit(data, epochs=1, batch_size=4, evaluate_on=images)


def test_the_schedule_after_a_warm_up_continues_with_fewer_workers() -> None:
    """After 40 of 100 iterations, a single worker takes over from four, with four times as many iterations to go."""
    before, after = optim.Warmup(5, optim.Cosine(1.0)), optim.Warmup(5, optim.Cosine(1.0))
    before.begin_fit(0, 100)
    after.begin_fit(40 - 4 * 40, 40 + 4 * 60)
    assert after(40) == pytest.approx(before(40), rel=0.1)  # the warm-up counts as progress
    assert after(279) == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(
    "schedule", [optim.StepDecay(1.0, 0.5, 1, "epoch"), optim.PiecewiseConstant({0: 1.0, 1: 0.5, 2: 0.25}, "epoch")]
)
def test_schedules_by_epoch_count_epochs_from_the_end_of_the_fit(schedule: optim.Schedule) -> None:
    """A stopped epoch of 10 has 7 iterations left. Earlier epochs had a different length."""
    schedule.begin_fit(100, 127, 10, 3)
    assert [schedule(i) for i in (100, 106, 107, 116, 117, 126)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_a_warm_up_runs_once_before_its_schedule() -> None:
    schedule = optim.Warmup(4, optim.OneCycle(0.5, warmup=0.0, end_divisor=10), start=0.2)
    schedule.begin_fit(0, 15)
    assert [schedule(i) for i in (0, 2, 4, 14)] == pytest.approx([0.1, 0.3, 0.5, 0.05])
    schedule.begin_fit(15, 26)
    assert [schedule(i) for i in (15, 25)] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize(("steps", "ends"), [(150, (199, 200, 300)), (3, (99, 100, 200))])
def test_schedules_by_epoch_count_epochs_from_the_end_of_a_warm_up(steps: int, ends: tuple[int, ...]) -> None:
    schedule = optim.Warmup(steps, optim.StepDecay(0.1, 0.1, 1, "epoch"), start=0.5)
    schedule.begin_fit(0, 500, 100, 5)
    found = [schedule(i) for i in (0, steps, *ends)]
    assert found == pytest.approx([0.05, 0.1, 0.1, 0.01, 0.001])


def test_a_further_fit_with_longer_epochs_remembers_the_epochs_of_the_warm_up() -> None:
    schedule, resumed = (optim.Warmup(15, optim.StepDecay(0.1, 0.5, 1, "epoch")) for _ in range(2))
    schedule.begin_fit(0, 50, 10, 5)
    resumed.restore(schedule.state())
    for each in (schedule, resumed):
        each.begin_fit(50, 250, 100, 7)
        assert [each(i) for i in (50, 149, 150, 249)] == pytest.approx([0.1 / 2**4] * 2 + [0.1 / 2**5] * 2)


def test_a_schedule_that_needs_the_length_of_a_fit_names_the_method_that_sets_it() -> None:
    for schedule in (optim.OneCycle(0.1), optim.Warmup(3, optim.Cosine(0.1)), optim.StepDecay(0.1, 0.5, 1, by="epoch")):
        with pytest.raises(ConfigError, match="begin_fit"):
            schedule(5)
        schedule.begin_fit(0, 20, 10, 2)
        assert schedule(5) > 0


def test_warm_up_and_scaled_schedules_pass_on_losses_and_state() -> None:
    schedule, resumed = (
        optim.Scaled(optim.Warmup(1, optim.ReduceOnPlateau(1.0, 0.5, patience=0)), 2.0) for _ in range(2)
    )
    assert schedule.monitor == "loss" and schedule.needs_validation
    schedule.on_evaluation(1.0)
    schedule.on_evaluation(1.0)
    resumed.restore(schedule.state())
    assert schedule(5) == resumed(5) == 1.0


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (lambda: optim.OneCycle(math.inf), "peak"),
        (lambda: optim.OneCycle(0.1, warmup=1), "warmup"),
        (lambda: optim.OneCycle(0.1, start_divisor=0.5), "start_divisor"),
        (lambda: optim.PiecewiseConstant({}), "rates"),
        (lambda: optim.PiecewiseConstant({3: 0.1}), "rates"),
        (lambda: optim.StepDecay(0.1, 0.5, 1, "round"), "by"),
        (lambda: optim.Cosine(0.1, 0.2), "end"),
        (lambda: optim.Cosine(0.1, growth=2), "growth"),
        (lambda: optim.ReduceOnPlateau(0.1, monitor=None), "monitor"),  # type: ignore[arg-type]
        (lambda: optim.ReduceOnPlateau(0.01, least=1), "least"),
        (lambda: optim.Warmup(0, 0.1), "steps"),
        (lambda: optim.scale_factor("liner", 4), "learning_rate_scale"),
        (lambda: optim.scale_factor(0, 4), "learning_rate_scale"),
    ],
)
def test_invalid_arguments_of_schedules_are_refused(make: Callable[[], object], setting: str) -> None:
    with refused(setting):
        make()


@pytest.mark.parametrize(("scale", "factor"), [("none", 1.0), ("linear", 9.0), ("sqrt", 3.0), (1.2, 1.2)])
def test_learning_rate_scale_gives_the_factor_for_the_number_of_workers(scale: str | float, factor: float) -> None:
    assert optim.scale_factor(scale, 9) == factor


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("cosine", optim.Cosine(0.001)),
        ({"name": "one_cycle", "peak": 0.2}, optim.OneCycle(0.2)),
        ({"name": "step", "factor": 0.5, "every": 10}, optim.StepDecay(0.001, 0.5, 10)),
        ({"name": "warmup", "steps": 5}, optim.Warmup(5, 0.001)),
        (
            {"name": "warmup", "steps": 5, "then": {"name": "cosine", "initial": 0.1}},
            optim.Warmup(5, optim.Cosine(0.1)),
        ),
        ({"name": "warmup", "steps": 5, "then": "cosine"}, optim.Warmup(5, optim.Cosine(0.001))),
        ({"name": "piecewise_constant", "rates": {0: 0.1, 10: 0.01}}, optim.PiecewiseConstant({0: 0.1, 10: 0.01})),
    ],
    ids=str,
)
def test_a_schedule_can_be_given_by_name(given: Any, expected: optim.Schedule) -> None:
    found = optim.Adam(given).learning_rate
    for each in (found, expected):
        each.begin_fit(0, 30)
    assert type(found) is type(expected) and [found(i) for i in range(30)] == [expected(i) for i in range(30)]


class Required(optim.SGD):
    """A user's optimizer without a default rate."""

    def __init__(self, learning_rate: Any) -> None:
        super().__init__(learning_rate)


@pytest.mark.parametrize(("kind", "rate"), [(Lion, 1e-4), (Required, 0.01)])
def test_a_named_schedule_begins_at_the_default_rate_of_the_constructor(kind: Any, rate: float) -> None:
    optimizer = kind("cosine")
    assert optimizer.learning_rate.initial == rate
    optimizer.learning_rate = "one_cycle"
    assert optimizer.learning_rate.peak == rate


@pytest.mark.parametrize("wrong", ["cosin", {"name": "step"}, {"name": "cosine", "evry": 3}, {"initial": 0.1}], ids=str)
def test_an_unknown_schedule_and_wrong_arguments_of_a_named_one_are_refused(wrong: Any) -> None:
    with refused("learning_rate"):
        optim.SGD(wrong)


class Returning(optim.Schedule):
    """A user's schedule, which returns the same value in every iteration."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, iteration: int) -> Any:
        return self.value


@pytest.mark.parametrize("value", [None, "0.1", -0.1, math.nan, np.array([0.1, 0.2])], ids=str)
def test_a_schedule_must_return_a_learning_rate(value: Any) -> None:
    for optimizer in (optim.SGD(Returning(value)), optim.Adam(Returning(value))):
        with ParallelWrapper(small_model(), 1, optimizer=optimizer) as wrapper, refused("learning_rate"):
            wrapper.fit(small_dataset(4), batch_size=4)
