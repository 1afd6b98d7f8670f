"""The description of a value that is not finite names the layer and the samples."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Concat, Conv2D, Dense, Dropout, Image, MaxPool2D, Model, Sequential
from cupynet.optim import SGD
from cupynet.training import Replica
from cupynet.training.diagnosis import diagnose
from tests.support.training import Poisoned, small_dataset

DATA = small_dataset(97)


@pytest.mark.parametrize(("accumulate", "samples"), [(1, "samples 17, 40"), (4, "sample 17")])
def test_layers_are_examined_with_the_statistics_of_the_batch(accumulate, samples):
    """The diagnosis normalizes by the batch, as in training, not by running estimates."""
    layers = {"conv1": Conv2D(3, 3), "norm1": BatchNorm(), "pool1": MaxPool2D(2), "drop": Dropout(0.2)}
    layers |= {"poisoned": Poisoned(17, 40), "norm2": BatchNorm(), "output": Dense(3)}
    model = Model(Sequential(layers), Image(8, 8, 1), create_backend("numpy", "double"), 1)
    replica = Replica(model, SGD(0.1), accumulate)
    estimates = dict(model.params.named_buffers())["norm1.variance"].data
    estimates[...] = np.nan
    (batch,) = Loader(DATA, 97, shuffle=False).epoch(0, model.backend)
    replica.gradient(batch)
    assert f" {samples}, " in diagnose(replica, batch) and "'poisoned'" in diagnose(replica, batch)
    assert model.backend.workspace.on_loan == 0
    assert np.isnan(estimates).all()
    np.testing.assert_array_equal(dict(model.params.named_buffers())["norm2.mean"].data, np.zeros(3))


def test_a_network_that_is_not_sequential_is_examined_as_one_layer():
    model = Model(Concat([Dense(1), [Poisoned(17), Dense(2)]]), Image(8, 8, 1), create_backend("numpy"), 1)
    replica = Replica(model, SGD(0.1))
    (batch,) = Loader(DATA, 97, shuffle=False).epoch(0, model.backend)
    replica.gradient(batch)
    assert "sample 17, " in diagnose(replica, batch) and "'network'" in diagnose(replica, batch)
