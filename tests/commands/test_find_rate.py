"""`cupynet find_rate` as a user types it."""

import csv
from pathlib import Path

import pytest

from cupynet.commands import find_rate
from cupynet.config.schema import RateSettings
from tests.support.commands import run
from tests.support.rate_tests import made, valley
from tests.support.resumed_runs import trained
from tests.support.settings import settings_of_command

TINY = ["data=synthetic", "data.train=300", "data.test=50", "model=mlp", "backend=numpy", "workers=2", "batch_size=16"]


def test_find_rate_prints_a_setting_for_train_and_writes_find_rate_csv(tmp_path: Path) -> None:
    asked = ["lowest=1e-3", "highest=10", "iterations=40", "hydra.run.dir=there", "parallel.learning_rate_scale=linear"]
    stdout, _ = run(tmp_path, *TINY, *asked, command="find_rate")
    assert "warning" not in stdout
    folder = tmp_path / "there"
    assert {"find_rate.csv", "train.log", ".hydra"} <= {path.name for path in folder.iterdir()}
    rows = list(csv.DictReader((folder / "find_rate.csv").read_text().splitlines()))
    assert [*rows[0]] == ["iteration", "learning_rate", "loss", "smoothed_loss"]
    assert float(rows[0]["learning_rate"]) == pytest.approx(1e-3) and float(rows[-1]["learning_rate"]) <= 10
    assert [row["iteration"] for row in rows] == [str(number) for number in range(1, len(rows) + 1)]
    assert any(row["loss"] != row["smoothed_loss"] for row in rows)
    (line,) = [line for line in stdout.splitlines() if line.startswith("set ")]
    trained(tmp_path / "run", *TINY, "epochs=1", line.split()[1])  # the line can be used as it is printed
    assert not (folder / "weights.safetensors").exists() and not (folder / "checkpoints").exists()


def test_find_rate_warns_about_a_loss_that_still_decreases_at_the_highest_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(find_rate, "job_overrides", list)  # there is no job
    settings = settings_of_command("find_rate", RateSettings, *TINY, "lowest=1e-4", "highest=1e-2", "iterations=40")
    find_rate.find(find_rate.prepare(settings), tmp_path)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "highest=" in warning


def schedule(name: str, **arguments: object) -> dict[str, object]:
    return {"_target_": f"cupynet.optim.{name}", **arguments}


RATE = "optimizer.learning_rate"


@pytest.mark.parametrize(
    ("node", "written"),
    [
        (0.1, f"{RATE}=0.031"),
        (schedule("OneCycle", peak=1), f"{RATE}.peak=0.031"),
        (schedule("Warmup", then=schedule("StepDecay", initial=1)), f"{RATE}.then.initial=0.031"),
        (schedule("Scaled", factor=2, schedule=schedule("Constant")), None),
        ({"_target_": "mine.Own"}, None),
        ("cosine", f"'{RATE}={{name:cosine,initial:0.031}}'"),
        ({"name": "warmup", "then": {"name": "cosine", "initial": 0.1}}, f"{RATE}.then.initial=0.031"),
        ({"name": "warmup", "steps": 9}, f"'{RATE}={{name:warmup,steps:9,then:0.031}}'"),
        ({"name": "map", "rates": {}}, None),
    ],
    ids=str,
)
def test_find_rate_prints_the_setting_that_gives_a_run_this_rate(node: object, written: str | None) -> None:
    """A schedule without an argument for its highest rate has no such setting."""
    found = find_rate.setting({"learning_rate": node}, 0.0314)
    assert found == written if written else "=" not in found and "0.031" in found


def test_find_rate_prints_a_schedule_chosen_by_name_as_a_whole() -> None:
    optimizer = {"learning_rate": schedule("Warmup", steps=9, then=schedule("Cosine", initial=1))}
    found = find_rate.setting(optimizer, 0.0314, ["optimizer=adam", f"{RATE}=warmup"])
    assert found == f"'{RATE}={{name:warmup,steps:9,then:{{name:cosine,initial:0.031}}}}'"
    assert find_rate.setting(optimizer, 0.0314, [f"{RATE}.steps=9"]) == f"{RATE}.then.initial=0.031"


def test_find_rate_draws_the_loss_over_the_rates() -> None:
    head, *rows = find_rate.bars(made(valley(60)))
    assert head.split() == ["rate", "loss"] and 10 < len(rows) <= 20 and max(map(len, rows)) <= 80
    lengths = [row.count("#") for row in rows]
    assert 40 <= max(lengths) <= 50 and min(lengths) < lengths[0]
    for flat in (2.3, 0.0):
        assert len(find_rate.bars(made([flat] * 12))) == 13
