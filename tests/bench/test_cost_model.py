"""The cost model of data-parallel averaging: its limits, its trends, and figures computed by hand."""

import math
from dataclasses import replace

import pytest

from cupynet.bench.cost_model import LINKS, Costs, Link, forecast
from cupynet.config import schema
from tests.support.costs import COSTS

FREE = Link(math.inf, 0.0)
SLOW = Link(1e9, 1e-3)


def test_a_forecast_for_the_measured_machine_equals_its_measurement() -> None:
    for frequency in (1, 3):
        found = forecast(COSTS, SLOW, 2, frequency)
        assert found.computing_s + found.averaging_s == pytest.approx(22e-3 + 1e-3 / frequency)
        assert found.images_per_s == pytest.approx(2 * 128 / (22e-3 + 1e-3 / frequency))
    four = replace(COSTS, cores=4)
    assert forecast(four, SLOW, 2, 1).computing_s == pytest.approx(20e-3 + 2e-3 / 3)


def test_the_time_to_average_over_a_link_is_as_computed_by_hand() -> None:
    """With eight workers on four machines, each machine sends 2 x 6/8 of the vector twice, over 1 GB/s."""
    found = forecast(COSTS, SLOW, 8, 1)
    assert found.machines == 4
    assert found.averaging_s == pytest.approx(1e-3 + (3 + 1 / 10) * 1e-3 + 2 * (2 * 6 / 8 * 3.4e6) / 1e9)
    assert found.images_per_s == pytest.approx(8 * 128 / (22e-3 + found.averaging_s))
    assert forecast(COSTS, FREE, 8, 1).averaging_s == pytest.approx(1e-3)


# costs and images/s of LeNet averaged every 3 iterations, measured on two idle cores at d5ef20e
THREADS = replace(COSTS, alone_s=11.86e-3, busy_s=13.06e-3, average_s=0.91e-3), {1: 11_073, 2: 18_266}
RANKS = replace(COSTS, alone_s=11.85e-3, busy_s=12.42e-3, average_s=1.27e-3), {1: 10_902, 2: 19_413}


@pytest.mark.parametrize(("costs", "measured"), [THREADS, RANKS], ids=["threads", "ranks"])
def test_forecasts_are_within_6_percent_of_measured_runs(costs: Costs, measured: dict[int, int]) -> None:
    for workers, rate in measured.items():
        found = forecast(costs, LINKS["10gbe"], workers, 3, machines=1)
        assert found.images_per_s == pytest.approx(rate, rel=0.06)


def test_rarer_averages_and_faster_links_cost_less() -> None:
    shares = [forecast(COSTS, LINKS["1gbe"], 8, each).averaging_s for each in (1, 3, 10, 50)]
    assert shares == sorted(shares, reverse=True)
    agreement_s = LINKS["1gbe"].latency_s / 10
    assert shares[0] - agreement_s == pytest.approx(50 * (shares[-1] - agreement_s))
    rates = [forecast(COSTS, LINKS[link], 64, 1).images_per_s for link in LINKS]
    assert rates == sorted(rates)


def test_workers_beyond_the_cores_take_turns() -> None:
    found = forecast(COSTS, SLOW, 8, 1, machines=1)
    assert found.computing_s == pytest.approx(4 * 22e-3)
    assert found.averaging_s == pytest.approx(4e-3)  # no traffic on a link
    assert forecast(COSTS, SLOW, 8, 1, machines=3).machines == 3
    assert forecast(COSTS, SLOW, 8, 1, cores=8).averaging_s == pytest.approx(1e-3)  # all on one larger machine


def test_links_have_the_names_that_the_setting_accepts() -> None:
    assert tuple(LINKS) == schema.LINKS
    link = Link.of({"bandwidth_gbit_s": 2, "latency_us": 30})
    assert link.bandwidth == 0.25e9
    assert link.latency_s == pytest.approx(30e-6)
    assert Link.of("wan") is LINKS["wan"]
