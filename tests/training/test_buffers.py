"""Running statistics and dropout in training: synchronized, averaged, skipped with a batch, resumed, on devices."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import DivergedError
from cupynet.data import Dataset, Loader
from cupynet.nn import (
    Activation,
    BatchNorm,
    Conv2D,
    Dense,
    Dropout,
    Image,
    Layer,
    LayerNorm,
    MaxPool2D,
    Model,
    Sequential,
)
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import ElasticAveraging, GradientSharing, Groups, ParameterAveraging, Pipeline, Synchronizer
from cupynet.training import Callback, NonFinite, ParallelWrapper, Replica, Trainer, parallel_wrapper
from cupynet.training.fit import Fit
from cupynet.training.resize import regrouped
from tests.support.refusals import refused
from tests.support.training import WAYS, KeepState, Seen, alone, on_threads, small_dataset

RATE = 0.05


def network(*, sync: bool = False, drop: float = 0.3) -> Sequential:
    return Sequential(
        {
            "conv": Conv2D(3, 3, bias=False),
            "norm": BatchNorm(sync=sync),
            "relu": Activation("relu"),
            "pool": MaxPool2D(2),
            "drop": Dropout(drop),
            "dense": Dense(8),
            "norm2": BatchNorm(sync=sync),
            "layer": LayerNorm(),
            "drop2": Dropout(drop),
            "output": Dense(3),
        }
    )


def model_of(dtype: str = "double", backend: str = "numpy", **options: Any) -> Model:
    return Model(network(**options), Image(8, 8, 1), create_backend(backend, dtype), seed=1)


def trained(
    workers: int,
    *,
    data: Dataset | None = None,
    batch_size: int = 6,
    synchronizer: Any = None,
    epochs: int = 2,
    optimizer: Any = None,
    dtype: str = "double",
    backend: str = "numpy",
    callbacks: Any = (),
    scales: Any = (),
    **options: Any,
) -> list[Trainer]:
    """The trainers of threads that have trained; scales: each one's loss scale."""
    data = small_dataset(60) if data is None else data

    def task(communicator: Any) -> Trainer:
        own = create_backend(backend, dtype, communicator.rank if backend == "cupy" else 0)
        own.activate()
        communicator.attach(own)
        if scales:
            own.loss_scale = scales[communicator.rank]
        trainer = Trainer(
            Replica(Model(network(**options), Image(8, 8, 1), own, seed=1), (optimizer or (lambda: SGD(RATE)))()),
            groups=Groups.of(communicator),
            synchronizer=copy.deepcopy(ParameterAveraging(1) if synchronizer is None else synchronizer),
            callbacks=[copy.deepcopy(each) for each in callbacks],
            prefetch_buffer=0,
        )
        trainer.fit(Fit(Loader(data, batch_size, seed=3), epochs))
        return trainer

    return on_threads(workers, task)


def weights(trainer: Trainer) -> dict[str, Any]:
    return trainer.model.weights()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


