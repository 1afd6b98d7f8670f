"""The options of training: one list, checked once, before anything is written."""

from __future__ import annotations

import inspect
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from cupynet.commands.train import prepare, train
from cupynet.data import Loader, Shift
from cupynet.nn import BatchNorm, Dense, Flatten, Sequential
from cupynet.optim import SGD, Adam, ReduceOnPlateau
from cupynet.parallel import (
    Adaptive,
    ElasticAveraging,
    ParameterAveraging,
    Pipeline,
    Placement,
    Synchronizer,
)
from cupynet.training import (
    EarlyStopping,
    History,
    NonFinite,
    ParallelWrapper,
    TrainingOptions,
    WeightAverage,
    options,
)
from cupynet.training.fit import Fit
from cupynet.training.options import CheckedOptions, FitData
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import small_dataset, small_model

SMALL = ("data=synthetic", "data.train=64", "data.test=16", "model=mlp", "model.layers.dense1.units=8", "backend=numpy")


def test_the_wrapper_takes_the_options() -> None:
    """In the same order, with the same types and defaults."""
    model, *others = inspect.signature(ParallelWrapper).parameters.values()
    assert (model.name, model.annotation) == ("model", "Model")
    assert others == list(inspect.signature(TrainingOptions).parameters.values())
    described = inspect.getdoc(TrainingOptions) or ""
    assert [each.name for each in fields(TrainingOptions) if f"    {each.name}: " not in described] == []


def test_every_argument_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {each.name: object() for each in fields(TrainingOptions)}
    seen: list[TrainingOptions] = []

    def check(found: TrainingOptions, *arguments: Any) -> CheckedOptions:
        seen.append(found)
        raise InterruptedError

    monkeypatch.setattr(TrainingOptions, "check", check)
    with pytest.raises(InterruptedError):
        ParallelWrapper(small_model(), **given)  # type: ignore[arg-type]
    assert vars(seen[0]) == given


def checked(data: FitData | None = None, model: Any = None, **arguments: Any) -> CheckedOptions:
    model = model or small_model()
    return TrainingOptions(**arguments).check(model.network, model.backend.name, data=data)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ({"averaging_frequency": 3}, "averaging_frequency"),  # the default, but written
        ({"average_updaters": True}, "average_updaters"),
        ({"report_score_after_averaging": False}, "report_score_after_averaging"),
    ],
)
def test_a_synchronizer_and_what_describes_another_contradict_each_other(
    arguments: dict[str, Any], setting: str
) -> None:
    with refused(setting):
        ParallelWrapper(small_model(), 2, synchronizer=ParameterAveraging(5), **arguments)


def test_averaging_has_defaults() -> None:
    found = checked(workers=2).synchronizer
    assert isinstance(found, ParameterAveraging)
    assert (found.averaging_frequency, found.average_updaters, found.report_score) == (3, True, True)
    found = checked(averaging_frequency="end", average_updaters=False, report_score_after_averaging=False).synchronizer
    assert isinstance(found, ParameterAveraging)
    assert (found.averaging_frequency, found.average_updaters, found.report_score) == ("end", False, False)


@pytest.mark.parametrize(
    "arguments",
    [
        {"workers": 1, "averaging_frequency": 10, "average_updaters": False},
        {"workers": 1, "synchronizer": ElasticAveraging(3), "learning_rate_scale": "linear"},
        {"workers": 2, "reduce": "host", "data_on_device": False},
    ],
)
def test_what_one_worker_or_a_cpu_does_not_need_is_accepted(arguments: dict[str, Any]) -> None:
    with ParallelWrapper(small_model(), **arguments) as wrapper:
        assert wrapper.fit(Loader(small_dataset(20), 4), 1).trainer.epoch == 1


NORM = Sequential({"flat": Flatten(), "norm": BatchNorm(sync=True), "output": Dense(3)})
IMAGES = FitData(examples=64, batch_size=8)


