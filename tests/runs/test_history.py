"""Histories by column: a wrapper's, and a run folder's."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Checkpoint, History, HistoryWriter, ParallelWrapper, Run, Schedule
from cupynet.core.errors import OutputError
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


def test_the_history_of_a_wrapper_equals_the_rows_of_history_jsonl(tmp_path: Path) -> None:
    data, run = small_dataset(60), Run.of(tmp_path)
    with ParallelWrapper(small_model(), 2, log_every=2, callbacks=[HistoryWriter()], run=run) as wrapper:
        assert wrapper.history == History({}, {})
        wrapper.fit(data, epochs=2, batch_size=10, evaluate_on=data, evaluate_every=2)
        wrapper.fit(data, epochs=1, batch_size=10)
        found = wrapper.history
    assert found == run.columns()
    assert found.epochs["epoch"] == [1, 2, 3] and found.reports["iteration"] == [2, 4, 6, 8]
    assert {"loss", "learning_rate", "images_per_s", "test_accuracy", "test_loss", "losses"} <= found.epochs.keys()
    assert {"loss", "learning_rate", "images_per_s", "drift"} <= found.reports.keys()
    assert [accuracy is None for accuracy in found.epochs["test_accuracy"]] == [True, False, True]
    assert np.sum(found.epochs["confusion"][1]) == 60 and found.epochs["confusion"][0] is None
    assert "kind" not in found.epochs and json.dumps(found.epochs)


def test_a_closed_history_writer_can_be_copied(tmp_path: Path) -> None:
    """scikit-learn copies callbacks, as in `clone`."""
    writer = HistoryWriter(tmp_path / "h.jsonl")
    with ParallelWrapper(small_model(), 1, callbacks=[writer]) as wrapper:
        wrapper.fit(small_dataset(20), batch_size=10)
    assert copy.deepcopy(writer) is not writer


def test_a_second_history_writer_keeps_the_rows_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have opened the file before one of them trains."""
    monkeypatch.chdir(tmp_path)
    with (
        ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()]) as one,
        ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()]) as other,
    ):
        for wrapper in (one, other):
            wrapper.warm_up(10)
        one.fit(small_dataset(20), batch_size=10)
        rows = Path("history.jsonl").read_bytes()
        with refused("path"):
            other.fit(small_dataset(20), batch_size=10)
    assert rows and Path("history.jsonl").read_bytes() == rows


@pytest.mark.parametrize("place", ["file/h.jsonl", "/dev/full"])
def test_a_history_jsonl_that_cannot_be_written_ends_the_run_with_74(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter(tmp_path / place)]) as wrapper,
        pytest.raises(OutputError) as caught,
    ):
        wrapper.fit(small_dataset(20), batch_size=10)
    assert place in str(caught.value) and caught.value.exit_code == 74


def test_learning_rates_of_any_number_type_are_written_to_history_jsonl(tmp_path: Path) -> None:
    class Float32(Schedule):
        def __call__(self, iteration: int) -> Any:
            return np.float32(0.5)

    callbacks = [HistoryWriter(), Checkpoint()]
    with ParallelWrapper(
        small_model(), 1, log_every=1, optimizer=SGD(Float32()), callbacks=callbacks, run=tmp_path / "run"
    ) as wrapper:
        wrapper.fit(small_dataset(20), batch_size=10)
    found = Run(tmp_path / "run").columns()
    assert found.epochs["learning_rate"] == [0.5] and found.reports["learning_rate"] == [0.5, 0.5]


@pytest.mark.parametrize("workers", [2, 1])
def test_a_restored_wrapper_has_the_history_of_the_whole_training(tmp_path: Path, workers: int) -> None:
    """This holds even if the wrapper had trained further, or continues with another number of workers."""
    data = small_dataset(60)
    with ParallelWrapper(small_model(), 2, log_every=2, progress="none") as wrapper:
        wrapper.fit(data, epochs=2, batch_size=10)
        path = wrapper.checkpoint(tmp_path)
        saved = wrapper.history
        wrapper.fit(data, epochs=1, batch_size=10)
        wrapper.restore(path)
        assert wrapper.history == saved
    with ParallelWrapper(small_model(), workers, log_every=2, progress="none") as wrapper:
        wrapper.restore(path)
        wrapper.fit(data, epochs=1, batch_size=10)
        assert wrapper.history.epochs["epoch"] == [1, 2, 3]
        assert wrapper.history.epochs["loss"][:2] == saved.epochs["loss"]
        assert wrapper.history.reports["iteration"][:3] == [2, 4, 6]


@pytest.mark.parametrize("restores", [False, True], ids=["first fit", "restored"])
@pytest.mark.parametrize("content", ["my own line\n" * 9, '{"kind": "epoch", "epoch": 1}\n' * 99], ids=["text", "rows"])
def test_a_history_file_of_another_run_is_refused_and_not_changed(tmp_path: Path, content: str, restores: bool) -> None:
    data, path = small_dataset(60), tmp_path / "rows.jsonl"
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter(tmp_path / "one.jsonl")]) as wrapper:
        wrapper.fit(data, epochs=1, batch_size=10)
        checkpoint = wrapper.checkpoint(tmp_path)
    path.write_text(content)
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter(path)]) as wrapper, refused("path", str(path)):
        if restores:
            wrapper.restore(checkpoint)
        wrapper.fit(data, epochs=1, batch_size=10)
    assert path.read_text() == content


def test_a_history_in_the_current_folder_is_refused_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "history.jsonl"
    path.write_text("my own line\n")
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()]) as wrapper, refused("path", "history.jsonl"):
        wrapper.fit(small_dataset(20))
    assert path.read_text() == "my own line\n"


def test_columns_of_a_history_have_none_where_a_row_has_no_value() -> None:
    rows: list[dict[str, object]] = [
        {"kind": "epoch", "a": 1},
        {"kind": "other", "a": 2},
        {"kind": "epoch", "b": None},
        {"a": 3},
    ]
    assert History.of(rows) == History({"a": [1, None], "b": [None, None]}, {})


def test_a_plot_of_a_history_has_a_panel_for_each_metric_even_if_its_name_ends_in_loss() -> None:
    pytest.importorskip("matplotlib")
    names = ("epoch", "loss", "validation_loss", "validation_accuracy", "validation_focal_loss", "validation_brier")
    figure = History({name: [1.0, 2.0] for name in names}, {}).plot()
    assert [axes.get_title() for axes in figure.axes] == ["Loss", "Accuracy", "focal_loss", "brier"]


def test_a_history_is_a_mapping_of_columns_that_also_knows_the_names_of_keras() -> None:
    columns = History({"loss": [2.0], "validation_loss": [3.0]}, {})
    assert dict(columns) == columns.epochs and list(columns) == ["loss", "validation_loss"]
    assert columns.history == {"loss": [2.0], "val_loss": columns["val_loss"]} and columns["validation_loss"] == [3.0]
    assert json.loads(json.dumps(columns.history)) == columns.history  # a dict, as pandas needs
    assert "val_loss" in columns and "accuracy" not in columns and columns.get("accuracy") is None
    assert 0 not in columns  # type: ignore[comparison-overlap]
    for empty_or_not in (columns, History({}, {})):
        with pytest.raises(KeyError, match="validation_loss|no epoch"):
            empty_or_not["accuracy"]
