"""Resuming with another number of workers: the mean of the replicas, and no sample left out."""

from __future__ import annotations

import logging
from functools import cache

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import Nesterov, OneCycle
from cupynet.parallel import GradientSharing, ParameterAveraging, Pipeline, ThresholdEncoding
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training import Callback, Checkpoint, History, NonFinite, ParallelWrapper
from cupynet.training.checkpointing import _states as stored_states
from cupynet.training.resize import mean, regrouped
from tests.support.refusals import refused
from tests.support.training import KINDS_OF_WAYS, WAYS, StopAfter, fingerprint, small_dataset, small_model

DATA = small_dataset(57)  # 15 batches of 4
LOADER = Loader(DATA, 4, seed=3)
EPOCHS = 2
EVERY_ROUND, STAGES = ParameterAveraging(1), Pipeline(2, 2)


class Rates(Callback):
    """The learning rates of reports, with their iterations."""

    def __init__(self):
        self.rates = []

    def on_report(self, trainer, report):
        self.rates.append((report.iteration, report.learning_rate))


def wrapper_of(folder, workers, way=None, *callbacks, dtype="double", **options):
    folder.mkdir(exist_ok=True)
    return ParallelWrapper(
        small_model(dtype),
        workers,
        synchronizer=ParameterAveraging(5) if way is None else way,
        optimizer=Nesterov(OneCycle(0.1), max_grad_norm=1.0),
        callbacks=[NonFinite("skip"), *callbacks, History()],
        report_every=1,
        run=folder,
        **options,
    )


@pytest.fixture(scope="module")
def checkpoint_after(tmp_path_factory):
    """Return a function that trains up to an iteration and returns its checkpoint; results are cached."""

    @cache
    def train(workers, iteration, way=None, **options):
        folder = tmp_path_factory.mktemp("left")
        saving = Checkpoint(every_iterations=iteration, keep_last=100)
        with wrapper_of(folder, workers, way, saving, StopAfter(iteration), **options) as wrapper:
            wrapper.fit(LOADER, EPOCHS)
        return Checkpoints(folder / "checkpoints").path(iteration)

    return train


def states(wrapper):
    found = {}
    wrapper.on_workers(lambda trainer: found.update({trainer.rank: trainer.state()}))
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize(
    ("way", "workers"),
    [("every 3", 1), ("every 3", 4), *((way, 2) for way in ("adaptive", "slowmo", *KINDS_OF_WAYS) if way != "every 3")],
)
def test_three_workers_become_another_number(tmp_path, checkpoint_after, way, workers):
    path = checkpoint_after(3, 7, WAYS[way])
    with wrapper_of(tmp_path, workers, WAYS[way]) as wrapper:
        wrapper.restore(path)
        found = states(wrapper)
        weights = [np.concatenate([w.ravel() for w in state["replica"]["weights"].values()]) for state in found]
        assert all(np.array_equal(weights[0], each) for each in weights) and wrapper.trainer.iteration == 7
        wrapper.fit(LOADER, EPOCHS - wrapper.trainer.epoch, evaluate_on=DATA)
        assert wrapper.trainer.epoch == EPOCHS and np.isfinite(wrapper.trainer.evaluation.loss)
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1


@pytest.mark.parametrize(("way", "workers"), [("adaptive", 3), ("elastic", 2), ("threshold", 2)])
def test_one_worker_becomes_several(tmp_path, checkpoint_after, way, workers):
    path = checkpoint_after(1, 7, WAYS[way])
    with wrapper_of(tmp_path, workers, WAYS[way]) as wrapper:
        wrapper.restore(path)
        wrapper.fit(LOADER, EPOCHS - wrapper.trainer.epoch)
        assert wrapper.trainer.epoch == EPOCHS and len({fingerprint(each) for each in wrapper.replicas()}) == 1


