"""The model of many workers: its limits, its directions, and figures that were worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from statistics import NormalDist

import pytest

from cupynet import checks
from cupynet.errors import ConfigError
from cupynet.parallel import forecast
from cupynet.parallel.communicator import Traffic
from cupynet.parallel.forecast import (
    LINKS,
    MESSAGE_S,
    Cluster,
    Costs,
    Link,
    Sharing,
    Step,
    all_gather_s,
    all_reduce_s,
    cut,
    data_parallel,
    forecasts,
    hybrid,
    pipeline,
    recommended,
    slowest,
)

STEPS = [Step(f"layer{i}", seconds, 1000 * (i + 1), 50_000) for i, seconds in enumerate((1e-3, 2e-3, 1e-3, 0.5e-3))]
COSTS = Costs(
    batch_size=128,
    alone_s=20e-3,
    busy_s=22e-3,
    step_s=18e-3,
    spread_s=1e-3,
    cores=2,
    local=Link("local", 5e9, 10e-6),
    average=Sharing(1e-3, 3.4e6),
    gradients=Sharing(0.6e-3, 1.7e6),
    threshold=Sharing(1e-3, 2e4, gathered=True, decode_s=20e-6),
    steps=STEPS,
    micro_batches=4,
)
FREE = Link("free", math.inf, 0.0)
SLOW = Link("slow", 1e9, 1e-3)
IDEAL = replace(  # nothing but arithmetic: no loop around it, no spread, no contention, nothing to pay for
    COSTS,
    alone_s=4 * sum(step.seconds for step in STEPS),
    busy_s=4 * sum(step.seconds for step in STEPS),
    spread_s=0.0,
    local=FREE,
    average=Sharing(0.0, 3.4e6),
)
MODES = ("averaging", "gradients", "threshold")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("link", LINKS)
def test_one_worker_talks_to_nobody(mode: str, link: str) -> None:
    found = data_parallel(COSTS, Cluster(LINKS[link], 2), 1, mode)
    assert (found.communication_s, found.waiting_s, found.bytes_sent, found.machines) == (0, 0, 0, 1)
    assert found.images_per_s == pytest.approx(128 / 20e-3) and found.efficiency == pytest.approx(1)


def test_without_a_price_only_stragglers_are_left() -> None:
    costs = replace(COSTS, average=Sharing(0.0, 3.4e6), gradients=Sharing(0.0, 1.7e6), busy_s=COSTS.alone_s)
    free = Cluster(FREE, 1, algorithm="ring")
    for workers, mode in itertools.product((2, 64), ("averaging", "gradients")):
        found = data_parallel(costs, free, workers, mode)
        spread = 1e-3 * slowest(workers)
        handled = 2 * (workers - 1) * MESSAGE_S  # the small gathers: messages that somebody has to handle
        assert found.efficiency == pytest.approx(20e-3 / (20e-3 + spread + handled))


def test_more_seldom_is_faster_and_sends_less() -> None:
    for link, workers in itertools.product(LINKS.values(), (2, 8, 1024)):
        found = [data_parallel(COSTS, Cluster(link, 2), workers, "averaging", k) for k in (1, 3, 10, 100)]
        for often, seldom in itertools.pairwise(found):
            assert seldom.images_per_s > often.images_per_s
            assert seldom.communication_s < often.communication_s and seldom.waiting_s < often.waiting_s
            assert seldom.bytes_sent < often.bytes_sent and seldom.computing_s == often.computing_s


@pytest.mark.parametrize("mode", [*MODES, "hybrid"])
@pytest.mark.parametrize("algorithm", checks.ALL_REDUCES)
def test_a_better_link_is_faster_and_more_workers_are_less_efficient(mode: str, algorithm: str) -> None:
    def rows(link: Link, workers: int) -> forecast.Forecast:
        (found,) = forecasts(COSTS, Cluster(link, 2, None, algorithm), workers, [mode], [3], 2)
        return found

    for workers in (4, 64, 1024):
        rates = [rows(LINKS[name], workers).images_per_s for name in ("wan", "1gbe", "10gbe", "100gbe")]
        assert rates == sorted(rates) and len(set(rates)) == 4
    use = [rows(LINKS["10gbe"], workers).efficiency for workers in (4, 8, 64, 1024)]
    assert use == sorted(use, reverse=True) and use[0] < 1


def test_all_reduce_by_hand() -> None:
    """4 workers, 4 MB, 1 GB/s, 1 ms."""
    ring = Cluster(SLOW, 1, algorithm="ring")
    assert all_reduce_s(ring, ring.place(4), 4e6) == pytest.approx(6e-3 + 6e-3)
    chunks = Cluster(SLOW, 1)
    assert all_reduce_s(chunks, chunks.place(4), 4e6) == pytest.approx(2 * (3e-3 + 1e-3 + 3 * MESSAGE_S))
    assert all_gather_s(chunks, chunks.place(4), 1e6) == pytest.approx(3e-3 + 1e-3 + 3 * MESSAGE_S)
    shared = Cluster(SLOW, 2)  # two on each machine: 2 x 2 chunks of 1 MB leave each machine, and then once more
    assert all_reduce_s(shared, shared.place(4), 4e6) == pytest.approx(2 * (4e-3 + 1e-3 + 3 * MESSAGE_S))
    here = Cluster(SLOW, 4)
    assert all_reduce_s(here, here.place(4), 4e6) == all_gather_s(here, here.place(4), 4e6) == 0


def test_lenet_over_a_gigabit() -> None:
    """431,080 weights: 27.6 ms, so that an iteration of 1 ms is 3.5 % of its time at work."""
    link = Link("1gbe", 125e6, 0.0)
    ring = Cluster(link, 1, algorithm="ring")
    assert all_reduce_s(ring, ring.place(10**6), 4 * 431_080) == pytest.approx(27.6e-3, rel=2e-3)


def test_bytes_are_those_that_a_communicator_counts() -> None:
    for workers in (2, 5):
        traffic = Traffic()
        traffic.all_reduce(3_400_000, workers)
        assert data_parallel(COSTS, Cluster(FREE, 2), workers, "averaging").bytes_sent == traffic.bytes_sent
        traffic = Traffic()
        traffic.all_gather(20_000, workers)
        assert data_parallel(COSTS, Cluster(FREE, 2), workers, "threshold").bytes_sent == traffic.bytes_sent


def test_what_is_gathered_grows_with_the_workers() -> None:
    """Encoded gradients go to everybody: they win with few workers on a slow link, and lose with very many."""
    for workers, wins in ((8, True), (4096, False)):
        cluster = Cluster(LINKS["1gbe"], 1)
        encoded, exact = (data_parallel(COSTS, cluster, workers, mode) for mode in ("threshold", "gradients"))
        assert (encoded.images_per_s > exact.images_per_s) == wins


def test_workers_beyond_the_cores_take_turns() -> None:
    at_hand = Cluster(FREE, 2, machines=1)
    two, four, three = (data_parallel(COSTS, at_hand, workers, "averaging", 10) for workers in (2, 4, 3))
    assert two.computing_s == pytest.approx(22e-3) and four.computing_s == pytest.approx(44e-3)
    assert three.computing_s == pytest.approx(33e-3)
    assert four.images_per_s == pytest.approx(two.images_per_s, rel=0.01)
    assert four.efficiency == pytest.approx(two.efficiency / 2, rel=0.01)
    assert {each.machines for each in (two, four, three)} == {1}
    apart = data_parallel(COSTS, Cluster(FREE, 2), 4, "averaging", 10)
    assert apart.machines == 2 and apart.images_per_s > 1.9 * four.images_per_s


def test_cores_slow_each_other_down_as_measured() -> None:
    seconds = [
        data_parallel(COSTS, Cluster(FREE, cores, 1), workers, "averaging").computing_s
        for cores, workers in ((5, 1), (5, 3), (5, 5), (1, 1))
    ]
    assert seconds == pytest.approx([20e-3, 21e-3, 22e-3, 20e-3])


@pytest.mark.parametrize("workers", [1, 2, 3, 10, 100, 1000])
def test_the_slowest_of_many(workers: int) -> None:
    """Against the integral of x d(Phi(x)^W)."""
    phi, width = NormalDist().cdf, 1e-3
    grid = [-8 + width * i for i in range(16_001)]
    exact = sum((x + width / 2) * (phi(x + width) ** workers - phi(x) ** workers) for x in grid)
    assert slowest(workers) == pytest.approx(exact, abs=0.03)


def test_cut_is_the_best_of_all() -> None:
    for seconds in ((3.0, 1.0, 4.0, 1.0, 5.0, 9.0), (1.0,) * 6, (9.0, 1.0, 1.0, 1.0, 1.0, 1.0)):
        for stages in range(1, 7):
            groups = cut(seconds, stages)
            assert list(itertools.chain(*groups)) == list(range(6)) and len(groups) == stages and all(groups)
            slow = max(sum(seconds[i] for i in group) for group in groups)
            ways = itertools.combinations(range(1, 6), stages - 1)
            best = min(max(sum(seconds[a:b]) for a, b in itertools.pairwise((0, *way, 6))) for way in ways)
            assert slow == pytest.approx(best)
    for stages in (0, 5):
        with pytest.raises(ConfigError, match=f"^stages={stages}: the network has 4 steps"):
            cut([1.0] * 4, stages)


def test_a_pipeline_reaches_its_bound_and_no_more() -> None:
    """(total work / slowest stage) x m / (m + s - 1)."""
    for stages, slow in ((2, 3e-3), (3, 2e-3), (4, 2e-3)):
        for m in (1, 4, 64):
            work = 4 * sum(step.seconds for step in STEPS)
            costs = replace(IDEAL, alone_s=work * m / 4, busy_s=work * m / 4, micro_batches=m)
            found = pipeline(costs, Cluster(FREE, 4), stages)
            bound = 4.5e-3 / slow * m / (m + stages - 1)
            assert found.images_per_s / costs.alone_images_per_s == pytest.approx(bound)
            assert found.communication_s == 0 and found.efficiency == pytest.approx(bound / stages)
            assert pipeline(costs, Cluster(SLOW, 1), stages).images_per_s < found.images_per_s


def test_messages_are_hidden_behind_work_until_they_take_longer() -> None:
    fast, slow = (pipeline(IDEAL, Cluster(Link("", bandwidth, 0.0), 1), 2) for bandwidth in (1e9, 1e7))
    assert fast.communication_s == pytest.approx(2 * 50e3 / 1e9)  # there and back, once
    assert slow.communication_s == pytest.approx(2 * 50e3 / 1e7 + 5 * (2 * 50e3 / 1e7 - 3e-3))
    assert fast.bytes_sent == slow.bytes_sent == 4 * 50e3


def test_stages_that_take_turns_gain_nothing() -> None:
    found = pipeline(replace(IDEAL, cores=1), Cluster(FREE, 1, machines=1), 3)
    assert found.images_per_s <= IDEAL.alone_images_per_s * 1.0001


def test_hybrid_is_as_many_pipelines() -> None:
    one = pipeline(IDEAL, Cluster(FREE, 2), 2)
    for replicas in (2, 5):
        found = hybrid(IDEAL, Cluster(FREE, 2, algorithm="ring"), 2 * replicas, 2, frequency=10**9)
        assert found.images_per_s == pytest.approx(replicas * one.images_per_s)
        assert found.efficiency == pytest.approx(one.efficiency) and found.machines == replicas
    with pytest.raises(ConfigError, match="^workers=5: cannot be shared out to replicas of 2 stages$"):
        hybrid(COSTS, Cluster(FREE, 2), 5, 2, 1)


def test_modes_that_cannot_work_are_left_out() -> None:
    def names(workers: int, **changes: object) -> list[str]:
        costs = replace(COSTS, **changes)  # type: ignore[arg-type]
        return [each.name for each in forecasts(costs, Cluster(FREE, 2), workers, checks.MODES, [1, 3], 2)]

    both = ["averaging, each iteration", "averaging every 3", "gradients, exact"]
    assert names(1) == [*both, "gradients, threshold"]
    assert names(1, threshold=None) == both
    assert names(3, threshold=None) == [*both, "pipeline of 3 stages"]
    assert names(4, threshold=None) == [*both, "pipeline of 4 stages", "hybrid 2x2, every 1", "hybrid 2x2, every 3"]
    assert names(8, threshold=None) == [*both, "hybrid 4x2, every 1", "hybrid 4x2, every 3"]
    assert names(8, threshold=None, steps=()) == both


def test_what_is_nearest_to_exact_and_fast_is_recommended() -> None:
    def best(link: Link, costs: Costs = COSTS, workers: int = 64) -> str:
        return recommended(forecasts(costs, Cluster(link, 1), workers, checks.MODES, [1, 3, 10, 50], 2)).name

    assert best(LINKS["wan"], replace(COSTS, threshold=None)) == "averaging every 50"
    assert best(LINKS["10gbe"]) in ("averaging every 3", "averaging every 10")
    calm = replace(COSTS, spread_s=0.0, average=Sharing(1e-5, 3.4e6), gradients=Sharing(1e-5, 1.7e6))
    assert best(FREE, calm, 4) in ("averaging, each iteration", "gradients, exact")
    only = forecasts(COSTS, Cluster(FREE, 2), 4, ["hybrid"], [1], 2)
    assert recommended(only) is only[0]


def test_links() -> None:
    assert tuple(LINKS) == checks.LINKS and all(LINKS[name].name == name for name in LINKS)
    assert Link.of("10gbe").bandwidth == 1.25e9 and Link.of("wan") == Link("wan", 12.5e6, 50e-3)
    assert Link.of({"bandwidth_gbit_s": 8, "latency_us": 3}) == Link("8 Gbit/s, 3 us", 1e9, pytest.approx(3e-6))
    with pytest.raises(ConfigError, match="^link='lan': must be one of wan, 1gbe"):
        Link.of("lan")
    assert FREE.send_s(1e9) == 0 and SLOW.send_s(1e6) == pytest.approx(2e-3)
