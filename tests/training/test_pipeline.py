"""A pipeline's stages together equal one replica in weights, reports, evaluations, stops and failures."""

import json
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from cupynet import SGD, Dataset, Loader, Nesterov, OneCycle, ParameterAveraging, Pipeline, Synchronizer, create_backend
from cupynet.backend.cpu.numpy_backend import NumpyBackend
from cupynet.commands import train as train_command
from cupynet.nn import Backward, Context, Conv2D, Dense, Dropout, GlobalAvgPool2D, Model, Sequential, SoftmaxNLL
from cupynet.parallel.communicators.threads import ThreadCommunicator
from cupynet.training import Callback, EpochRecord, ParallelWrapper, Trainer
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.calls import watch
from tests.support.commands import SMALL as SMALL_LENET
from tests.support.networks import SMALL, small_networks
from tests.support.settings import settings_of
from tests.support.trainers import assert_resumes, on_loan, workspaces
from tests.support.training import Identity, On, small_dataset, small_model

DATA = small_dataset(61)
LOADER = Loader(DATA, 6, seed=3)


def clipped() -> Nesterov:
    return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.5)


def close(found: Any, expected: Any, bound: float = 1e-12) -> bool:
    return bool(np.abs(found - expected).max() <= bound * np.abs(expected).max())


@pytest.mark.parametrize(
    ("stages", "micro_batches", "workers", "backend", "synchronizer"),
    [
        (2, 8, 1, "numba", ParameterAveraging(1)),
        ([["conv1"], ["pool1"], ["dense1"], ["output"]], 3, 1, "numba", ParameterAveraging(1)),
        (3, 4, 2, "numpy", ParameterAveraging(1)),
        (2, 4, 3, "numpy", GradientMean()),
    ],
    ids=["small micro-batches", "named", "averaged replicas", "replicas that share gradients"],
)
def test_a_pipeline_equals_the_unsplit_network(
    stages: Any, micro_batches: int, workers: int, backend: str, synchronizer: Synchronizer
) -> None:
    """Training uses momentum, l2 and clipping. In the last round, one replica has one sample, the others have none."""
    found, whole = small_model(backend=backend), small_model(backend=backend)
    start = whole.params.master.copy()
    for model, pipeline in ((found, Pipeline(stages, micro_batches)), (whole, None)):
        options: dict[str, Any] = {"optimizer": clipped(), "synchronizer": synchronizer, "pipeline": pipeline}
        with ParallelWrapper(model, workers, **options, timeout_s=60) as wrapper:
            wrapper.fit(Loader(small_dataset(60 * workers + 1), 6, seed=3))
            assert on_loan(wrapper) == [0] * wrapper.placement.ranks
    assert close(found.params.master, whole.params.master)
    assert not close(whole.params.master, start, 1e-3)


@pytest.mark.parametrize("name", small_networks())
def test_a_stage_may_end_after_any_layer(name: str) -> None:
    images = np.random.default_rng(1).integers(0, 256, (10, 9, 8, 2)).astype(np.uint8)
    data = Dataset("noise", images, np.arange(10) % 3, 3)
    found = []
    for pipeline in (None, Pipeline([[layer] for layer, _ in small_networks()[name]], 4)):
        model = Model(small_networks()[name], SMALL, create_backend("numpy", "double"), 1)
        with ParallelWrapper(model, 1, optimizer=SGD(0.1), pipeline=pipeline, timeout_s=60) as wrapper:
            wrapper.fit(Loader(data, 5, seed=1), epochs=1, evaluate_on=data)
            assert set(on_loan(wrapper)) == {0}
        found.append(model.params.master)
    assert close(found[1], found[0])