def test_the_mean_is_weighted_like_the_next_average(tmp_path, checkpoint_after):
    """After 4 of 5 rounds between averages. In the last one, some workers had no batch and one a short batch."""
    path = checkpoint_after(4, 4)
    stored = read(path)
    with wrapper_of(tmp_path / "same", 4) as wrapper:
        wrapper.restore(path)
        parts = states(wrapper)
    counts = [part["synchronizer"]["tally"]["samples"] for part in parts]
    assert counts == [16, 16, 13, 12] and len(stored.state["workers"]) == 4
    with wrapper_of(tmp_path / "two", 2) as wrapper:
        wrapper.restore(path)
        for state in states(wrapper):
            for kind, of in (("weights", lambda s: s["weights"]), ("momentum", lambda s: s["optimizer"]["velocity"])):
                for name, found in of(state["replica"]).items():
                    wanted = sum(n * of(part["replica"])[name] for n, part in zip(counts, parts, strict=True)) / 57
                    assert np.allclose(found, wanted, rtol=0, atol=1e-15), (kind, name)
            assert state["synchronizer"]["tally"]["rounds"] == 0


@pytest.mark.parametrize(("workers", "again"), [(3, 2), (1, 0), (5, 3)])
def test_no_batch_is_left_out_and_few_are_trained_twice(tmp_path, checkpoint_after, caplog, workers, again):
    """Four workers stop after 2 rounds, 8 of 15 batches. Three workers continue after batch 6, so 2 are repeated."""
    path = checkpoint_after(4, 2, EVERY_ROUND)
    seen: list[int] = []
    with wrapper_of(tmp_path, workers, EVERY_ROUND) as wrapper, caplog.at_level(logging.INFO):
        wrapper.restore(path)
        assert (wrapper.trainer.epoch, wrapper.trainer.round) == (0, 8 // workers)

        def watch(trainer):
            original = trainer.replica.gradient

            def gradient(batch):
                if batch is not None and batch.epoch == 0:
                    seen.append(batch.index)
                return original(batch)

            trainer.replica.gradient = gradient

        wrapper.on_workers(watch)
        wrapper.fit(LOADER, 1)
    assert sorted(seen) == list(range(8 - again, 15))
    (line,) = [record.getMessage() for record in caplog.records if "again" in record.getMessage()]
    assert line.endswith(f" {again}")


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_whose_last_round_was_done_is_complete(tmp_path, workers):
    """Four workers need 4 rounds for 15 batches; with fewer workers, 4 rounds are not a whole epoch."""
    callbacks = [Checkpoint(every_iterations=4, every_epochs=100, keep_last=100, path=tmp_path)]
    options = {"synchronizer": ParameterAveraging(1), "optimizer": Nesterov(0.1)}
    with ParallelWrapper(small_model(), 4, callbacks=callbacks, **options) as wrapper:
        wrapper.fit(LOADER, 3)
    assert read(tmp_path / "step-00000004").state["epoch"] == 0
    with ParallelWrapper(small_model(), workers, **options) as wrapper:
        wrapper.restore(tmp_path / "step-00000004")
        wrapper.fit(LOADER, 2)
        rounds = -(-15 // workers)
        assert (wrapper.trainer.epoch, wrapper.trainer.iteration) == (2, 4 + rounds)


@pytest.mark.parametrize("workers", [2, 6])
def test_time_spent_is_counted_once(tmp_path, checkpoint_after, workers):
    """A new worker has spent nothing."""
    path = checkpoint_after(4, 4)
    with wrapper_of(tmp_path / "same", 4) as wrapper:
        wrapper.restore(path)
        before = [state["clock"] for state in states(wrapper)]
    with wrapper_of(tmp_path / "other", workers) as wrapper:
        wrapper.restore(path)
        clocks = [state["clock"] for state in states(wrapper)]
    assert [clock["samples"] for clock in clocks] == [16, 16, 13, 12, 0, 0][:workers]
    for name in ("compute_s", "data_s", "averaging_s", "bytes_sent"):
        assert sum(clock[name] for clock in clocks) == pytest.approx(sum(clock[name] for clock in before[:workers]))
    assert [clock["images"] for clock in clocks] == [57, 57, 57, 57, 0, 0][:workers]


def test_the_learning_rate_continues_at_the_same_fraction_of_training(tmp_path, checkpoint_after):
    """Four workers have 4 rounds an epoch and stop after the first; for one worker with 15 they count as 16."""
    path, seen = checkpoint_after(4, 4), Rates()
    with wrapper_of(tmp_path, 1, None, seen) as wrapper:
        wrapper.restore(path)
        wrapper.fit(LOADER, 1)
    schedule = OneCycle(0.1)
    schedule.span(4 - 16, 4 + 15)
    assert [rate for _, rate in seen.rates] == [pytest.approx(schedule(4 + i)) for i in range(15)]
    assert [iteration for iteration, _ in seen.rates] == list(range(5, 20))


@pytest.mark.parametrize("workers", [1, 3])
def test_stages_resume_as_the_same_stages(tmp_path, checkpoint_after, workers):
    path = checkpoint_after(2, 4, pipeline=STAGES)
    with wrapper_of(tmp_path, workers, pipeline=STAGES) as wrapper:
        wrapper.restore(path)
        first, second = ({id(w): w for w in wrapper.replicas()[i::2]}.values() for i in (0, 1))
        assert len({fingerprint(each) for each in first}) == len({fingerprint(each) for each in second}) == 1
        wrapper.fit(LOADER, EPOCHS - wrapper.trainer.epoch, evaluate_on=DATA)
        assert wrapper.trainer.epoch == EPOCHS


def test_residuals_are_averaged():
    """Each new worker gets the mean of the residuals that were still to be sent."""
    trees = [{"residual": {"a": np.array([1.0, 3.0])}, "n": 5}, {"residual": {"a": np.array([3.0, 5.0])}, "n": 7}]
    assert mean(trees, [0.5, 0.5])["residual"]["a"].tolist() == [2.0, 4.0] and mean(trees, [0.5, 0.5])["n"] == 5
    assert mean([{"a": np.array([1.0])}, {"a": np.array([np.nan])}], [1.0, 0.0])["a"].tolist() == [1.0]
    assert GradientSharing(ThresholdEncoding()).merge({"tally": {}})[0] == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_a_checkpoint_of_an_earlier_version_can_be_resumed(tmp_path, checkpoint_after, workers):
    stored = read(checkpoint_after(2, 7))
    for worker in stored.state["workers"]:
        numbers = worker["numbers"]
        del numbers["losses"]
        for clock in (numbers["clock"], numbers["epoch_start"], numbers["since"]["start"]):
            del clock["compile_s"]
    path = Checkpoints(tmp_path / "changed").save(7, stored.state, stored.arrays)
    with wrapper_of(tmp_path, workers) as wrapper:
        wrapper.restore(path)
        wrapper.fit(LOADER, EPOCHS - wrapper.trainer.epoch)
        assert wrapper.trainer.epoch == EPOCHS and np.isfinite(wrapper.history.epochs["loss"]).all()


@pytest.mark.parametrize("whole", [3, 4])  # 4 whole replicas could be mistaken for 2 replicas of 2 stages
def test_whole_replicas_do_not_resume_as_stages(tmp_path, checkpoint_after, whole):
    path = checkpoint_after(whole, 4)
    with wrapper_of(tmp_path, 1, pipeline=STAGES) as wrapper, refused(""):
        wrapper.restore(path)


def test_other_workers_begin_with_the_least_loss_scale(checkpoint_after):
    """The steps that were skipped before are counted by one of them."""
    scales = [{"scale": 512.0, "rounds": 3, "skipped": 2}, {"scale": 256.0, "rounds": 7, "skipped": 1}]
    stored = stored_states(read(checkpoint_after(2, 7)))
    states = [{**state, "scaling": scale} for state, scale in zip(stored, scales, strict=True)]
    for state in regrouped(states, 3, 1, ParameterAveraging(5), {}):
        assert (state["scaling"]["scale"], state["scaling"]["skipped"]) == (256.0, 0)


@pytest.mark.parametrize(("then", "now"), [("float", "float"), ("half", "float")])
def test_a_checkpoint_of_another_dtype_can_be_resumed(tmp_path, checkpoint_after, caplog, then, now):
    """The log says what differs, if training does not continue bit for bit."""
    path = checkpoint_after(2, 7, dtype=then)
    with wrapper_of(tmp_path, 2, dtype=now) as wrapper, caplog.at_level(logging.INFO):
        wrapper.restore(path)
        wrapper.fit(LOADER, EPOCHS - wrapper.trainer.epoch)
        assert np.isfinite(wrapper.model.params.master).all()
    assert (f"dtype {now}, then {then}" in caplog.text) == (then != now)
