"""The plan: what it prints follows from what it measured, and what cannot work is refused. No time is asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cupynet.bench import measure
from cupynet.bench.cost_model import LINKS, Cluster, Forecast, forecast
from cupynet.commands import plan
from cupynet.commands.plan import Checked
from cupynet.config.removed import refuse_removed
from cupynet.config.schema import PlanSettings, Settings, own_names, read
from cupynet.core.errors import ConfigError
from tests.support.commands import QUICK, run
from tests.support.costs import COSTS
from tests.support.settings import MINIMAL, settings_of_command

WIDTH = 100


def found(link: str, *workers: int, machines: int | None = None) -> dict[int, list[Forecast]]:
    here = Cluster(LINKS[link], 2, machines)
    return {each: [forecast(COSTS, here, each, every) for every in (1, 3, 10, 50)] for each in workers}


def test_the_table_has_a_line_for_every_forecast() -> None:
    rows = found("10gbe", 2, 64, 1024)
    lines = plan.table(rows)
    assert len(lines) == 1 + 3 * 4 and max(map(len, lines)) <= WIDTH
    for line, each in zip(lines[1:], [each for some in rows.values() for each in some], strict=True):
        assert line.split()[:4] == [
            f"{each.workers:,}", f"{each.machines:,}", str(each.frequency), f"{each.images_per_s:,.0f}"
        ]  # fmt: skip


def test_the_basis_of_a_forecast_names_the_link() -> None:
    for name in LINKS:
        for machines in (None, 16):
            lines = plan.foundation(COSTS, Cluster(LINKS[name], 128, machines))
            assert any(name in line for line in lines)


def test_the_advice_has_a_frequency_for_each_number_of_workers() -> None:
    sentence = plan.advice(found("1gbe", 2, 8), Cluster(LINKS["1gbe"], 2))
    assert "over 1gbe" in sentence and " with 2 (" in sentence and " with 8 (" in sentence
    assert "share cores" not in sentence
    crowded = plan.advice(found("1gbe", 2, 8, 64, machines=1), Cluster(LINKS["1gbe"], 2, 1))
    assert "from 8 workers on they share cores" in crowded


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (64, 16)])
def test_costs_follow_from_three_rates(cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Iterations of 10 ms alone, 12 ms beside others, and an average of 3 ms; workers beyond the cores take turns."""
    turns = workers / min(cores, workers)
    asked: Any = SimpleNamespace(
        settings=SimpleNamespace(batch_size=100, repeats=3),
        experiment=SimpleNamespace(settings=SimpleNamespace(workers=workers)),
    )
    monkeypatch.setattr(plan, "cores_of", lambda experiment: cores)
    monkeypatch.setattr(measure, "averaged_bytes", lambda experiment: 3_400_000)

    def rate(of: int, frequency: int | str) -> float:
        seconds = 10e-3 if of == 1 else 12e-3 * turns
        return of * 100 / (seconds + (3e-3 * turns if frequency == 1 else 0))

    costs = plan.measured(asked, rate)
    assert (costs.alone_s, costs.busy_s, costs.average_s) == pytest.approx((10e-3, 12e-3, 3e-3))
    assert (costs.cores, costs.size) == (min(cores, 16), 3_400_000)


def test_the_verdict_counts_what_is_near() -> None:
    rows = [Checked("threads", 2, 3, 90.0, 100.0), Checked("ranks", 4, 10, 150.0, 100.0)]
    assert plan.verdict(rows).startswith("1 of 2 ")
    lines = plan.check_table(rows)
    assert lines[1].split() == ["2", "threads", "3", "90", "100", "0.90"] and max(map(len, lines)) <= WIDTH


def test_the_settings_of_a_plan_describe_runs() -> None:
    settings: PlanSettings = read(PlanSettings, {**MINIMAL, "workers": 8, "frequencies": [10, 1, 10]})
    assert (settings.asked, settings.every) == ([8], [1, 10])
    assert type(settings.run(3)) is Settings and settings.run(3).workers == 3
    usual: PlanSettings = read(PlanSettings, MINIMAL)
    assert (usual.asked, usual.every) == ([2, 8, 64, 1024], [1, 3, 10, 50])
    checked: PlanSettings = read(PlanSettings, {**MINIMAL, "check": True})
    assert (checked.asked, checked.every) == ([1, 2, 4], [3])
    assert {"workers", "link", "check"} <= set(own_names(PlanSettings)) and "epochs" not in own_names(PlanSettings)


