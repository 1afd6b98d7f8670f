"""A run's folder: what is saved is read again, and what is no run is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core import files
from cupynet.core.errors import DataError
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.summaries import FIGURES, SUMMARY, changed


def test_a_summary_round_trips(tmp_path: Path) -> None:
    run, weights = Run(tmp_path), {"conv1.weight": np.arange(6.0).reshape(2, 3)}
    run.save(SUMMARY, weights)
    run.history_path.write_text('{"kind": "epoch"}\n{"kind": "report"}\n{"kind": "epo')  # a killed process wrote
    assert run.summary() == SUMMARY
    np.testing.assert_array_equal(run.weights()["conv1.weight"], weights["conv1.weight"])
    assert [row["kind"] for row in run.history()] == ["epoch", "report"]


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    run, store = Run(tmp_path), Checkpoints(tmp_path / "checkpoints")
    run.save(SUMMARY, {"a": np.ones(2)})
    store.save(3, {"step": 3}, {})
    (tmp_path / ".hydra").mkdir()
    for name in (".weights.safetensors.7.part", ".summary.json.8.part", ".hydra/.overrides.yaml.9.part"):
        (tmp_path / name).write_text("half")
    for name in ("step-00000004.tmp-7", "step-00000002.tmp-7"):
        (tmp_path / "checkpoints" / name).mkdir()
    before = run.weights_path.read_bytes()
    run.tidy()
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "manifest.json",
        "state.json",
        "summary.json",
        "weights.safetensors",
    ]
    assert store.steps() == [3] and run.weights_path.read_bytes() == before and run.summary() == SUMMARY


class Killed(BaseException):
    """Stands in for the end of a process."""


def test_a_save_that_is_killed_leaves_no_summary_of_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    run = Run(tmp_path)
    run.save(SUMMARY, {"a": np.ones(1)})
    monkeypatch.setattr(files, "write_json", killed)
    with pytest.raises(Killed):
        run.save(SUMMARY, {"a": np.zeros(1)})
    assert not run.summary_path.exists()


def test_a_result_without_mistakes_has_no_examples_of_an_earlier_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(SUMMARY, {}, np.zeros((2, 3, 3, 1), np.uint8))
    assert run.examples_path.exists()
    run.save(SUMMARY, {}, np.zeros((0, 3, 3, 1), np.uint8))
    assert not run.examples_path.exists()


def test_a_resumed_run_is_unfinished_until_it_is_saved_again(tmp_path: Path) -> None:
    run, store = Run(tmp_path), Checkpoints(tmp_path / "checkpoints")
    run.save(SUMMARY, {})
    for step in (3, 7):
        store.save(step, {}, {})
    run.reopen(3)
    assert run.reopened_path.exists() and store.steps() == [3]
    run.save(SUMMARY, {})
    assert not run.reopened_path.exists()


def test_a_run_fails_only_after_it_began(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fail(65)
    assert not run.failed_path.exists()
    run.started_path.write_text('{"started": "2026-05-01 12:30:00", "epochs": 3}')
    run.fail(65)
    assert json.loads(run.failed_path.read_text()) == {"exit_code": 65}
    assert (run.started(), run.planned_epochs()) == ("2026-05-01 12:30:00", 3)


def test_a_new_run_in_an_old_folder_starts_empty(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(SUMMARY, {"a": np.ones(1)})
    for path in (run.history_path, run.started_path, run.failed_path, run.reopened_path, run.report_path):
        path.write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    run.begin()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_keys_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(SUMMARY, {})
    run.summary_path.write_text(json.dumps({**json.loads(run.summary_path.read_text()), "colour": "red"}))
    assert run.summary() == SUMMARY


@pytest.mark.parametrize("content", [None, "{", "[1]", '{"dataset": "mnist"}'])
def test_a_missing_or_damaged_summary_is_named(content: str | None, tmp_path: Path) -> None:
    run = Run(tmp_path)
    if content is not None:
        run.summary_path.write_text(content)
    with pytest.raises(DataError, match=r"summary\.json"):
        run.summary()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", "${oc.env:HOME}"),
        ("workers", True),
        ("dataset", 3),
        ("test_accuracy", "\x1b[2J"),
        ("devices", "cpu"),
        ("environment", None),
        ("fallback", 0),
        ("test_loss", float("inf")),
    ],
)
def test_a_summary_with_values_of_other_types_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.summary_path.write_text(json.dumps({**FIGURES, name: value}))
    with pytest.raises(DataError, match=name):
        run.summary()


@pytest.mark.parametrize("content", [None, "{\n", "[" * 100_000 + "\n"])
def test_a_missing_or_damaged_history_is_named(content: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    if content is not None:
        run.history_path.write_text(content)
    with pytest.raises(DataError, match=r"history\.jsonl"):
        run.history()


KEYS = """
    dataset fallback backend devices dtype workers seed epochs iterations batch_size averaging_frequency synchronizer
    parameters stopped_by images images_per_s wall_s train_s compile_s evaluate_s data_s averaging_s validation_accuracy
    test_accuracy test_loss test_f1 test stages pipeline commit environment stop_reason early_stopping bytes_sent spent
    divergence divergence_by_layer left_out skipped_steps memory advice normalize class_names image_shape fast_dev_run
    train_loss
"""


def test_the_summary_file_is_flat(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(SUMMARY, {})
    found = json.loads(run.summary_path.read_text())
    assert sorted(found) == sorted(KEYS.split())
    assert {name: found[name] for name in FIGURES} == FIGURES
    assert changed(workers=3).setup.workers == 3