def near(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    for name, weight in expected.items():
        scale = max(1.0, float(np.abs(weight).max()))
        np.testing.assert_allclose(found[name] / scale, weight / scale, rtol=0, atol=tolerance, err_msg=name)


# one replica on the concatenated batch ------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "way", "backend"), [(2, "weights", "numpy"), (3, "gradients", "numba")])
def test_synchronised_statistics_equal_one_replica_on_the_concatenated_batch(
    workers: int, way: str, backend: str
) -> None:
    """With dropout, and a last round with fewer workers and a short batch."""
    batches = 5 * workers - 1
    data = small_dataset(6 * batches - 2)
    synchronizer = ParameterAveraging(1) if way == "weights" else GradientSharing()
    several = trained(workers, data=data, synchronizer=synchronizer, sync=True, backend=backend)
    one = trained(1, data=data, batch_size=6 * workers, sync=True, backend=backend)[0]
    assert several[0].iteration == one.iteration == 10
    for trainer in several:
        near(weights(trainer), weights(one), 1e-10)
        same(weights(trainer), weights(several[0]))


def test_a_last_batch_of_one_example_equals_one_replica() -> None:
    """Alone in its round it changes no running statistics, but its loss moves the layers above."""
    several = trained(2, data=small_dataset(25), synchronizer=GradientSharing(), sync=True)
    one = trained(1, data=small_dataset(25), batch_size=12, sync=True)[0]
    assert several[0].iteration == one.iteration == 6
    for trainer in several:
        near(weights(trainer), weights(one), 1e-10)
        same(weights(trainer), weights(several[0]))
    dropped = trained(1, data=small_dataset(24), batch_size=12, sync=True)[0]
    assert np.abs(weights(one)["output.bias"] - weights(dropped)["output.bias"]).max() > 1e-4


def test_each_replica_has_its_own_loss_scale() -> None:
    found, expected = trained(2, sync=True, scales=(64.0, 0.5)), trained(2, sync=True)
    near(weights(found[0]), weights(expected[0]), 1e-12)


def test_dropout_equals_one_replica_on_the_concatenated_batch() -> None:
    """Without statistics of a batch; LayerNorm has none."""

    def made(workers: int, batch_size: int) -> dict[str, Any]:
        layers = {"norm": LayerNorm("channels"), "drop": Dropout(0.5), "dense": Dense(8, "relu"), "d2": Dropout(0.2)}

        def task(communicator: Any) -> Any:
            model = Model(Sequential({**layers, "o": Dense(3)}), Image(8, 8, 1), create_backend("numpy", "double"))
            groups, synchronizer = Groups.of(communicator), ParameterAveraging(1)
            trainer = Trainer(Replica(model, SGD(RATE)), groups=groups, synchronizer=synchronizer)
            trainer.fit(Fit(Loader(small_dataset(56), batch_size, seed=3), 2))
            return model.weights()

        return on_threads(workers, task)[0]

    near(made(2, 6), made(1, 12), 1e-12)


def test_a_round_without_batches_leaves_the_estimates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    data, gradient = small_dataset(24), Replica.backpropagate
    fewer = trained(2, data=data, sync=True, epochs=1)
    monkeypatch.setattr(
        Replica,
        "backpropagate",
        lambda self, batch: gradient(self, None if batch is not None and batch.index in (2, 3) else batch),
    )
    found = trained(2, data=data, sync=True, epochs=1)
    same(weights(found[0]), weights(found[1]))
    assert np.isfinite(np.concatenate([w.reshape(-1) for w in weights(found[0]).values()])).all()
    assert np.abs(weights(found[0])["norm.mean"] - weights(fewer[0])["norm.mean"]).max() > 0


# how buffers are averaged -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "sync"), [("every 3", False), ("diloco, half", False), ("threshold", False), ("elastic", True)]
)
def test_replicas_end_with_the_same_estimates(way: str, sync: bool) -> None:
    """Eight batches for three workers, the last one short: in the last round one worker has none."""
    found = trained(
        3, data=small_dataset(46), synchronizer=WAYS[way], optimizer=lambda: Nesterov(RATE), dtype="float", sync=sync
    )
    for trainer in found:
        same(weights(trainer), weights(found[0]))
    mean, variance = weights(found[0])["norm.mean"], weights(found[0])["norm.variance"]
    assert (mean != 0).all() and (variance != 1).all() and np.isfinite(variance).all()


class Notes(Replica):
    """Records its running statistics right after the gradient, and the number of samples."""

    def backpropagate(self, batch: Any) -> int:
        self.count = super().backpropagate(batch)
        self.mine = self.params.buffers.copy()
        return self.count


