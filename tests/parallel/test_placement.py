"""The placement of workers and stages on the devices of made-up machines."""

from collections.abc import Callable

import numpy as np
import pytest

from cupynet.parallel import Placement, placement
from tests.support.refusals import refused

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    def of(gpus: int, cores: int = 8) -> None:
        monkeypatch.setattr(placement, "device_count", lambda name: gpus if name == "cupy" else 0)
        monkeypatch.setattr(placement, "available_cores", lambda: cores)

    return of


@pytest.mark.parametrize(
    ("gpus", "workers", "devices", "found"),
    [
        (2, None, None, [0, 1]),
        (4, None, [0, 2], [0, 2]),
        (2, 4, None, [0, 1, 0, 1]),
        (4, np.int64(3), np.array([3, 1]), [3, 1, 3]),
    ],
)
def test_every_gpu_gets_one_replica_by_default_and_more_workers_take_turns(
    machine: Machine, gpus: int, workers: int | None, devices: list[int] | None, found: list[int]
) -> None:
    machine(gpus)
    assert Placement.of("cupy", workers, devices).names() == [f"cuda:{device}" for device in found]


@pytest.mark.parametrize(("cores", "workers"), [(8, 4), (2, 2), (1, 1)])
def test_at_most_four_workers_share_the_cores_by_default(machine: Machine, cores: int, workers: int) -> None:
    machine(0, cores)
    assert Placement.of("numpy").names() == ["cpu"] * workers


def test_the_models_own_device_is_the_first(machine: Machine) -> None:
    machine(3)
    assert Placement.of("cupy", first=2).devices == (2, 0, 1)


@pytest.mark.parametrize(
    ("backend", "devices"), [("numpy", [0]), ("cupy", [0, 2]), ("cupy", [1, 1]), ("cupy", []), ("cupy", [-1])]
)
def test_bad_devices_are_refused(machine: Machine, backend: str, devices: list[int]) -> None:
    machine(2)
    with refused("devices"):
        Placement.of(backend, None, devices)


def test_the_number_of_ranks_decides_the_number_of_replicas() -> None:
    assert Placement.of("numpy", seats=(0, 1, 0, 1)).workers == 4
    assert Placement.of("numpy", stages=2, seats=(0, 1, 0, 1)).workers == 2
    with refused("workers", "3"):
        Placement.of("numpy", 3, seats=(0, 1, 0, 1))
    with refused("pipeline.stages", "2"):
        Placement.of("numpy", stages=2, seats=(0, 1, 2))


def test_a_ranks_number_on_its_machine_chooses_its_device() -> None:
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
def test_replicas_of_stages(
    machine: Machine, gpus: int, cores: int, workers: int | None, stages: int | None, found: tuple[int, int]
) -> None:
    """The network could be split into 4 stages."""
    machine(gpus, cores)
    placed = Placement.of("cupy" if gpus else "numpy", workers, stages=stages, most_stages=4)
    assert (placed.workers, placed.stages) == found
    assert placed.ranks == len(placed.names()) == found[0] * found[1]


def test_stages_take_devices_in_turn(machine: Machine) -> None:
    machine(3)
    assert Placement.of("cupy", 2, stages=2).names() == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
