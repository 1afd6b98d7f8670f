"""`make records`: what it writes follows from the runs it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import records

SMALL = ("data=synthetic", "data.train=64", "data.test=32", "epochs=1", "model=mlp", "callbacks.checkpoint=null")


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> records.Maker:
    """Of tiny runs; the tree may have changes while somebody works on it."""
    from cupynet.backend.environment import commit

    monkeypatch.setattr(records, "commit", commit)
    (tmp_path / "runs").mkdir()
    return records.Maker(tmp_path / "runs", tmp_path, SMALL)


def written(maker: records.Maker, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((maker.target / f"{name}.json").read_text("utf-8"))
    assert found["commit"] == maker.commit and found["environment"]["python"]
    return found


@pytest.mark.slow
def test_a_record_has_its_command_its_runs_and_where_they_were_made(maker: records.Maker) -> None:
    records.keras_cnn(maker, seeds=[1, 2])
    found = written(maker, "keras_cnn")
    assert found["command"] == "cupynet train experiment=keras_cnn seed=SEED"
    reached = [run["test_accuracy"] for run in found["runs"]]
    assert [run["seed"] for run in found["runs"]] == [1, 2] and len(reached) == 2
    assert found["test_accuracy"] == {
        "mean": round(sum(reached) / 2, 6),
        "lowest": min(reached),
        "highest": max(reached),
    }


def test_precision_records_include_float(maker: records.Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {"float": 0.9931, "half": 0.993, "bfloat16": 0.9945}

    def train(settings: str) -> tuple[dict[str, Any], float]:
        asked = dict(each.split("=") for each in settings.split())
        numbers = {"seed": int(asked["seed"]), "workers": int(asked["workers"]), "images": 640, "skipped_steps": 1}
        return {**numbers, "test_loss": 0.02, "test_accuracy": reached[asked["dtype"]]}, 200.0

    monkeypatch.setattr(maker, "train", train)
    maker._environment = {"python": "3"}
    records.precision(maker)
    found = written(maker, "precision")["dtypes"]
    assert {dtype: each["points_below_float"] for dtype, each in found.items()} == {
        "float": 0.0,
        "half": 0.01,
        "bfloat16": -0.14,
    }
    for dtype, each in found.items():
        assert each["test_accuracy_of_five_seeds"]["mean"] == reached[dtype]
        assert [(run["seed"], run["workers"], run["skipped_steps"]) for run in each["runs"]] == [
            (seed, 2, 1) for seed in range(1, 6)
        ]


def test_memory_is_fitted_by_a_line(maker: records.Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {1: 220.0, 2: 240.0, 4: 280.0}
    monkeypatch.setattr(maker, "train", lambda settings, workers: ({}, held[workers]))
    maker._environment = {"python": "3"}
    records.memory(maker, tuple(held))
    assert written(maker, "memory")["line"] == {"mb": 200.0, "mb_per_worker": 20.0, "off_by": 0.0}


@pytest.mark.slow
def test_a_run_that_fails_or_is_of_another_commit_makes_no_record(maker: records.Maker) -> None:
    with pytest.raises(SystemExit, match="workers=0"):
        maker.train("workers=0")
    maker.commit = "0" * 40
    with pytest.raises(SystemExit):
        maker.train("workers=1")
    assert not [*maker.target.glob("*.json")]


def test_files_that_differ_from_the_commit_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import subprocess

    for command in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-mx"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert len(records.commit()) == 40
    (tmp_path / "new.py").write_text("")
    with pytest.raises(SystemExit, match="new.py"):
        records.commit()


@pytest.mark.parametrize("path", sorted(records.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_record_names_its_commit_and_its_machine(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert len(found["commit"]) == 40 and found["environment"]
