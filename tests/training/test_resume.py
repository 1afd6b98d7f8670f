"""Training resumes bit for bit, or with a different number of workers: replicas are averaged, no sample is left out."""

import logging
from collections.abc import Callable
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Batch, ConfigError, DataError, Loader, Nesterov, OneCycle, SoftmaxNLL, Synthetic
from cupynet.parallel import GradientSharing, ParameterAveraging, Pipeline, Synchronizer, ThresholdEncoding
from cupynet.runs.checkpoints import Checkpoints, Stored, read
from cupynet.training import Callback, Checkpoint, ParallelWrapper, Replica
from cupynet.training.checkpointing import _states as stored_states
from cupynet.training.checkpointing import check_classes, stages_of
from cupynet.training.resize import mean, resized
from tests.support.calls import watch
from tests.support.refusals import data_error
from tests.support.training import KINDS_OF_WAYS, WAYS, StopAfter, fingerprint, small_dataset, small_model

DATA = small_dataset(57)  # 15 batches of 4, the last of one sample
LOADER = Loader(DATA, 4, seed=3)
Saved = Callable[..., Path]
EVERY_5, EVERY_ROUND, STAGES = ParameterAveraging(5), ParameterAveraging(1), Pipeline(2, 2)


def test_a_resume_with_data_of_other_classes_is_refused() -> None:
    stored, source = Stored(Path("step"), {"model": {"class_names": ["cat", "dog"]}}, {}), Synthetic()
    source.class_names = ("cat", "dog")
    check_classes(stored, source)
    source.class_names = ("dog", "fox")
    with data_error("fox"):
        check_classes(stored, source)


def wrapper_of(
    workers: int, way: Synchronizer = EVERY_5, *callbacks: Callback, dtype: str = "double", **options: Any
) -> ParallelWrapper:
    optimizer = Nesterov(OneCycle(0.1), max_grad_norm=1.0)
    options = {"synchronizer": way, "optimizer": optimizer, "log_every": 1, **options}
    return ParallelWrapper(small_model(dtype), workers, callbacks=callbacks, **options)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    @cache
    def save(workers: int, iteration: int, way: Synchronizer = EVERY_5, *, stops: bool = True, **options: Any) -> Path:
        """Train up to an iteration, or to the end, and return that iteration's checkpoint."""
        folder = tmp_path_factory.mktemp("run")
        saving = Checkpoint(every_iterations=iteration, every_epochs=100, keep_last=100, path=folder)
        with wrapper_of(workers, way, saving, StopAfter(iteration if stops else -1), **options) as wrapper:
            wrapper.fit(LOADER, epochs=2)
        return Checkpoints(folder).path(iteration)

    return save


def finish(wrapper: ParallelWrapper) -> None:
    wrapper.fit(LOADER, epochs=2 - wrapper.trainer.epoch, evaluate_on=DATA)
    assert wrapper.trainer.epoch == 2
    assert wrapper.trainer.evaluation is not None and np.isfinite(wrapper.trainer.evaluation.loss)


def states(wrapper: ParallelWrapper, path: Path) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    wrapper.restore(path)
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.state()}))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(
    ("way", "before", "after", "stages"),
    [
        *((way, 3, 2, 1) for way in (*KINDS_OF_WAYS, "adaptive", "slowmo")),
        *(("every 3", 3, 4, 1), ("adaptive", 1, 3, 1), ("threshold", 1, 2, 1)),
        *(("every 3", 2, 1, 2), ("every 3", 2, 3, 2)),
    ],
)
def test_workers_may_change_on_resume(checkpoint: Saved, way: str, before: int, after: int, stages: int) -> None:
    options: dict[str, Any] = {"pipeline": STAGES} if stages == 2 else {}

    def replicas_are_equal() -> bool:
        models = wrapper.replicas()
        return all(len({fingerprint(model) for model in models[stage::stages]}) == 1 for stage in range(stages))

    path = checkpoint(before, 7, WAYS[way], **options)
    with wrapper_of(after, WAYS[way], **options) as wrapper:
        wrapper.restore(path)
        assert wrapper.trainer.iteration == 7 and replicas_are_equal()
        finish(wrapper)
        assert replicas_are_equal()


