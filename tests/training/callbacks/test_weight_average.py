"""The mean of the weights along training: which weights it covers, with several workers, and after a resume."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Dense, Image, Model, Sequential
from cupynet.optim import LAMB, SGD, Adam, Nadam, Optimizer, ReduceOnPlateau, Warmup
from cupynet.optim.schedules import Cosine
from cupynet.parallel import GradientSharing, Groups, ParameterAveraging, Pipeline, SlowMo, Synchronizer
from cupynet.training import (
    Callback,
    Checkpoint,
    EarlyStopping,
    ParallelWrapper,
    Replica,
    StopReason,
    Trainer,
    WeightAverage,
)
from cupynet.training.callback_list import by_class_name
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import KeepState, Seen, StopAfter, fingerprint, on_threads, small_dataset, small_model


def followed(workers: int, average: WeightAverage, synchronizer: Synchronizer, epochs: int = 2, more: Any = ()) -> Any:
    """Train, and return each worker's weights along the way and at the end, and its evaluations."""

    def task(communicator: Any) -> Any:
        way = weights_seen()
        trainer = Trainer(
            Replica(small_model(), Adam(0.01)),
            groups=Groups.of(communicator),
            synchronizer=copy.deepcopy(synchronizer),
            callbacks=[copy.deepcopy(average), way, *copy.deepcopy(more)],
            report_every=0,
        )
        data = Loader(small_dataset(41), 4, seed=3)
        trainer.fit(Fit(data, epochs, evaluate_on=data))
        return way, trainer.params.master.copy(), trainer.evaluation, trainer.evaluate(data)

    return on_threads(workers, task)


def kept(way: list[Any], decay: float | None) -> Any:
    mean = way[0]
    for count, weights in enumerate(way[1:], 1):
        share = count / (count + 1) if decay is None else min(decay, (1 + count) / (10 + count))
        mean = share * mean + (1 - share) * weights
    return mean


def weights_seen() -> Seen:
    """Keeps the weights of each replica after each iteration and each epoch."""
    return Seen(lambda trainer: trainer.params.master.copy())


@pytest.mark.parametrize(
    ("average", "of", "workers", "synchronizer"),
    [
        (WeightAverage(0.8), lambda way: way.iterations, 3, ParameterAveraging(2)),
        (WeightAverage(None, after=2, every=3), lambda way: way.iterations[4::3], 3, GradientSharing()),
        (WeightAverage(None, by="epoch"), lambda way: way.epochs, 1, ParameterAveraging(2)),
        (WeightAverage(0.5, by="epoch", after=1), lambda way: way.epochs[1:], 3, ParameterAveraging(2)),
    ],
    ids=["exponential", "every third", "epochs", "late"],
)
def test_the_result_is_the_mean_of_the_weights_passed(
    average: WeightAverage, of: Any, workers: int, synchronizer: Synchronizer
) -> None:
    found = followed(workers, average, synchronizer)
    expected = sum(kept(of(way), average.decay) for way, *_ in found) / workers
    for _, weights, evaluation, again in found:
        np.testing.assert_allclose(weights, expected, rtol=1e-12, atol=1e-14)
        assert evaluation.to_dict() == again.to_dict()  # of the mean
    assert len({weights.tobytes() for _, weights, *_ in found}) == 1
    assert len(of(found[0][0])) == 1 or abs(found[0][1] - found[0][0].iterations[-1]).max() > 1e-6


def test_training_itself_does_not_change() -> None:
    averaged = followed(2, WeightAverage(0.9), ParameterAveraging(2))
    never = followed(2, WeightAverage(0.9, after=1000), ParameterAveraging(2))
    for one, other in zip(averaged, never, strict=True):
        np.testing.assert_array_equal(one[0].iterations, other[0].iterations)
    np.testing.assert_array_equal(never[0][1], never[0][0].epochs[-1])


def test_a_stopped_fit_keeps_its_last_weights_by_default() -> None:
    for when_stopped in (False, True):
        average = WeightAverage(0.9, when_stopped=when_stopped)
        ((way, weights, *_),) = followed(1, average, Synchronizer(), more=[StopAfter(5)])
        assert len(way.iterations) == 5
        expected = kept(way.iterations, 0.9) if when_stopped else way.iterations[-1]
        np.testing.assert_allclose(weights, expected, rtol=1e-12)


def test_early_stopping_takes_the_mean() -> None:
    stop = StopAfter(5, reason=StopReason.EARLY)
    ((way, weights, *_),) = followed(1, WeightAverage(0.9), Synchronizer(), more=[stop])
    np.testing.assert_allclose(weights, kept(way.iterations, 0.9), rtol=1e-12)


OPTIMIZERS = {
    "adam": lambda: Adam(Warmup(3, Cosine(0.02)), max_grad_norm=1.0),
    "nadam": lambda: Nadam(0.01, clip_value=0.5),
    "lamb": lambda: LAMB(0.02, clip_layer_norm=0.5),
}


