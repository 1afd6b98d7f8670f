"""Checkpoints: a fit that was stopped or killed resumes from disk, bit for bit."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import ConfigError, Dataset, Loader, Nesterov, OneCycle, OutputError, create_backend, load
from cupynet.core import lock
from cupynet.parallel import ParameterAveraging, Pipeline
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training import Callback, Checkpoint, EarlyStopping, HistoryWriter, ParallelWrapper, consensus
from cupynet.training.callbacks.history import Rows
from cupynet.training.state_tree import apart, together
from tests.support.backends import needs_bfloat16
from tests.support.calls import watch
from tests.support.refusals import data_error, refused
from tests.support.resumed_runs import timeless_history, trained
from tests.support.training import KINDS_OF_WAYS, WAYS, On, StopAfter, fingerprint, small_dataset, small_model

DATA = small_dataset(57)  # 15 batches, the last of one sample: five rounds for three workers


def wrapper_of(folder: Path, *callbacks: Callback, saves: bool = True, **options: Any) -> ParallelWrapper:
    folder.mkdir(exist_ok=True)
    checkpoint = [Checkpoint(every_iterations=4, keep_last=3)] if saves else []
    options = {"workers": 3, "synchronizer": ParameterAveraging(3), **options}
    options |= {"optimizer": Nesterov(OneCycle(0.1), max_grad_norm=1.0), "log_every": 2, "run": folder}
    return ParallelWrapper(small_model("float"), callbacks=[*checkpoint, *callbacks, HistoryWriter()], **options)


def fit(wrapper: ParallelWrapper, epochs: int = 2, restore: Path | None = None) -> str:
    """Train until `epochs` epochs are complete, and return the fingerprint of the weights."""
    with wrapper:
        if restore is not None:
            wrapper.restore(restore)
            epochs -= wrapper.trainer.epoch
        wrapper.fit(Loader(DATA, 4, seed=3), epochs=epochs, validation_data=Loader(DATA, 20, shuffle=False))
        measured = wrapper.trainer.statistics.measured
        return fingerprint(wrapper.model) + str(measured and (measured.drift, measured.drift_by_layer))


@pytest.mark.parametrize("way", WAYS)
def test_a_saved_stopped_and_resumed_fit_is_bit_identical_with_every_synchronizer(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit of each kind stops three times. The first epoch ends after iteration 5."""
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    whole, parts, restored = tmp_path / "whole", tmp_path / "parts", None
    wanted = fit(wrapper_of(whole, synchronizer=WAYS[way], saves=False))
    for iteration in (2, 5, 7) if way in KINDS_OF_WAYS else (7,):
        assert fit(wrapper_of(parts, StopAfter(iteration), synchronizer=WAYS[way]), restore=restored) != wanted
        restored = parts / "checkpoints"
    assert fit(wrapper_of(parts, synchronizer=WAYS[way], saves=False), restore=restored) == wanted
    assert timeless_history(parts) == timeless_history(whole)


@pytest.mark.parametrize("pipeline", [None, Pipeline(2, 2)])
def test_a_fit_killed_after_its_last_epoch_has_the_same_result(tmp_path: Path, pipeline: Pipeline | None) -> None:
    """The best weights are restored after the last checkpoint, and `on_fit_end` is called once per fit."""
    ends: list[int] = []
    end = On("on_fit_end", lambda trainer: ends.append(trainer.epoch))

    def make() -> ParallelWrapper:
        stopping = EarlyStopping("loss", mode="max", patience=9)  # the first epoch is the best
        return wrapper_of(tmp_path, stopping, end, workers=2, pipeline=pipeline)

    wanted = fit(make())
    with make() as killed:
        killed.restore(tmp_path / "checkpoints")
        assert fingerprint(killed.model) != wanted
    assert fit(make(), restore=tmp_path / "checkpoints") == wanted
    assert ends == [2, 2]


def test_state_that_replicas_share_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    names = {name for name, _ in small_model().params.named()}
    fit(wrapper_of(tmp_path, StopAfter(3)))
    common = read(tmp_path / "checkpoints" / "step-00000003").arrays
    assert set(common["weights"]) == names and not any("@" in name for name in common["state"])
    fit(wrapper_of(tmp_path / "b", synchronizer=ParameterAveraging("epoch")), 1)
    apart = read(tmp_path / "b" / "checkpoints" / "step-00000004").arrays["weights"]
    assert set(apart) == {f"{name}@{rank}" for name in names for rank in range(3)}


