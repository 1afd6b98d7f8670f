"""A run's folder: saved files can be read again, and folders that are not runs are rejected."""

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from cupynet.core import files
from cupynet.core.errors import DataError
from cupynet.runs import layout
from cupynet.runs.checkpoints import Checkpoints
from cupynet.runs.run import Run
from tests.support.compared_runs import FIGURES, summary
from tests.support.refusals import data_error

SUMMARY = summary()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path)
    found.save(SUMMARY, {"a": np.ones(2)}, np.zeros((2, 3, 3, 1), np.uint8))
    return found


def test_saved_results_are_read_again_and_an_incomplete_row_of_the_history_is_ignored(run: Run) -> None:
    run.history_path.write_text('{"kind": "epoch"}\n{"kind": "report"}\n{"kind": "epo')  # written by a killed process
    assert run.summary() == SUMMARY
    np.testing.assert_array_equal(run.weights()["a"], np.ones(2))
    assert [row["kind"] for row in run.history()] == ["epoch", "report"]


def test_the_summary_file_is_flat_and_keys_of_a_later_version_are_ignored(run: Run) -> None:
    found = json.loads(run.summary_path.read_text())
    given = FIGURES | {"workers": 2, "iterations": 30, "averaging_frequency": "epoch"}
    assert {name: found[name] for name in given} == given
    run.summary_path.write_text(json.dumps({**found, "colour": "red"}))
    assert run.summary() == SUMMARY


def test_partial_files_of_a_killed_run_are_removed(run: Run, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints")
    store.save(3, {"step": 3}, {})
    (tmp_path / ".hydra").mkdir()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    for name in (".weights.safetensors.7.part", ".summary.json.8.part", ".hydra/.overrides.yaml.9.part"):
        (tmp_path / name).write_text("half")
    for name in ("step-00000004.tmp-7", "step-00000002.tmp-7"):
        (tmp_path / "checkpoints" / name).mkdir()
    run.tidy()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before
    assert os.listdir(store.folder) == ["step-00000003"]


def test_a_run_killed_while_saving_has_no_summary_of_other_weights(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "write_json", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run.save(SUMMARY, {"a": np.zeros(1)})
    assert not run.summary_path.exists()


def test_a_result_without_mistakes_has_no_examples_of_an_earlier_one(run: Run) -> None:
    assert run.examples_path.exists()
    run.save(SUMMARY, {}, np.zeros((0, 3, 3, 1), np.uint8))
    assert not run.examples_path.exists()


def test_a_resumed_run_is_unfinished_until_it_is_saved_again(run: Run, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "checkpoints")
    for step in (3, 7):
        store.save(step, {}, {})
    run.reopen(3)
    assert run.reopened_path.exists() and store.steps() == [3]
    run.save(SUMMARY, {})
    assert not run.reopened_path.exists()


def test_an_error_is_recorded_in_failed_json_only_after_the_run_began(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.fail(DataError("no file"))
    assert not run.failed_path.exists()
    run.started_path.write_text('{"started": "2026-05-01 12:30:00", "epochs": 3}')
    run.fail(DataError("no file"))
    assert json.loads(run.failed_path.read_text()) == {"exit_code": 65, "error": "no file"}
    assert run.last_start() == {"started": "2026-05-01 12:30:00", "epochs": 3}


def test_one_of_the_trials_is_named_for_the_folder_of_a_search(tmp_path: Path) -> None:
    (tmp_path / layout.STUDY).touch()
    for folder in (tmp_path, tmp_path / layout.TRIALS / "0000"):
        (folder / layout.SETTINGS).parent.mkdir(parents=True)
        (folder / layout.SETTINGS).touch()
    assert layout.runs_inside(tmp_path).endswith(f"such as {tmp_path / layout.TRIALS / '0000'}")


def test_a_new_run_in_an_old_folder_starts_empty(run: Run, tmp_path: Path) -> None:
    identity = tmp_path / "cupynet_run.json"
    for path in (run.history_path, run.started_path, run.failed_path, run.reopened_path, run.report_path, identity):
        path.write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    run.begin()
    assert os.listdir(tmp_path) == ["notes.txt"]


DAMAGED = {
    "no summary": ("summary.json", None),
    "a summary without results": ("summary.json", '{"dataset": "mnist"}'),
    "no history": ("history.jsonl", None),
    "half a history": ("history.jsonl", "{\n"),
    "a deep history": ("history.jsonl", "[" * 100_000 + "\n"),
    "a pipe": ("history.jsonl", "a pipe"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_missing_or_damaged_file_of_a_run_is_named(kind: str, tmp_path: Path) -> None:
    run, (name, content) = Run(tmp_path), DAMAGED[kind]
    if content == "a pipe":
        os.mkfifo(tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_text(content)
    with data_error(name):
        run.summary() if name == "summary.json" else run.history()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("workers", "${oc.env:HOME}"), ("workers", True), ("dataset", 3), ("test_accuracy", "\x1b[2J")),
        *(("devices", "cpu"), ("environment", None), ("fallback", 0), ("test_loss", float("inf"))),
        *(("workers", 1.5), ("images_per_s", True), ("train_s", float("nan"))),
        pytest.param("train_s", 10**400, id="a number beyond floats"),
    ],
)
def test_a_summary_with_values_of_other_types_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.summary_path.write_text(json.dumps({**FIGURES, name: value}))
    with pytest.raises(DataError, match=name):
        run.summary()


@pytest.mark.parametrize("kind", [Path, str, Run])
def test_a_run_for_training_is_given_by_its_path_and_its_folder_is_made(kind: Any, tmp_path: Path) -> None:
    """Otherwise the model could not be written at the end of the first fit."""
    assert Run.of(kind(tmp_path / "run")).folder == tmp_path / "run"
    assert (tmp_path / "run").is_dir()
