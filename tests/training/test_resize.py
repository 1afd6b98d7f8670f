"""Resuming with a different number of workers: replicas are averaged, and no sample is left out."""

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import ConfigError
from cupynet.data import Batch, Loader
from cupynet.optim import Nesterov, OneCycle
from cupynet.parallel import GradientSharing, ParameterAveraging, Pipeline, Synchronizer, ThresholdEncoding
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training import Callback, Checkpoint, HistoryWriter, NonFinite, ParallelWrapper, Replica
from cupynet.training.checkpointing import _states as stored_states
from cupynet.training.resize import mean, resized
from tests.support.calls import watch
from tests.support.refusals import refused
from tests.support.training import KINDS_OF_WAYS, WAYS, Recorder, StopAfter, fingerprint, small_dataset, small_model

DATA = small_dataset(57)  # 15 batches of 4
LOADER = Loader(DATA, 4, seed=3)
EVERY_5, EVERY_ROUND, STAGES = ParameterAveraging(5), ParameterAveraging(1), Pipeline(2, 2)


class Runs:
    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self.new_folder = new_folder
        self.checkpoint = cache(self._checkpoint)

    def wrapper(
        self, workers: int, way: Synchronizer = EVERY_5, *callbacks: Callback, dtype: str = "double", **options: Any
    ) -> ParallelWrapper:
        return ParallelWrapper(
            small_model(dtype),
            workers,
            synchronizer=way,
            optimizer=Nesterov(OneCycle(0.1), max_grad_norm=1.0),
            callbacks=[NonFinite("skip"), *callbacks, HistoryWriter()],
            log_every=1,
            run=self.new_folder(),
            **options,
        )

    def _checkpoint(
        self, workers: int, iteration: int, way: Synchronizer = EVERY_5, *, stops: bool = True, **options: Any
    ) -> Path:
        """Train up to an iteration, or to the end, and return that iteration's checkpoint."""
        folder = self.new_folder()
        saving = Checkpoint(every_iterations=iteration, every_epochs=100, keep_last=100, path=folder)
        with self.wrapper(workers, way, saving, StopAfter(iteration if stops else -1), **options) as wrapper:
            wrapper.fit(LOADER, epochs=2)
        return Checkpoints(folder).path(iteration)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(lambda: tmp_path_factory.mktemp("run"))


def finish(wrapper: ParallelWrapper) -> None:
    wrapper.fit(LOADER, epochs=2 - wrapper.trainer.epoch, evaluate_on=DATA)
    assert wrapper.trainer.epoch == 2
    assert wrapper.trainer.evaluation is not None and np.isfinite(wrapper.trainer.evaluation.loss)


def states(wrapper: ParallelWrapper, path: Path) -> list[dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    wrapper.restore(path)
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.state()}))
    return [found[rank] for rank in sorted(found)]


def weights_of(state: dict[str, Any]) -> Any:
    return state["replica"]["weights"]


def velocity_of(state: dict[str, Any]) -> Any:
    return state["replica"]["optimizer"]["velocity"]


@pytest.mark.parametrize(
    ("way", "before", "after"),
    [
        *((way, 3, 2) for way in (*KINDS_OF_WAYS, "adaptive", "slowmo")),
        *(("every 3", 3, 4), ("adaptive", 1, 3), ("threshold", 1, 2)),
    ],
)
def test_workers_become_another_number(runs: Runs, way: str, before: int, after: int) -> None:
    path = runs.checkpoint(before, 7, WAYS[way])
    with runs.wrapper(after, WAYS[way]) as wrapper:
        wrapper.restore(path)
        assert wrapper.trainer.iteration == 7
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1
        finish(wrapper)
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1


def test_the_mean_is_weighted_like_the_next_average(runs: Runs) -> None:
    """The checkpoint follows 4 of 5 rounds between averages. In the fourth, batches had 4, 4, 1 and 0 samples."""
    path = runs.checkpoint(4, 4)
    with runs.wrapper(4) as same, runs.wrapper(2) as two:
        parts, found = states(same, path), states(two, path)
    counts = [part["synchronizer"]["tally"]["samples"] for part in parts]
    assert counts == [16, 16, 13, 12]
    for state in found:
        for take in (weights_of, velocity_of):
            for name, array in take(state).items():
                expected = sum(n * take(part)[name] for n, part in zip(counts, parts, strict=True)) / 57
                np.testing.assert_allclose(array, expected, rtol=0, atol=1e-15)
        assert state["synchronizer"]["tally"]["rounds"] == 0