@pytest.mark.parametrize(
    ("iteration", "optimizer", "synchronizer"),
    [
        (1, "adam", ParameterAveraging(3, outer=SlowMo())),
        (5, "nadam", GradientSharing()),
        (7, "lamb", ParameterAveraging(3, outer=SlowMo())),
    ],
    ids=["slowmo", "sharing", "late"],
)
def test_training_resumes_bit_for_bit(iteration: int, optimizer: str, synchronizer: Synchronizer) -> None:
    """With moments, a schedule, and the mean: bit for bit."""
    loader = Loader(small_dataset(57), 4, seed=3)

    def trainer_of(communicator: Any, *callbacks: Callback) -> Trainer:
        own: Optimizer = OPTIMIZERS[optimizer]()
        return Trainer(
            Replica(small_model("float"), own),
            groups=Groups.of(communicator),
            synchronizer=copy.deepcopy(synchronizer),
            callbacks=[WeightAverage(0.9, after=1), *callbacks],
        )

    def whole(communicator: Any) -> Any:
        keep = KeepState(iteration)
        trainer = trainer_of(communicator, keep)
        trainer.fit(Fit(loader, 2))
        return fingerprint(trainer.model), keep.kept

    def rest(communicator: Any) -> Any:
        trainer = trainer_of(communicator)
        trainer.restore(uninterrupted[communicator.rank][1])
        trainer.fit(Fit(loader, 2 - trainer.epoch))
        return fingerprint(trainer.model)

    uninterrupted = on_threads(3, whole)
    assert on_threads(3, rest) == [weights for weights, _ in uninterrupted]


def test_the_state_includes_a_plateau_schedule() -> None:
    """Nothing is ever better by so much, so each evaluation halves the learning rate; one was before the state."""
    data = Loader(small_dataset(20), 4, seed=3)

    def trainer_of(*callbacks: Callback) -> Trainer:
        optimizer = SGD(ReduceOnPlateau(0.1, 0.5, patience=0, min_improvement=10.0))
        return Trainer(Replica(small_model(), optimizer), callbacks=callbacks)

    keep = KeepState(12)
    whole = trainer_of(keep)
    whole.fit(Fit(data, 4, evaluate_on=data, split="validation"))
    again = trainer_of()
    again.restore(keep.kept)
    assert again.replica.optimizer.learning_rate(0) == 0.05
    again.fit(Fit(data, 2, evaluate_on=data, split="validation"))
    assert again.replica.optimizer.learning_rate(0) == whole.replica.optimizer.learning_rate(0) == 0.0125
    assert fingerprint(again.model) == fingerprint(whole.model)


def test_stages_of_a_pipeline_have_the_mean_of_the_whole_network() -> None:
    def trained(pipeline: Pipeline | None) -> Any:
        model = small_model()
        with ParallelWrapper(
            model, 2, 2, optimizer=SGD(0.05), callbacks=[WeightAverage(0.8)], pipeline=pipeline, report_every=0
        ) as wrapper:
            wrapper.fit(Loader(small_dataset(41), 4, seed=3), 2)
        return model.params.master

    np.testing.assert_allclose(trained(Pipeline(stages=2)), trained(None), rtol=1e-9, atol=1e-12)


def test_a_second_fit_starts_a_new_mean() -> None:
    model, average, way = small_model(), WeightAverage(None), weights_seen()
    with ParallelWrapper(model, 1, optimizer=SGD(0.05), callbacks=[average, way]) as wrapper:
        wrapper.fit(small_dataset(20), 1, batch_size=4)
        way.iterations.clear()
        wrapper.fit(small_dataset(20), 1, batch_size=4)
    assert average.added == 5
    np.testing.assert_allclose(model.params.master, np.mean(way.iterations, axis=0), rtol=1e-12)


def test_a_fit_restored_from_a_state_without_the_mean_starts_a_new_one() -> None:
    data, keeper = small_dataset(20), KeepState(3)
    with ParallelWrapper(small_model(), 1, callbacks=[keeper]) as wrapper:
        wrapper.fit(data, 1, batch_size=4)
    average = WeightAverage(None)
    with ParallelWrapper(small_model(), 1, callbacks=[average]) as wrapper:
        wrapper.fit(data, 2, batch_size=4)
        wrapper.on_workers(lambda trainer: trainer.restore(keeper.kept))
        wrapper.fit(data, 1, batch_size=4)
    assert average.added == 2


@pytest.mark.parametrize("arguments", [{"decay": 1.0}, {"by": "round"}, {"every": 0}, {"when_stopped": 1}])
def test_arguments_are_checked(arguments: dict[str, Any]) -> None:
    with refused(*arguments):
        WeightAverage(**arguments)


def test_running_statistics_are_averaged_too() -> None:
    """Running statistics of the last weights would not be those of their mean."""
    network = Sequential({"norm1": BatchNorm(), "output": Dense(3)})
    model = Model(network, Image(8, 8, 1), create_backend("numpy", "double"), 1)
    statistics = Seen(lambda trainer: trainer.params.buffers.copy())
    average = WeightAverage(decay=None, by="epoch")
    trainer = Trainer(Replica(model, SGD(0.05)), callbacks=[statistics, average], report_every=0)
    trainer.fit(Fit(Loader(small_dataset(41), 4, seed=3), 3))
    np.testing.assert_allclose(model.params.buffers, np.mean(statistics.epochs, axis=0), rtol=1e-12)