def test_the_state_of_a_callback_has_plain_values_and_numeric_arrays_only() -> None:
    values = {"float": np.float32(1.5), "integer": np.int64(3), "flag": np.bool_(True), "list": [1, None], "text": "a"}
    numbers, arrays = apart({"callbacks": values, "a/b%": {"vector": np.arange(3)}})
    found = together(json.loads(json.dumps(numbers)), arrays)
    assert found["callbacks"] == values and found["a/b%"]["vector"].tolist() == [0, 1, 2]
    for value in (object(), np.array(["a"]), np.datetime64("now")):
        with pytest.raises(ConfigError, match="callbacks/Remembers/value"):
            apart({"callbacks": {"Remembers": {"value": value}}})


@needs_bfloat16
def test_bfloat16_arrays_of_a_state_can_be_sent_and_saved() -> None:
    numbers, arrays = apart({"vector": np.array([1.5], create_backend("numpy", "bfloat16").policy.storage)})
    assert not numbers and arrays["vector"].dtype == np.float32 and arrays["vector"] == [1.5]


@pytest.mark.parametrize("kind", [Checkpoint, HistoryWriter])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_callback_that_writes_files_is_refused_by_another_wrapper_until_the_first_is_closed(
    kind: Any, workers: int, tmp_path: Path
) -> None:
    def wrapper_in(name: str) -> ParallelWrapper:
        return ParallelWrapper(small_model(), workers, callbacks=[callback], run=tmp_path / name)

    callback = kind()
    with wrapper_in("a") as first:
        first.fit(FORTY, batch_size=4)
        with refused("callbacks", kind.__name__):
            wrapper_in("b").fit(FORTY, batch_size=4)
        first.fit(FORTY, batch_size=4)
    with wrapper_in("b") as second:
        second.fit(FORTY, batch_size=4)


@pytest.mark.parametrize("run", [None, Path("run")], ids=["no run", "run"])
def test_a_run_stays_in_its_folder_if_the_current_folder_changes(
    run: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with saving(None, run=run) as wrapper:
        wrapper.fit(FORTY, batch_size=4)
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        wrapper.fit(FORTY, batch_size=4)
    assert Checkpoints(tmp_path / (run or "") / "checkpoints").steps() == [10, 20]
    assert not any((tmp_path / "other").iterdir())


def test_a_checkpoint_contains_the_weights_loaded_since_the_last_fit(tmp_path: Path) -> None:
    other, restored = small_model(seed=9), small_model()
    with ParallelWrapper(small_model(), 3) as wrapper:
        wrapper.fit(FORTY, batch_size=4)
        wrapper.model.load_weights(other)
        path = wrapper.checkpoint(tmp_path)
    with ParallelWrapper(restored, 1) as single:
        single.restore(path)
    for name, weight in other.weights().items():
        np.testing.assert_allclose(restored.weights()[name], weight, rtol=1e-12)


FORTY = small_dataset(40)  # ten iterations per epoch


def saving(path: Path | str | None, *, run: Path | None = None, **options: Any) -> ParallelWrapper:
    return ParallelWrapper(small_model(), 1, callbacks=[Checkpoint(path=path, **options)], run=run)


def train(wrapper: ParallelWrapper, restore: Path | str | None = None, epochs: int = 1) -> None:
    with wrapper:
        if restore is not None:
            wrapper.restore(restore)
        wrapper.fit(FORTY, epochs=epochs, batch_size=4)


def test_the_last_the_best_and_every_nth_checkpoint_are_kept(tmp_path: Path) -> None:
    """With wrong labels the loss grows during training, so each run's first checkpoint is its best."""
    callback = Checkpoint(keep_last=1, keep_every=2, best="loss")
    right = small_dataset(9)
    wrong = Dataset("wrong labels", right.images, (right.labels + 1) % 3, 3)
    for run in (tmp_path / "one", tmp_path / "two"):
        with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.05), callbacks=[callback], run=run) as wrapper:
            wrapper.fit(small_dataset(40), epochs=5, batch_size=4, validation_data=wrong)
        assert Checkpoints(run / "checkpoints").steps() == [5, 10, 20, 25]


def test_a_best_metric_that_is_changed_between_fits_is_compared_from_then_on(tmp_path: Path) -> None:
    best = Checkpoint(path=tmp_path, best="accuracy", keep_last=9)
    with ParallelWrapper(small_model(), 1, callbacks=[best]) as wrapper:
        wrapper.fit(FORTY, batch_size=4, validation_data=FORTY)
        best.best = "loss"  # above any accuracy
        assert best.best_path is None
        wrapper.fit(FORTY, batch_size=4, validation_data=FORTY)
    assert best.best_path == Checkpoints(tmp_path).path(20)