@pytest.mark.parametrize(("workers", "again"), [(3, 2), (1, 0), (5, 3)])
def test_no_batch_is_left_out_and_few_are_trained_twice(
    runs: Runs, workers: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four workers stop after 2 rounds with 8 of 15 batches. Three workers continue after 6, so 2 are repeated."""
    seen: list[int] = []

    def note(_: Any, replica: Replica, batch: Batch | None) -> None:
        if batch is not None and batch.epoch == 0:
            seen.append(batch.index)

    with runs.wrapper(workers, EVERY_ROUND) as wrapper:
        wrapper.restore(runs.checkpoint(4, 2, EVERY_ROUND))
        watch(monkeypatch, Replica, "gradient", note)
        wrapper.fit(LOADER, epochs=1)
    assert sorted(seen) == list(range(8 - again, 15))


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_whose_last_round_was_done_is_complete(runs: Runs, workers: int) -> None:
    """Four workers need 4 rounds for 15 batches. With fewer workers, 4 rounds are not a whole epoch."""
    path = runs.checkpoint(4, 4, stops=False)
    assert read(path).state["epoch"] == 0
    with runs.wrapper(workers) as wrapper:
        wrapper.restore(path)
        finish(wrapper)
        assert wrapper.trainer.iteration == 4 + LOADER.iterations(workers)


@pytest.mark.parametrize("workers", [2, 6])
def test_time_spent_is_counted_once(runs: Runs, workers: int) -> None:
    path = runs.checkpoint(4, 4)
    with runs.wrapper(4) as same, runs.wrapper(workers) as other:
        before = [state["clock"] for state in states(same, path)]
        clocks = [state["clock"] for state in states(other, path)]
    assert [clock["samples"] for clock in clocks] == [16, 16, 13, 12, 0, 0][:workers]
    assert [clock["images"] for clock in clocks] == [57, 57, 57, 57, 0, 0][:workers]
    for name in ("compute_s", "data_s", "averaging_s", "bytes_sent"):
        assert sum(clock[name] for clock in clocks) == pytest.approx(sum(clock[name] for clock in before[:workers]))


def test_the_learning_rate_continues_at_the_same_fraction_of_training(runs: Runs) -> None:
    """Four workers stop after one epoch of 4 rounds. It counts as 16 rounds for one worker, whose epochs have 15."""
    recorder, schedule = Recorder(), OneCycle(0.1)
    with runs.wrapper(1, EVERY_5, recorder) as wrapper:
        wrapper.restore(runs.checkpoint(4, 4))
        wrapper.fit(LOADER, epochs=1)
    schedule.begin_fit(4 - 16, 4 + 15)
    rates = [report.learning_rate for report in recorder.reports]
    assert rates == pytest.approx([schedule(4 + i) for i in range(15)])


@pytest.mark.parametrize("workers", [1, 3])
def test_stages_resume_as_the_same_stages(runs: Runs, workers: int) -> None:
    with runs.wrapper(workers, pipeline=STAGES) as wrapper:
        wrapper.restore(runs.checkpoint(2, 4, pipeline=STAGES))
        for stage in (0, 1):
            assert len({fingerprint(each) for each in wrapper.replicas()[stage::2]}) == 1
        finish(wrapper)


def test_whole_replicas_do_not_resume_as_stages(runs: Runs) -> None:
    """Four whole replicas could be mistaken for two replicas of two stages."""
    with runs.wrapper(1, pipeline=STAGES) as wrapper, refused(""):
        wrapper.restore(runs.checkpoint(4, 4))


def test_residuals_are_averaged() -> None:
    trees = [{"residual": {"a": np.array([1.0, 3.0])}, "n": 5}, {"residual": {"a": np.array([3.0, 5.0])}, "n": 7}]
    assert mean(trees, [0.5, 0.5])["residual"]["a"].tolist() == [2.0, 4.0]
    assert mean([{"a": np.array([1.0])}, {"a": np.array([np.nan])}], [1.0, 0.0])["a"].tolist() == [1.0]
    assert GradientSharing(ThresholdEncoding()).merge({"tally": {}})[0] == 1


def test_other_workers_begin_with_the_least_loss_scale(runs: Runs) -> None:
    scales = [{"scale": 512.0, "rounds": 3, "skipped": 2}, {"scale": 256.0, "rounds": 7, "skipped": 1}]
    stored = stored_states(read(runs.checkpoint(2, 7)))
    states = [{**state, "scaling": scale} for state, scale in zip(stored, scales, strict=True)]
    for state in resized(states, 3, 1, EVERY_5, {}):
        assert (state["scaling"]["scale"], state["scaling"]["skipped"]) == (256.0, 0)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_checkpoint_of_an_earlier_version_can_be_resumed(runs: Runs, workers: int) -> None:
    stored = read(runs.checkpoint(2, 7))
    for worker in stored.state["workers"]:
        numbers = worker["numbers"]
        del numbers["losses"]
        for clock in (numbers["clock"], numbers["epoch_start"], numbers["since"]["start"]):
            del clock["compile_s"]
    with runs.wrapper(workers) as wrapper:
        wrapper.restore(Checkpoints(runs.new_folder()).save(7, stored.state, stored.arrays))
        finish(wrapper)


def test_another_learning_rate_is_logged(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    path = runs.checkpoint(2, 7)
    for peak in (0.1, 0.25):
        optimizer = Nesterov(OneCycle(peak), max_grad_norm=1.0)
        wrapper = ParallelWrapper(small_model("double"), 2, synchronizer=EVERY_5, optimizer=optimizer)
        with wrapper, caplog.at_level(logging.INFO):
            wrapper.restore(path)
    assert ["0.25" in text for text in caplog.messages if str(path) in text] == [False, True]


@pytest.mark.parametrize("workers", [2, 3])
def test_a_checkpoint_of_another_synchronizer_is_refused(runs: Runs, workers: int) -> None:
    path = runs.checkpoint(2, 7)
    with runs.wrapper(workers, WAYS["elastic"]) as wrapper, pytest.raises(ConfigError):
        wrapper.restore(path)


@pytest.mark.parametrize("then", ["float", "half"])
def test_a_checkpoint_of_another_dtype_can_be_resumed(runs: Runs, caplog: pytest.LogCaptureFixture, then: str) -> None:
    """If training does not continue bit for bit, the log names the difference."""
    path = runs.checkpoint(2, 7, dtype=then)
    with runs.wrapper(2, dtype="float") as wrapper, caplog.at_level(logging.INFO):
        wrapper.restore(path)
        finish(wrapper)
    assert ("half" in caplog.text) == (then == "half")