def test_the_mean_at_a_resume_with_other_workers_is_weighted_like_the_next_average(checkpoint: Saved) -> None:
    """The checkpoint follows 4 of 5 rounds between averages. In the fourth, batches had 4, 4, 1 and 0 samples."""
    path = checkpoint(4, 4)
    with wrapper_of(4) as same, wrapper_of(2) as two:
        parts, found = states(same, path), states(two, path)
    counts = [part["synchronizer"]["tally"]["samples"] for part in parts]
    assert counts == [16, 16, 13, 12]
    for state in found:
        assert state["synchronizer"]["tally"]["rounds"] == 0
        for take in (itemgetter("weights"), lambda replica: replica["optimizer"]["velocity"]):
            vectors = [take(part["replica"]) for part in parts]
            for name, array in take(state["replica"]).items():
                expected = np.average([vector[name] for vector in vectors], axis=0, weights=counts)
                np.testing.assert_allclose(array, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("way", "iteration"), [("slowmo", 6), ("threshold", 6), ("every 3", 7), ("elastic", 7)])
def test_layers_frozen_at_a_resume_do_not_change(checkpoint: Saved, way: str, iteration: int) -> None:
    """At iteration 7 the replicas differ, and continue with the mean."""
    model, path = small_model(), checkpoint(3, iteration, WAYS[way])
    model.freeze("dense1")
    with ParallelWrapper(model, 3, optimizer=Nesterov(OneCycle(0.1)), synchronizer=WAYS[way]) as wrapper:
        wrapper.restore(path)
        before = model.weights()["dense1.weight"]
        finish(wrapper)
        for replica in wrapper.replicas():
            assert np.array_equal(replica.weights()["dense1.weight"], before)


