"""Models in several threads: prediction during a fit, and a second fit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.nn import Model
from cupynet.optim import Nesterov
from cupynet.training import ParallelWrapper
from tests.support.training import fingerprint, small_dataset, small_model
from tests.support.workspaces import on_loan


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads interrupt each other between any two instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def fit(model: Model, workers: int, callbacks: Any = ()) -> str:
    """The weights after a short fit, as a digest."""
    with ParallelWrapper(model, workers, optimizer=Nesterov(0.05), callbacks=callbacks) as wrapper:
        wrapper.fit(Loader(small_dataset(60), 4, seed=1), epochs=1)
        assert on_loan(wrapper) == [0] * workers
    return fingerprint(model)


@pytest.mark.parametrize(("backend", "workers"), [("numpy", 1), ("numba", 2)])
@pytest.mark.usefixtures("frequent_switches")
def test_prediction_during_a_fit_does_not_change_what_is_trained(backend: str, workers: int) -> None:
    expected = fit(small_model("float", backend), workers)
    model, images, over = small_model("float", backend), small_dataset(7).images, threading.Event()
    answers: list[Any] = []

    def predict() -> None:
        try:
            while not over.is_set():
                answers.append(model.predict(images))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=predict) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        found = fit(model, workers)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not [each for each in answers if isinstance(each, Exception)]
    assert all(each.shape == (7, 3) and np.allclose(each.sum(axis=1), 1, atol=1e-5) for each in answers)
    assert found == expected
