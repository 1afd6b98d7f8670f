"""Checkpoints: a fit that was stopped or killed resumes from the disk, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from cupynet.core import lock
from cupynet.core.errors import ConfigError, DataError, OutputError
from cupynet.data import Dataset, Loader
from cupynet.optim import Nesterov, OneCycle
from cupynet.parallel import ParameterAveraging, Pipeline
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.runs.run import Run
from cupynet.training import Callback, Checkpoint, EarlyStopping, History, ParallelWrapper
from tests.support.refusals import refused
from tests.support.training import WAYS, StopAfter, fingerprint, small_dataset, small_model

EPOCHS, WORKERS = 2, 3
TIMES = ("images_per_s", "compute_s", "data_s", "averaging_s", "waiting_s", "train_s", "bytes_sent")


def wrapper_of(
    folder, synchronizer=None, *callbacks, workers=WORKERS, dtype="float", saves=True, **options
) -> ParallelWrapper:
    folder.mkdir(exist_ok=True)
    checkpoint = [Checkpoint(every_iterations=4, keep_last=3)] if saves else []
    return ParallelWrapper(
        small_model(dtype),
        workers,
        synchronizer=ParameterAveraging(3) if synchronizer is None else synchronizer,
        optimizer=Nesterov(OneCycle(0.1), max_grad_norm=1.0),
        callbacks=[*checkpoint, *callbacks, History()],
        report_every=2,
        run=folder,
        **options,
    )


def fit(wrapper: ParallelWrapper, epochs: int = EPOCHS) -> None:
    """57 samples, 15 batches: the third worker has none in the last round but one, and the last is of one sample."""
    data = small_dataset(57)
    loader, held_out = Loader(data, 4, seed=3), Loader(data, 20, shuffle=False)
    wrapper.fit(loader, epochs, evaluate_on=held_out, split="validation")


def rows(folder) -> list[dict]:
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in found]


def outcome(wrapper: ParallelWrapper) -> tuple:
    """Weights and optimizer state of every worker of the wrapper."""
    states: dict = {}
    wrapper.on_workers(lambda trainer: states.update({trainer.rank: trainer.replica.state()}))
    flat = [
        (name, array.tobytes())
        for rank in sorted(states)
        for part in (states[rank]["weights"], *states[rank]["optimizer"].values())
        for name, array in part.items()
    ]
    return fingerprint(wrapper.model), flat


@pytest.mark.parametrize(
    ("way", "iteration"),
    [
        ("every 3", 5),  # the end of an epoch
        ("adaptive", 8),
        ("diloco, half", 2),
        ("threshold, target", 2),
    ],
)
def test_a_stopped_fit_resumes_from_the_disk(tmp_path, way, iteration):
    with wrapper_of(tmp_path / "whole", WAYS[way], saves=False) as whole:
        fit(whole)
        wanted = outcome(whole)
    with wrapper_of(tmp_path / "parts", WAYS[way], StopAfter(iteration)) as first:
        fit(first)
        stopped_at = first.trainer.iteration
    assert stopped_at < 10
    with wrapper_of(tmp_path / "parts", WAYS[way], saves=False) as second:
        second.restore(tmp_path / "parts" / "checkpoints")
        assert second.trainer.iteration == stopped_at
        fit(second, EPOCHS - second.trainer.epoch)
        assert outcome(second) == wanted
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_a_killed_fit_resumes_from_an_earlier_checkpoint(tmp_path):
    """Rows of the history written since are cut off."""
    with wrapper_of(tmp_path) as whole:
        fit(whole)
        wanted, written = outcome(whole), rows(tmp_path)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [5, 8, 10]
    with wrapper_of(tmp_path) as again:
        again.restore(tmp_path / "checkpoints" / "step-00000008")
        fit(again, EPOCHS - again.trainer.epoch)
        assert outcome(again) == wanted and rows(tmp_path) == written


def test_the_history_in_memory_continues(tmp_path):
    with wrapper_of(tmp_path, None, StopAfter(6)) as first:
        fit(first)
    with wrapper_of(tmp_path) as second:
        second.restore(tmp_path / "checkpoints")
        fit(second, EPOCHS - second.trainer.epoch)
        assert list(second.history.epochs["epoch"]) == [1, 2]
        assert list(second.history.reports["iteration"]) == [2, 4, 6, 8, 10]


def test_stages_and_early_stopping_resume(tmp_path):
    def make(folder, *callbacks, **options):
        stopping = EarlyStopping("loss", patience=9)
        callbacks = (stopping, *callbacks)
        return wrapper_of(folder, None, *callbacks, workers=2, pipeline=Pipeline(2, 2), **options), stopping

    whole, stopping = make(tmp_path / "whole", saves=False)
    with whole:
        fit(whole, 3)
        wanted = outcome(whole)
    first, _ = make(tmp_path / "parts", StopAfter(11))
    with first:
        fit(first, 3)
    second, again = make(tmp_path / "parts", saves=False)
    with second:
        second.restore(tmp_path / "parts" / "checkpoints")
        assert 11 <= second.trainer.iteration <= 20  # stages agree on stops every tenth round, or sooner
        fit(second, 3 - second.trainer.epoch)
        assert outcome(second) == wanted
    assert again.result.scores == stopping.result.scores and again.result.best_epoch == stopping.result.best_epoch
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_a_fit_ended_by_early_stopping_does_not_train_again(tmp_path):
    def make():
        stopping = EarlyStopping("loss", max_epochs=1)
        return wrapper_of(tmp_path, None, stopping), stopping

    first, stopping = make()
    with first:
        fit(first)
        wanted = outcome(first)
    second, again = make()
    with second:
        second.restore(tmp_path / "checkpoints")
        fit(second, EPOCHS - second.trainer.epoch)
        assert second.trainer.iteration == 5 and outcome(second) == wanted
    assert (again.result.reason, again.result.best_epoch) == (stopping.result.reason, 1) == ("max_epochs", 1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_fit_killed_after_its_last_epoch_has_the_same_result(tmp_path, stages):
    """The best weights are restored after the last checkpoint, and callbacks see the end of the fit once."""
    events = []

    class Told(Callback):
        def on_fit_end(self, trainer):
            events.append("on_fit_end")

    def make():
        stopping = EarlyStopping("loss", direction="max", patience=9)  # the best is the first
        return wrapper_of(tmp_path, None, stopping, Told(), workers=2, pipeline=Pipeline(2, 2) if stages == 2 else None)

    with make() as first:
        fit(first)
        wanted = outcome(first)
    events.clear()
    with make() as second:
        second.restore(tmp_path / "checkpoints")
        assert second.trainer.epoch == EPOCHS and outcome(second) != wanted
        fit(second, 0)
        assert outcome(second) == wanted
        with refused("epochs"):
            fit(second, 0)
    assert events == ["on_fit_end"]


def test_taking_a_checkpoint_changes_nothing(tmp_path):
    with wrapper_of(tmp_path / "with") as one:
        fit(one)
    with wrapper_of(tmp_path / "without", saves=False) as other:
        fit(other)
    assert fingerprint(other.model) == fingerprint(one.model)
    sent = [[row["bytes_sent"] for row in Run(tmp_path / name).history()] for name in ("with", "without")]
    assert sent[0] == sent[1] and sent[0][-1] > 0
    assert not (tmp_path / "without" / "checkpoints").exists()


def test_state_shared_by_replicas_is_stored_once(tmp_path):
    with wrapper_of(tmp_path, None, StopAfter(3)) as wrapper:
        fit(wrapper)
    common = read(tmp_path / "checkpoints" / "step-00000003").arrays
    names = {name for name, _ in small_model().params.named()}
    assert set(common["weights"]) == names and not any("@" in name for name in common["state"])
    with wrapper_of(tmp_path / "b", ParameterAveraging("epoch")) as wrapper:
        fit(wrapper, 1)
    apart = read(tmp_path / "b" / "checkpoints" / "step-00000004").arrays["weights"]
    assert set(apart) == {f"{name}@{rank}" for name in names for rank in range(WORKERS)}


def test_which_checkpoints_are_kept(tmp_path):
    """The labels of the validation images are wrong: the more is learned, the worse, so that the first is the best."""
    callback = Checkpoint(keep_last=1, keep_every=2, best="loss", path=tmp_path / "kept")
    right = small_dataset(9)
    wrong = Dataset("wrong labels", right.images, (right.labels + 1) % 3, 3)
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.05), callbacks=[callback]) as wrapper:
        wrapper.fit(small_dataset(40), 5, batch_size=4, evaluate_on=wrong, split="validation")
    assert Checkpoints(tmp_path / "kept").steps() == [5, 10, 20, 25]


def test_a_checkpoint_between_fits(tmp_path):
    data = small_dataset(40)
    with ParallelWrapper(small_model(), 2) as one:
        one.fit(data, 1, batch_size=4)
        path = one.checkpoint(tmp_path)
        one.fit(data, 2, batch_size=4)
    with ParallelWrapper(small_model(seed=5), 2) as other:
        other.restore(path)
        assert other.trainer.epoch == 1
        other.fit(data, 2, batch_size=4)
        assert fingerprint(other.model) == fingerprint(one.model)


def test_bad_checkpoints_are_refused(tmp_path):
    with ParallelWrapper(small_model(), 2) as one:
        one.fit(small_dataset(20), 1, batch_size=4)
        path = one.checkpoint(tmp_path / "two")
    Checkpoints(tmp_path / "odd").save(1, {"workers": []}, {"weights": {"a": np.zeros(2)}})
    with ParallelWrapper(small_model(), 1, pipeline=Pipeline(3)) as other, refused(""):
        other.restore(path)  # of whole replicas
    with ParallelWrapper(small_model(), 2) as other, refused(""):
        other.restore(tmp_path / "nothing")
    for damaged in ("two/step-00000099", "odd"):
        with ParallelWrapper(small_model(), 2) as other, pytest.raises(DataError, match=damaged):
            other.restore(tmp_path / damaged)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clock/samples", "x"),
        ("losses/samples", None),
        ("replica/updates", {}),
        ("synchronizer/tally/samples", 10**400),
    ],
)
def test_a_forged_number_is_refused_before_training(tmp_path, name, value):
    with ParallelWrapper(small_model(), 2) as one:
        one.fit(small_dataset(20), 1, batch_size=4)
        stored = read(one.checkpoint(tmp_path / "good"))
    *above, last = name.split("/")
    for worker in stored.state["workers"]:
        node = worker["numbers"]
        for each in above:
            node = node[each]
        node[last] = value
    Checkpoints(tmp_path / "forged").save(1, stored.state, stored.arrays)
    with ParallelWrapper(small_model(), 2) as other, pytest.raises(DataError):
        other.restore(tmp_path / "forged")


def test_a_callback_in_a_new_wrapper_resets_the_best_score(tmp_path):
    """The best score of one training says nothing about another."""
    callback = Checkpoint(best="loss", keep_last=1)
    for run in ("one", "two"):
        with ParallelWrapper(small_model("float"), 2, callbacks=[callback], run=tmp_path / run) as wrapper:
            fit(wrapper, 1)
            assert callback._best_step == wrapper.trainer.iteration
            assert callback._best_score == wrapper.trainer.evaluation.loss
        callback._best_score = 1e-9  # as of a network that was better


# a folder belongs to one run ------------------------------------------------------------------------------------------


def saving(path, *, run=None, **options) -> ParallelWrapper:
    """A wrapper that saves checkpoints in `path`."""
    return ParallelWrapper(small_model(), 1, callbacks=[Checkpoint(path=path, **options)], run=run)


@pytest.mark.parametrize("made_by", ["callback", "command"])
def test_the_checkpoints_of_another_run_are_never_removed(tmp_path, made_by):
    data, ck = small_dataset(40), tmp_path / ("ck" if made_by == "callback" else "one/checkpoints")
    with saving(ck if made_by == "callback" else None, run=tmp_path / "one") as one:
        one.fit(data, 3, batch_size=4)
    before = Checkpoints(ck).steps()
    with saving(ck, run=tmp_path / "two") as two, refused("path", str(ck)):
        two.fit(data, 1, batch_size=4)
    assert two_iterations(two) == 0 and Checkpoints(ck).steps() == before == [20, 30]
    with refused("path", str(ck)):
        Checkpoint(path=ck).check_new()


def test_a_second_training_in_the_default_folder_is_refused_before_kernels_are_compiled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = small_dataset(40)
    with saving(None) as wrapper:
        wrapper.fit(data, 1, batch_size=4)
    with saving(None) as wrapper, refused("path", "checkpoints"):
        wrapper.warm = False
        monkeypatch.setattr(wrapper, "warm_up", lambda batch_size: pytest.fail("compiled"))
        wrapper.fit(data, 1, batch_size=4)
    with saving(None) as wrapper:
        wrapper.restore("checkpoints")
        wrapper.fit(data, 1, batch_size=4)
    assert Checkpoints("checkpoints").steps() == [10, 20]


def two_iterations(wrapper: ParallelWrapper) -> int:
    """The iterations of a wrapper that may be closed."""
    return sum(trainer.iteration for trainer in wrapper._trainers if trainer is not None)


def test_a_resumed_run_still_owns_its_folder(tmp_path):
    """Also in another folder of the run, and if the folder of the checkpoints has moved."""
    data = small_dataset(40)
    with saving(tmp_path / "ck", run=tmp_path / "one") as wrapper:
        wrapper.fit(data, 1, batch_size=4)
        wrapper.fit(data, 1, batch_size=4)
    (tmp_path / "ck").rename(tmp_path / "moved")
    with saving(tmp_path / "moved", run=tmp_path / "two") as wrapper:
        wrapper.restore(tmp_path / "moved")
        wrapper.fit(data, 1, batch_size=4)
    assert Checkpoints(tmp_path / "moved").steps() == [20, 30]
    other = saving(tmp_path / "moved")
    with other, pytest.raises(ConfigError):  # continues one run, and would write into the folder of another
        with saving(tmp_path / "ck") as wrapper:
            wrapper.fit(data, 1, batch_size=4)
        other.restore(tmp_path / "ck")
        other.fit(data, 1, batch_size=4)
    assert Checkpoints(tmp_path / "moved").steps() == [20, 30]


def test_checkpoints_of_an_earlier_version_continue_in_their_folder(tmp_path):
    """States of earlier versions have no identity, and their folder has no mark."""
    with saving(tmp_path / "ck") as wrapper:
        wrapper.fit(small_dataset(40), 1, batch_size=4)
    store = Checkpoints(tmp_path / "ck")
    stored = read(store.path(10))
    for name in ("identity", "counted"):
        del stored.state["workers"][0]["numbers"]["callbacks"]["Checkpoint"][name]
    store.save(10, stored.state, stored.arrays)
    (tmp_path / "ck" / "run.json").unlink()
    with saving(tmp_path / "ck") as wrapper:
        wrapper.restore(tmp_path / "ck")
        wrapper.fit(small_dataset(40), 1, batch_size=4)
    assert store.steps() == [10, 20]


def test_a_folder_is_locked_while_a_run_saves_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "TIMEOUT_S", 0.0)
    data = small_dataset(40)
    with saving(tmp_path / "ck") as one:
        one.fit(data, 1, batch_size=4)
        with saving(tmp_path / "ck") as two, pytest.raises(ConfigError):
            two.restore(tmp_path / "ck")
        one.fit(data, 1, batch_size=4)
    assert not (tmp_path / "ck" / "running.json").exists() and Checkpoints(tmp_path / "ck").steps() == [10, 20]


# how often ------------------------------------------------------------------------------------------------------------


def saved_steps(monkeypatch) -> list[int]:
    """The iteration of each checkpoint that is written from now on, as it is written."""
    written = []
    save = Checkpoints.save

    def noted(self, step, state, arrays):
        written.append(step)
        return save(self, step, state, arrays)

    monkeypatch.setattr(Checkpoints, "save", noted)
    return written


def test_the_end_of_an_epoch_is_saved_and_counted_once(tmp_path, monkeypatch):
    """With 4 rounds in an epoch, so that every 4th iteration ends one."""
    written = saved_steps(monkeypatch)
    with saving(tmp_path, every_iterations=4, keep_every=2, keep_last=1) as wrapper:
        wrapper.fit(small_dataset(16), 5, batch_size=4)
    assert written == [4, 8, 12, 16, 20] and Checkpoints(tmp_path).steps() == [8, 16, 20]


def test_the_best_epoch_and_its_last_iteration_count_once(tmp_path):
    """An epoch that `every_epochs` passes over is saved again if it is the best: that replaces the same checkpoint."""
    options = {"every_iterations": 4, "every_epochs": 9, "keep_every": 2, "best": "loss", "keep_last": 1}
    with saving(tmp_path, **options) as wrapper:
        wrapper.fit(small_dataset(16), 5, batch_size=4, evaluate_on=small_dataset(8), split="validation")
        callback = wrapper.callbacks[-1]
        assert (callback._written, callback._permanent) == (5, [8, 16])


def test_a_resumed_run_keeps_counting_its_checkpoints(tmp_path):
    """Every third one is kept for good: with those of iterations 4, 8 and 12 that is the third."""
    options = {"keep_every": 3, "keep_last": 1}
    for epochs in (2, 1, 4):
        with saving(tmp_path, **options) as wrapper:
            if Checkpoints(tmp_path).steps():
                wrapper.restore(tmp_path)
            wrapper.fit(small_dataset(16), epochs, batch_size=4)
    assert Checkpoints(tmp_path).steps() == [12, 24, 28]


def test_a_stop_right_after_a_checkpoint_saves_no_second_one(tmp_path, monkeypatch):
    written = saved_steps(monkeypatch)
    callbacks = [Checkpoint(every_iterations=2, path=tmp_path), StopAfter(2)]
    with ParallelWrapper(small_model(), 1, callbacks=callbacks) as wrapper:
        wrapper.fit(small_dataset(16), 2, batch_size=4)
    assert written == [2]


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path):
    (tmp_path / "file").touch()
    checkpoint = Checkpoint(path=tmp_path / "file" / "below")
    with ParallelWrapper(small_model(), workers=1, callbacks=[checkpoint]) as wrapper, pytest.raises(OutputError):
        wrapper.warm_up(4)