def normed(dtype: str, average: WeightAverage) -> ParallelWrapper:
    """Return a wrapper of a network with buffers."""
    network = Sequential({"dense1": Dense(5), "norm1": BatchNorm(), "output": Dense(3)})
    model = Model(network, Image(8, 8, 1), create_backend("numpy", dtype), 1)
    return ParallelWrapper(model, 1, optimizer=SGD(0.05), callbacks=[average], progress="none", report_every=0)


@pytest.mark.parametrize(
    ("first", "then", "earlier_version"),
    [("float", "double", True), ("double", "half", False), ("float", "float", True)],
)
def test_the_mean_resumes_in_another_dtype(first: str, then: str, earlier_version: bool, tmp_path: Any) -> None:
    data = Loader(small_dataset(41), 4, seed=3)
    saved, resumed = WeightAverage(0.9), WeightAverage(0.9)
    with normed(first, saved) as wrapper:
        wrapper.fit(data, 1)
        state = saved.state()
        if earlier_version:  # all buffers as one padded vector
            saved.state = lambda: {**state, "buffers": {"0": saved._means[1]}}  # type: ignore[method-assign]
        wrapper.checkpoint(tmp_path)
    with normed(then, resumed) as wrapper:
        wrapper.restore(tmp_path)
        found = resumed.state()
        wrapper.fit(data, 1)
    assert found["added"] == 11 and set(found["buffers"]) == {"norm1.mean", "norm1.variance"}
    for kind in ("mean", "buffers"):
        for name, array in state[kind].items():
            np.testing.assert_allclose(found[kind][name], array, rtol=1e-6)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_mean_of_another_number_of_workers_is_that_of_all(workers: int, tmp_path: Any) -> None:
    def wrapper(workers: int, *callbacks: Callback) -> ParallelWrapper:
        given = [WeightAverage(None), *callbacks]
        return ParallelWrapper(small_model(), workers, 100, optimizer=SGD(0.05), callbacks=given, progress="none")

    def of_workers(wrapper: ParallelWrapper, state: Any) -> list[Any]:
        found: dict[int, Any] = {}
        wrapper.on_workers(lambda trainer: found.update({trainer.rank: state(trainer)["callbacks"]["WeightAverage"]}))
        return [found[rank] for rank in sorted(found)]

    with wrapper(2, KeepState(3), Checkpoint(path=tmp_path, every_iterations=3)) as before:
        before.fit(Loader(small_dataset(41), 4, seed=3), 1)
        own = of_workers(before, lambda trainer: by_class_name(trainer.callbacks)["KeepState"].kept)
    with wrapper(workers) as after:
        after.restore(tmp_path / "step-00000003")
        found = of_workers(after, lambda trainer: trainer.state())
    assert [state["added"] for state in found] == [3] * workers
    for name, first in own[0]["mean"].items():
        expected = (first + own[1]["mean"][name]) / 2
        assert abs(first - expected).max() > 1e-6
        for state in found:
            np.testing.assert_allclose(state["mean"][name], expected, rtol=1e-12)


def test_early_stopping_may_end_a_fit_whose_result_is_the_mean(tmp_path: Any) -> None:
    """Also if it resumes from a state with best weights."""
    data = small_dataset(41)

    def trained(stopping: EarlyStopping, *callbacks: Callback, resume: bool = False) -> Any:
        model = small_model()
        given = [stopping, *callbacks, StopAfter(11)] if not resume else [stopping, *callbacks]
        with ParallelWrapper(model, 1, optimizer=SGD(0.05), callbacks=given, progress="none") as wrapper:
            if resume:
                wrapper.restore(tmp_path)
            wrapper.fit(data, 2, batch_size=4, evaluate_on=data, split="validation")
            wrapper.checkpoint(tmp_path)
        return model.params.master

    trained(EarlyStopping())
    average, way, stopping = WeightAverage(0.9), weights_seen(), EarlyStopping(restore_best=False, max_epochs=2)
    weights = trained(stopping, average, way, resume=True)
    assert stopping.result is not None and not stopping.result.restored and stopping.result.reason == "max_epochs"
    np.testing.assert_allclose(weights, kept(way.iterations, 0.9), rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "warnings"),
    [({"after": 14}, 1), ({"after": 2, "by": "epoch"}, 1), ({"after": 13}, 0), ({"after": 1, "by": "epoch"}, 0)],
)
def test_a_warning_if_nothing_was_averaged(arguments: dict[str, Any], warnings: int, caplog: Any) -> None:
    with ParallelWrapper(small_model(), 2, callbacks=[WeightAverage(**arguments)]) as wrapper:
        wrapper.fit(Loader(small_dataset(56), 4), 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
