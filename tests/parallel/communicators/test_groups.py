"""Groups of workers: the replicas of a stage and the stages of a replica."""

from __future__ import annotations

from cupynet.parallel import Groups, SerialCommunicator, ThreadLauncher


def test_groups_of_one_by_default():
    groups = Groups.of()
    assert (groups.world.size, groups.replicas.size, groups.stages.size) == (1, 1, 1)


def test_a_grid_deals_out_replicas_and_stages():
    found = {}

    def task(world):
        groups = Groups.grid(world, stages=2)
        same_stage = groups.replicas.gather_numbers(world.rank)[:, 0].tolist()
        one_replica = groups.stages.gather_numbers(world.rank)[:, 0].tolist()
        found[world.rank] = groups.replicas.rank, same_stage, groups.stages.rank, one_replica

    with ThreadLauncher(6, timeout_s=20) as launcher:
        launcher.run(task)
    assert found == {
        rank: (rank // 2, [rank % 2, rank % 2 + 2, rank % 2 + 4], rank % 2, [rank - rank % 2, rank - rank % 2 + 1])
        for rank in range(6)
    }


def test_one_stage_is_a_whole_replica():
    world = SerialCommunicator()
    groups = Groups.grid(world, stages=1)
    assert groups.replicas is world and groups.stages.size == 1