@pytest.mark.parametrize(
    ("arguments", "data", "setting"),
    [
        ({"workers": 0}, None, "workers"),
        ({"averaging_frequency": 0}, None, "averaging_frequency"),
        ({"prefetch_buffer": -1}, None, "prefetch_buffer"),
        ({"report_every": -1}, None, "report_every"),
        ({"blas_threads": 0}, None, "blas_threads"),
        ({"optimizer": Adam}, None, "optimizer"),
        ({"devices": [0]}, None, "devices"),
        ({"workers": 2, "accumulate": 0}, None, "accumulate"),
        ({"accumulate": 2, "pipeline": Pipeline(2)}, None, "accumulate"),
        ({"accumulate": 9}, IMAGES, "accumulate"),
        ({"reduce": "nccl"}, None, "reduce"),
        ({"reduce": "mean"}, None, "reduce"),
        ({"data_on_device": True}, None, "data_on_device"),
        ({"pipeline": Pipeline(9)}, None, "pipeline.stages"),
        ({"workers": 2, "synchronizer": Synchronizer()}, None, "synchronizer"),
        ({"workers": 2, "pipeline": Pipeline(2), "averaging_frequency": Adaptive(0.1)}, None, "synchronizer"),
        ({"learning_rate_scale": "cubic"}, None, "learning_rate_scale"),
        ({"progress": "line"}, None, "progress"),
        ({"launcher": "processes"}, None, "launcher"),
        ({"callbacks": [History]}, None, "callbacks"),
        ({"callbacks": [EarlyStopping()]}, IMAGES, "EarlyStopping"),
        ({"optimizer": Adam(ReduceOnPlateau(0.1))}, IMAGES, "optimizer.learning_rate"),
        (
            {"workers": 2, "averaging_frequency": "end", "callbacks": [EarlyStopping()]},
            replace(IMAGES, validates=True),
            "EarlyStopping",
        ),
    ],
)
def test_a_refusal_names_the_option(arguments: dict[str, Any], data: FitData | None, setting: str) -> None:
    with refused(setting):
        checked(data, **arguments)


def test_images_that_are_augmented_are_not_kept_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "on_device", lambda name, value, backend: value)  # as on a GPU
    checked(IMAGES, data_on_device=True)
    with refused("data_on_device"):
        checked(replace(IMAGES, augmented=True), data_on_device=True)


def test_the_data_of_a_fit_are_described() -> None:
    loader = Loader(small_dataset(20), 4, augment=[Shift(1)])
    for evaluate_on, split, validates in ((None, "test", False), (loader, "test", False), (loader, "validation", True)):
        found = FitData.of(Fit(loader, 1, evaluate_on, 1, split))
        assert found == FitData(20, 4, augmented=True, validates=validates)


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (("devices=[0]",), "devices"),
        (("accumulate=200",), "accumulate"),
        (("parallel.reduce=nccl",), "parallel.reduce"),
        (("memory.data_on_device=true",), "memory.data_on_device"),
        (("parallel=pipeline", "parallel.pipeline.stages=9"), "parallel.pipeline.stages"),
        (("workers=2", "parallel=elastic", "parallel.synchronizer.pull=0.9"), "parallel.synchronizer.pull"),
        (("callbacks=early_stopping",), "callbacks.early_stopping"),
        (("batch_size=1", "model.layers.drop1._target_=cupynet.nn.BatchNorm"), "batch_size"),
    ],
)
def test_a_refusal_names_the_setting_and_nothing_is_loaded(
    overrides: tuple[str, ...], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupynet.data.Synthetic.load", lambda source: pytest.fail("the data were loaded"))
    with refused(setting):
        prepare(settings_of(*SMALL, *overrides))


def test_options_are_checked_once_for_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TrainingOptions] = []
    check = TrainingOptions.check

    def counted(found: TrainingOptions, *arguments: Any, **named: Any) -> CheckedOptions:
        assert not any(tmp_path.iterdir())
        seen.append(found)
        return check(found, *arguments, **named)

    monkeypatch.setattr(TrainingOptions, "check", counted)
    with ParallelWrapper(small_model(), 2, callbacks=[History()], run=tmp_path / "python") as wrapper:
        wrapper.fit(small_dataset(20)).fit(small_dataset(20))
    assert len(seen) == 1
    shutil.rmtree(tmp_path / "python")
    experiment = prepare(settings_of(*SMALL, "epochs=1", "workers=2"))
    assert len(seen) == 2
    (tmp_path / "run").mkdir()
    train(experiment, tmp_path / "run")
    assert len(seen) == 2


def test_two_callbacks_that_decide_the_same_are_refused() -> None:
    for callbacks in ([NonFinite(), NonFinite()], [EarlyStopping(), WeightAverage()]):
        with refused(""):
            checked(callbacks=callbacks)
    checked(callbacks=[NonFinite(), WeightAverage(), EarlyStopping(restore_best=False)])


def test_the_placement_is_chosen_and_the_learning_rate_scaled() -> None:
    found = checked(workers=2, learning_rate_scale="linear", optimizer=SGD(0.1))
    assert found.placement == Placement(2, ()) and found.optimizer.learning_rate(0) == 0.2
    stages = checked(workers=2, learning_rate_scale="linear", optimizer=SGD(0.1), pipeline=Pipeline(2))
    assert stages.placement.ranks == 4 and stages.optimizer.learning_rate(0) == 0.2
