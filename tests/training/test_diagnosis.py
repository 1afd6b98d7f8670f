"""The description of a value that is not finite names the layer and the samples."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Dropout, Image, Layer, MaxPool2D, Model, Sequential
from cupynet.optim import SGD
from cupynet.training import Replica
from cupynet.training.diagnosis import diagnose
from tests.support.training import Poisoned, small_dataset


def replica_of(network: Layer, accumulate: int = 1) -> Replica:
    return Replica(Model(network, Image(8, 8, 1), create_backend("numpy", "double"), 1), SGD(0.1), accumulate)


def diagnosed(replica: Replica) -> str:
    (batch,) = Loader(small_dataset(97), 97, shuffle=False).epoch(0, replica.backend)
    replica.gradient(batch)
    return diagnose(replica, batch)


@pytest.mark.parametrize(("accumulate", "samples"), [(1, "samples 17, 40"), (4, "sample 17")])
def test_layers_are_examined_with_the_statistics_of_the_batch(accumulate: int, samples: str) -> None:
    """The diagnosis normalizes by the batch, as in training, not by running estimates, which it leaves alone."""
    layers = {"conv1": Conv2D(3, 3), "norm1": BatchNorm(), "pool1": MaxPool2D(2), "drop": Dropout(0.2)}
    layers |= {"poisoned": Poisoned(17, 40), "norm2": BatchNorm(), "output": Dense(3)}
    replica = replica_of(Sequential(layers), accumulate)
    dict(replica.params.named_buffers())["norm1.variance"].data[...] = np.nan
    estimates = replica.params.buffers.copy()
    text = diagnosed(replica)
    assert f" {samples}, " in text and "'poisoned'" in text
    np.testing.assert_array_equal(replica.params.buffers, estimates)
    assert replica.backend.workspace.on_loan == 0


def test_a_network_that_is_not_sequential_is_examined_as_one_layer() -> None:
    text = diagnosed(replica_of(Concat([Dense(1), [Poisoned(17), Dense(2)]])))
    assert "sample 17, " in text and "'network'" in text
