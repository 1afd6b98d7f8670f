"""Settings that need more memory than the machine has are rejected before anything is allocated."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import gpus
from cupynet.config import memory_estimate
from cupynet.config.experiment import Experiment
from cupynet.config.memory_estimate import check_memory, needed_bytes, output_values, replica_bytes
from cupynet.nn import Image, Model
from cupynet.optim import SGD, Adam
from cupynet.parallel import Placement
from tests.support.networks import lenet
from tests.support.refusals import refused
from tests.support.settings import settings_of
from tests.support.training import small_model


def experiment(*overrides: str) -> Experiment:
    return Experiment(settings_of("data=synthetic", "backend=numpy", *overrides))


def placed(one: Experiment, there: Placement, job: Any = None) -> tuple[Any, ...]:
    """Return the arguments of `check_memory` for an experiment whose workers are placed elsewhere."""
    model, checked = one.model(), replace(one.checked, placement=there)
    return one.settings, checked, model.network, model.params.count, one.source, job


def machine_with(size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "memory", lambda: size and (size, "this machine has"))


def test_the_estimate_grows_with_the_batch_and_the_optimizer() -> None:
    model = small_model("float")
    network, weights, policy = model.network, model.params.count, model.backend.policy
    one = replica_bytes(network, weights, SGD(0.1), policy, 100)
    assert one["weights"] == weights * 2 * 4  # weights and gradients
    assert replica_bytes(network, weights, Adam(0.1), policy, 100)["weights"] == 2 * one["weights"]
    assert replica_bytes(network, weights, SGD(0.1), policy, 25)["activations"] == one["activations"] / 4


@pytest.mark.standin
def test_outputs_of_layers_computed_as_one_count_once_and_windows_that_are_multiplied_too() -> None:
    plain, fused, gpu = (
        output_values(Model(lenet((4, 6), 10), Image(28, 28, 1), create_backend(name), 1).network)
        for name in ("numpy", "numba", "cupy")
    )
    first, second = 24 * 24 * 25, 8 * 8 * 25 * 4  # im2col rows of each convolution
    assert plain - fused == 24 * 24 * 4 + 8 * 8 * 6 + first + second
    assert gpu - fused == second  # the first one needs no im2col rows on a GPU


@pytest.mark.parametrize("name", ["batch_size", "data.train", "model.layers.dense1.units"])
def test_a_run_that_needs_more_than_there_is_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(10**10, monkeypatch)
    with refused("batch_size"):
        experiment("workers=1", f"{name}=1000000000")
    machine_with(None, monkeypatch)  # if the size is unknown, nothing is rejected
    experiment("workers=1", f"{name}=1000000000")


def test_devices_share_the_replicas_and_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_with(None, monkeypatch)
    one = experiment("workers=4", "batch_size=100000")
    two, four = (needed_bytes(*placed(one, Placement(4, tuple(range(count))))) for count in (2, 4))
    assert two == {use: 2 * size for use, size in four.items()} and set(two) == {"weights", "activations"}
    monkeypatch.setattr(gpus, "memory", lambda devices: 10**9)
    with refused("batch_size", "100000"):
        check_memory(*placed(one, Placement(4, (0, 1))))
    monkeypatch.setattr(gpus, "memory", lambda devices: 10**12)
    machine_with(10**9, monkeypatch)
    check_memory(*placed(one, Placement(4, (0, 1))))  # device memory does not count here


def test_each_rank_of_a_machine_loads_its_own_images() -> None:
    one = experiment("data.train=1000", "data.test=500", "workers=3")
    for job, copies in ((None, 1), (SimpleNamespace(on_machine=2), 2)):
        assert needed_bytes(*placed(one, one.placement, job))["images"] == copies * 1500 * 28 * 28


def test_a_refusal_of_one_rank_reaches_all() -> None:
    one = experiment("workers=2", "batch_size=5")
    job = SimpleNamespace(on_machine=1, first_word=lambda text: text or "refused by another")
    with refused("batch_size", "5"):
        check_memory(*placed(one, one.placement, job))
