"""Settings that need more memory than the machine has are refused before anything is allocated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.backend import cuda
from cupynet.config import experiment as experiment_module
from cupynet.config.experiment import Experiment
from cupynet.config.memory_estimate import Usage, output_values
from cupynet.core.errors import ConfigError
from cupynet.data import Dataset, Synthetic
from cupynet.optim import SGD, Adam
from cupynet.parallel import Placement
from tests.support.networks import lenet
from tests.support.settings import settings_of
from tests.support.shards import write_shards
from tests.support.training import small_model

NAMES = {"batch_size": "batch_size", "workers": "workers", "prefetch": "buffer", "train": "data.train", "layer": "l "}


def usage(**changes: Any) -> Usage:
    model = small_model("float")
    given = {"network": model.network, "weights": model.params.count, "policy": model.backend.policy}
    return Usage(**{**given, "optimizer": SGD(0.1), "batch_size": 100, **changes})


def test_the_estimate_grows_with_each_setting() -> None:
    one = usage(workers=2, prefetch=4, trained=10**6, images={"train": 1000})
    sizes = one.by_setting()
    twice = replace(one, batch_size=200).by_setting()
    assert twice["batch_size"] == 2 * sizes["batch_size"] and twice["prefetch"] == 2 * sizes["prefetch"]
    twice = replace(one, workers=4).by_setting()
    assert twice["batch_size"] == 2 * sizes["batch_size"] and twice["workers"] == 2 * sizes["workers"]
    assert sizes["workers"] == 2 * one.weights * 2 * 4  # weights and gradients
    assert replace(one, optimizer=Adam(0.1)).by_setting()["workers"] == 2 * sizes["workers"]
    assert replace(one, trained=300, prefetch=10**5).by_setting()["prefetch"] == 300 * 64 * 4
    assert sizes["train"] == 1000 * 64
    assert replace(one, held=0.25).by_setting()["batch_size"] == sizes["batch_size"] / 4
    assert replace(one, devices=2).by_setting()["workers"] == sizes["workers"] / 2


def test_outputs_of_layers_computed_as_one_count_once() -> None:
    from cupynet.backend import create_backend
    from cupynet.nn import Image, Model

    plain, fused = (
        output_values(Model(lenet((4, 6), 10), Image(28, 28, 1), create_backend(name), 1).network)
        for name in ("numpy", "numba")
    )
    assert plain - fused == 24 * 24 * 4 + 8 * 8 * 6  # of both convolutions


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"batch_size": 10**9}, "batch_size=1000000000: needs about "),
        ({"workers": 10**6}, "workers=1000000: needs about "),
        ({"prefetch": 10**6, "trained": 10**9}, "buffer=1000000: needs about "),
        ({"images": {"train": 10**9, "test": 5}}, "data.train=1000000000: needs about "),
    ],
)
def test_the_setting_that_weighs_most_is_named(changes: Any, expected: str) -> None:
    asked, there = usage(**changes), 2 * 10**9
    assert asked.refusal(there, "this machine has", NAMES).startswith(expected)
    assert asked.refusal(sum(asked.by_setting().values()), "this machine has", NAMES) == ""


def test_a_network_that_is_too_large_by_itself_is_named_by_its_layer() -> None:
    for layer, override in (
        ("conv1", "filters=100000000"),
        ("conv1", "padding=100000"),
        ("dense1", "units=1000000000"),
    ):
        one = Experiment(settings_of("data=synthetic", "workers=2", f"model.layers.{layer}.{override}"))
        with pytest.raises(ConfigError, match=rf"^model.layers.{layer} \(.*{override.split('=')[1]}"):
            one.check_memory()


@pytest.mark.parametrize("setting", ["batch_size=1000000000", "data.train=1000000000", "batch_size=1" + "0" * 18])
def test_the_settings_are_named_as_on_the_command_line(setting: str) -> None:
    one = Experiment(settings_of("data=synthetic", "workers=1", setting))
    with pytest.raises(ConfigError, match=f"^{setting}: needs about "):
        one.check_memory()


def test_devices_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Experiment(settings_of("data=synthetic", "workers=4", "backend=numpy", "batch_size=100000"))
    one.placement = Placement(4, (0, 1))
    monkeypatch.setattr(cuda, "memory", lambda devices: 10**9)
    with pytest.raises(ConfigError, match=r"^batch_size=100000: needs about .* the device has 1.0 GB"):
        one.check_memory()
    monkeypatch.setattr(cuda, "memory", lambda devices: 10**12)
    monkeypatch.setattr(experiment_module, "memory", lambda: (10**9, "this machine has"))
    one.check_memory()  # what is on the devices does not count here


def test_each_rank_of_a_machine_loads_its_own_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        machines, rank = ("n01", "n01", "n02"), 1

        def first_word(self, text: str) -> str:
            return text

    one = Experiment(settings_of("data=synthetic", "data.train=1000000", "batch_size=1", "backend=numpy", "workers=3"))
    there = (10**9, "this machine has")  # the images have 784 MB
    monkeypatch.setattr(experiment_module, "memory", lambda: there)
    one.check_memory()
    one.job = Job()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="^data.train=1000000: needs about 1.6 GB"):
        one.check_memory()


def test_batches_made_ahead_of_shards_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = Dataset("images", np.zeros((10_000, 28, 28, 1), np.uint8), np.arange(10_000) % 10, 10)
    write_shards(images, tmp_path, 2)
    settings = ("backend=numpy", "workers=2", "batch_size=1", "parallel.prefetch_buffer=99999")
    one = Experiment(settings_of("data=shards", f"data.folder={tmp_path}", *settings))
    monkeypatch.setattr(experiment_module, "memory", lambda: (2 * 10**7, "this machine has"))
    with pytest.raises(ConfigError, match="^parallel.prefetch_buffer=99999: needs about "):  # 31 MB of images
        one.check_memory()


def test_a_refusal_of_one_rank_reaches_all() -> None:
    class Job:
        machines, rank = ("n01", "n02"), 0

        def first_word(self, text: str) -> str:
            assert text == ""
            return "batch_size=5: refused by another"

    one = Experiment(settings_of("data=synthetic", "workers=2"))
    one.job = Job()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="^batch_size=5: refused by another$"):
        one.check_memory()


def test_an_unknown_size_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_module, "memory", lambda: None)
    Experiment(settings_of("data=synthetic", "workers=1", "batch_size=1000000000")).check_memory()


def test_sources_know_what_they_load() -> None:
    for validation in (0, 30):
        source = Synthetic(train=100, test=50, limit=40, validation=validation)
        data = source.load()
        held = len(data.train) + (0 if data.validation is None else len(data.validation))
        assert source.expected() == {"train": 100 if validation else held, "test": len(data.test)}
