"""Captured steps read their batches and learning rates on the device, and train like single launches."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.data import Loader
from cupynet.nn import Conv2D, Dense, Dropout, Image, Model, Sequential
from cupynet.optim import Constant, Nesterov, OneCycle, ReduceOnPlateau, Schedule
from cupynet.training import ParallelWrapper, Trainer
from tests.support.calls import watch
from tests.support.device_runs import Run, compared, single_launches, train_on_device
from tests.support.shards import write_shards
from tests.support.training import On, small_dataset, small_model

on_devices = pytest.mark.usefixtures("devices")  # on the stand-in, and on a GPU if there is one


def dropping() -> Model:
    layers = {"conv1": Conv2D(3, 3), "drop": Dropout(0.3), "output": Dense(3)}
    return Model(Sequential(layers), Image(8, 8, 1), create_backend("cupy"), 1)


@pytest.mark.standin
@pytest.mark.parametrize("model", [dropping, lambda: small_model("half", "cupy")], ids=["dropout", "half"])
def test_the_host_makes_one_call_per_iteration(model: Callable[[], Model], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.standin.machine import Machine
    from tests.standin.streams import Graph

    calls = [0]
    watch(monkeypatch, Machine, "run", lambda *_: calls.append(calls.pop() + 1))
    watch(monkeypatch, Graph, "launch", lambda _, graph: calls.append(calls.pop() - len(graph.operations) + 1))
    end = On("on_iteration_end", lambda _: calls.append(0))
    options: dict[str, Any] = {"optimizer": Nesterov(OneCycle(0.1)), "callbacks": [end], "log_every": 0}
    with ParallelWrapper(model(), 1, "epoch", **options) as training:
        training.fit(Loader(small_dataset(160), 8, seed=3), epochs=3)
    later = calls[22:40], calls[42:60]  # without the first iterations of the epochs
    assert [sum(each) for each in later] == [18 + 1, 18 + 1]  # the rates of many iterations are sent together


class Counts(Schedule):
    """A schedule that depends on the number of calls, though it should not."""

    calls = 0

    def __call__(self, iteration: int) -> float:
        self.calls += 1
        return 0.1 / self.calls


class SetByCallback(Schedule):
    """A schedule whose next rate is set by a callback after each iteration."""

    def __init__(self) -> None:
        self.rates = [0.05]

    def __call__(self, iteration: int) -> float:
        return self.rates[iteration]


def tell(trainer: Trainer) -> None:
    trainer.schedule.rates.append(0.05 / trainer.iteration)  # type: ignore[attr-defined]


def lower(trainer: Trainer) -> None:
    if trainer.iteration in (4, 5, 12):
        trainer.replica.optimizer.learning_rate = Constant(0.05 / trainer.iteration)


def launch_singly(trainer: Trainer) -> None:
    trainer.replica.launch_singly(trainer.iteration in (3, 4, 11))


@on_devices
@pytest.mark.parametrize(
    ("change", "rate"),
    [(lower, 0.05), (launch_singly, OneCycle(0.05)), (lambda _: None, Counts()), (tell, SetByCallback())],
    ids=["rates set by a callback", "single launches in between", "rates that depend on calls", "rates not yet known"],
)
def test_captured_steps_take_the_right_batch_and_rate(change: Callable[[Trainer], None], rate: Any) -> None:
    def train() -> Run:
        optimizer, callback = Nesterov(copy.deepcopy(rate)), On("on_iteration_end", change)
        return train_on_device("half", 1, optimizer=optimizer, callbacks=[callback], data=small_dataset(61))

    assert compared(train, scores=False)["ahead"]


@on_devices
def test_captured_steps_of_several_fits_equal_single_launches() -> None:
    """Each fit has new arrays on the device; float images are sent. The rate changes at each evaluation."""

    def train() -> dict[str, Any]:
        model, optimizer = small_model("half", "cupy"), Nesterov(ReduceOnPlateau(0.05, 0.5, patience=0, min_delta=9))
        with ParallelWrapper(model, 1, 3, optimizer=optimizer, timeout_s=60) as training:
            for samples, dtype in ((97, np.uint8), (61, np.uint8), (97, np.float32)):
                data = small_dataset(samples)
                images = data.images.astype(dtype)
                training.fit((images, data.labels), epochs=3, batch_size=8, validation_split=0.2)
        return model.weights()

    found = train()
    with single_launches():
        np.testing.assert_equal(found, train())


@on_devices
def test_captured_dropout_of_shards_depends_on_samples_of_the_whole_data_set(tmp_path: Path) -> None:
    shards = write_shards(small_dataset(97), tmp_path, 2)
    assert compared(lambda: train_on_device(network=dropping(), data=shards))["ahead"]