def test_the_model_has_the_weights_of_all_stages_and_stages_take_loaded_weights(tmp_path: Path) -> None:
    model = small_model()

    def look(trainer: Trainer, record: EpochRecord) -> None:
        assert record.evaluation is not None
        right = (model.predict(DATA.images).argmax(axis=1) == DATA.labels).mean()
        assert right == pytest.approx(record.evaluation.accuracy, abs=1e-12)

    callbacks = [On("on_epoch_end", look)]
    with ParallelWrapper(model, 2, optimizer=clipped(), pipeline=Pipeline(2), callbacks=callbacks) as wrapper:
        wrapper.fit(LOADER, epochs=3, evaluate_on=DATA)
        first, second = (stage.weights() for stage in wrapper.replicas()[:2])
        np.testing.assert_equal(model.weights(), first | second)
        path = wrapper.checkpoint(tmp_path)
        model.load_weights({name: 0 * weight for name, weight in model.weights().items()})
        assert wrapper.evaluate(DATA).loss == pytest.approx(np.log(3))
        wrapper.restore(path)
        np.testing.assert_equal(model.weights(), first | second)


@pytest.mark.parametrize(
    ("synchronizer", "iteration"),
    [(ParameterAveraging(3), 2), (GradientMean(), 4)],
    ids=["between averages", "end of an epoch"],
)
def test_replicas_of_a_pipeline_resume_bit_for_bit(synchronizer: Synchronizer, iteration: int, tmp_path: Path) -> None:
    data = small_dataset(45)  # 8 batches of 6 for 2 replicas, the last of three samples

    def wrapper_of(*callbacks: Callback) -> ParallelWrapper:
        optimizer = Nesterov(OneCycle(0.1), max_grad_norm=1.0)
        options: dict[str, Any] = {"optimizer": optimizer, "synchronizer": synchronizer, "log_every": 2}
        return ParallelWrapper(small_model("float"), 2, pipeline=Pipeline(2), callbacks=callbacks, **options)

    held_out = Loader(data, 7, shuffle=False)
    assert_resumes(wrapper_of, iteration, tmp_path, Loader(data, 6, seed=3), evaluate_on=held_out)


def test_a_pipeline_with_stages_without_weights_resumes(tmp_path: Path) -> None:
    layers = {"drop": Dropout(0.1), "conv": Conv2D(3, 3), "mean": GlobalAvgPool2D()}

    def wrapper_of(*callbacks: Callback) -> ParallelWrapper:
        model = Model(layers, DATA.image_shape, create_backend("numpy", "double"))
        return ParallelWrapper(model, 2, pipeline=Pipeline([["drop"], ["conv"], ["mean"]]), callbacks=callbacks)

    assert_resumes(wrapper_of, 4, tmp_path, LOADER, evaluate_on=LOADER)


def test_reports_and_evaluations_of_a_pipeline_equal_the_unsplit_network() -> None:
    histories, held_out = [], Loader(small_dataset(50, seed=2), 8, shuffle=False)
    for pipeline in (None, Pipeline(3, 4)):
        with ParallelWrapper(small_model(), 2, 2, optimizer=clipped(), pipeline=pipeline, log_every=2) as wrapper:
            histories.append(wrapper.fit(LOADER, epochs=2, evaluate_on=held_out))
            evaluation = wrapper.trainer.evaluation
            assert evaluation is not None and evaluation.to_dict() == wrapper.evaluate(held_out).to_dict()
    whole, stages = histories
    for name in ("loss", "score_after_averaging"):
        found = stages.reports[name]
        assert len(found) == 6 and None not in found and found == pytest.approx(whole.reports[name], rel=1e-10)
    assert (stages["samples"], stages["confusion"]) == (whole["samples"], whole["confusion"])
    assert stages["test_loss"] == pytest.approx(whole["test_loss"], rel=1e-10)


def test_the_summary_of_a_run_has_its_stages_and_the_bound_of_their_speed_up(tmp_path: Path) -> None:
    stages = "parallel.pipeline.stages=[[conv1,pool1,conv2,pool2],[dense1,output]]"
    small = ("data=synthetic", "data.train=64", "data.test=16", "epochs=1", "batch_size=16", "backend=numpy")
    settings = settings_of(*small, *SMALL_LENET, "parallel=pipeline", stages)
    train_command.train(train_command.prepare(settings), tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())["pipeline"]
    assert found["layers"] == [["conv1", "pool1", "conv2", "pool2"], ["dense1", "output"]] and found["bound"] > 0


