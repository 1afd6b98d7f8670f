"""Non-finite losses and gradients: found in their round, on their worker, and never averaged into other replicas."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import DivergedError
from cupynet.data import Batch, Dataset, Loader
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Dropout, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import Communicator, ElasticAveraging, GradientSharing, ParameterAveraging, Pipeline, Synchronizer
from cupynet.training import Callback, NonFinite, ParallelWrapper, Replica
from cupynet.training.finite_check import diagnose
from cupynet.training.fit import Fit
from tests.support.trainers import callback_of, fit_on_threads, on_loan
from tests.support.training import At, Poisoned, StopAfter, alone, fingerprint, network_with, small_dataset, small_model

DATA = small_dataset(97)  # 25 batches
IN_ORDER = Loader(DATA, 4, shuffle=False)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("largest", "dtype", "divide"), [(255, "double", True), (1, "double", False), (1e5, "half", False)]
)
def test_only_images_up_to_255_should_be_divided(largest: float, dtype: str, divide: bool) -> None:
    images = DATA.images.astype(np.float32) / 255
    images[0, 0, 0] = 1
    wrapper = ParallelWrapper(network_with(Poisoned(17), dtype), 1, progress="none")
    with wrapper, pytest.raises(DivergedError) as caught:
        wrapper.fit(largest * images, DATA.labels, epochs=1)
    assert ("by 255" in str(caught.value)) == divide


@pytest.mark.parametrize(
    ("workers", "pipeline", "backwards", "place"),
    [
        (1, None, False, "'poisoned'"),
        (3, None, False, "'poisoned'"),
        (1, None, True, "'dense1.bias'"),
        (1, Pipeline(2, 2), False, "the loss"),
        (1, Pipeline(2, 2), True, "'dense1.bias'"),
    ],
    ids=["loss", "workers", "gradient", "loss of a stage", "gradient of a stage"],
)
def test_a_loss_or_gradient_that_is_not_finite_names_worker_batch_and_layer(
    workers: int, pipeline: Pipeline | None, backwards: bool, place: str
) -> None:
    """Among all non-finite gradients, dense1's are nearest to the loss. The second of two stages has the loss."""
    model = network_with(Poisoned(17, backwards=backwards))
    with ParallelWrapper(model, workers, pipeline=pipeline, log_every=0, timeout_s=20) as wrapper:
        with pytest.raises(DivergedError) as caught:
            wrapper.fit(IN_ORDER, epochs=1)
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())  # no weight was spoilt
    rank = 1 if pipeline or workers == 3 else 0
    assert f"worker {rank} at batch 4 of epoch 1" in str(caught.value) and place in str(caught.value)


def test_a_worker_spoiled_by_another_workers_batch_leaves_its_own_out(caplog: pytest.LogCaptureFixture) -> None:
    """With synchronized statistics, one bad batch makes all losses NaN, but only its own worker finds the cause."""
    layers = {"norm1": BatchNorm(sync=True), "poisoned": Poisoned(0), "norm2": BatchNorm(sync=True), "output": Dense(3)}
    guard = NonFinite("skip")
    with ParallelWrapper(Model(layers, (8, 8, 1), "numpy"), 2, callbacks=[guard], timeout_s=20) as wrapper:
        wrapper.fit(IN_ORDER, epochs=1)
        assert on_loan(wrapper) == [0, 0] and guard.skipped_batches == 2
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sorted("'poisoned'" in text for text in warnings) == [False, True]


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_weights_that_are_not_finite_are_never_skipped(action: str) -> None:
    model = small_model()
    spoil = At(5, lambda: dict(model.params.named())["output.bias"].master.fill(np.inf))
    trainer = alone(model, SGD(0.01), callbacks=[spoil, NonFinite(action)])
    with pytest.raises(DivergedError) as caught:
        trainer.fit(Fit(IN_ORDER, 1))
    assert trainer.iteration == 5 and "'output' of worker 0 at batch 5 of epoch 1" in str(caught.value)


@pytest.mark.parametrize("way", [ParameterAveraging(3), GradientSharing()], ids=str)
def test_skip_equals_a_run_without_that_batch(way: Synchronizer) -> None:
    class Leaves(Replica):
        """Gets no batch instead of the one with sample 17."""

        def backpropagate(self, batch: Batch | None) -> Any:
            return super().backpropagate(None if batch is not None and 17 in batch.samples else batch)

    def fitted(kind: type[Replica], *poisoned: Poisoned, guards: Sequence[NonFinite] = ()) -> list[dict[str, Any]]:
        def replica(communicator: Communicator) -> Replica:
            layers = [Conv2D(3, 3), BatchNorm(), MaxPool2D(2), *copy.deepcopy(poisoned), Dense(3)]
            return kind(Model(layers, (8, 8, 1), create_backend("numpy", "double"), 1), Nesterov(0.05))

        trainers = fit_on_threads(3, replica, way, Loader(DATA, 4, seed=3), *guards, epochs=2)
        skipped = [callback_of(trainer, NonFinite).skipped_batches for trainer in trainers if guards]
        assert set(skipped) <= {2}  # one in each epoch
        return [trainer.model.weights() for trainer in trainers]

    np.testing.assert_equal(fitted(Replica, Poisoned(17), guards=[NonFinite("skip")]), fitted(Leaves))


