"""The plan: its output follows from its measurements, and impossible settings are rejected. No time is asserted."""

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.bench.cost_model import LINKS, forecast
from cupynet.commands import plan
from cupynet.config.experiment import Experiment
from cupynet.config.schema import PlanSettings, Settings, read
from tests.support.commands import QUICK, run
from tests.support.costs import COSTS
from tests.support.refusals import refused
from tests.support.settings import MINIMAL, settings_of, settings_of_command


def test_plan_shows_the_share_of_averaging_in_the_whole_time() -> None:
    row = asdict(forecast(COSTS, LINKS["10gbe"], 2, 1)) | {"averaging_s": 1.0, "computing_s": 3.0}
    assert plan.table(COSTS, [row])[-1].split()[-2:] == ["25", "%"]


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return Experiment(settings_of("data=synthetic", "data.train=256", "batch_size=16", "workers=2"))


def test_plan_counts_the_weights_and_the_optimizer_state_of_an_average(experiment: Experiment) -> None:
    weights = 4 * experiment.model().params.master.size
    assert plan.averaged_bytes(experiment) == 2 * weights
    for overrides, sent in (
        (["parallel.average_updaters=false"], weights),
        (["parallel.synchronizer.transfer_dtype=half"], weights * 3 // 2),
        (["parallel=elastic"], weights),
    ):
        other = Experiment(settings_of("data=synthetic", "workers=2", *overrides))
        assert plan.averaged_bytes(other) == sent


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (64, 16)])
def test_costs_of_a_plan_follow_from_three_rates(cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations take 10 ms alone and 12 ms with others, averages 3 ms. Workers beyond the cores take turns."""
    turns = workers / min(cores, workers)
    asked: Any = SimpleNamespace(
        settings=SimpleNamespace(batch_size=100, repeats=3),
        experiment=SimpleNamespace(placement=SimpleNamespace(workers=workers)),
        cores=cores,
    )
    monkeypatch.setattr(plan, "averaged_bytes", lambda experiment: 3_400_000)

    def rate(of: int, frequency: int | str) -> float:
        seconds = 10e-3 if of == 1 else 12e-3 * turns
        return of * 100 / (seconds + (3e-3 * turns if frequency == 1 else 0))

    costs = plan.measured(asked, rate)
    assert (costs.alone_s, costs.busy_s, costs.average_s) == pytest.approx((10e-3, 12e-3, 3e-3))
    assert (costs.cores, costs.size) == (min(cores, 16), 3_400_000)


def test_workers_and_frequencies_of_a_plan_are_sorted_and_have_defaults() -> None:
    settings: PlanSettings = read(PlanSettings, {**MINIMAL, "workers": 8, "frequencies": [10, 1, 10]})
    assert (settings.asked, settings.every) == ([8], [1, 10])
    assert type(settings.run(3)) is Settings and settings.run(3).workers == 3
    checked: PlanSettings = read(PlanSettings, {**MINIMAL, "check": True})
    assert (checked.asked, checked.every) == ([1, 2, 4], [3])


IMPOSSIBLE = {
    "link=10gb": "link",
    "link={bandwidth_gbit_s:1}": "link",
    "link={bandwidth_gbit_s:0,latency_us:1}": "link.bandwidth_gbit_s",
    "workers=[2,0]": "workers",
    "workers=[]": "workers",
    "frequencies=often": "frequencies",
    "parallel=pipeline": "parallel",
    "parallel.launcher=mpi": "parallel.launcher",
}


@pytest.mark.parametrize("override", IMPOSSIBLE)
def test_plan_refuses_impossible_requests_before_anything_is_measured(override: str) -> None:
    with refused(IMPOSSIBLE[override]):
        plan.prepare(settings_of_command("plan", PlanSettings, override))


def test_plan_measures_costs_and_writes_its_forecasts_to_plan_json(tmp_path: Path) -> None:
    quick = [each for each in QUICK if not each.startswith("epochs")]
    stdout, _ = run(
        tmp_path, *quick, "repeats=1", "images=600", "workers=[1,2,4]", "link={bandwidth_gbit_s:2,latency_us:30}",
        command="plan",
    )  # fmt: skip
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    result = json.loads(file.read_text())
    rows = result["forecasts"]
    assert [(row["workers"], row["frequency"]) for row in rows] == [
        (1, 1), *((workers, every) for workers in (2, 4) for every in (1, 3, 10, 50)),
    ]  # fmt: skip
    assert all(row["images_per_s"] > 0 and 0 < row["computing_s"] < 60 for row in rows)
    shown = [line.split()[:4] for line in stdout.splitlines()]
    for row in rows:
        figures = [f"{row['workers']:,}", f"{row['machines']:,}", str(row["frequency"]), f"{row['images_per_s']:,.0f}"]
        assert figures in shown
    assert result["costs"]["size"] == pytest.approx(2 * 4 * 431_080, rel=0.01)  # weights and velocities
    assert result["link"] == {"bandwidth_gbit_s": 2, "latency_us": 30}
    assert str(file.relative_to(tmp_path)) in stdout
