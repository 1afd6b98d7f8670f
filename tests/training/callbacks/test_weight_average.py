"""The mean of the weights over training: which weights it covers, with several workers, and after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupynet import SGD, Adam, BatchNorm, Dense, Loader, Model
from cupynet.parallel import Communicator, GradientSharing, ParameterAveraging, Pipeline, Synchronizer
from cupynet.training import Callback, ParallelWrapper, Replica, StopReason, WeightAverage
from tests.support.refusals import refused
from tests.support.trainers import callback_of, fit_on_threads, fitted
from tests.support.training import Seen, StopAfter, alone, fingerprint, small_dataset, small_model

LOADER = Loader(small_dataset(41), 4, seed=3)  # 11 batches
Weights = NDArray[np.float64]


def normalized() -> Model:
    return Model([BatchNorm(), Dense(8, "relu"), Dense(3)], (8, 8, 1), "numpy", dtype="double")


def weights_seen() -> Seen:
    return Seen(lambda trainer: np.concatenate(trainer.params.vectors))


def followed(workers: int, average: WeightAverage, way: Synchronizer, *more: Callback) -> list[tuple[Seen, Weights]]:
    """Train for two epochs. Return each worker's weights and running statistics during training and at the end."""

    def replica(communicator: Communicator) -> Replica:
        return Replica(normalized(), Adam(0.01))

    callbacks, options = (average, weights_seen(), *more), {"epochs": 2, "log_every": 0}
    found = fit_on_threads(workers, replica, way, LOADER, *callbacks, evaluate_on=LOADER, **options)
    for trainer in found:
        loss = alone(trainer.model, SGD(0.1)).evaluate(LOADER).loss
        assert trainer.evaluation is None or trainer.evaluation.loss == pytest.approx(loss, rel=1e-12)
    return [(callback_of(trainer, Seen), np.concatenate(trainer.params.vectors)) for trainer in found]


def mean(way: list[Weights], decay: float | None) -> Weights:
    result = way[0]
    for count, weights in enumerate(way[1:], 1):
        share = count / (count + 1) if decay is None else min(decay, (1 + count) / (10 + count))
        result = share * result + (1 - share) * weights
    return result


@pytest.mark.parametrize(
    ("average", "passed", "workers", "synchronizer"),
    [
        (WeightAverage(0.8), lambda way: way.iterations, 3, ParameterAveraging(2)),
        (WeightAverage(None, start_after=2, interval=3), lambda way: way.iterations[4::3], 3, GradientSharing()),
        (WeightAverage(None, unit="epoch"), lambda way: way.epochs, 1, ParameterAveraging(2)),
        (WeightAverage(0.5, unit="epoch", start_after=1), lambda way: way.epochs[1:], 3, ParameterAveraging(2)),
    ],
    ids=["exponential", "every third", "epochs", "late"],
)
def test_the_final_weights_are_the_mean_of_the_weights_during_training(
    average: WeightAverage, passed: Callable[[Seen], list[Weights]], workers: int, synchronizer: Synchronizer
) -> None:
    found = followed(workers, average, synchronizer)
    expected = sum(mean(passed(way), average.decay) for way, _ in found) / workers
    for _, weights in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)
    assert len({weights.tobytes() for _, weights in found}) == 1