def test_a_resumed_run_that_selects_by_another_metric_forgets_the_best_checkpoint(tmp_path: Path) -> None:
    for metric in ("accuracy", "loss"):
        best = Checkpoint(path=tmp_path, best=metric)
        with ParallelWrapper(small_model(), 1, callbacks=[best]) as wrapper:
            if metric == "loss":
                wrapper.restore(tmp_path)
                assert best.best_path is None
            wrapper.fit(FORTY, batch_size=4, validation_data=FORTY)
    assert best.best_path == Checkpoints(tmp_path).path(20)


@pytest.mark.parametrize("every", [None, 10])
def test_a_fit_ends_with_one_checkpoint(every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[Any] = []
    watch(monkeypatch, Checkpoints, "save", lambda _, store, step, *rest: saves.append(step))
    train(saving(tmp_path, every_epochs=5, every_iterations=every))
    assert saves == Checkpoints(tmp_path).steps() == [10]


def test_a_checkpoint_creates_missing_folders(tmp_path: Path) -> None:
    with ParallelWrapper(small_model(), 2) as wrapper:
        assert wrapper.checkpoint(tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize(
    ("options", "fits", "steps"),
    [
        ({"every_iterations": 10, "keep_every": 2}, [5], [20, 40, 50]),  # the end of an epoch is counted once
        ({"keep_every": 3}, [2, 1, 4], [30, 60, 70]),  # resumed runs keep counting
    ],
)
def test_keep_every_counts_over_resumed_runs_and_the_end_of_an_epoch_once(
    options: dict[str, Any], fits: list[int], steps: list[int], tmp_path: Path
) -> None:
    for number, epochs in enumerate(fits):
        train(saving(tmp_path, keep_last=1, **options), restore=tmp_path if number else None, epochs=epochs)
    assert Checkpoints(tmp_path).steps() == steps


@pytest.mark.parametrize("default", [False, True], ids=["own folder", "folder of a run"])
def test_a_folder_with_checkpoints_of_another_run_is_refused_and_kept(tmp_path: Path, default: bool) -> None:
    ck = tmp_path / "one" / "checkpoints" if default else tmp_path / "ck"
    train(saving(None if default else ck, run=tmp_path / "one"), epochs=3)
    train(saving(tmp_path / "two"))
    for restored in (None, tmp_path / "two"):
        with refused("path", str(ck)):
            train(saving(ck, run=tmp_path / "two"), restore=restored)
    with refused("path", str(ck)):
        Checkpoint(path=ck).check_new()
    assert Checkpoints(ck).steps() == [20, 30]


def test_checkpoints_in_the_current_folder_are_refused_unless_they_are_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(saving(None))
    with refused("path"):
        train(saving(None))
    train(saving(None), restore="checkpoints")
    assert Checkpoints(tmp_path / "checkpoints").steps() == [10, 20]


@pytest.mark.parametrize("callbacks", [[], [Checkpoint()], [HistoryWriter()]], ids=["model", "checkpoints", "history"])
def test_the_folder_of_another_run_is_refused_unless_it_is_restored(tmp_path: Path, callbacks: list[Callback]) -> None:
    def wrapper() -> ParallelWrapper:
        return ParallelWrapper(small_model(), 1, callbacks=callbacks, run=tmp_path)

    with wrapper() as first:
        first.fit(FORTY, batch_size=4)
        first.fit(FORTY, batch_size=4)
        first.checkpoint(tmp_path / "later")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with wrapper() as other:
        with refused("run", str(tmp_path)):
            other.fit(FORTY, batch_size=4)
        assert not (tmp_path / "running.json").exists()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    train(wrapper(), restore=tmp_path / "later")


@pytest.mark.parametrize("callbacks", [[], [Checkpoint()]], ids=["model", "checkpoints"])
def test_a_run_folder_is_continued_only_from_checkpoints_of_its_run(tmp_path: Path, callbacks: list[Callback]) -> None:
    def continued(name: str, origin: str) -> None:
        with ParallelWrapper(small_model(), 1, callbacks=callbacks, run=tmp_path / name) as wrapper:
            if origin:
                wrapper.restore(tmp_path / "later" / origin)
            wrapper.fit(FORTY, batch_size=4)
            (tmp_path / "later").mkdir(exist_ok=True)
            wrapper.checkpoint(tmp_path / "later" / name)

    for name, origin in (("a", ""), ("b", ""), ("a", "a"), ("of b", "b"), ("of b", "of b")):
        continued(name, origin)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, origin in (("a", "b"), ("b", "of b"), ("of b", "b")):
        with refused("run", str(tmp_path / name)):
            continued(name, origin)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_an_earlier_version_without_identity_continues_any_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Rows, "state", lambda rows: {"rows": "[]"})
        train(ParallelWrapper(small_model(), 1, callbacks=[Checkpoint()], run=tmp_path / "earlier"))
    (tmp_path / "earlier" / "cupynet_run.json").unlink()
    train(ParallelWrapper(small_model(), 1, run=tmp_path / "run"))
    for run in ("run", "run", "new", "earlier"):
        train(ParallelWrapper(small_model(), 1, run=tmp_path / run), restore=tmp_path / "earlier" / "checkpoints")
    other = one_checkpoint(tmp_path / "other")
    for folder in (tmp_path / "new", tmp_path / "earlier"):
        with refused("run", str(folder)):
            train(ParallelWrapper(small_model(), 1, run=folder), restore=other)


def test_a_checkpoint_folder_is_continued_only_from_checkpoints_of_its_run(tmp_path: Path) -> None:
    def saving(name: str) -> ParallelWrapper:
        return ParallelWrapper(small_model(), 1, callbacks=[Checkpoint(path=tmp_path / name)])

    train(saving("a"))
    with saving("of a") as wrapper:
        for _ in range(2):
            wrapper.restore(tmp_path / "a")
            wrapper.fit(FORTY, batch_size=4)
    train(saving("of a"), restore=tmp_path / "of a")
    for name, origin in (("a", "of a"), ("of a", "a")):
        before = Checkpoints(tmp_path / name).steps()
        with refused("path", str(tmp_path / name)):
            train(saving(name), restore=tmp_path / origin)
        assert Checkpoints(tmp_path / name).steps() == before


def one_checkpoint(folder: Path) -> Path:
    with ParallelWrapper(small_model(), 1) as wrapper:
        wrapper.evaluate(FORTY)
        return wrapper.checkpoint(folder)


def test_one_wrapper_may_train_several_times_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    with ParallelWrapper(small_model(), 1, callbacks=[Checkpoint()], run=tmp_path / "run") as wrapper:
        for _ in range(2):
            wrapper.restore(one_checkpoint(tmp_path / "other"))
            wrapper.fit(FORTY, batch_size=4)
    train(ParallelWrapper(small_model(), 1, run=tmp_path / "run"), restore=tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("restored", [False, True])
def test_the_folder_of_a_run_of_a_command_is_refused_and_kept(tmp_path: Path, restored: bool) -> None:
    trained(tmp_path / "run", "data=synthetic", "data.train=60", "data.test=20", "model=mlp", "workers=1", "epochs=1")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    model = load(tmp_path / "run")
    with ParallelWrapper(model, 1, run=tmp_path / "run") as wrapper, refused("run", str(tmp_path / "run")):
        if restored:
            wrapper.restore(tmp_path / "run" / "checkpoints")
        wrapper.fit(np.zeros((8, 28, 28), np.uint8), np.zeros(8, int), batch_size=4)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_damaged_identity_of_a_run_is_named_and_its_folder_is_kept(content: str, tmp_path: Path) -> None:
    train(ParallelWrapper(small_model(), 1, callbacks=[Checkpoint()], run=tmp_path))
    model = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cupynet_run.json").write_text(content)
    with data_error(tmp_path / "cupynet_run.json"):
        train(ParallelWrapper(small_model(), 1, run=tmp_path), restore=tmp_path / "checkpoints")
    assert (tmp_path / "model.safetensors").read_bytes() == model


def test_writing_a_checkpoint_does_not_average_the_replicas(tmp_path: Path) -> None:
    replicas: list[str] = []  # after each checkpoint
    note = On(
        "on_iteration_end", lambda trainer: replicas.append(fingerprint(trainer.model)), every_rank=True, last=True
    )
    callbacks = [Checkpoint(every_iterations=1, keep_last=9, path=tmp_path), note]
    with ParallelWrapper(small_model(), 2, 100, callbacks=callbacks) as wrapper:
        wrapper.fit(FORTY, batch_size=4)
    assert len({*replicas}) == len(replicas) == 10  # five iterations of two replicas
    assert Checkpoints(tmp_path).steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", ["own", "run"])
def test_a_run_with_checkpoints_elsewhere_or_in_its_folder_itself_is_continued(place: str, tmp_path: Path) -> None:
    for restored in (None, tmp_path / place):
        callbacks = [Checkpoint(path=tmp_path / place), HistoryWriter()]
        train(ParallelWrapper(small_model(), 1, callbacks=callbacks, run=tmp_path / "run"), restore=restored)
    assert Checkpoints(tmp_path / place).steps() == [10, 20]


def test_a_history_in_the_run_folder_is_not_continued_by_a_checkpoint_that_does_not_know_it(tmp_path: Path) -> None:
    train(saving(tmp_path / "other"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "history.jsonl").write_text('{"kind": "report"}\n')
    restored = ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()], run=tmp_path / "run")
    train(restored, restore=tmp_path / "other")
    assert '"report"' not in (tmp_path / "run" / "history.jsonl").read_text()


def test_a_run_folder_is_locked_until_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    other = ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()], run=tmp_path)
    with ParallelWrapper(small_model(), 1, run=tmp_path) as one:
        one.fit(FORTY, batch_size=4)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
            other.fit(FORTY, batch_size=4)
        one.fit(FORTY, batch_size=4)
        (tmp_path / "model.safetensors").unlink()
    train(other)
    assert {path.name for path in tmp_path.iterdir()} == {"history.jsonl", "cupynet_run.json", "model.safetensors"}