@pytest.mark.parametrize(
    "way",
    [
        GradientSharing("threshold", reduce="mean"),
        GradientSharing("threshold", reduce="sum"),
        ElasticAveraging(1),
        ParameterAveraging(1, outer_optimizer="slowmo"),
        ParameterAveraging(2),
    ],
    ids=str,
)
def test_a_round_in_which_every_worker_leaves_its_batch_out_spoils_nothing(way: Synchronizer) -> None:
    """The last round has one batch, which is skipped. Its values reach the other workers through the statistics."""
    layers = {"poisoned": Poisoned(96), "norm": BatchNorm(sync=True), "dense": Dense(3)}
    model, guard = Model(layers, (8, 8, 1), "numpy"), NonFinite("skip")
    with ParallelWrapper(model, 3, synchronizer=way, callbacks=[guard], timeout_s=20) as wrapper:
        wrapper.fit(IN_ORDER, epochs=1)
        assert guard.skipped_batches == 1 and len({fingerprint(each) for each in wrapper.replicas()}) == 1
    assert np.isfinite(model.params.master).all() and np.isfinite(model.params.buffers).all()


def test_a_skipped_batch_changes_no_statistics_in_any_stage() -> None:
    """Only the gradient of the first stage is not finite; the second has already updated its running statistics."""

    def weights(dataset: Dataset, poisoned: Poisoned) -> dict[str, Any]:
        layers = {"conv": Conv2D(3, 3), "poisoned": poisoned, "norm": BatchNorm(), "output": Dense(3)}
        model, guard = Model(layers, (8, 8, 1), "numpy", 1), NonFinite("skip")
        pipeline = Pipeline([["conv", "poisoned"], ["norm", "output"]], 2)
        with ParallelWrapper(model, 1, pipeline=pipeline, callbacks=[guard], timeout_s=20) as wrapper:
            wrapper.fit(Loader(dataset, 4, shuffle=False), epochs=1)
        assert guard.skipped_batches == len(poisoned.samples)  # not once for each stage
        return model.weights()

    without = np.delete(np.arange(len(DATA)), slice(16, 20))  # the batch of sample 17
    np.testing.assert_equal(weights(DATA, Poisoned(17, backwards=True)), weights(DATA.take(without), Poisoned()))


def test_the_number_of_skipped_batches_is_limited_even_across_a_resume(tmp_path: Path) -> None:
    def wrapper(*callbacks: Callback) -> ParallelWrapper:
        return ParallelWrapper(network_with(Poisoned(5, 41)), 1, callbacks=[NonFinite("skip", 1), *callbacks])

    with wrapper(StopAfter(5)) as first:
        first.fit(IN_ORDER, epochs=1)
        first.checkpoint(tmp_path)
    with wrapper() as second, pytest.raises(DivergedError):
        second.restore(tmp_path)
        second.fit(IN_ORDER, epochs=1)


def test_the_limit_of_skipped_batches_may_be_raised_between_fits() -> None:
    guard = NonFinite("skip", 2)
    with ParallelWrapper(network_with(Poisoned(5, 41)), 2, callbacks=[guard]) as wrapper:
        wrapper.fit(IN_ORDER, epochs=1)
        guard.max_skipped = 20
        wrapper.fit(IN_ORDER, epochs=3)
    assert guard.skipped_batches == 8


@pytest.mark.parametrize("workers", [1, 3])
def test_batches_skipped_by_removed_workers_count(workers: int, tmp_path: Path) -> None:
    def guarded(workers: int) -> tuple[NonFinite, ParallelWrapper]:
        guard = NonFinite("skip")
        return guard, ParallelWrapper(network_with(Poisoned(5, 9, 41)), workers, callbacks=[guard])

    _, first = guarded(2)
    with first:
        first.fit(IN_ORDER, epochs=1)  # worker 0 skips two batches, and worker 1 one
        first.checkpoint(tmp_path)
    guard, second = guarded(workers)
    with second:
        second.restore(tmp_path)
        assert guard.skipped_batches == 3
        second.fit(IN_ORDER, epochs=1)
        assert guard.skipped_batches == 6


NORMALIZED = {"conv1": Conv2D(3, 3), "norm1": BatchNorm(), "pool1": MaxPool2D(2), "drop": Dropout(0.2)}
NORMALIZED |= {"poisoned": Poisoned(17, 40), "norm2": BatchNorm(), "output": Dense(3)}


@pytest.mark.parametrize(
    ("network", "accumulation_steps", "samples", "layer"),
    [
        (Sequential(NORMALIZED), 1, " samples 17, 40, ", "'poisoned'"),
        (Sequential(NORMALIZED), 4, " sample 17, ", "'poisoned'"),
        (Concat([Dense(1), [Poisoned(17), Dense(2)]]), 1, " sample 17, ", "'network'"),
    ],
    ids=["batch", "parts", "not sequential"],
)
def test_the_layer_and_the_samples_are_found_with_the_statistics_of_the_batch(
    network: Layer, accumulation_steps: int, samples: str, layer: str
) -> None:
    """As in training, the diagnosis normalizes by the batch. It neither uses nor changes the running estimates."""
    model = Model(network, Image(8, 8, 1), create_backend("numpy", "double"), 1)
    replica = Replica(model, SGD(0.1), accumulation_steps)
    model.params.buffers[:1] = np.nan
    before = model.params.buffers.copy()
    (batch,) = Loader(DATA, 97, shuffle=False).epoch(0, replica.backend)
    replica.gradient(batch)
    text = diagnose(replica, batch)
    assert samples in text and layer in text
    np.testing.assert_array_equal(model.params.buffers, before)
    assert replica.backend.workspace.on_loan == 0
