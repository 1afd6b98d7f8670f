"""The stages of a pipeline together equal one replica: weights, reports, evaluations, stops and failures."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.commands import train as train_command
from cupynet.core.errors import DivergedError
from cupynet.data import Dataset, Loader
from cupynet.nn import Conv2D, Dense, Layer, Model, Sequential, SoftmaxNLL
from cupynet.optim import SGD, Momentum, Nesterov, OneCycle
from cupynet.parallel import ParameterAveraging, Pipeline
from cupynet.parallel.communicators.threads import ThreadCommunicator
from cupynet.training import Callback, EarlyStopping, ParallelWrapper, parallel_wrapper
from cupynet.training.pipeline_stage import Stage
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.commands import SMALL as SMALL_LENET
from tests.support.commands import run
from tests.support.networks import SMALL, small_networks
from tests.support.settings import settings_of
from tests.support.training import (
    KeepState,
    Recorder,
    StopAfter,
    fingerprint,
    reported_rows,
    small_dataset,
    small_model,
)
from tests.support.workspaces import on_loan, workspaces


def clipped() -> Nesterov:
    return Nesterov(0.05, 0.9, l2=1e-3, max_grad_norm=0.5)


def trained(
    model: Model,
    pipeline: Pipeline | None,
    workers: int = 1,
    *,
    synchronizer: Any = None,
    samples: int = 61,
    batch_size: int = 6,
    epochs: int = 1,
    optimizer: Any = clipped,
    callbacks: Any = (),
) -> np.ndarray:
    """The weights after training on the bright rows."""
    with ParallelWrapper(
        model, workers, optimizer=optimizer(), synchronizer=synchronizer or ParameterAveraging(1), pipeline=pipeline,
        callbacks=callbacks, report_every=2, timeout_s=60,
    ) as wrapper:  # fmt: skip
        wrapper.fit(Loader(small_dataset(samples), batch_size, seed=3), epochs)
        assert on_loan(wrapper) == [0] * wrapper.placement.ranks
    return model.params.master


@cache
def trained_whole(backend: str = "numpy") -> np.ndarray:
    """The weights of one replica that is not split."""
    return trained(small_model(backend=backend), None)


def close(found: np.ndarray, expected: np.ndarray, bound: float = 1e-12) -> bool:
    return bool(np.abs(found - expected).max() <= bound * np.abs(expected).max())


# equal to one replica -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "micro_batches", "backend"),
    [
        (2, 8, "numba"),
        (3, 4, "numpy"),
        ([["conv1"], ["pool1"], ["dense1"], ["output"]], 3, "numba"),
    ],
    ids=["small micro-batches", "three stages", "named"],
)
def test_a_pipeline_is_the_unsplit_network(stages, micro_batches, backend):
    """Eleven iterations in double with momentum, l2 and clipping; the last batch has one sample, fewer than parts."""
    whole = trained_whole(backend)
    assert close(trained(small_model(backend=backend), Pipeline(stages, micro_batches)), whole)
    assert not close(small_model(backend=backend).params.master, whole, 1e-3)


@pytest.mark.parametrize("name", small_networks())
def test_every_layer_can_end_a_stage(name):
    """Networks cut after every layer have the gradient of the whole network."""
    data = Dataset(
        "noise", np.random.default_rng(1).integers(0, 256, (10, 9, 8, 2)).astype(np.uint8), np.arange(10) % 3, 3
    )
    models = [Model(small_networks()[name], SMALL, create_backend("numpy", "double"), 1) for _ in range(2)]
    stages = [[name] for name, _ in models[0].network]
    for model, pipeline in zip(models, (None, Pipeline(stages, 4)), strict=True):
        with ParallelWrapper(model, 1, optimizer=SGD(0.1), pipeline=pipeline, timeout_s=60) as wrapper:
            wrapper.fit(Loader(data, 5, seed=1), 1, evaluate_on=data)
            assert set(on_loan(wrapper)) == {0}
    assert close(models[1].params.master, models[0].params.master)


@pytest.mark.parametrize(("stages", "dtype", "bound"), [(3, "half", 2e-3)])
def test_a_pipeline_is_the_unsplit_network_in_narrower_types(stages, dtype, bound):
    found, whole = (trained(small_model(dtype), each, samples=18) for each in (Pipeline(stages, 4), None))
    assert close(found, whole, bound)


@pytest.mark.parametrize(
    ("stages", "workers", "synchronizer", "optimizer"),
    [
        (2, 3, GradientMean(), clipped),
        (3, 2, ParameterAveraging(1), lambda: Momentum(0.05, 0.9, l2=1e-3)),
    ],
    ids=["clipped mean of gradients", "averaging every iteration"],
)
def test_hybrid_is_data_parallel_with_the_same_replicas(stages, workers, synchronizer, optimizer):
    """Ten iterations in double; in the last round some replicas have no batch, and one has a short one."""
    options = {"synchronizer": synchronizer, "optimizer": optimizer, "samples": 6 * 9 * workers + 4}
    whole = trained(small_model(), None, workers, **options)
    assert close(trained(small_model(), Pipeline(stages, 4), workers, **options), whole)


def test_stages_start_with_the_weights_of_the_whole_network():
    model, found = small_model("half", seed=5), {}
    model.load_weights({name: weight + 0.25 for name, weight in model.weights().items()})

    class Look(Callback):
        every_rank = True

        def on_fit_start(self, trainer):
            found.update(trainer.model.weights())

    before = model.weights()
    trained(model, Pipeline(3), callbacks=[Look()])
    assert set(found) == set(before)
    for name, weight in before.items():
        np.testing.assert_array_equal(found[name], weight)


# what others see ------------------------------------------------------------------------------------------------------


def test_reports_and_evaluations_are_those_of_one_replica():
    seen = []
    held_out = Loader(small_dataset(50, seed=2), 8, shuffle=False)
    for pipeline in (None, Pipeline(3, 4)):
        recorder = Recorder()
        recorder.every_rank = False
        with ParallelWrapper(
            small_model(), 2, 2, optimizer=clipped(), pipeline=pipeline, callbacks=[recorder], report_every=2
        ) as wrapper:
            wrapper.fit(Loader(small_dataset(61), 6, seed=3), 2, evaluate_on=held_out)
            assert wrapper.evaluate(held_out).to_dict() == wrapper.trainer.evaluation.to_dict()
        seen.append(recorder)
    whole, stages = seen
    for name in ("loss", "score_after_averaging"):
        found, expected = ([getattr(each, name) for each in recorder.reports] for recorder in (stages, whole))
        assert len(found) == 6 and found == pytest.approx(expected, rel=1e-10)
    for one, other in zip(whole.epochs, stages.epochs, strict=True):
        assert (one.samples, one.evaluation.samples) == (other.samples, other.evaluation.samples)
        np.testing.assert_array_equal(one.evaluation.confusion, other.evaluation.confusion)
        assert other.evaluation.loss == pytest.approx(one.evaluation.loss, rel=1e-10)


def test_the_model_has_all_stages_weights_after_each_epoch():
    model, data = small_model(), small_dataset(61)

    class Look(Callback):
        def on_epoch_end(self, trainer, record):
            right = (model.predict(data.images).argmax(axis=1) == data.labels).mean()
            assert right == pytest.approx(record.evaluation.accuracy, abs=1e-12)

    with ParallelWrapper(model, 2, optimizer=clipped(), pipeline=Pipeline(2), callbacks=[Look()]) as wrapper:
        wrapper.fit(Loader(data, 6, seed=3), 3, evaluate_on=data)
        first, second = (stage.weights() for stage in wrapper.replicas()[:2])
        for name, weight in (first | second).items():
            np.testing.assert_array_equal(model.weights()[name], weight)


def test_weights_that_a_callback_changes_at_the_end_are_kept():
    class Halve(Callback):
        every_rank = True

        def after_finish(self, trainer):
            trainer.model.params.master *= 0.5

    whole = trained(small_model(), None, 2)
    halved = trained(small_model(), Pipeline(2), 2, callbacks=[Halve()])
    assert close(halved, 0.5 * whole)


def test_early_stopping_restores_the_best_weights_of_all_stages():
    found = []
    for pipeline in (None, Pipeline(3)):
        model, data = small_model(), small_dataset(60)
        stopping = EarlyStopping("accuracy", patience=1, max_epochs=4)
        with ParallelWrapper(
            model, 2, 1, optimizer=SGD(0.5), pipeline=pipeline, callbacks=[stopping], timeout_s=20
        ) as wrapper:
            wrapper.fit(Loader(data, 6, seed=3), 9, evaluate_on=small_dataset(50, seed=2), split="validation")
            assert wrapper.evaluate(small_dataset(50, seed=2)).accuracy == stopping.result.best_score
        found.append((stopping.result.best_epoch, stopping.result.epochs, model.params.master))
    assert found[0][:2] == found[1][:2] and found[0][0] < found[0][1]
    assert close(found[1][2], found[0][2], 1e-9)


def test_a_stop_ends_all_stages_after_the_same_round():
    stop = StopAfter(4, rank=3)
    with ParallelWrapper(small_model(), 2, 3, pipeline=Pipeline(2), callbacks=[stop]) as wrapper:
        wrapper.fit(Loader(small_dataset(400), 4), 1)
        assert wrapper.trainer.stopped.text == "enough"
        assert len({trainer.iteration for trainer in wrapper._trainers}) == 1 and wrapper.trainer.iteration < 50


@pytest.mark.parametrize(
    ("synchronizer", "iteration"),
    [(ParameterAveraging(3), 2), (ParameterAveraging(3), 5), (GradientMean(), 4)],
    ids=["between averages", "after an average", "end of an epoch"],
)
def test_training_resumes_bit_for_bit(synchronizer, iteration):
    data = small_dataset(45)  # 8 batches of 6 for 2 replicas, the last of three samples
    loader, held_out = Loader(data, 6, seed=3), Loader(data, 7, shuffle=False)

    def wrapper_of(*callbacks: Callback) -> ParallelWrapper:
        return ParallelWrapper(
            small_model("float"), 2, optimizer=Nesterov(OneCycle(0.1), max_grad_norm=1.0), report_every=2,
            synchronizer=copy.deepcopy(synchronizer), pipeline=Pipeline(2), callbacks=callbacks,
        )  # fmt: skip

    whole, rest = Recorder(), Recorder()
    with wrapper_of(KeepState(iteration), whole) as wrapper:
        wrapper.fit(loader, 2, evaluate_on=held_out)
        keeps = [each for trainer in wrapper._trainers for each in trainer.callbacks if isinstance(each, KeepState)]
        states = [keep.kept for keep in keeps]
        expected = fingerprint(wrapper.model)
    with wrapper_of(rest) as wrapper:
        wrapper.on_workers(lambda trainer: trainer.restore(states[trainer.rank]))
        wrapper.fit(loader, 2 - wrapper.trainer.epoch, evaluate_on=held_out)
        assert fingerprint(wrapper.model) == expected
    assert reported_rows(rest, iteration) == reported_rows(whole, iteration)


# what it costs --------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_number_of_micro_batches():
    found = []
    for micro_batches in (4, 16):
        with ParallelWrapper(small_model(), 1, pipeline=Pipeline(2, micro_batches)) as wrapper:
            wrapper.fit(Loader(small_dataset(6 * micro_batches), 3 * micro_batches), 2)  # micro-batches of three
            found.append([workspace.allocated_bytes for workspace in workspaces(wrapper)])
    assert found[0] == found[1]


def test_images_are_loaded_by_the_first_stage_alone(monkeypatch):
    loaded: list[int] = []

    class Watched(Stage):
        def __init__(self, whole, optimizer, groups, backend, *others):
            load = backend.load_images
            backend.load_images = lambda *given: (loaded.append(groups.world.rank), load(*given))[1]
            super().__init__(whole, optimizer, groups, backend, *others)

    monkeypatch.setattr(parallel_wrapper, "Stage", Watched)
    trained(small_model(), Pipeline(3), 2)
    assert set(loaded) == {0, 3}


def test_evaluated_batches_do_not_pile_up_before_a_slow_stage(monkeypatch):
    class Slow(Layer):
        def build(self, input, params, backend):
            return input

        def forward(self, x, context):
            time.sleep(0.003)
            return x, lambda dy: dy

    waiting: list[int] = []
    send = ThreadCommunicator.send

    def counted(communicator, array, to):
        send(communicator, array, to)
        if array.shape == (4, 6, 6, 3):  # no weights, and no word that a batch was taken
            waiting.append(len(communicator.group.messages[communicator.rank, to]))

    monkeypatch.setattr(ThreadCommunicator, "send", counted)
    network = Sequential({"conv": Conv2D(3, 3), "slow": Slow(), "output": Dense(3)})
    model = Model(network, small_model().input, create_backend("numpy"), 1)
    with ParallelWrapper(model, 1, pipeline=Pipeline([["conv"], ["slow", "output"]])) as wrapper:
        wrapper.fit(small_dataset(8), 1)
        waiting.clear()
        wrapper.evaluate(Loader(small_dataset(120), 4))
    assert len(waiting) == 30 and max(waiting) == 1


def test_warm_up_changes_nothing_and_training_measures_the_stages():
    model = small_model("float", "numba")
    before = fingerprint(model)
    with ParallelWrapper(model, 2, 1, pipeline=Pipeline(2, 4)) as wrapper:
        assert wrapper.warm_up(10) > 0
        assert fingerprint(model) == before
        wrapper.fit(Loader(small_dataset(200), 10), 2)
        statistics = wrapper.trainer.statistics
        spent, round_s = statistics.spent, 20 / statistics.clock.images_per_s
        speed = wrapper.options.pipeline.speed(wrapper.layers, 10, spent.compute_s, spent.samples, round_s)
        assert speed["layers"] == [["conv1", "pool1"], ["dense1", "output"]] and speed["micro_batches"] == 4
        first = (spent.compute_s[0] + spent.compute_s[2]) / 40 / 4  # two replicas, 40 batches in all
        assert speed["work_s"][0] == pytest.approx(first) and min(speed["work_s"]) > 0
        assert speed["round_s"] == round_s


def test_waiting_for_another_stage_is_not_counted_as_computing():
    class Sleeping(SoftmaxNLL):
        """The last stage alone has the loss."""

        def __call__(self, *arguments):
            time.sleep(0.01)
            return super().__call__(*arguments)

    network = Sequential({"dense1": Dense(4), "output": Dense(3)})
    model = Model(network, small_model().input, create_backend("numpy"), 1, Sleeping())
    recorder = Recorder()
    with ParallelWrapper(model, 1, pipeline=Pipeline(2, 2), callbacks=[recorder], report_every=2) as wrapper:
        wrapper.fit(Loader(small_dataset(40), 4), 1, evaluate_on=small_dataset(40))
        spent, clocks = wrapper.trainer.statistics.spent, [trainer.statistics.clock for trainer in wrapper._trainers]
    slept = 10 * 2 * 0.01  # rounds, micro-batches
    assert spent.waiting_s[0] > 0.9 * slept > spent.waiting_s[1]
    assert spent.compute_s[0] < spent.waiting_s[0] and spent.compute_s[1] > 0.9 * slept
    assert spent.waiting_s == [clock.waiting_s for clock in clocks]
    for rank in range(2):
        parts = (spent.compute_s, spent.data_s, spent.averaging_s, spent.waiting_s)
        assert sum(part[rank] for part in parts) <= spent.rounds_s[rank]
    assert recorder.reports[-1].waiting_s > 0 and recorder.epochs[0].spent.waiting_s[0] > 0


# failures -------------------------------------------------------------------------------------------------------------


class Fuse(Layer):
    """The identity, which raises in its n-th pass."""

    def __init__(self, at: int, backward: bool) -> None:
        self.at, self.fails_backward, self.passes = at, backward, 0

    def build(self, input, params, backend):
        return input

    def forward(self, x, context):
        self._pass(backward=False)
        y = self.backend.borrow(x.shape)
        y[...] = x

        def backward(dy):
            self._pass(backward=True)
            return dy

        return y, backward

    def _pass(self, *, backward: bool) -> None:
        self.passes += backward == self.fails_backward
        if self.passes == self.at:
            raise ZeroDivisionError("the fuse has blown")


def with_a_fuse(place: int, at: int, backward: bool) -> tuple[Model, list[list[str]]]:
    layers: list[tuple[str, Layer]] = [("first", Dense(6)), ("second", Dense(5)), ("third", Dense(3))]
    layers.insert(place, ("fuse", Fuse(at, backward)))
    names = [["first"], ["second"], ["third"]]
    names[max(place - 1, 0)].insert(0 if place == 0 else 1, "fuse")
    model = small_model()
    return Model(Sequential(dict(layers)), model.input, model.backend, 1), names


@pytest.mark.parametrize(("place", "backward"), [(1, False), (2, True), (3, False)])
def test_a_stage_that_fails_ends_all_with_its_own_error(place, backward):
    model, stages = with_a_fuse(place, 5, backward)
    with (
        pytest.raises(ZeroDivisionError) as caught,
        ParallelWrapper(model, 2, pipeline=Pipeline(stages, 4), timeout_s=20) as wrapper,
    ):
        wrapper.fit(Loader(small_dataset(200), 8), 2)
    (note,) = caught.value.__notes__
    assert re.match(rf"worker \d \(stage {place} of 3, .*fuse; numpy, device 0\), epoch 1, at batch \d+$", note), note
    assert any("_pass" in frame.name for frame in caught.traceback)


@pytest.mark.slow
def test_fifty_stages_that_fail_at_random_moments():
    rng, data = random.Random(7), small_dataset(120)
    for _ in range(50):
        place, at, backward = rng.randrange(4), rng.randrange(1, 150), rng.random() < 0.5
        model, stages = with_a_fuse(place, at, backward and place > 0)  # nobody differentiates before the first weights
        pipeline, workers = Pipeline(stages, 4), rng.choice([1, 2, 3])
        with pytest.raises(ZeroDivisionError), ParallelWrapper(model, workers, pipeline=pipeline, timeout_s=20) as all_:
            all_.warm_up(8)
            all_.fit(Loader(data, 8), 20, evaluate_on=data)


def test_a_stage_that_diverges_ends_the_run():
    model = small_model("float")
    with (
        pytest.raises(DivergedError),
        ParallelWrapper(model, 2, 2, optimizer=SGD(1e30), pipeline=Pipeline(2), timeout_s=20) as wrapper,
    ):
        wrapper.fit(Loader(small_dataset(200), 4), 3)


# from the command line ------------------------------------------------------------------------------------------------


SMALL_RUN = ("data=synthetic", "data.train=64", "data.test=16", "epochs=1", "batch_size=16", "backend=numpy")


def test_a_run_of_the_command_reports_its_stages(tmp_path):
    stages = ["parallel.pipeline.stages=[[conv1,pool1,conv2,pool2],[dense1,output]]"]
    settings = settings_of(*SMALL_RUN, *SMALL_LENET, "parallel=pipeline", *stages)
    train_command.train(train_command.prepare(settings), tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())["pipeline"]
    assert found["layers"] == [["conv1", "pool1", "conv2", "pool2"], ["dense1", "output"]] and found["bound"] > 0


@pytest.mark.slow
@pytest.mark.skipif("CUPYNET_DATA" not in os.environ, reason="needs MNIST below CUPYNET_DATA")
@pytest.mark.parametrize("experiment", ["model_parallel", "hybrid_parallel"])
def test_an_epoch_of_mnist(experiment, tmp_path):
    data = str(Path(os.environ["CUPYNET_DATA"]).resolve())
    stdout, _ = run(tmp_path, f"experiment={experiment}", "epochs=1", "data.fallback=null", CUPYNET_DATA=data)
    accuracy = float(re.search(r"test accuracy +([\d.]+) %", stdout)[1])
    assert accuracy > 95


def test_stages_are_evaluated_with_the_weights_that_the_user_loads():
    model, data = small_model(), small_dataset(61)
    with ParallelWrapper(model, 2, optimizer=clipped(), pipeline=Pipeline(2)) as wrapper:
        wrapper.fit(Loader(data, 6, seed=3), 3)
        model.load_weights({name: 0 * weight for name, weight in model.weights().items()})
        assert wrapper.evaluate(data).loss == pytest.approx(np.log(3))
