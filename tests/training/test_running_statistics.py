"""Running statistics and dropout in training: synchronized, averaged, skipped with a batch, resumed, on devices."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Batch, Callback, Loader, ParallelWrapper, Replica, Trainer, create_backend
from cupynet.nn import Activation, Backward, BatchNorm, Context, Conv2D, Dense, Dropout, LayerNorm, MaxPool2D, Model
from cupynet.parallel import Communicator, GradientSharing, ParameterAveraging, Pipeline, Synchronizer
from tests.support.device_runs import Run, compared, train_on_device
from tests.support.refusals import refused
from tests.support.trainers import fit_on_threads, fitted
from tests.support.training import WAYS, Identity, On, assert_close, small_dataset

RATE = 0.05
EVERY_ROUND, EVERY_3 = ParameterAveraging(1), ParameterAveraging(3)
IMAGE = (8, 8, 1)
on_standin = pytest.mark.standin
Weights = dict[str, Any]


def network(*, sync: bool = False) -> dict[str, Any]:
    first = {"conv": Conv2D(3, 3, bias=False), "norm": BatchNorm(sync=sync), "relu": Activation("relu")}
    second = {"pool": MaxPool2D(2), "drop": Dropout(0.3), "dense": Dense(8), "norm2": BatchNorm(sync=sync)}
    return {**first, **second, "layer": LayerNorm(), "drop2": Dropout(0.3), "output": Dense(3)}


def without_batch_statistics() -> dict[str, Any]:
    first = {"conv": Conv2D(3, 3), "norm": LayerNorm("channels"), "pool": MaxPool2D(2), "drop": Dropout(0.4)}
    return {**first, "dense": Dense(8, "relu"), "drop2": Dropout(0.5), "output": Dense(3)}


def model_of(dtype: str = "double", backend: str = "numpy", *, sync: bool = False) -> Model:
    return Model(network(sync=sync), IMAGE, create_backend(backend, dtype), seed=1)


def loader_of(samples: int, batch_size: int = 6) -> Loader:
    return Loader(small_dataset(samples), batch_size, seed=3)


def trained(
    workers: int, loader: Loader, way: Synchronizer, *callbacks: Callback, kind: type[Replica] = Replica, **model: Any
) -> list[Trainer]:
    def replica(communicator: Communicator) -> Replica:
        return kind(model_of(**model), SGD(RATE))

    return fit_on_threads(workers, replica, way, loader, *callbacks, epochs=2, prefetch_buffer=0)


@pytest.mark.parametrize(
    ("workers", "samples", "synchronizer", "backend"),
    [
        (2, 52, ParameterAveraging(1), "numpy"),  # a last round with fewer workers and a short batch
        (3, 82, GradientSharing(), "numba"),
        (2, 25, GradientSharing(), "numpy"),  # the last batch has one example
    ],
)
def test_synchronized_batch_norm_equals_one_replica_on_the_concatenated_batch(
    workers: int, samples: int, synchronizer: Synchronizer, backend: str
) -> None:
    several = trained(workers, loader_of(samples), synchronizer, backend=backend, sync=True)
    (one,) = trained(1, loader_of(samples, 6 * workers), EVERY_ROUND, backend=backend, sync=True)
    assert several[0].iteration == one.iteration
    for trainer in several:
        assert_close(trainer.model.weights(), one.model.weights())
        np.testing.assert_equal(trainer.model.weights(), several[0].model.weights())


class Notes(Replica):
    """Keeps the number of samples and the running statistics of the last gradient."""

    def backpropagate(self, batch: Batch | None) -> int:
        self.count = super().backpropagate(batch)
        self.mine = self.params.buffers.copy()
        return self.count


@pytest.mark.parametrize("synchronizer", WAYS.values(), ids=WAYS)
def test_running_statistics_are_averaged_by_samples_with_every_synchronizer(synchronizer: Synchronizer) -> None:
    """This is exact even if weights are sent in 16 bits or take an outer step. Batches have 5, 3 and 0 samples."""
    found = trained(3, loader_of(8, 5), synchronizer, kind=Notes)
    notes: list[Any] = [trainer.replica for trainer in found]
    assert [note.count for note in notes] == [5, 3, 0]
    expected = (5 * notes[0].mine + 3 * notes[1].mine) / 8
    for trainer in found:
        np.testing.assert_allclose(trainer.params.buffers, expected, rtol=1e-14, atol=0)
        np.testing.assert_array_equal(trainer.params.buffers, found[0].params.buffers)
    assert np.abs(notes[0].mine - expected).max() > 1e-3


def test_a_worker_without_a_batch_keeps_the_running_statistics_of_layers_without_sync() -> None:
    """The rate is so low that the first layer has the same input in both cases."""

    def statistics(*, sync: bool) -> Any:
        layers = {"first": BatchNorm(), "dense": Dense(4), "second": BatchNorm(sync=sync), "output": Dense(3)}
        model = Model(layers, IMAGE, create_backend("numpy", "double"), seed=1)
        loader = loader_of(40, 8)  # the third worker has no batch in the second iteration
        found = fitted(model, loader, 3, synchronizer=ParameterAveraging(2), optimizer=SGD(1e-12)).weights()
        return found["first.mean"], found["first.variance"]

    np.testing.assert_allclose(statistics(sync=True), statistics(sync=False), rtol=1e-9)


def test_replicas_begin_with_the_weights_and_running_statistics_of_rank_0() -> None:
    begun: list[Weights] = []
    replicas = [Replica(model_of(), SGD(RATE)) for _ in range(3)]
    for rank, replica in enumerate(replicas):
        replica.params.master[...] += rank
        replica.params.buffers[...] += rank
    look = On("on_fit_start", lambda trainer: begun.append(trainer.model.weights()), every_rank=True)
    fit_on_threads(3, lambda c: replicas[c.rank], EVERY_3, loader_of(24), look)
    np.testing.assert_equal(begun, [model_of().weights()] * 3)


@pytest.mark.parametrize(
    ("layers", "workers", "pipeline"),
    [(network, 2, Pipeline(2, 1)), (without_batch_statistics, 1, Pipeline(2, 3))],
    ids=["whole batches", "micro-batches"],
)
def test_a_pipeline_has_the_running_statistics_and_dropout_of_the_whole_network(
    layers: Callable[[], dict[str, Any]], workers: int, pipeline: Pipeline
) -> None:
    def piped(pipeline: Pipeline | None) -> Weights:
        model, loader = Model(layers(), IMAGE, "numpy", 1, dtype="double"), loader_of(60)
        options: dict[str, Any] = {"optimizer": SGD(RATE), "synchronizer": ParameterAveraging(2), "pipeline": pipeline}
        return fitted(model, loader, workers, epochs=2, **options).weights()

    found = piped(pipeline)
    assert_close(found, piped(None), 1e-12)
    assert np.all(found.get("norm2.mean", 1) != 0)


def test_synchronized_batch_norm_is_refused_with_micro_batches_and_accumulation() -> None:
    with refused("pipeline"):
        ParallelWrapper(model_of(sync=True), 2, pipeline=Pipeline(2, 2))
    with refused("accumulation_steps"):
        ParallelWrapper(model_of(sync=True), 1, accumulation_steps=2)


def on_backend(
    backend: str, dtype: str, workers: int, way: Synchronizer, samples: int, *, sync: bool = False, **options: Any
) -> Run:
    model = model_of(dtype, backend, sync=sync)
    return train_on_device(network=model, workers=workers, synchronizer=way, data=small_dataset(samples), **options)


@on_standin
@pytest.mark.parametrize(("workers", "scale"), [(2, None), (1, 2.0**24)])
def test_captured_steps_with_batch_norm_and_dropout_equal_single_launches(workers: int, scale: float | None) -> None:
    """Steps that overflow do not change the estimates."""
    found = compared(lambda: on_backend("cupy", "half", workers, EVERY_3, 76, scale=scale), scores=False)
    assert found["ahead"] and (found["skipped"] > 0) == (scale is not None)
    assert (found["weights"]["norm.mean"] != 0).all()


@on_standin
@pytest.mark.smoke
@pytest.mark.parametrize(("workers", "way", "sync"), [(1, EVERY_3, False), (3, EVERY_ROUND, True)])
def test_batch_norm_and_dropout_on_a_gpu_equal_numpy(workers: int, way: Synchronizer, sync: bool) -> None:
    """Two of three workers share a device, and two have no batch in the last round."""
    found, expected = (on_backend(backend, "double", workers, way, 28, sync=sync) for backend in ("cupy", "numpy"))
    assert found["ahead"] != sync
    assert_close(found["weights"], expected["weights"], 1e-9)


@on_standin
@pytest.mark.parametrize("name", ["iteration", "replicas", "samples"])
def test_graph_capture_refuses_attributes_of_the_context_that_it_would_freeze(name: str) -> None:
    class Asks(Identity):
        capturable = True

        def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
            if context.train:
                getattr(context, name)
            return super().forward(x, context)

    model = Model([Asks(), Dense(3)], IMAGE, "cupy")
    with pytest.raises(RuntimeError):
        fitted(model, loader_of(24))