def test_a_failed_fit_unlocks_its_run_folder_for_another_try(tmp_path: Path) -> None:
    failing = On("on_iteration_end", lambda trainer: 1 / 0)
    with ParallelWrapper(small_model(), 2, callbacks=[failing], run=tmp_path) as failed:
        with pytest.raises(ZeroDivisionError):
            failed.fit(FORTY, batch_size=4)
        train(ParallelWrapper(small_model(), 2, run=tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"cupynet_run.json", "model.safetensors"}


def test_a_run_in_the_folder_of_the_users_hydra_program_saves_its_model(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").touch()
    train(ParallelWrapper(small_model(), 1, run=tmp_path))
    assert (tmp_path / "model.safetensors").is_file()


def test_the_history_of_a_run_that_left_neither_model_nor_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"kind": "report"}\n')
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()], run=tmp_path) as wrapper:
        wrapper.evaluate(FORTY)
        wrapper.stop()
        wrapper.fit(FORTY, batch_size=4)  # stops before its first iteration
        wrapper.fit(FORTY, batch_size=4)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(("kind", "named"), [("other text", "path"), ("run of a command", "run"), ("link", "path")])
def test_a_history_that_is_not_of_a_run_in_python_is_refused_and_kept(kind: str, named: str, tmp_path: Path) -> None:
    rows, history = tmp_path / "rows.jsonl", tmp_path / "run" / "history.jsonl"
    rows.write_text(content := "measured by hand\n" if kind == "other text" else '{"kind": "report"}\n')
    history.parent.mkdir()
    if kind == "run of a command":
        (history.parent / "started.json").touch()
    if kind == "link":
        history.symlink_to(rows)
    else:
        rows.rename(history)
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()], run=history.parent) as wrapper, refused(named):
        wrapper.fit(FORTY, batch_size=4)
    assert history.read_text() == content


