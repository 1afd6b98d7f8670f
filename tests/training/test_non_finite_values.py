"""Non-finite losses and gradients: found in their iteration, on their worker, with the cause."""

from typing import Any

import numpy as np
import pytest

from cupynet import SGD, DivergedError, Loader, ParallelWrapper, Pipeline, Replica, create_backend
from cupynet.data.dataset import hold_out
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Dropout, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.training.finite_check import diagnose
from cupynet.training.fit import Fit
from tests.support.training import At, Poisoned, Seen, alone, fingerprint, network_with, small_dataset, small_model

DATA = small_dataset(97)  # 25 batches
IN_ORDER = Loader(DATA, 4, shuffle=False)


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
def test_a_loss_or_gradient_that_is_not_finite_changes_no_weights_and_names_worker_batch_and_layer(
    workers: int, pipeline: Pipeline | None, backwards: bool, place: str
) -> None:
    """Among all non-finite gradients, dense1's are nearest to the loss. The second of two stages has the loss."""
    model, seen = network_with(Poisoned(17, backwards=backwards)), Seen()
    options: dict[str, Any] = {"pipeline": pipeline, "callbacks": [seen], "log_every": 0, "timeout_s": 20}
    with ParallelWrapper(model, workers, **options) as wrapper:
        with pytest.raises(DivergedError) as caught:
            wrapper.fit(IN_ORDER, epochs=1)
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())
    if wrapper.placement.ranks == 1:
        assert len(seen.iterations) == 4 and fingerprint(model) == seen.iterations[-1]
    rank = 1 if pipeline or workers == 3 else 0
    assert f"worker {rank} at batch 4 of epoch 1" in str(caught.value) and place in str(caught.value)


def test_the_error_names_samples_by_their_index_before_a_part_was_held_out() -> None:
    kept, _ = hold_out(DATA.labels, 0.3, IN_ORDER.seed, "validation_split")
    with ParallelWrapper(network_with(Poisoned(17))) as wrapper, pytest.raises(DivergedError) as caught:
        wrapper.fit(IN_ORDER, validation_split=0.3)
    assert kept[17] > 17 and f" sample {kept[17]}," in str(caught.value)


def test_weights_that_are_not_finite_end_the_fit_and_are_named() -> None:
    model = small_model()
    spoil = At(5, lambda: dict(model.params.named())["output.bias"].master.fill(np.inf))
    trainer = alone(model, SGD(0.01), callbacks=[spoil])
    with pytest.raises(DivergedError) as caught:
        trainer.fit(Fit(IN_ORDER, 1))
    assert caught.value.exit_code == 3 and trainer.iteration == 5
    assert "'output' of worker 0 at batch 5 of epoch 1" in str(caught.value)


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
def test_the_first_layer_that_is_not_finite_is_found_with_the_statistics_of_the_batch(
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
