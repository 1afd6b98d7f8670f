"""The placement of workers and stages on devices, for made-up machines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupynet.parallel import Placement, placement
from tests.support.refusals import refused


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with so many GPUs and cores."""

    def of(gpus: int, cores: int = 8) -> None:
        monkeypatch.setattr(placement, "device_count", lambda name: gpus if name == "cupy" else 0)
        monkeypatch.setattr(placement, "available_cores", lambda: cores)

    return of


@pytest.mark.parametrize(
    ("gpus", "cores", "backend", "workers", "devices", "names"),
    [
        (2, 8, "cupy", None, None, ["cuda:0", "cuda:1"]),
        (4, 8, "cupy", None, [0, 2], ["cuda:0", "cuda:2"]),
        (2, 8, "cupy", 4, None, ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]),
        (4, 8, "cupy", 3, [3, 1], ["cuda:3", "cuda:1", "cuda:3"]),
        (0, 8, "numba", None, None, ["cpu"] * 4),
        (0, 2, "numpy", None, None, ["cpu"] * 2),
        (0, 1, "numpy", None, None, ["cpu"]),
    ],
)
def test_workers_take_devices_in_turn(machine, gpus, cores, backend, workers, devices, names):
    machine(gpus, cores)
    found = Placement.of(backend, workers, devices)
    assert found.names() == names and found.workers == len(names)


def test_the_models_own_device_is_the_first(machine):
    machine(3)
    assert Placement.of("cupy", first=2).devices == (2, 0, 1)


def test_numpy_integers_are_accepted(machine):
    machine(3)
    assert Placement.of("cupy", np.int64(2), np.array([0, 2])) == Placement(2, (0, 2))


@pytest.mark.parametrize(
    ("backend", "workers", "devices", "setting"),
    [
        ("numpy", None, [0], "devices"),
        ("cupy", None, [0, 2], "devices"),
        ("cupy", None, [1, 1], "devices"),
        ("cupy", None, [], "devices"),
        ("cupy", None, [-1], "devices"),
        ("numpy", 1.5, None, "workers"),
    ],
)
def test_bad_workers_and_devices_are_refused(machine, backend, workers, devices, setting):
    machine(2)
    with refused(setting):
        Placement.of(backend, workers, devices)


def test_the_number_of_ranks_decides_the_number_of_replicas():
    assert Placement.of("numpy", seats=(0, 1, 0, 1)).workers == 4
    grid = Placement.of("numpy", stages=2, seats=(0, 1, 0, 1))
    assert (grid.workers, grid.ranks, grid.names()) == (2, 4, ["cpu"] * 4)
    with refused("workers", "3"):
        Placement.of("numpy", 3, seats=(0, 1, 0, 1))
    with refused("workers", "1"):
        Placement.of("numpy", stages=2, seats=(0, 1, 2))


def test_a_ranks_number_on_its_machine_chooses_its_device():
    placement = Placement(4, (0, 2), seats=(0, 0, 1, 1))
    assert [placement.device(rank) for rank in range(4)] == [0, 0, 2, 2]
    assert placement.names() == ["cuda:0", "cuda:0", "cuda:2", "cuda:2"]


@pytest.mark.parametrize(
    ("gpus", "cores", "workers", "stages", "most", "found"),
    [
        (0, 2, None, None, 4, (1, 2)),  # one replica on all devices or cores by default
        (8, 2, None, None, 4, (1, 4)),
        (8, 2, 3, None, 4, (3, 2)),
        (2, 8, 3, None, 4, (3, 1)),
        (8, 2, None, 2, 4, (4, 2)),
        (8, 2, None, 3, 4, (2, 3)),
        (2, 8, None, 3, 4, (1, 3)),
        (0, 64, None, 2, 4, (4, 2)),
        (0, 1, 2, 5, 5, (2, 5)),
    ],
)
def test_replicas_of_stages(machine, gpus, cores, workers, stages, most, found):
    machine(gpus, cores)
    placed = Placement.of("cupy" if gpus else "numpy", workers, stages=stages, most_stages=most)
    assert (placed.workers, placed.stages) == found
    assert placed.ranks == len(placed.names()) == found[0] * found[1]


def test_stages_take_devices_in_turn(machine):
    machine(3)
    assert Placement.of("cupy", 2, stages=2).names() == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