def test_a_refused_fit_keeps_the_history_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"kind": "report"}\n')
    with ParallelWrapper(small_model(), 1, callbacks=[HistoryWriter()], run=tmp_path) as wrapper, refused("epochs"):
        wrapper.fit(FORTY, epochs=0)
    assert (tmp_path / "history.jsonl").read_text() == '{"kind": "report"}\n'


def test_saving_in_the_folder_of_a_longer_run_causes_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise, restoring the folder would surprise."""
    for epochs in (2, 1):
        with ParallelWrapper(small_model(), 1) as wrapper:
            wrapper.fit(FORTY, epochs=epochs, batch_size=4)
            wrapper.checkpoint(tmp_path)
            assert (str(tmp_path) in caplog.text) is (epochs == 1)


def test_a_checkpoint_folder_is_locked_until_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    with saving(tmp_path) as one:
        one.fit(FORTY, epochs=1, batch_size=4)
        with pytest.raises(ConfigError):
            train(saving(tmp_path), restore=tmp_path)
        one.fit(FORTY, epochs=1, batch_size=4)
    assert not (tmp_path / "running.json").exists() and Checkpoints(tmp_path).steps() == [10, 20]


def test_a_checkpoint_folder_that_cannot_be_created_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with saving(tmp_path / "file" / "below") as wrapper, pytest.raises(OutputError):
        wrapper.warm_up(4)
