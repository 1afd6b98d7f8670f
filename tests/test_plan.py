"""The plan: what it tells follows from what it measured, and what cannot work is refused. No time is asserted."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from cupynet import plan
from cupynet.errors import ConfigError
from cupynet.parallel.forecast import LINKS, Cluster, Costs, Forecast, fits, forecasts, pipeline, recommended, what_fits
from cupynet.plan import Checked
from cupynet.settings import PlanSettings, Settings, own_names, read
from tests.parallel.test_forecast import COSTS
from tests.test_settings import LEAST
from tests.test_train import QUICK, run

MODES = ["averaging", "gradients", "threshold", "pipeline", "hybrid"]


def found(link: str, *workers: int, machines: int | None = None) -> dict[int, list[Forecast]]:
    here = Cluster(LINKS[link], 2, machines)
    return {each: forecasts(COSTS, here, each, MODES, [1, 3, 10, 50], 2) for each in workers}


def printed(renderable: object) -> list[str]:
    out = plan.console()
    with out.capture() as captured:
        out.print(renderable)
    return captured.get().splitlines()


@pytest.mark.parametrize("ascii_only", [False, True])
def test_the_table_has_a_line_for_every_forecast(ascii_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # a narrow terminal gets wide lines, not cut ones
    rows = found("10gbe", 2, 64, 1024)
    lines = printed(plan.table(rows, ascii_only=ascii_only))
    assert len(lines) == 1 + sum(map(len, rows.values()))
    assert max(map(len, lines)) <= plan.WIDTH and not any("…" in line for line in lines)
    assert all(line.isascii() for line in lines) == ascii_only
    names = [each.name for some in rows.values() for each in some]
    for line, name in zip(lines[1:], names, strict=True):
        assert name in line and "%" in line
    assert [line[:7].strip() for line in lines[1:] if line[:7].strip()] == ["2", "64", "1,024"]


def test_a_bar_is_as_long_as_the_others_and_shows_the_shares() -> None:
    half = Forecast("averaging", 2, 1.0, 1.0, 0.5, 0.25, 0.25, 0.0, 1, frequency=1)
    assert plan.bar(half, ascii_only=True).plain == "#" * 12 + "=" * 6 + "." * 6
    for some in found("wan", 1, 2, 8, 1024).values():
        for each in some:
            assert len(plan.bar(each, ascii_only=False).plain) == plan.BAR


def test_the_foundation_fits_a_hundred_columns() -> None:
    slow = replace(COSTS, alone_s=12.345)
    for machines in (None, 1, 16):
        for name in LINKS:
            lines = plan.foundation(slow, Cluster(LINKS[name], 128, machines))
            assert max(map(len, lines)) <= plan.WIDTH
            assert any(name in line for line in lines)
    assert "1 machine;" in "\n".join(plan.foundation(COSTS, Cluster(LINKS["wan"], 1, 1)))


def test_the_advice_is_one_sentence_that_names_alike_workers_together() -> None:
    rows = found("1gbe", 2, 8, 64)
    best = {workers: recommended(each) for workers, each in rows.items()}
    names = [each.name for each in best.values()]
    sentence = plan.advice(best, Cluster(LINKS["1gbe"], 2))
    assert sentence.startswith("Recommended over 1gbe: ") and sentence.endswith(".") and sentence.count(". ") == 0
    for name in set(names):
        assert sentence.count(name) == 1
    assert "take turns" not in sentence
    alike = {workers: recommended(found("nvlink", workers)[workers]) for workers in (2, 4)}
    alike[4] = replace(alike[4], frequency=alike[2].frequency, mode=alike[2].mode)
    assert "2 to 4 workers" in plan.advice(alike, Cluster(LINKS["nvlink"], 1))
    crowded = plan.advice(best, Cluster(LINKS["1gbe"], 2, machines=1))
    assert crowded.endswith("; from 8 workers on they take turns and nothing is gained.")


def test_the_middle_of_several_sittings() -> None:
    sittings = [
        replace(COSTS, alone_s=seconds, average=replace(COSTS.average, local_s=2 * seconds))
        for seconds in (3.0, 1.0, 2.0)
    ]
    middle: Costs = plan.middle(sittings)
    assert (middle.alone_s, middle.average.local_s) == (2.0, 4.0)
    assert middle == replace(COSTS, alone_s=2.0, average=replace(COSTS.average, local_s=4.0))
    assert plan.middle([COSTS]) == COSTS and middle.steps[0].name == "layer0"


def test_the_verdict_counts_what_is_near_and_names_the_furthest() -> None:
    rows = [Checked("threads", 2, "averaging every 3", 90.0, 100.0), Checked("ranks", 4, "gradients", 150.0, 100.0)]
    assert plan.verdict(rows) == (
        "1 of 2 forecasts are within 25 % of what was measured; the furthest, gradients with 4 ranks, is off by +50 %."
    )
    lines = printed(plan.check_table(rows))
    assert lines[1].split() == ["2", "threads", "averaging", "every", "3", "90", "100", "0.90"]
    assert max(map(len, lines)) <= plan.WIDTH


def test_the_settings_of_a_plan_describe_runs() -> None:
    settings: PlanSettings = read(PlanSettings, {**LEAST, "workers": 8, "frequencies": [10, 1, 10]})
    assert (settings.asked, settings.every) == ([8], [1, 10])
    assert type(settings.run(3)) is Settings and settings.run(3).workers == 3
    usual: PlanSettings = read(PlanSettings, LEAST)
    assert (usual.asked, usual.every) == ([2, 8, 64, 1024], [1, 3, 10, 50])
    checked: PlanSettings = read(PlanSettings, {**LEAST, "check": True})
    assert (checked.asked, checked.every) == ([1, 2, 4], [3])
    assert usual.compared == MODES and checked.compared == [mode for mode in MODES if mode != "threshold"]
    parts: PlanSettings = read(PlanSettings, {**LEAST, "accumulate": 2})
    assert parts.compared == ["averaging", "gradients", "threshold"] and parts.run(2).accumulate == 2
    assert {"workers", "link", "check"} <= set(own_names(PlanSettings)) and "epochs" not in own_names(PlanSettings)


REFUSED = [
    ("link", "10gb", "link=10gb: must be one of measured, wan, 1gbe, 10gbe, 100gbe, nvlink, or {"),
    ("link", {"bandwidth_gbit_s": 1}, "link={bandwidth_gbit_s:1}: must be one of measured"),
    (
        *("link", {"bandwidth_gbit_s": 0, "latency_us": 1}),
        "link={bandwidth_gbit_s:0,latency_us:1}: bandwidth_gbit_s=0: must be a number above 0",
    ),
    ("workers", [2, 0], "workers=[2,0]: must be an integer of at least 1 and at most 1000000, a list"),
    ("workers", [], "workers=[]: must be an integer of at least 1"),
    ("frequencies", "often", "frequencies=often: must be an integer of at least 1, a list"),
    ("modes", ["averagin"], "modes=[averagin]: must be some of averaging, gradients"),
    ("modes", [], "modes=[]: must be some of"),
    ("all_reduce", "tree", "all_reduce=tree: must be one of chunks, ring"),
    ("stages", 0, "stages=0: must be an integer of at least 1"),
    ("machines", 0, "machines=0: must be an integer of at least 1, or null for as many as the workers fill"),
    ("check", 1, "check=1: must be true or false"),
]


@pytest.mark.parametrize(("key", "value", "line"), REFUSED)
def test_what_cannot_be_is_refused(key: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(PlanSettings, {**LEAST, key: value})
    assert str(caught.value).startswith(line)


def test_what_cannot_work_is_refused_in_one_line(tmp_path) -> None:
    for setting, line in (
        ("link=10gb", "link=10gb: must be one of measured"),
        (
            "link={bandwidth_gbit_s:1,latency_us:-1}",
            "link={bandwidth_gbit_s:1,latency_us:-1}: latency_us=-1: must be a",
        ),
        ("micro_batches=300", "micro_batches=300: a batch has 128 images"),
    ):
        _, stderr = run(tmp_path, setting, command="plan", code=2)
        assert stderr.startswith(f"cupynet: {line}") and stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_stages_are_not_forecast_of_a_run_that_accumulates(tmp_path) -> None:
    """Its runs would be refused."""
    _, stderr = run(tmp_path, "accumulate=2", "modes=[averaging,pipeline,hybrid]", command="plan", code=2)
    line = "accumulate=2: modes=[pipeline,hybrid] cut batches by micro_batches: leave it at 1, or these modes out"
    assert stderr == f"cupynet: {line}\n" and not list(tmp_path.iterdir())


def test_a_check_starts_no_thousand_workers(tmp_path) -> None:
    _, stderr = run(tmp_path, "check=true", "workers=1024", command="plan", code=2)
    assert stderr == "cupynet: workers=1024: check=true starts them all: ask for at most 32\n"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["modes=hybrid", "workers=1"], "workers=1: cannot work in modes=[hybrid]: hybrid takes 4, 6, 8 ... workers"),
        (["modes=hybrid", "workers=2", "stages=3"], "workers=2: cannot work in modes=[hybrid]: hybrid takes 6, 9, 12"),
        (
            ["modes=hybrid", "workers=18", "stages=9"],
            "workers=18: cannot work in modes=[hybrid]: hybrid takes stages=2",
        ),
        (
            ["modes=[pipeline,hybrid]", "workers=[1,2]"],
            "workers=1: cannot work in modes=[pipeline,hybrid]: pipeline takes 2 to 4 workers",
        ),
        (["modes=pipeline", "workers=9", "check=true"], "workers=9: cannot work in modes=[pipeline]: pipeline takes 2"),
    ],
)
def test_workers_that_fit_no_mode_are_refused_before_anything_is_measured(settings, line, tmp_path) -> None:
    _, stderr = run(tmp_path, *settings, "data.train=600", command="plan", code=2)
    assert stderr.startswith(f"cupynet: {line}") and stderr.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("stages", [1, 2, 3, 9])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_said_to_fit_fits(mode: str, stages: int, steps: int) -> None:
    fitting = [workers for workers in range(1, 40) if fits(mode, workers, stages, steps)]
    costs = replace(COSTS, steps=(COSTS.steps * 2)[:steps])
    here = Cluster(LINKS["10gbe"], 2)
    assert fitting == [each for each in range(1, 40) if forecasts(costs, here, each, [mode], [3], stages)]
    said = what_fits(mode, stages, steps)
    if fitting and mode in ("pipeline", "hybrid"):
        numbers = [int(number) for number in re.findall(r"\d+", said.split("workers")[0])]
        assert set(numbers) <= set(fitting) and numbers[0] == fitting[0]


def test_a_plan_measures_and_forecasts(tmp_path) -> None:
    quick = [each for each in QUICK if not each.startswith("epochs")]
    stdout, _ = run(
        tmp_path, *quick, "repeats=1", "images=600", "workers=[1,2,4]", "link={bandwidth_gbit_s:2,latency_us:30}",
        "micro_batches=2", command="plan",
    )  # fmt: skip
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    result = json.loads(file.read_text())
    rows = result["forecasts"]
    assert {row["workers"] for row in rows} == {1, 2, 4} and {row["mode"] for row in rows} >= {"averaging", "pipeline"}
    assert all(row["images_per_s"] > 0 and 0 < row["iteration_s"] < 60 for row in rows)
    assert [step["name"] for step in result["costs"]["steps"]][-1] == "output"
    assert result["costs"]["average"]["size"] == pytest.approx(2 * 4 * 431_080, rel=0.01)  # weights and velocities
    assert result["costs"]["gradients"]["size"] == pytest.approx(4 * 431_080, rel=0.01)
    assert result["cluster"]["link"]["bandwidth"] == 0.25e9
    assert result["sentence"] in stdout and "2 Gbit/s" in stdout


@pytest.mark.slow
def test_a_check_trains_and_compares(tmp_path) -> None:
    stdout, _ = run(
        tmp_path, "data.train=2000", "data.test=200", "repeats=1", "images=2000", "workers=[1,2]", "modes=[averaging]",
        "check=true", "batch_size=64", command="plan",
    )  # fmt: skip
    (file,) = tmp_path.glob("outputs/plan/*/*/plan.json")
    rows = json.loads(file.read_text())["checked"]
    threads = [row for row in rows if row["kind"] == "threads"]
    assert [row["workers"] for row in threads] == [1, 2] and all(row["measured"] > 0 for row in rows)
    assert all(row["ratio"] == pytest.approx(row["predicted"] / row["measured"]) for row in rows)
    assert "forecasts are within 25 % of what was measured" in stdout


def test_a_pipeline_has_a_row_of_its_own() -> None:
    (row,) = [each for each in found("nvlink", 2)[2] if each.mode == "pipeline"]
    assert row == pipeline(COSTS, Cluster(LINKS["nvlink"], 2), 2)