@pytest.mark.parametrize(
    "synchronizer",
    [
        ParameterAveraging(5), ParameterAveraging(1, wire="half"), ParameterAveraging(1, outer="diloco"),
        GradientSharing(), GradientSharing(reduce="sum"), GradientSharing("threshold"), ElasticAveraging(1),
    ],
    ids=str,
)  # fmt: skip
def test_estimates_are_weighted_by_their_samples(synchronizer: Synchronizer) -> None:
    """Exactly, even if weights are sent in 16 bits or take an outer step. The batches have 5, 3 and 0 samples."""

    def task(communicator: Any) -> Trainer:
        groups, own = Groups.of(communicator), Notes(model_of(), SGD(RATE))
        trainer = Trainer(own, groups=groups, synchronizer=copy.deepcopy(synchronizer))
        trainer.fit(Fit(Loader(small_dataset(8), 5, seed=3), 1))
        return trainer

    found = on_threads(3, task)
    notes = [trainer.replica for trainer in found]
    assert [note.count for note in notes] == [5, 3, 0]
    expected = (5 * notes[0].mine + 3 * notes[1].mine) / 8
    for trainer in found:
        np.testing.assert_allclose(trainer.params.buffers, expected, rtol=1e-14, atol=0)
        np.testing.assert_array_equal(trainer.params.buffers, found[0].params.buffers)
    assert np.abs(notes[0].mine - expected).max() > 1e-3


def test_replicas_begin_with_the_estimates_of_rank_0() -> None:
    begun: list[Any] = []

    class First(Callback):
        every_rank = True

        def on_fit_start(self, trainer: Any) -> None:
            begun.append(trainer.params.buffers.copy())

    def task(communicator: Any) -> None:
        model = model_of()
        model.params.buffers += communicator.rank
        replica, averaging = Replica(model, SGD(RATE)), ParameterAveraging(3)
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=averaging, callbacks=[First()])
        trainer.fit(Fit(Loader(small_dataset(24), 4), 1))

    on_threads(3, task)
    for buffers in begun:
        np.testing.assert_array_equal(buffers, model_of().params.buffers)


# what is left out ---------------------------------------------------------------------------------------------------


class Broken(Replica):
    """Makes the gradient of one batch NaN."""

    index = 3

    def backpropagate(self, batch: Any) -> int:
        samples = super().backpropagate(batch)
        if batch is not None and (batch.index, batch.epoch) == (self.index, 0):
            self.params.grad[0] = np.nan
        return samples


class Without(Replica):
    """Gets no batch in its place."""

    def backpropagate(self, batch: Any) -> int:
        known = batch is not None and (batch.index, batch.epoch) == (Broken.index, 0)
        return super().backpropagate(None if known else batch)


def left_out(kind: type[Replica], workers: int) -> list[dict[str, Any]]:
    def task(communicator: Any) -> dict[str, Any]:
        trainer = Trainer(
            kind(model_of(), SGD(RATE)),
            groups=Groups.of(communicator),
            synchronizer=ParameterAveraging(2),
            callbacks=[NonFinite("skip")],
        )
        trainer.fit(Fit(Loader(small_dataset(60), 6, seed=3), 2))
        return trainer.model.weights()

    return on_threads(workers, task)


def test_a_skipped_batch_leaves_the_estimates_alone() -> None:
    for each, expected in zip(left_out(Broken, 2), left_out(Without, 2), strict=True):
        same(each, expected)


def test_a_diverged_fit_keeps_the_estimates_from_before_the_batch() -> None:
    model, seen = model_of(), Seen(lambda trainer: trainer.model.weights())
    trainer = Trainer(Broken(model, SGD(RATE)), prefetch_buffer=0, callbacks=[seen])
    with pytest.raises(DivergedError):
        trainer.fit(Fit(Loader(small_dataset(60), 6, seed=3), 1))
    same(model.weights(), seen.iterations[-1])


