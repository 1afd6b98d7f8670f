"""The one-page example of the method: it trains, and equals `ParallelWrapper`."""

import pytest

from cupynet import Image, Loader, Model, Nesterov, ParallelWrapper, Sequential, Synthetic, create_backend
from cupynet.backend import blas
from cupynet.guides import lenet_replicas
from cupynet.guides.lenet_replicas import AVERAGING_FREQUENCY, EPOCHS, LENET, WORKERS


@pytest.mark.parametrize(
    ("backend", "digits", "least"),
    [
        pytest.param("numba", 2000, 0.9, id="numba", marks=pytest.mark.slow),
        pytest.param("cupy", 256, 0.2, id="standin", marks=pytest.mark.standin),
    ],
)
def test_lenet_replicas_learns(backend: str, digits: int, least: float) -> None:
    assert lenet_replicas.main(backend, digits) >= least


def test_lenet_replicas_equals_parallel_wrapper() -> None:
    data = Synthetic(train=320, test=40).load()
    model = Model(Sequential(LENET), Image(28, 28, 1), create_backend("numba"), seed=123)
    with ParallelWrapper(
        model, WORKERS, AVERAGING_FREQUENCY, optimizer=Nesterov(0.01, 0.9), blas_threads=1, progress="none"
    ) as wrapper:
        wrapper.fit(Loader(data.train, batch_size=32, seed=12345), epochs=EPOCHS)
        found = wrapper.evaluate(data.test).accuracy
    with blas.Limit(1):  # a different number of threads may round products differently
        assert lenet_replicas.main("numba", 320) == found
