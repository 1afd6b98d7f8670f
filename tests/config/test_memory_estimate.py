"""Settings that need more memory than the machine has are refused before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import gpus
from cupynet.config import memory_estimate
from cupynet.config.experiment import Experiment
from cupynet.config.memory_estimate import check_memory, output_values, replica_bytes
from cupynet.core.errors import ConfigError
from cupynet.data import Synthetic
from cupynet.nn import Image, Model
from cupynet.optim import SGD, Adam
from cupynet.parallel import Placement
from tests.support.networks import lenet
from tests.support.settings import settings_of
from tests.support.training import small_model


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


@pytest.mark.parametrize(
    ("override", "use"),
    [
        ("batch_size=1000000000", "activations"),
        ("batch_size=1" + "0" * 18, "activations"),
        ("data.train=1000000000", "images"),
        ("model.layers.conv1.padding=100000", "activations"),
        ("model.layers.dense1.units=1000000000", "weights"),
    ],
)
def test_the_use_that_needs_most_is_shown(override: str, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "memory", lambda: (10**10, "this machine has"))
    with pytest.raises(ConfigError, match=rf"^batch_size=\d+: with 1 worker .*{use} [\d.]+ .B.*lower batch_size"):
        Experiment(settings_of("data=synthetic", "workers=1", override))


def checked(one: Experiment, there: Placement, job: Any = None) -> None:
    """Check the memory of an experiment with workers that are placed elsewhere."""
    options, weights = replace(one.checked, placement=there), one.model().params.count
    check_memory(one.settings, options, one.model().network, weights, one.source, job)


def test_devices_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "memory", lambda: None)
    one = Experiment(settings_of("data=synthetic", "workers=4", "backend=numpy", "batch_size=100000"))
    monkeypatch.setattr(gpus, "memory", lambda devices: 10**9)
    with pytest.raises(ConfigError, match=r"^batch_size=100000: with 4 workers .* the device has 1.0 GB"):
        checked(one, Placement(4, (0, 1)))
    monkeypatch.setattr(gpus, "memory", lambda devices: 10**12)
    monkeypatch.setattr(memory_estimate, "memory", lambda: (10**9, "this machine has"))
    checked(one, Placement(4, (0, 1)))  # what is on the devices does not count here


def test_each_rank_of_a_machine_loads_its_own_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        on_machine = 2

        def first_word(self, text: str) -> str:
            return text

    there = (10**9, "this machine has")  # the images have 784 MB
    monkeypatch.setattr(memory_estimate, "memory", lambda: there)
    one = Experiment(settings_of("data=synthetic", "data.train=1000000", "batch_size=1", "backend=numpy", "workers=3"))
    with pytest.raises(ConfigError, match=r"images 1\.6 GB"):
        checked(one, one.placement, Job())


def test_a_refusal_of_one_rank_reaches_all() -> None:
    class Job:
        on_machine = 1

        def first_word(self, text: str) -> str:
            assert text == ""
            return "refused by another"

    one = Experiment(settings_of("data=synthetic", "workers=2", "batch_size=5"))
    with pytest.raises(ConfigError, match="^batch_size=5: refused by another$"):
        checked(one, one.placement, Job())


def test_an_unknown_size_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_estimate, "memory", lambda: None)
    Experiment(settings_of("data=synthetic", "workers=1", "batch_size=1000000000"))


def test_sources_know_what_they_load() -> None:
    for validation in (0, 30):
        source = Synthetic(train=100, test=50, limit=40, validation=validation)
        assert source.expected() == {"train": 100, "test": 50}
