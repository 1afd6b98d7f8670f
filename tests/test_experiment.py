"""Settings turned into a run's objects: what only a machine with GPUs would show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.backend import cuda
from cupynet.data import Loader
from cupynet.experiment import Experiment
from cupynet.optim import SGD
from cupynet.settings import MemorySettings
from cupynet.training import Trainer
from tests.training.conftest import small_dataset, small_model


def experiment(devices: list[int], **memory: Any) -> Experiment:
    """One of which only its devices and its memory group are known."""
    bare = object.__new__(Experiment)
    bare.settings, bare.devices = SimpleNamespace(memory=MemorySettings(**memory)), devices  # type: ignore[assignment]
    return bare


def test_pools_are_trimmed_after_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cuda, "trim_pools", lambda *arguments: asked.append(arguments))
    callbacks = experiment([0, 2], device_pool_trim_above="2KiB", pinned_pool_trim_above=64).callbacks()
    Trainer(small_model(), SGD(0.01), callbacks=callbacks).fit(Loader(small_dataset(12), 4), 3)
    assert asked == [([0, 2], 2048, 64)] * 3


def test_pools_are_capped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(cuda, "limit_pools", lambda *arguments: asked.append(arguments))
    experiment([1], device_pool_limit="80%").limit_memory()
    experiment([1]).limit_memory()
    assert asked == [([1], 0.8)]


def test_a_cpu_has_no_pools() -> None:
    bare = experiment([], device_pool_limit="80%", device_pool_trim_above=1)
    bare.limit_memory()
    assert bare.callbacks() == []
