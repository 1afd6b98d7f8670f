"""Settings turned into a run's objects: what only a machine with GPUs would show."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.array import Array
from cupynet.backend.cuda import gpus
from cupynet.commands import doctor
from cupynet.commands.train import prepare
from cupynet.config import memory_pools
from cupynet.config.announcement import announce
from cupynet.config.experiment import Experiment
from cupynet.core.errors import ConfigError, DataError
from cupynet.data import Augmentation, Data, Dataset, Draws, Source
from cupynet.parallel import Placement, placement
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import EarlyStopping, Pools, WeightAverage
from tests.support.settings import CONF, settings_of
from tests.support.training import small_dataset

SMALL = ("model=mlp", "model.layers.dense1.units=16", "model.layers.dense2.units=8")


def experiment(devices: tuple[int, ...], *overrides: str) -> Experiment:
    """An experiment on devices that this machine does not have."""
    found = Experiment(settings_of("data=synthetic", "workers=1", "backend=numpy", *overrides))
    return placed(found, Placement(1, devices))


def placed(found: Experiment, there: Placement) -> Experiment:
    """The experiment with workers on devices that this machine does not have."""
    found.checked = replace(found.checked, placement=there)
    return found


def test_pools_are_watched_and_trimmed_as_the_settings_say() -> None:
    settings = ("memory.device_pool_trim_above=2KiB", "memory.pinned_pool_trim_above=64")
    found = experiment((0, 2), *settings)
    (pools,) = placed(found, Placement(3, (0, 2))).pools()
    assert isinstance(pools, Pools) and not pools.processes
    assert (pools.devices, pools.device_above, pools.pinned_above) == ([0, 2, 0], 2048, 64)
    (untouched,) = experiment((0,)).pools()
    assert isinstance(untouched, Pools) and (untouched.device_above, untouched.pinned_above) == (None, None)


def test_pools_are_capped_for_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gpus, "limit_pools", lambda *arguments: asked.append(arguments))
    for one in (experiment((1,), "memory.device_pool_limit=80%"), experiment((1,))):
        memory_pools.limit(one.settings.memory, one.devices)
    assert asked == [([1], 0.8), ([1], None)]


def test_a_cpu_has_no_pools() -> None:
    on_cpu = experiment((), "memory.device_pool_limit=80%", "memory.device_pool_trim_above=1")
    memory_pools.limit(on_cpu.settings.memory, on_cpu.devices)
    assert on_cpu.pools() == []


@pytest.mark.standin
def test_tf32_is_used_if_it_is_enabled() -> None:
    for overrides, expected in (([], False), (["backend.tf32=true"], True)):
        found = Experiment(settings_of("data=synthetic", "workers=1", "backend=cupy", *overrides))
        assert found.model().backend.options["tf32"] is expected
    with pytest.raises(
        ConfigError, match="^backend.tf32=true: requires dtype=float, but dtype=half. Remove this setting"
    ):
        Experiment(settings_of("data=synthetic", "backend=cupy", "backend.tf32=true", "dtype=half"))
    with pytest.raises(
        ConfigError, match="^backend.tf32=true: requires a GPU, but backend numpy runs on the CPU. Remove this setting$"
    ):
        Experiment(settings_of("data=synthetic", "backend=numpy", "backend.tf32=true"))


def test_a_source_that_declared_other_shapes_is_refused() -> None:
    class Liar(Source):
        image_shape, classes = (8, 8, 3), 3

        def load(self) -> Data:
            grey: Dataset = small_dataset(12)
            return Data("grey", grey, None, grey)

    found = experiment(())
    found.source = Liar()
    with pytest.raises(DataError, match="8, 8, 3.*8, 8, 1"):
        found.load()


def test_a_source_made_without_init_is_trained_on() -> None:
    """As a user writes one that needs no setting."""

    class Bare(Source):
        image_shape, classes = (8, 8, 1), 3

        def __init__(self) -> None:
            pass

        def load(self) -> Data:
            return Data("bare", small_dataset(12), None, small_dataset(12))

    found = experiment(())
    found.source = Bare()
    assert len(list(found.train_loader(found.load()).epoch(0, create_backend("numpy")))) == 1


def test_a_source_whose_files_cannot_be_read_is_an_error_of_the_data() -> None:
    class Gone(Source):
        image_shape, classes, name = (8, 8, 1), 3, "own"

        def load(self) -> Data:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", "own.npy")

    found = experiment(())
    found.source = Gone()
    with pytest.raises(DataError, match=r"data 'own': cannot be read \(.*No such file or directory: 'own.npy'\)"):
        found.load()


@pytest.mark.parametrize(
    "part",
    [
        "{_target_: cupynet.data.Shift, pixels: 28}",
        "{_target_: cupynet.data.Elastic, sigma: 29}",
        "{_target_: tests.config.test_experiment.Cropped}",
    ],
)
def test_augmentations_that_do_not_fit_are_refused_before_anything_is_written(part: str) -> None:
    trusted = "trusted_modules=[tests.config.test_experiment]"
    with pytest.raises(ConfigError, match="Shift pixels=28|Elastic sigma=29|Cropped"):
        experiment((), "data=synthetic", f"data.augment=[{part}]", trusted)
    (found,) = doctor.examine("training", ["data=synthetic", f"data.augment=[{part}]", trusted, "backend=numpy"])
    assert found.code == 2


class Cropped(Augmentation):
    """Returns smaller images."""

    def __call__(self, images: Array, draws: Draws) -> Array:
        return images[:, 1:]


def test_batches_of_one_vector_are_refused_before_anything_is_written() -> None:
    norm = ("model=mlp", "model.layers.drop1._target_=cupynet.nn.BatchNorm")
    experiment((), *norm, "batch_size=2")
    Experiment(settings_of("data=synthetic", "backend=numpy", *norm, "batch_size=1"), trains=False)
    with pytest.raises(ConfigError, match="^batch_size=1: layer 'drop1'"):
        experiment((), *norm, "batch_size=1")


@pytest.mark.parametrize("driver", [True, False])
def test_the_first_line_is_about_what_is_used(
    driver: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr("cupynet.config.announcement.has_driver", lambda: driver)
    found = experiment(())
    found.backend_reason = "CuPy is not installed (No module named 'cupy'); numba cannot be used (it is broken)"
    announce(found)
    assert caplog.messages[0].startswith("backend ")
    assert caplog.messages[1].startswith("CuPy is not installed") == driver and "numba cannot" in caplog.messages[1]


def test_an_activation_that_the_loss_applies_too_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    warning = "has activation relu, and the loss applies softmax"
    announce(experiment(()))
    assert warning not in caplog.text
    announce(experiment((), "model.layers.output.activation=relu"))
    assert warning in caplog.text


@pytest.mark.parametrize(("cores", "workers"), [(8, 1), (2, 1), (1, 1), (8, 3)])
def test_a_resumed_pipeline_keeps_its_stages_and_replicas(
    cores: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "available_cores", lambda: cores)
    asked = [] if workers == 1 else [f"workers={workers}"]
    settings = settings_of("data=synthetic", "backend=numpy", "parallel=pipeline", *asked)
    made = Experiment(settings, 2).placement
    assert (made.workers, made.stages) == (workers, 2)


def test_a_single_mpi_rank_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for size, reported in ((1, True), (2, False)):
        made = experiment(())
        made.job = SimpleNamespace(size=size, sharing=1, on_machine=1)  # type: ignore[assignment]
        announce(made)
        assert ("there is only one rank: start mpiexec -n 4" in caplog.text) == reported
        caplog.clear()


def test_learning_rate_scale_multiplies_by_the_workers() -> None:
    found = experiment((), "parallel.learning_rate_scale=linear", "optimizer.learning_rate=0.01")
    with found.wrapper(options=replace(found.options, workers=3)) as wrapper:
        assert wrapper.optimizer.learning_rate(0) == pytest.approx(0.03)
    assert found.optimizer.learning_rate(0) == 0.01


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("data.train=600",),
            "^callbacks.early_stopping: .*data.validation=5000",
        ),
        (
            ("data.validation=100", "workers=2", "parallel.averaging_frequency=end"),
            "^callbacks.early_stopping: .*replicas averaged at the end .*parallel.averaging_frequency=epoch",
        ),
        (
            ("data.validation=100", "workers=2", "parallel=post_local", "parallel.averaging_frequency=end"),
            "averaged in every iteration until 2 epochs are complete, then at the end are not evaluated after each",
        ),
    ],
)
def test_early_stopping_that_cannot_choose_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        experiment((), "callbacks=early_stopping", *overrides)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("parallel=elastic", "parallel.synchronizer.pull=0.9"), ".pull=0.9: must be at most 0.5 with 2 workers"),
        (
            (
                "parallel=adaptive",
                "+parallel.pipeline._target_=cupynet.parallel.Pipeline",
                "+parallel.pipeline.stages=2",
            ),
            ": ParameterAveraging averages when its measurements say so, and each stage",
        ),
    ],
)
def test_a_synchronizer_that_cannot_keep_these_workers_together_is_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^parallel.synchronizer{message}") as refused:
        experiment((), *overrides, "workers=2")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("overrides", [("parallel.averaging_frequency=end",), ("parallel.averaging_frequency=epoch",)])
def test_early_stopping_on_held_out_images_is_taken(overrides: tuple[str, ...]) -> None:
    """One worker alone is evaluated after every epoch, whatever the frequency."""
    found = experiment((), "callbacks=early_stopping", "data.validation=100", *overrides)
    assert any(isinstance(each, EarlyStopping) for each in found.callbacks)


def test_data_stay_on_gpus_alone() -> None:
    with pytest.raises(
        ConfigError, match=r"^memory.data_on_device=true: requires a GPU, but backend numpy runs on the CPU"
    ):
        Experiment(settings_of("backend=numpy", "memory.data_on_device=true"))
    with Experiment(settings_of("backend=numpy", "memory.data_on_device=false")).wrapper() as wrapper:
        assert wrapper.options.data_on_device is False


def test_callbacks_that_compare_epochs_need_validation_images() -> None:
    plateau = (
        "optimizer=adam",
        "optimizer.learning_rate={_target_: cupynet.optim.ReduceOnPlateau, initial: 0.1}",
        "workers=2",
    )
    with pytest.raises(ConfigError, match="^optimizer.learning_rate: .*data.validation=5000"):
        experiment((), *plateau)
    with pytest.raises(ConfigError, match="^optimizer.learning_rate: .*parallel.averaging_frequency=epoch"):
        experiment((), *plateau, "data.validation=100", "parallel.averaging_frequency=end")
    assert experiment((), *plateau, "data.validation=100").optimizer.learning_rate(0) == 0.1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("callbacks=[early_stopping,weight_average]",), ("early_stopping", "weight_average")),
        (
            ("callbacks=weight_average", "+callbacks.swa._target_=cupynet.training.WeightAverage"),
            ("weight_average", "swa"),
        ),
        (("+callbacks.guard._target_=cupynet.training.NonFinite",), ("nonfinite", "guard")),
    ],
    ids=lambda each: " ".join(each),
)
def test_two_callbacks_that_decide_the_same_are_refused(settings: tuple[str, ...], named: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment((), *settings, "data.validation=100")
    assert all(f"callbacks.{name}" in str(caught.value) for name in named)


def test_early_stopping_leaves_the_final_weights_to_their_mean() -> None:
    both = "callbacks=[early_stopping,weight_average]", "callbacks.early_stopping.restore_best=false"
    assert experiment((), *both, "data.validation=100").callbacks


def test_stages_of_a_pipeline_cut_batches_by_themselves() -> None:
    with pytest.raises(ConfigError, match="^accumulate=2: a pipeline cuts batches into micro-batches"):
        experiment((), "parallel=pipeline", "accumulate=2")


OPTIMIZERS, LOSSES = (sorted(path.stem for path in (CONF / group).glob("*.yaml")) for group in ("optimizer", "loss"))
PAIRS = [(f"optimizer={name}", f"loss={LOSSES[place % len(LOSSES)]}") for place, name in enumerate(OPTIMIZERS)]


@pytest.mark.parametrize("files", [*PAIRS, ("callbacks=weight_average", "accumulate=3")], ids=" ".join)
def test_every_file_of_optimizers_and_losses_trains(files: tuple[str, ...]) -> None:
    """Two workers train a small network for 6 iterations: every weight array changes, and the test loss is finite."""
    assert len(OPTIMIZERS) > len(LOSSES)
    found = experiment((), "data.train=192", "data.test=64", "data.validation=0", "batch_size=16", *SMALL, *files)
    placed(found, Placement(2, ()))
    data = found.load()
    with found.wrapper(callbacks=[each for each in found.callbacks if isinstance(each, WeightAverage)]) as training:
        before = training.model.weights()
        training.fit(found.train_loader(data), 1)
        evaluation = training.evaluate(data.test)
        assert training.trainer.iteration == 6 and np.isfinite(evaluation.loss)
        after = training.model.weights()
    assert all((after[name] != weight).any() for name, weight in before.items())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("model=keras_cnn", "model.layers.norm1.sync=true", "accumulate=2"),
            "accumulate=2: layer 'norm1' exchanges statistics of whole batches with the other replicas. Use "
            "accumulate=1, or sync=false in that layer",
        ),
        (("accumulate=129", "batch_size=128"), "accumulate=129: must be at most batch_size, which is 128"),
        (("loss.class_weights=[1,2]",), "loss.class_weights: 2 weights for 10 classes: set one for each"),
        (
            ("data.normalize={mean:[0.1,0.2],deviation:[1,1]}",),
            "data.normalize={mean:[0.1,0.2],deviation:[1.0,1.0]}: images have 1 channel: give a number for each",
        ),
        (
            ("~model.layers.output",),
            "model: the network gives Flat(500), but the data has 10 classes: end in Dense(units=10)",
        ),
    ],
)
def test_bad_settings_are_refused_before_data_are_loaded(settings: tuple[str, ...], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment((), *settings)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("data.seed=null", "data.seed=None: must be an integer of at least 0"),
        ("data.validation=[1,a]", "data.validation=[1, 'a']: must be an integer of at least 0"),
        ("model.layers.conv2.kernel=x", "model.layers.conv2.kernel='x': must be an integer of at least 1, or a pair"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate=-1: must be a number above 0, or a schedule"),
        ("callbacks.checkpoint.every_epochs=0.5", "callbacks.checkpoint.every_epochs=0.5: must be an integer of at"),
        ("parallel.averaging_frequency=0", "parallel.synchronizer.averaging_frequency=0: must be an integer of at"),
    ],
)
def test_errors_of_parts_name_the_setting_and_the_value(wrong: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment((), wrong)
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("parallel.averaging_frequency=epoc", "did you mean 'epoch'"),
        ("callbacks.progress=bars", "callbacks.progress: must be a Callback"),
        ("devices=[0,0]", "devices=[0, 0]: "),
        ("devices=[]", "devices=[]: "),
    ],
)
def test_constructors_refuse_bad_values_of_the_right_type(wrong: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        experiment((), wrong)
    assert said in str(caught.value)


def test_an_error_names_the_argument_of_a_part() -> None:
    with pytest.raises(ConfigError) as refused:
        experiment((), "parallel.synchronizer.averaging_frequency=0")
    assert (refused.value.setting, refused.value.value) == ("parallel.synchronizer.averaging_frequency", "0")


def test_a_batch_may_be_cut_into_single_examples() -> None:
    assert experiment((), "accumulate=8", "batch_size=8").settings.accumulate == 8


def test_an_unused_frequency_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    announce(experiment((), "parallel=gradients", "parallel.averaging_frequency=7"))
    assert "parallel.averaging_frequency=7 is not used: gradients are shared in every iteration" in caplog.messages
    caplog.clear()
    announce(experiment((), "parallel=gradients"))
    announce(experiment((), "parallel=diloco", "parallel.averaging_frequency=7"))
    assert "is not used" not in caplog.text


@pytest.mark.parametrize(
    ("setting", "warning"),
    [
        ("model.layers.output.activation=relu", "has activation relu, and the loss applies softmax"),
        ("parallel.pipeline.micro_batches=1000", "micro_batches=1000: a batch has only 8 examples"),
    ],
)
def test_probable_mistakes_are_warned_of(setting: str, warning: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = ("data=synthetic", "backend=numpy", "parallel=pipeline", "parallel.pipeline.stages=2", "batch_size=8")
    announce(Experiment(settings_of(*settings)))
    assert warning not in caplog.text
    announce(Experiment(settings_of(*settings, setting)))
    assert warning in caplog.text


def test_a_new_run_does_not_write_into_the_results_of_another(tmp_path: Path) -> None:
    Checkpoints(tmp_path / "ck").save(3, {}, {})
    (tmp_path / "history.jsonl").write_text("{}\n")
    (tmp_path / "empty").touch()
    for setting in ("checkpoint.path={}/ck", "history.path={}/history.jsonl"):
        setting = f"callbacks.{setting.format(tmp_path)}"
        with pytest.raises(ConfigError, match=f"^{setting}: "):
            prepare(settings_of("data=synthetic", *SMALL, setting))
        prepare(settings_of("data=synthetic", *SMALL, setting.replace(str(tmp_path), f"{tmp_path}/new")))
    prepare(settings_of("data=synthetic", *SMALL, f"callbacks.history.path={tmp_path}/empty"))
    prepare(settings_of("data=synthetic", *SMALL, f"callbacks.checkpoint.path={tmp_path}/{'x' * 300}"))
