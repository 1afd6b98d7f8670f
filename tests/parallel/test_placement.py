"""The placement of workers and stages on the devices of made-up machines."""

from typing import Any

import numpy as np
import pytest

from cupynet.parallel import Placement, placement
from tests.support.refusals import refused


def make_up(monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int) -> None:
    monkeypatch.setattr(placement, "device_count", lambda name: gpus if name == "cupy" else 0)
    monkeypatch.setattr(placement, "available_cores", lambda: cores)


@pytest.mark.parametrize(
    ("gpus", "cores", "arguments", "found"),
    [
        (2, 8, {}, [0, 1]),  # one replica on each GPU
        (3, 8, {"first": 2}, [2, 0, 1]),
        (4, 8, {"devices": [0, 2]}, [0, 2]),
        (2, 8, {"workers": 4}, [0, 1, 0, 1]),
        (4, 8, {"workers": np.int64(3), "devices": np.array([3, 1])}, [3, 1, 3]),
        (3, 8, {"workers": 2, "stages": 2}, [0, 1, 2, 0]),
        (0, 8, {}, ["cpu"] * 4),  # at most four share the cores
        (0, 2, {}, ["cpu"] * 2),
    ],
)
def test_workers_take_turns_on_the_devices_by_default_one_on_each_gpu_or_up_to_four_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, arguments: dict[str, Any], found: list[Any]
) -> None:
    make_up(monkeypatch, gpus, cores)
    expected = [f"cuda:{device}" if gpus else device for device in found]
    assert Placement.of("cupy" if gpus else "numpy", **arguments).names() == expected


@pytest.mark.parametrize(
    ("backend", "devices"), [("numpy", [0]), ("cupy", [0, 2]), ("cupy", [1, 1]), ("cupy", []), ("cupy", [-1])]
)
def test_devices_that_do_not_exist_repeat_or_are_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, backend: str, devices: list[int]
) -> None:
    make_up(monkeypatch, 2, 8)
    with refused("devices"):
        Placement.of(backend, None, devices)


def test_the_number_of_ranks_determines_the_number_of_replicas_and_any_other_is_refused() -> None:
    assert Placement.of("numpy", seats=(0, 1, 0, 1)).workers == 4
    assert Placement.of("numpy", stages=2, seats=(0, 1, 0, 1)).workers == 2
    with refused("workers", "3"):
        Placement.of("numpy", 3, seats=(0, 1, 0, 1))
    with refused("pipeline.stages", "2"):
        Placement.of("numpy", stages=2, seats=(0, 1, 2))


def test_the_local_rank_on_a_machine_determines_the_device() -> None:
    assert Placement(4, (0, 2), seats=(0, 0, 1, 1)).names() == ["cuda:0", "cuda:0", "cuda:2", "cuda:2"]


@pytest.mark.parametrize(
    ("gpus", "cores", "workers", "stages", "found"),
    [
        (0, 2, None, None, (1, 2)),  # one replica on all devices or cores by default
        (8, 2, None, None, (1, 4)),
        (8, 2, 3, None, (3, 2)),
        (2, 8, 3, None, (3, 1)),
        (8, 2, None, 3, (2, 3)),
        (2, 8, None, 3, (1, 3)),
        (0, 64, None, 2, (4, 2)),
    ],
)
def test_replicas_of_stages_fill_the_devices_or_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: int, cores: int, workers: Any, stages: Any, found: tuple[int, int]
) -> None:
    """The network could be split into 4 stages."""
    make_up(monkeypatch, gpus, cores)
    placed = Placement.of("cupy" if gpus else "numpy", workers, stages=stages, most_stages=4)
    assert (placed.workers, placed.stages) == found
    assert placed.ranks == len(placed.names()) == found[0] * found[1]
