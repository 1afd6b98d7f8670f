"""A run's objects built from settings, including cases that only a machine with GPUs would show."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet.backend.cuda import gpus
from cupynet.commands.train import prepare
from cupynet.config.announcement import announce
from cupynet.config.experiment import Experiment
from cupynet.core.errors import DataError
from cupynet.core.files import save_weights
from cupynet.data import Data
from cupynet.nn import SoftmaxNLL
from cupynet.parallel import Placement
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import Pools, Profile
from cupynet.training.replica import Replica
from tests.support.backends import needs_bfloat16
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import small_dataset

SMALL = ("model=mlp", "model.layers.dense1.units=16", "model.layers.dense2.units=8")


def experiment(*overrides: str, workers: int = 1, devices: tuple[int, ...] = ()) -> Experiment:
    """Return an experiment with workers on devices that this machine does not have."""
    found = Experiment(settings_of("data=synthetic", "workers=1", "backend=numpy", *overrides))
    found.checked = replace(found.checked, placement=Placement(workers, devices))
    return found


def test_memory_pools_are_trimmed_above_the_sizes_in_the_settings() -> None:
    settings = ("memory.device_pool_trim_above=2KiB", "memory.pinned_pool_trim_above=64")
    (pools,) = experiment(*settings, workers=3, devices=(0, 2)).pools()
    assert isinstance(pools, Pools) and not pools.processes
    assert (pools.devices, pools.device_above, pools.pinned_above) == ([0, 2, 0], 2048, 64)


def test_device_pool_limit_caps_the_pools_of_a_job_and_is_lifted_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gpus, "limit_pools", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(gpus, "trim_pools", lambda *arguments: asked.append(arguments))
    for setting, limit in (("memory.device_pool_limit=80%", 0.8), ("seed=1", None)):
        with pytest.raises(KeyError), experiment(setting, devices=(1,)).pools_limited():
            assert asked.pop() == ([1], limit)
            raise KeyError
        assert asked == [([1], None), ([], None, 0)]
        asked.clear()
    with experiment().pools_limited():  # on a CPU
        pass
    assert not asked


def test_a_source_whose_data_are_missing_or_not_as_it_declares_is_a_data_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other_shapes = experiment(), small_dataset(12)
    loaded = Mock(side_effect=[Data("own", other_shapes, None, other_shapes), FileNotFoundError("own.npy")])
    monkeypatch.setattr(one.source, "load", loaded)
    for _ in range(2):
        with pytest.raises(DataError):
            one.load()


REFUSED = {
    ("callbacks=early_stopping", "data.train=600"): "callbacks.early_stopping",
    ("batch_size=1", "model=mlp", "model.layers.drop1._target_=cupynet.nn.BatchNorm"): "batch_size",
    ("memory.data_on_device=true",): "memory.data_on_device",
    ("model=keras_cnn", "model.layers.norm1.sync=true", "accumulation_steps=2"): "accumulation_steps",
    ("loss.class_weights=[1,2]",): "loss.class_weights",
    ("data.normalize={mean:[0.1,0.2],std:[1,1]}",): "data.normalize",
    ("data.augment=[{_target_:cupynet.data.Shift,pixels:28}]",): "data",
    ("weights=nothing",): "weights",
    ("freeze=[conv9]",): "freeze",
    ("freeze=['*']",): "freeze",
    ("learning_rate_factors={conv*:0.5,*:0}",): "learning_rate_factors",
    ("learning_rate_factors={conv9:0.1}",): "learning_rate_factors",
    ("learning_rate_factors={0:0.1}",): "learning_rate_factors",  # YAML reads the key as a number
    ("learning_rate_factors={conv1:-0.1}",): "learning_rate_factors.conv1",
    ("backend.tf32=true",): "backend.tf32",
    ("~model.layers.output",): "model",
    ("data.validation=[1,a]",): "data.validation",
    ("model.layers.conv2.kernel_size=x",): "model.layers.conv2.kernel_size",
    ("optimizer.learning_rate=-1",): "optimizer.learning_rate",
    ("optimizer.learning_rate=step",): "optimizer.learning_rate",
    ("optimizer.learning_rate={name:warmup,then:0.1}",): "optimizer.learning_rate",
    ("parallel.averaging_frequency=epoc",): "parallel.synchronizer.averaging_frequency",
    ("callbacks.progress=bars",): "callbacks.progress",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_settings_that_cannot_work_are_refused_before_data_are_loaded(
    overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cupynet.data.Synthetic.load", lambda source: pytest.fail("the data were loaded"))
    with refused(REFUSED[overrides]):
        experiment(*overrides)


def test_a_callback_that_is_set_to_null_is_removed() -> None:
    kinds = {type(each).__name__ for each in experiment("callbacks.report=null", "callbacks.progress=null").callbacks}
    assert kinds == {"HistoryWriter", "Checkpoint"}


def test_a_frozen_batch_norm_accepts_batches_of_one_sample() -> None:
    experiment("batch_size=1", "model=mlp", "model.layers.drop1._target_=cupynet.nn.BatchNorm", "freeze=[drop1]")


def test_a_new_run_does_not_write_into_the_checkpoints_or_history_of_another(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "ck").save(3, {}, {})
    (tmp_path / "history.jsonl").write_text("{}\n")
    (tmp_path / "empty").touch()
    for setting, name in (("callbacks.checkpoint.path", "ck"), ("callbacks.history.path", "history.jsonl")):
        with refused(setting, f"{tmp_path}/{name}"):
            prepare(settings_of("data=synthetic", *SMALL, f"{setting}={tmp_path}/{name}"))
        prepare(settings_of("data=synthetic", *SMALL, f"{setting}={tmp_path}/new/{name}"))
    prepare(settings_of("data=synthetic", *SMALL, f"callbacks.history.path={tmp_path}/empty"))


@pytest.mark.parametrize(
    ("overrides", "warnings"),
    [
        (("model.layers.output.activation=relu",), 1),
        (("parallel=gradients", "parallel.averaging_frequency=7"), 1),
        (("parallel=gradients",), 0),
        (("parallel=pipeline", "parallel.pipeline.stages=1", "parallel.pipeline.micro_batches=1000"), 1),
        (("parallel=diloco", "parallel.averaging_frequency=7"), 0),
    ],
)
def test_settings_that_are_valid_but_probably_a_mistake_cause_a_warning(
    overrides: tuple[str, ...], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    announce(experiment(*overrides))
    assert sum(each.levelname == "WARNING" for each in caplog.records) == warnings


@needs_bfloat16
@pytest.mark.parametrize("has_amx", [True, False])
def test_bfloat16_on_a_processor_without_amx_causes_a_warning(
    has_amx: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr("cupynet.backend.cpu.kernels.amx.available", lambda: has_amx)
    caplog.set_level("INFO")
    announce(experiment("dtype=bfloat16", "backend=numba"))
    assert any(each.levelname == "WARNING" for each in caplog.records) != has_amx
    assert ("AMX" in caplog.text) == has_amx


@pytest.mark.parametrize(("asked", "iterations"), [("true", Profile().iterations), ("3", 3)])
def test_profile_times_as_many_iterations_as_the_setting_says(asked: str, iterations: int) -> None:
    (profile,) = (each for each in experiment(f"profile={asked}").own_callbacks() if isinstance(each, Profile))
    assert profile.iterations == iterations


def test_a_run_starts_from_the_weights_that_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = experiment(*SMALL, "seed=9").model()
    own.save(tmp_path / "own.safetensors")
    save_weights(tmp_path / "weights.safetensors", own.weights())
    for file in ("own.safetensors", "weights.safetensors"):
        with caplog.at_level("INFO"):
            model = experiment(*SMALL, f"weights={tmp_path / file}", "model.layers.dense2.units=9").model()
        assert np.array_equal(model.weights()["dense1.weight"], own.weights()["dense1.weight"])
        assert "dense2.weight" in caplog.messages[-1] and "dense1.weight" not in caplog.messages[-1]


def test_freeze_and_learning_rate_factors_apply_to_the_layers_and_weights_that_they_match() -> None:
    params = experiment(*SMALL, "freeze=[dense1,*2.bias]", "learning_rate_factors={dense2:0.1}").model().params
    assert params.frozen == ["dense1.weight", "dense1.bias", "dense2.bias"] and params.rates["dense2.weight"] == 0.1


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path / "other.safetensors", {"other.weight": np.ones(3)})
    with refused("weights"):
        experiment(*SMALL, f"weights={tmp_path / 'other.safetensors'}")


def test_balanced_class_weights_are_computed_from_the_training_labels() -> None:
    one = experiment("loss.class_weights=balanced", "loss.label_smoothing=0.1")
    labels = one.load().train.labels
    loss = one.model().loss
    assert isinstance(loss, SoftmaxNLL) and loss.class_weights is not None and loss.label_smoothing == 0.1
    np.testing.assert_allclose(loss.class_weights, len(labels) / (10 * np.bincount(labels)))
    with refused("loss.class_weights", "balanced"):  # a class has no images
        one._balance(replace(small_dataset(30), classes=4))


def test_an_error_while_kernels_are_compiled_ahead_is_left_to_training(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse = Mock(side_effect=RuntimeError("no memory"))
    monkeypatch.setattr(Replica, "rehearse", rehearse)
    experiment(*SMALL).rehearse()
    rehearse.assert_called_once()