def test_a_weight_average_changes_no_training_and_warns_if_it_never_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Two workers have 12 iterations."""
    averaged, (never, _) = (followed(2, WeightAverage(start_after=n), ParameterAveraging(2)) for n in (0, 12))
    for way, _ in averaged:
        np.testing.assert_array_equal(way.iterations[-1], never[0].iterations[-1])
    np.testing.assert_array_equal(never[1], never[0].iterations[-1])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    followed(2, WeightAverage(start_after=11), ParameterAveraging(2))
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("reason", "averaged"), [(StopReason.REQUEST, False), (StopReason.SIGNAL, False), (StopReason.EARLY, True)]
)
def test_a_fit_stopped_on_request_or_by_a_signal_keeps_its_last_weights(reason: StopReason, averaged: bool) -> None:
    """A fit that early stopping ended does not."""
    ((way, weights),) = followed(1, WeightAverage(0.9), Synchronizer(), StopAfter(5, reason=reason))
    assert len(way.iterations) == 5
    np.testing.assert_allclose(weights, mean(way.iterations, 0.9) if averaged else way.iterations[-1], rtol=1e-12)


def test_a_weight_average_is_the_same_with_a_pipeline() -> None:
    def trained(pipeline: Pipeline | None) -> Any:
        options: dict[str, Any] = {"optimizer": SGD(0.05), "callbacks": [WeightAverage(0.8)], "pipeline": pipeline}
        return fitted(small_model(), LOADER, 2, epochs=2, **options).params.master

    np.testing.assert_allclose(trained(Pipeline(2)), trained(None), rtol=1e-9, atol=1e-12)


def test_changed_arguments_of_a_weight_average_apply_to_all_workers() -> None:
    """Workers other than the first have copies of the callbacks."""
    way, average = weights_seen(), WeightAverage(None)
    with ParallelWrapper(small_model("double"), 2, 1, optimizer=SGD(0.05), callbacks=[average, way]) as wrapper:
        wrapper.fit(LOADER)
        way.iterations.clear()
        average.start_after = 3
        wrapper.fit(LOADER)
    np.testing.assert_allclose(wrapper.model.params.master, np.mean(way.iterations[3:], axis=0), rtol=1e-12)


@pytest.mark.parametrize("arguments", [{"decay": 1.0}, {"unit": "round"}, {"interval": 0}])
def test_bad_arguments_of_a_weight_average_are_refused(arguments: dict[str, Any]) -> None:
    with refused(*arguments):
        WeightAverage(**arguments)


def averages(wrapper: ParallelWrapper) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    wrapper.on_workers(lambda trainer: found.append(trainer.state()["callbacks"]["WeightAverage"]))
    return found


@pytest.mark.parametrize("workers", [1, 3])
def test_a_weight_average_resumed_by_another_number_of_workers_is_the_mean_of_all(workers: int, tmp_path: Path) -> None:
    def wrapper(workers: int, *callbacks: Callback) -> ParallelWrapper:
        given = [WeightAverage(None), *callbacks]
        return ParallelWrapper(normalized(), workers, 100, optimizer=SGD(0.05), callbacks=given)

    with wrapper(2, StopAfter(3)) as before:
        before.fit(LOADER, epochs=2)
        path = before.checkpoint(tmp_path)
        one, other = averages(before)
    with wrapper(workers) as after:
        after.restore(path)
        found = averages(after)
    assert [state["added"] for state in found] == [one["added"]] * workers
    assert [*one["buffers"]] == ["batchnorm1.mean", "batchnorm1.variance"]
    for kind in ("mean", "buffers"):
        for name, first in one[kind].items():
            for state in found:
                np.testing.assert_allclose(state[kind][name], (first + other[kind][name]) / 2, rtol=1e-12)


def test_a_weight_average_resumed_with_another_unit_starts_again(tmp_path: Path) -> None:
    with ParallelWrapper(small_model(), 1, callbacks=[WeightAverage()]) as wrapper:
        wrapper.fit(LOADER)
        path = wrapper.checkpoint(tmp_path)
    with ParallelWrapper(small_model(), 1, callbacks=[WeightAverage(unit="epoch")]) as wrapper:
        wrapper.restore(path)
        (state,) = averages(wrapper)
    assert (state["added"], state["passed"], state["unit"]) == (0, 0, "epoch")


def test_wrappers_that_share_a_weight_average_have_their_own_weights() -> None:
    shared = WeightAverage()
    with (
        ParallelWrapper(small_model(), 2, callbacks=[shared]) as one,
        ParallelWrapper(small_model(), 2, callbacks=[shared]) as other,
        ParallelWrapper(small_model(), 2, callbacks=[WeightAverage()]) as alone,
    ):
        for wrapper in (one, other, one, alone, alone):
            wrapper.fit(LOADER)
            assert len({fingerprint(model) for model in wrapper.replicas()}) == 1
        assert fingerprint(one.model) == fingerprint(alone.model) != fingerprint(other.model)
