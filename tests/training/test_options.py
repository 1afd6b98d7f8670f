"""Training options: a single list, checked once before anything is written."""

import inspect
from dataclasses import replace
from typing import Any

import pytest

from cupynet import BatchNorm, Dense, Flat, Hinge, Image, Loader, Model, Sequential, Shift, create_backend
from cupynet.core import shared_options
from cupynet.optim import SGD, Adam, AMSGrad, ReduceOnPlateau
from cupynet.parallel import Adaptive, ElasticAveraging, ParameterAveraging, Pipeline, Synchronizer
from cupynet.training import (
    Checkpoint,
    EarlyStopping,
    HistoryWriter,
    LambdaCallback,
    ParallelWrapper,
    TrainingOptions,
    WeightAverage,
)
from cupynet.training.fit import Fit
from cupynet.training.options import CheckedOptions, FitData
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


def test_the_wrapper_takes_all_training_options_with_the_same_defaults() -> None:
    model, *others = inspect.signature(ParallelWrapper).parameters.values()
    assert others == list(inspect.signature(TrainingOptions).parameters.values())


def checked(data: FitData | None = None, **arguments: Any) -> CheckedOptions:
    model = small_model()
    return TrainingOptions(**arguments).check(model.network, model.backend.name, data=data)


def test_options_that_one_worker_or_a_cpu_does_not_need_are_accepted() -> None:
    checked(workers=1, averaging_frequency=10, average_updaters=False)
    checked(workers=1, synchronizer=ElasticAveraging(3), learning_rate_scale="linear")
    checked(workers=2, reduce="host", data_on_device=False)


IMAGES, AVERAGING = FitData(examples=64, batch_size=8), ParameterAveraging(5)


@pytest.mark.parametrize(
    ("arguments", "data", "setting"),
    [
        ({"workers": 0}, None, "workers"),
        ({"prefetch_buffer": -1}, None, "prefetch_buffer"),
        ({"log_every": -1}, None, "log_every"),
        ({"blas_threads": 0}, None, "blas_threads"),
        ({"optimizer": Adam}, None, "optimizer"),
        ({"optimizer": "adamm"}, None, "optimizer"),
        ({"devices": [0]}, None, "devices"),
        ({"accumulation_steps": 2, "pipeline": Pipeline(2)}, None, "accumulation_steps"),
        ({"accumulation_steps": 9}, IMAGES, "accumulation_steps"),
        ({"reduce": "nccl"}, None, "reduce"),
        ({"data_on_device": True}, None, "data_on_device"),
        ({"pipeline": Pipeline(9)}, None, "pipeline.stages"),
        ({"workers": 2, "synchronizer": Synchronizer()}, None, "synchronizer"),
        ({"workers": 2, "synchronizer": AVERAGING, "averaging_frequency": 3}, None, "averaging_frequency"),
        ({"workers": 2, "synchronizer": AVERAGING, "average_updaters": True}, None, "average_updaters"),
        (
            {"workers": 2, "synchronizer": AVERAGING, "report_score_after_averaging": False},
            None,
            "report_score_after_averaging",
        ),
        ({"workers": 2, "pipeline": Pipeline(2), "averaging_frequency": Adaptive(0.1)}, None, "synchronizer"),
        ({"learning_rate_scale": "cubic"}, None, "learning_rate_scale"),
        ({"progress": "line"}, None, "progress"),
        ({"launcher": "processes"}, None, "launcher"),
        ({"callbacks": [HistoryWriter]}, None, "callbacks"),
        ({"callbacks": [HistoryWriter()] * 2}, None, "callbacks"),
        ({"run": ""}, None, "run"),
        ({"callbacks": [EarlyStopping()]}, IMAGES, "EarlyStopping"),
        ({"log_every": 0, "callbacks": [EarlyStopping(max_score=5.0)]}, IMAGES, "log_every"),
        ({"callbacks": [Checkpoint(best="loss")]}, replace(IMAGES, evaluates=False), "Checkpoint.best"),
        ({"optimizer": Adam(ReduceOnPlateau(0.1))}, IMAGES, "optimizer.learning_rate"),
        (
            {"workers": 2, "averaging_frequency": "end", "callbacks": [EarlyStopping()]},
            replace(IMAGES, validates=True),
            "EarlyStopping",
        ),
    ],
)
def test_an_invalid_option_is_refused_by_name(arguments: dict[str, Any], data: FitData | None, setting: str) -> None:
    with refused(setting):
        checked(data, **arguments)


