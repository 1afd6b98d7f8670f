"""`make records`: a record follows from its runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import records

SMALL = ("data=synthetic", "data.train=64", "data.test=32", "epochs=1", "model=mlp", "callbacks.checkpoint=null")


@pytest.fixture
def maker(tmp_path: Path) -> records.Maker:
    (tmp_path / "runs").mkdir()
    return records.Maker(tmp_path / "runs", tmp_path, SMALL)


def written(maker: records.Maker, name: str) -> Any:
    return json.loads((maker.target / f"{name}.json").read_text("utf-8"))


@pytest.mark.slow
def test_a_record_has_its_command_its_runs_and_where_they_were_made(maker: records.Maker) -> None:
    records.compare(maker, "keras_cnn")
    found = written(maker, "keras_cnn")
    assert found["commit"] == maker.commit and found["environment"]["python"]
    variant = found["variants"]["keras_cnn"]
    assert variant["command"] == "cupynet train experiment=keras_cnn seed=SEED"
    reached = [run["test_accuracy"] for run in variant["runs"]]
    assert [run["seed"] for run in variant["runs"]] == [1, 2, 3]
    mean = round(sum(reached) / 3, 6)
    assert variant["test_accuracy"] == {"mean": mean, "lowest": min(reached), "highest": max(reached)}


def test_a_record_compares_the_accuracy_of_its_variants_with_the_first(
    maker: records.Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = {"float": 0.9931, "half": 0.993, "bfloat16": 0.9945}

    def train(settings: str, seed: int) -> tuple[dict[str, Any], float]:
        dtype = settings.split()[2].partition("=")[2]
        figures = {"seed": seed, "dtype": dtype, "test_accuracy": reached[dtype]}
        return {**dict.fromkeys(records.FIGURES, 1), **figures}, 200.0

    monkeypatch.setattr(maker, "train", train)
    records.compare(maker, "precision")
    found = written(maker, "precision")["variants"]
    assert [each["points_below_the_first"] for each in found.values()] == [0.0, 0.01, -0.14]
    for dtype, each in found.items():
        assert [(run["seed"], run["dtype"]) for run in each["runs"]] == [(seed, dtype) for seed in range(1, 6)]


def test_the_memory_record_fits_a_line_to_the_number_of_workers(
    maker: records.Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {1: 220.0, 2: 240.0, 4: 280.0}
    monkeypatch.setattr(maker, "train", lambda settings, workers: ({}, held[workers]))
    records.memory(maker, tuple(held))
    assert written(maker, "memory")["line"] == {"mb": 200.0, "mb_per_worker": 20.0, "off_by": 0.0}


def test_make_records_refuses_a_tree_with_changes_or_without_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for changed in ("a" * 40 + "-dirty", None):
        monkeypatch.setattr(records, "commit", lambda found=changed: found)
        with pytest.raises(SystemExit):
            records.main(["memory"])


def test_every_record_names_its_commit_and_its_machine() -> None:
    paths = list(records.RECORDS.glob("*.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text("utf-8"))
        assert len(found["commit"]) == 40 and found["environment"], path