@pytest.mark.parametrize(("workers", "again"), [(3, 2), (1, 0), (5, 3)])
def test_no_batch_is_left_out_and_few_are_repeated_with_another_number_of_workers(
    checkpoint: Saved, workers: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers stop after 2 rounds with 8 of 15 batches. Three workers continue after 6, so 2 are repeated."""
    seen: list[int] = []

    def note(_: Any, replica: Replica, batch: Batch | None) -> None:
        if batch is not None and batch.epoch == 0:
            seen.append(batch.index)

    with wrapper_of(workers, EVERY_ROUND) as wrapper:
        wrapper.restore(checkpoint(4, 2, EVERY_ROUND))
        watch(monkeypatch, Replica, "gradient", note)
        wrapper.fit(LOADER, epochs=1)
    assert sorted(seen) == list(range(8 - again, 15))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_complete_epoch_is_not_repeated_with_another_number_of_workers(checkpoint: Saved, workers: int) -> None:
    """Four workers need 4 rounds for 15 batches. With fewer workers, 4 rounds are not a whole epoch."""
    path = checkpoint(4, 4, stops=False)
    assert read(path).state["epoch"] == 0
    with wrapper_of(workers) as wrapper:
        wrapper.restore(path)
        finish(wrapper)
        assert wrapper.trainer.iteration == 4 + LOADER.iterations(workers)


@pytest.mark.parametrize("workers", [2, 6])
def test_time_and_traffic_are_counted_once_with_another_number_of_workers(checkpoint: Saved, workers: int) -> None:
    path = checkpoint(4, 4)
    with wrapper_of(4) as same, wrapper_of(workers) as other:
        before = [state["clock"] for state in states(same, path)]
        clocks = [state["clock"] for state in states(other, path)]
    first = 16 if workers > 4 else 16 + 13 + 12  # the first worker takes over the counts of removed workers
    assert [clock["samples"] for clock in clocks] == [first, 16, 13, 12, 0, 0][:workers]
    assert [clock["images"] for clock in clocks] == [57, 57, 57, 57, 0, 0][:workers]
    assert sum(clock["bytes_sent"] for clock in clocks) == sum(clock["bytes_sent"] for clock in before)
    for name in ("compute_s", "data_s", "averaging_s"):
        assert sum(clock[name] for clock in clocks) == pytest.approx(sum(clock[name] for clock in before[:workers]))


def test_the_learning_rate_continues_at_the_same_fraction_of_training(checkpoint: Saved) -> None:
    """Four workers stop after one epoch of 4 rounds. It counts as 16 rounds for one worker, whose epochs have 15."""
    schedule = OneCycle(0.1)
    schedule.begin_fit(4 - 16, 4 + 15)
    with wrapper_of(1) as wrapper:
        wrapper.restore(checkpoint(4, 4))
        found = wrapper.fit(LOADER, epochs=1).reports
    assert found["learning_rate"] == pytest.approx([schedule(4 + i) for i in range(15)])


def test_residuals_are_averaged_for_another_number_of_workers() -> None:
    trees = [{"residual": {"a": np.array([1.0, 3.0])}, "n": 5}, {"residual": {"a": np.array([3.0, 5.0])}, "n": 7}]
    assert mean(trees, [0.5, 0.5])["residual"]["a"].tolist() == [2.0, 4.0]
    assert mean([{"a": np.array([1.0])}, {"a": np.array([np.nan])}], [1.0, 0.0])["a"].tolist() == [1.0]
    assert GradientSharing(ThresholdEncoding()).merge({"tally": {}})[0] == 1


def test_another_number_of_workers_begins_with_the_lowest_loss_scale(checkpoint: Saved) -> None:
    scales = [{"scale": 512.0, "rounds": 3, "skipped": 2}, {"scale": 256.0, "rounds": 7, "skipped": 1}]
    stored = stored_states(read(checkpoint(2, 7)))
    states = [{**state, "scaling": scale} for state, scale in zip(stored, scales, strict=True)]
    for size, skipped in (3, [3, 0, 0]), (1, [3]):
        found = [state["scaling"] for state in resized(states, size, 1, EVERY_5, {})]
        assert [scaling["scale"] for scaling in found] == [256.0] * size
        assert [scaling["skipped"] for scaling in found] == skipped
    shared = resized(states, 3, 1, GradientSharing(), {}, joint=True)  # all workers skip the same steps
    assert {state["scaling"]["skipped"] for state in shared} == {1}


def test_statistics_that_an_earlier_version_did_not_save_are_unknown(checkpoint: Saved, tmp_path: Path) -> None:
    """Its name of the drift is known. The accuracy of the resumed epoch would be too low without the earlier hits."""
    stored = read(checkpoint(2, 7))
    for worker in stored.state["workers"]:
        losses, since = worker["numbers"]["losses"], worker["numbers"]["since"]
        del losses["hits"], losses["epoch_hits"], since["hits"], since["drift"]
        since["divergence"] = 0.25
    with wrapper_of(2) as wrapper:
        wrapper.restore(Checkpoints(tmp_path).save(7, stored.state, stored.arrays))
        finish(wrapper)
        accuracies, drifts = wrapper.history.epochs["accuracy"], wrapper.history.reports["drift"]
    assert [accuracy is None for accuracy in accuracies] == [True, False] and drifts[7] == 0.25


def test_a_changed_loss_rate_or_freeze_is_logged_on_resume(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model, other = small_model(), small_model()
    model.freeze("conv1.bias")
    other.loss = SoftmaxNLL(0.125)
    with ParallelWrapper(model, 1, optimizer=SGD(0.1)) as wrapper:
        wrapper.checkpoint(tmp_path)
    for changed, rate in ((other, 0.25), (model, 0.1)):
        with ParallelWrapper(changed, 1, optimizer=SGD(rate)) as wrapper, caplog.at_level(logging.INFO):
            wrapper.restore(tmp_path)
    texts = [text for text in caplog.messages if str(tmp_path) in text]
    named = [[each in text for each in ("0.125", "conv1.bias", "0.25")] for text in texts]
    assert named == [[True] * 3, [False] * 3]


def test_a_run_folder_is_refused_by_restore_which_names_its_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with wrapper_of(1) as wrapper, pytest.raises(ConfigError, match="checkpoints"):
        wrapper.restore(tmp_path)


@pytest.mark.parametrize(
    ("way", "taken", "workers", "pipeline"),
    [
        (EVERY_5, WAYS["elastic"], 2, None),
        (EVERY_5, WAYS["elastic"], 3, None),
        (WAYS["elastic"], EVERY_5, 2, None),
        (EVERY_5, WAYS["slowmo"], 2, None),
        (WAYS["gradients"], WAYS["threshold"], 2, None),
        (EVERY_5, EVERY_5, 1, STAGES),
    ],
    ids=["elastic", "elastic with more workers", "elastic before", "outer optimizer", "encoding", "stages"],
)
def test_a_checkpoint_of_another_synchronizer_or_pipeline_is_refused_and_changes_nothing(
    checkpoint: Saved, way: Synchronizer, taken: Synchronizer, workers: int, pipeline: Pipeline | None
) -> None:
    """Two whole replicas could be mistaken for one replica of two stages."""
    path = checkpoint(2, 7, way)
    with wrapper_of(workers, taken, pipeline=pipeline) as untouched:
        untouched.fit(LOADER, epochs=2)
    with wrapper_of(workers, taken, pipeline=pipeline) as wrapper:
        with pytest.raises(ConfigError):
            wrapper.restore(path)
        wrapper.fit(LOADER, epochs=2)
    assert fingerprint(wrapper.model) == fingerprint(untouched.model)


@pytest.mark.parametrize("damage", ["worker 1", "class names"])
def test_a_damaged_checkpoint_is_refused_and_does_not_change_how_the_model_reads_images(
    damage: str, checkpoint: Saved, tmp_path: Path
) -> None:
    stored = read(checkpoint(2, 7))
    names = ["ant", "bee", "cat", "dog"] if damage == "class names" else ["ant", "bee", "cat"]
    stored.state["model"] |= {"class_names": names, "normalize": {"mean": [0.5], "std": [0.25]}, "trained_on": "pixels"}
    if damage == "worker 1":
        stored.state["workers"][1]["numbers"]["trainer"]["iteration"] = -1
    path = Checkpoints(tmp_path).save(7, stored.state, stored.arrays)
    with wrapper_of(2) as wrapper:
        before = fingerprint(wrapper.model), wrapper.model.pixels, wrapper.model.class_names, wrapper.model.trained_on
        with pytest.raises((ConfigError, DataError)):
            wrapper.restore(path)
        model = wrapper.model
        assert (fingerprint(model), model.pixels, model.class_names, model.trained_on) == before


@pytest.mark.parametrize(("workers", "pipeline", "expected"), [(2, None, 1), (1, STAGES, 2), (2, STAGES, 2)])
def test_stages_are_counted_in_a_checkpoint_of_an_earlier_version(
    checkpoint: Saved, workers: int, pipeline: Pipeline | None, expected: int
) -> None:
    stored = read(checkpoint(workers, 7, pipeline=pipeline))
    assert stored.state.pop("stages") == stages_of(stored) == expected
    stored.state["stages"] = 3
    with data_error("3 stages"):
        stages_of(stored)


@pytest.mark.parametrize("then", ["float", "half"])
def test_a_checkpoint_of_another_dtype_resumes_and_the_log_names_the_difference(
    checkpoint: Saved, caplog: pytest.LogCaptureFixture, then: str
) -> None:
    path = checkpoint(2, 7, dtype=then)
    with wrapper_of(2, dtype="float") as wrapper, caplog.at_level(logging.INFO):
        wrapper.restore(path)
        finish(wrapper)
    assert ("half" in caplog.text) == (then == "half")