def test_augmented_images_are_refused_with_data_on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_options, "on_device", lambda name, value, backend: value)  # as on a GPU
    checked(IMAGES, data_on_device=True)
    with refused("data_on_device"):
        checked(replace(IMAGES, augmented=True), data_on_device=True)


def test_a_batch_norm_that_is_not_frozen_needs_two_samples_at_a_time() -> None:
    def check(batch_size: int, parts: int = 1, workers: int = 1, *, sync: bool = False, frozen: bool = False) -> None:
        model = Model([BatchNorm(sync=sync), Dense(3)], Flat(5), "numpy")
        if frozen:
            model.freeze("batchnorm1")
        options = TrainingOptions(workers=workers, accumulation_steps=parts)
        options.check(model.network, "numpy", data=replace(IMAGES, examples=5, batch_size=batch_size))

    for batch_size, parts in ((1, 1), (2, 2), (9, 5)):
        with refused("batch_size"):
            check(batch_size, parts)
    check(3, parts=2)
    check(1, workers=2, sync=True)
    check(1, frozen=True)


@pytest.mark.parametrize(("split", "validates"), [("test", False), ("validation", True)])
def test_only_validation_data_and_not_test_data_count_as_validation(split: str, validates: bool) -> None:
    loader = Loader(small_dataset(20), 4, augment=[Shift(1)])
    expected = FitData(20, 4, augmented=True, validates=validates)
    assert FitData.of(Fit(loader, 1, loader, 1, split), small_model().loss) == expected


def test_two_callbacks_that_set_the_final_weights_are_refused() -> None:
    with refused(""):
        checked(callbacks=[EarlyStopping(), WeightAverage()])
    checked(callbacks=[WeightAverage(), EarlyStopping(restore_best_weights=False)])


@pytest.mark.parametrize("pipeline", [None, Pipeline(2)])
def test_learning_rate_scale_counts_replicas_and_not_stages(pipeline: Pipeline | None) -> None:
    assert isinstance(checked(workers=2, optimizer="amsgrad").optimizer, AMSGrad)
    optimizer = SGD(0.1)
    found = checked(workers=2, learning_rate_scale="linear", optimizer=optimizer, pipeline=pipeline)
    assert (found.optimizer.learning_rate(0), optimizer.learning_rate(0)) == (0.2, 0.1)
    assert found.placement.ranks == (2 if pipeline is None else 4)


def test_ranks_compare_the_arguments_that_must_be_equal_in_all_processes() -> None:
    """A callback that communicates waited for the other ranks until the timeout."""

    def shared(model: Model, **options: Any) -> dict[str, Any]:
        found = TrainingOptions(**options).check(model.network, model.backend.name)
        return found.shared(model, Fit(Loader(small_dataset(8), 4), 1))

    def other(**arguments: Any) -> Model:
        network = Sequential({"dense1": Dense(4, **arguments), "output": Dense(3)})
        return Model(network, Image(8, 8, 1), create_backend("numpy"), 1)

    before, hinge, slow = shared(other()), other(), other()
    hinge.loss = Hinge()
    slow.set_learning_rate_factors({"dense1": 0.1})
    changes = {
        "network.dense1": shared(other(activation="tanh")),
        "loss": shared(hinge),
        "learning_rate_factors": shared(slow),
        "metrics": shared(other(), metrics=["auc"]),
        "synchronizer.measure_every": shared(other(), synchronizer=ParameterAveraging(3, measure_every=1)),
        "callbacks": shared(other(), callbacks=[Checkpoint(), LambdaCallback()]),
        "accumulation_steps": shared(other(), accumulation_steps=2),
    }
    assert shared(other()) == before
    for setting, after in changes.items():
        assert {name for name in before if before[name] != after[name]} == {setting}