def test_the_memory_of_a_stage_does_not_grow_with_the_number_of_micro_batches() -> None:
    found = []
    for micro_batches in (4, 16):
        with ParallelWrapper(small_model(), 1, pipeline=Pipeline(2, micro_batches)) as wrapper:
            wrapper.fit(Loader(small_dataset(6 * micro_batches), 3 * micro_batches), epochs=2)  # micro-batches of three
            found.append([workspace.allocated_bytes for workspace in workspaces(wrapper)])
    assert found[0] == found[1]


def test_only_the_first_stage_loads_images(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[int] = []
    loaded: set[Any] = set()
    watch(monkeypatch, NumpyBackend, "load_images", lambda _, backend, *given: loaded.add(backend))
    with ParallelWrapper(small_model(), 2, pipeline=Pipeline(3)) as wrapper:
        wrapper.fit(LOADER)
        wrapper.on_workers(lambda trainer: ranks.extend([trainer.rank] * (trainer.backend in loaded)))
    assert sorted(ranks) == [0, 3]


def test_batches_of_an_evaluation_do_not_pile_up_before_a_slow_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Identity):
        def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
            time.sleep(0.003)
            return super().forward(x, context)

    outputs = (4, 6, 6, 3)
    waiting: list[int] = []

    def note(_: None, communicator: Any, array: Any, to: int) -> None:
        if array.shape == outputs:  # excludes weights, which the stage may not have received yet
            messages = communicator.group.messages[communicator.rank, to]
            waiting.append(sum(message.shape == outputs for message in list(messages)))

    watch(monkeypatch, ThreadCommunicator, "send", note)
    network = Sequential({"conv": Conv2D(3, 3), "slow": Slow(), "output": Dense(3)})
    model = Model(network, small_model().input, create_backend("numpy"), 1)
    with ParallelWrapper(model, 1, pipeline=Pipeline([["conv"], ["slow", "output"]])) as wrapper:
        wrapper.fit(small_dataset(8), epochs=1)
        waiting.clear()
        wrapper.evaluate(Loader(small_dataset(120), 4))
    assert len(waiting) == 30 and max(waiting) <= 1


def test_waiting_for_another_stage_is_not_counted_as_computing() -> None:
    class Sleeping(SoftmaxNLL):
        """Only the last stage computes the loss."""

        def __call__(self, *arguments: Any) -> Any:
            time.sleep(0.01)
            return super().__call__(*arguments)

    network = Sequential({"dense1": Dense(4), "output": Dense(3)})
    model = Model(network, small_model().input, create_backend("numpy"), 1, Sleeping())
    with ParallelWrapper(model, 1, pipeline=Pipeline(2, 2), log_every=2) as wrapper:
        reports = wrapper.fit(Loader(small_dataset(40), 4), epochs=1, evaluate_on=small_dataset(40)).reports
        spent = wrapper.trainer.statistics.spent
    assert spent is not None
    slept = 10 * 2 * 0.01  # rounds, micro-batches
    assert spent.waiting_s[0] > 0.9 * slept > spent.waiting_s[1]
    assert spent.compute_s[0] < spent.waiting_s[0] and spent.compute_s[1] > 0.9 * slept
    for rank in range(2):
        parts = (spent.compute_s, spent.data_s, spent.averaging_s, spent.waiting_s)
        assert sum(part[rank] for part in parts) <= spent.rounds_s[rank]
    assert reports["waiting_s"][-1] > 0


class Fuse(Identity):
    """Fails in a backward pass. Meanwhile, the stage before continues, and the next one waits."""

    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        def fail(dy: Any) -> NoReturn:
            raise ZeroDivisionError

        return x, fail


def test_a_stage_that_fails_ends_all_stages_with_its_own_error() -> None:
    network = Sequential({"first": Dense(6), "second": Dense(5), "fuse": Fuse(), "third": Dense(3)})
    model = Model(network, small_model().input, create_backend("numpy"), 1)
    pipeline = Pipeline([["first"], ["second", "fuse"], ["third"]], 4)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        ParallelWrapper(model, 2, pipeline=pipeline, timeout_s=20) as wrapper,
    ):
        wrapper.fit(small_dataset(200), batch_size=8)
    (note,) = getattr(caught.value, "__notes__", [])
    assert "(stage 2 of 3, " in note and "fuse; numpy, device 0), epoch 1, at batch " in note
    assert any(frame.name == "fail" for frame in caught.traceback)