# resuming -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "workers", "sync"),
    [("every 3", 2, False), ("elastic", 2, True), ("half", 1, False)],
)
def test_training_resumes_bit_for_bit(way: str, workers: int, sync: bool) -> None:
    """New replicas take over a state from the middle of an epoch, between two averages."""

    def task(states: Any) -> Any:
        def run(communicator: Any) -> tuple[Any, Any]:
            own, keep = model_of("float", "numba", sync=sync), KeepState(4)
            replica, groups = Replica(own, Nesterov(RATE)), Groups.of(communicator)
            trainer = Trainer(replica, groups=groups, synchronizer=copy.deepcopy(WAYS[way]), callbacks=[keep])
            if states is not None:
                trainer.restore(states[communicator.rank])
            trainer.fit(Fit(Loader(small_dataset(63), 6, seed=3), 2 - trainer.epoch))
            return own.weights(), getattr(keep, "kept", None)

        return run

    whole = on_threads(workers, task(None))
    again = on_threads(workers, task([state for _, state in whole]))
    for (found, _), (expected, _) in zip(again, whole, strict=True):
        same(found, expected)


def test_other_workers_begin_with_the_mean_of_the_estimates() -> None:
    """Weighted by the samples since the last average: a batch of 6 and one of 4."""
    found = trained(2, data=small_dataset(22), synchronizer=ParameterAveraging("epoch"), epochs=1)
    states = [copy.deepcopy(trainer.state()) for trainer in found]
    rng = np.random.default_rng(3)
    for state, seen in zip(states, (6, 4), strict=True):
        state["synchronizer"]["tally"]["samples"] = seen
        state["replica"]["weights"]["norm.mean"] = rng.normal(size=3)
    means = [state["replica"]["weights"]["norm.mean"] for state in states]
    for state in regrouped(states, 3, 1, found[0].synchronizer, {}):
        expected = 0.6 * means[0] + 0.4 * means[1]
        np.testing.assert_allclose(state["replica"]["weights"]["norm.mean"], expected, rtol=1e-14)
        Trainer(Replica(model_of(), SGD(RATE))).replica.restore(state["replica"])


# stages of a pipeline -----------------------------------------------------------------------------------------------


def piped(workers: int, stages: int, micro_batches: int, **options: Any) -> Model:
    model = model_of(**options)
    with ParallelWrapper(
        model,
        workers,
        optimizer=SGD(RATE),
        synchronizer=ParameterAveraging(2),
        pipeline=Pipeline(stages, micro_batches) if stages > 1 else None,
        timeout_s=60,
    ) as training:
        training.fit(Loader(small_dataset(60), 6, seed=3), 2)
    return model


@pytest.mark.parametrize("workers", [1, 2])
def test_stages_have_the_estimates_of_their_layers(workers: int) -> None:
    """With one micro-batch a pipeline sees whole batches, and the user's model has all it has learnt."""
    found, whole = piped(workers, 2, 1), piped(workers, 1, 1)
    near(found.weights(), whole.weights(), 1e-12)
    assert (found.weights()["norm2.mean"] != 0).all()


def test_dropout_does_not_see_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> Sequential:
        layers = {"conv": Conv2D(3, 3, activation="relu"), "pool": MaxPool2D(2), "drop": Dropout(0.4)}
        return Sequential({**layers, "dense": Dense(8, "relu"), "drop2": Dropout(0.5), "output": Dense(3)})

    monkeypatch.setattr("tests.training.test_buffers.network", without)
    near(piped(1, 2, 3).weights(), piped(1, 1, 1).weights(), 1e-12)


def test_a_pipeline_refuses_layers_that_synchronise_replicas() -> None:
    with refused("pipeline"):
        piped(2, 2, 2, sync=True)


# on devices ---------------------------------------------------------------------------------------------------------


