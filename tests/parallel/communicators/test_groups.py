"""Groups of workers: a stage's replicas and a replica's stages."""

from cupynet.parallel import Communicator, Groups, SerialCommunicator
from tests.support.training import on_threads


def test_a_grid_deals_out_replicas_and_stages() -> None:
    def task(world: Communicator) -> tuple[list[float], list[float]]:
        groups = Groups.grid(world, stages=2)
        same_stage = groups.replicas.gather_numbers(world.rank)[:, 0].tolist()
        one_replica = groups.stages.gather_numbers(world.rank)[:, 0].tolist()
        return same_stage, one_replica

    found = on_threads(6, task)
    assert found[0] == ([0, 2, 4], [0, 1])
    assert found[1] == ([1, 3, 5], [0, 1])
    assert found[5] == ([1, 3, 5], [4, 5])


def test_one_stage_is_a_whole_replica() -> None:
    world = SerialCommunicator()
    groups = Groups.grid(world, stages=1)
    assert groups.replicas is world and groups.stages.size == 1