REFUSED = [
    ("link", "10gb", "link=10gb: must be one of wan, 1gbe, 10gbe, 100gbe, nvlink, or {"),
    ("link", {"bandwidth_gbit_s": 1}, "link={bandwidth_gbit_s:1}: must be one of wan"),
    (*("link", {"bandwidth_gbit_s": 0, "latency_us": 1}), "link.bandwidth_gbit_s=0: must be a number above 0"),
    ("workers", [2, 0], "workers=[2,0]: must be an integer of at least 1, a list"),
    ("workers", [], "workers=[]: must be an integer of at least 1"),
    ("frequencies", "often", "frequencies=often: must be an integer of at least 1, a list"),
    ("machines", 0, "machines=0: must be an integer of at least 1"),
    ("check", 1, "check=1: must be true or false"),
]


@pytest.mark.parametrize(("key", "value", "line"), REFUSED)
def test_impossible_requests_are_refused(key: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(PlanSettings, {**MINIMAL, key: value})
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("link=10gb", "link=10gb: must be one of wan"),
        ("link={bandwidth_gbit_s:1,latency_us:-1}", "link.latency_us=-1: must be a"),
        ("parallel=pipeline", "parallel: only averaging is forecast"),
        ("parallel=gradients", "parallel: only averaging is forecast"),
        ("parallel.launcher=mpi", "launcher=mpi: "),
        ("check=true workers=1024", "workers=1024: check=true starts them all. Use at most 32."),
    ],
)
def test_bad_settings_are_refused_before_anything_is_measured(setting: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        plan.prepare(settings_of_command("plan", PlanSettings, *setting.split()))
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "setting", ["modes=[pipeline]", "stages=2", "micro_batches=4", "all_reduce=ring", "link=measured"]
)
def test_removed_settings_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(setting)}: was removed; "):
        refuse_removed([setting])


def test_a_bad_setting_is_refused_in_one_line(tmp_path: Path) -> None:
    _, stderr = run(tmp_path, "link=10gb", command="plan", code=2)
    assert stderr.startswith("cupynet: link=10gb: must be one of wan") and stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_plan_measures_and_forecasts(tmp_path: Path) -> None:
    quick = [each for each in QUICK if not each.startswith("epochs")]
    stdout, _ = run(
        tmp_path, *quick, "repeats=1", "images=600", "workers=[1,2,4]", "link={bandwidth_gbit_s:2,latency_us:30}",
        command="plan",
    )  # fmt: skip
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    result = json.loads(file.read_text())
    rows = result["forecasts"]
    assert [(row["workers"], row["frequency"]) for row in rows] == [(w, f) for w in (1, 2, 4) for f in (1, 3, 10, 50)]
    assert all(row["images_per_s"] > 0 and 0 < row["computing_s"] < 60 for row in rows)
    assert result["costs"]["size"] == pytest.approx(2 * 4 * 431_080, rel=0.01)  # weights and velocities
    assert result["cluster"]["link"]["bandwidth"] == 0.25e9
    assert result["sentence"] in stdout and "2 Gbit/s" in stdout


@pytest.mark.slow
def test_a_check_trains_and_compares(tmp_path) -> None:
    stdout, _ = run(
        tmp_path, "data.train=2000", "data.test=200", "repeats=1", "images=2000", "workers=[1,2]",
        "check=true", "batch_size=64", command="plan",
    )  # fmt: skip
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    rows = json.loads(file.read_text())["checked"]
    threads = [row for row in rows if row["kind"] == "threads"]
    assert [row["workers"] for row in threads] == [1, 2] and all(row["measured"] > 0 for row in rows)
    assert all(row["ratio"] == pytest.approx(row["predicted"] / row["measured"]) for row in rows)
    assert "forecasts are within 25 % of the measured speed" in stdout