def wrapped(dtype: str, workers: int, monkeypatch: pytest.MonkeyPatch | None, **options: Any) -> dict[str, Any]:
    """Train on devices; with a monkeypatch without graph capture."""
    model = model_of(dtype, "cupy", sync=options.pop("sync", False))
    if "scale" in options:
        model.backend.loss_scale = options.pop("scale")
    with ParallelWrapper(
        model, workers, optimizer=Nesterov(RATE), synchronizer=options.pop("synchronizer", ParameterAveraging(3)),
        timeout_s=60, prefetch_buffer=0,
    ) as training:  # fmt: skip
        if monkeypatch is not None:
            monkeypatch.setattr(parallel_wrapper, "replica_of", Replica)
        training.fit(Loader(small_dataset(76), 8, seed=3), 3)
        ahead = getattr(training.trainer.replica, "_ahead", False)
        return {"weights": model.weights(), "ahead": ahead, "skipped": training.trainer.statistics.skipped_steps}


@pytest.mark.standin
@pytest.mark.parametrize(("dtype", "way"), [("half", "every 3"), ("float", "gradients")])
def test_captured_steps_equal_single_launches(
    dtype: str, way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    found = wrapped(dtype, 2, None, synchronizer=WAYS[way])
    assert found["ahead"] == (way != "gradients") and "cannot be captured" not in caplog.text
    same(found["weights"], wrapped(dtype, 2, monkeypatch, synchronizer=WAYS[way])["weights"])
    assert (found["weights"]["norm.mean"] != 0).all()


@pytest.mark.standin
def test_steps_that_overflow_leave_no_trace_in_the_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    found = wrapped("half", 1, None, scale=2.0**24)
    plainly = wrapped("half", 1, monkeypatch, scale=2.0**24)
    assert found["skipped"] == plainly["skipped"] > 0 and found["ahead"]
    same(found["weights"], plainly["weights"])


@pytest.mark.standin
@pytest.mark.smoke
def test_devices_equal_numpy() -> None:
    """Dropout to the bit, sums to their rounding."""
    on_device = wrapped("double", 1, None)["weights"]
    model = model_of("double")
    trainer = alone(model, Nesterov(RATE))
    trainer.fit(Fit(Loader(small_dataset(76), 8, seed=3), 3))
    near(on_device, model.weights(), 1e-9)


@pytest.mark.standin
@pytest.mark.parametrize(("workers", "dtype"), [(3, "double")])
def test_statistics_are_synchronised_between_devices(workers: int, dtype: str) -> None:
    """Of three workers, two share a device. In half each worker finds its own loss scale."""
    found = wrapped(dtype, workers, None, sync=True, synchronizer=ParameterAveraging(1))
    assert not found["ahead"]
    host = trained(workers, data=small_dataset(76), batch_size=8, epochs=3, sync=True, dtype=dtype,
                   optimizer=lambda: Nesterov(RATE))  # fmt: skip
    near(found["weights"], weights(host[0]), 1e-9 if dtype == "double" else 0.05)


class Asks(Layer):
    """Reads an attribute of the context that graph capture would freeze."""

    recordable = True

    def __init__(self, name: str) -> None:
        self.name = name

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        return input

    def forward(self, x: Any, context: Any) -> Any:
        if context.train:
            getattr(context, self.name)
        return x, lambda dy: dy


@pytest.mark.standin
@pytest.mark.parametrize("name", ["iteration", "replicas", "samples"])
def test_graph_capture_refuses_attributes_that_it_would_freeze(name: str) -> None:
    network = Sequential({"asks": Asks(name), "output": Dense(3)})
    model = Model(network, Image(8, 8, 1), create_backend("cupy"))
    with (
        ParallelWrapper(model, 1, optimizer=SGD(RATE), timeout_s=60, prefetch_buffer=0) as training,
        pytest.raises(RuntimeError, match=name),
    ):
        training.fit(Loader(small_dataset(24), 8, seed=3), 1)


def test_parts_of_a_batch_and_statistics_of_all_replicas_are_refused_together() -> None:
    network = Sequential({"norm1": BatchNorm(sync=True), "output": Dense(3)})
    model = Model(network, Image(8, 8, 1), create_backend("numpy"), 1)
    with refused("accumulate"):
        ParallelWrapper(model, 1, accumulate=2)
