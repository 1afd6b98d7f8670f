"""The loop: reports, stops, failures, what a callback sees."""

from __future__ import annotations

import signal
import threading

import pytest

from cupynet.backend import create_backend
from cupynet.data import Loader, Synthetic
from cupynet.nn import Conv2D, Dense, Image, MaxPool2D, Model, Sequential
from cupynet.optim import SGD, Nesterov, OneCycle
from cupynet.parallel import ParameterAveraging, WorkerTeam
from cupynet.training import Callback, History, ParallelWrapper, Trainer, warm_up
from tests.training.conftest import Recorder, fingerprint, small_dataset, small_model, train


def lenet() -> Sequential:
    return Sequential(
        {
            "conv1": Conv2D(20, 5),
            "pool1": MaxPool2D(2),
            "conv2": Conv2D(50, 5),
            "pool2": MaxPool2D(2),
            "dense1": Dense(500, "relu"),
            "output": Dense(10),
        }
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_lenet_learns_the_synthetic_digits(workers):
    data = Synthetic(seed=12345).load()
    model = Model(lenet(), Image(28, 28, 1), create_backend("numba"), seed=1)
    loader = Loader(data.train, 64, seed=12345)
    with ParallelWrapper(model, workers, optimizer=Nesterov(OneCycle(0.05), l2=5e-4)) as wrapper:
        accuracy = wrapper.fit(loader, epochs=3).evaluate(Loader(data.test, 100, shuffle=False)).accuracy
    assert accuracy > 0.97


def test_half_learns_as_float_does():
    losses = {}
    for dtype in ("half", "float"):
        recorder = Recorder()
        trainer = Trainer(small_model(dtype), Nesterov(0.05), callbacks=[recorder], report_every=5)
        trainer.fit(Loader(small_dataset(200), 8, seed=1), 4)
        losses[dtype] = recorder.reports[-1].loss
        assert recorder.reports[-1].loss < recorder.reports[0].loss / 2
    assert losses["half"] == pytest.approx(losses["float"], abs=0.05)


@pytest.mark.parametrize("backend", ["numpy", "numba"])
def test_a_step_leaves_nothing_on_loan_and_allocates_once(backend):
    model = small_model("float", backend)
    trainer = Trainer(model, SGD(0.01), prefetch_buffer=0, report_every=0)
    batches = list(Loader(small_dataset(50), 8, seed=1).epoch(0, model.backend))
    trainer.step(batches[0])
    allocated = model.backend.workspace.allocated_bytes
    for batch in batches:  # the last one is short
        trainer.step(batch)
        assert model.backend.workspace.on_loan == 0
    assert model.backend.workspace.allocated_bytes == allocated
    trainer.evaluate(Loader(small_dataset(50), 8, shuffle=False))
    assert model.backend.workspace.on_loan == 0


def test_reports_add_up():
    run = train(2, lambda: SGD(0.05), samples=64, batch_size=4, epochs=2, frequency=2)
    reports = run.recorders[0].reports
    assert [r.iteration for r in reports] == [2, 4, 6, 8, 10, 12, 14, 16]
    for report in reports:
        assert report.images_per_s > 0 and report.compute_s > 0 and report.averaging_s > 0
        assert report.divergence > 0 and report.score_after_averaging > 0
    clock = run.trainers[0].clock
    assert clock.images == 128
    assert clock.timed_images == (16 - 10) * 8
    assert clock.compute_s + clock.data_s + clock.averaging_s <= clock.rounds_s


def test_callbacks_are_told_on_rank_0_only_unless_they_ask():
    class Quiet(Callback):
        def __init__(self):
            self.threads = set()

        def on_iteration_end(self, trainer):
            self.threads.add(threading.get_ident())

    class Loud(Quiet):
        every_rank = True

    quiet, loud = Quiet(), Loud()
    with ParallelWrapper(small_model(), 3, callbacks=[quiet, loud]) as wrapper:
        wrapper.fit(Loader(small_dataset(30), 4), 1)
    assert (len(quiet.threads), len(loud.threads)) == (1, 3)


@pytest.mark.parametrize(("workers", "frequency"), [(1, 1), (1, "end"), (3, 2), (3, "end")])
def test_a_stop_signal_ends_training_at_the_same_iteration_everywhere(workers, frequency):
    class StopAt(Recorder):
        def on_iteration_end(self, trainer):
            super().on_iteration_end(trainer)
            if trainer.iteration == 7 and trainer.communicator.rank == 0:
                team.stop(signal.SIGTERM)

    recorders = [StopAt() for _ in range(workers)]
    loader = Loader(small_dataset(600), 2, seed=1)

    def task(communicator):
        trainer = Trainer(
            small_model(),
            SGD(0.01),
            communicator=communicator,
            synchronizer=ParameterAveraging(communicator, frequency),
            callbacks=[recorders[communicator.rank]],
        )
        trainer.fit(loader, 5)
        return trainer

    with WorkerTeam(workers, timeout_s=60, limit_blas=False) as team:
        trainers = team.run(task)
    assert {t.stopped_by for t in trainers} == {signal.SIGTERM}
    assert len({t.iteration for t in trainers}) == 1 and 7 <= trainers[0].iteration <= 50
    assert trainers[0].epoch == 0
    assert len({fingerprint(t.model) for t in trainers}) == 1


@pytest.mark.parametrize(("samples", "epochs"), [(40, [(1, 5, 40)]), (48, [])])
def test_a_stop_at_the_last_round_completes_the_epoch_and_an_earlier_one_does_not(samples, epochs):
    class StopAt(Recorder):
        every_rank = False

        def on_iteration_end(self, trainer):
            if trainer.iteration == 4:
                wrapper.stop()

    recorder = StopAt()
    with ParallelWrapper(small_model(), 2, 1, callbacks=[recorder]) as wrapper:
        wrapper.fit(Loader(small_dataset(samples), 4), 3)
        assert (wrapper.trainer.iteration, wrapper.trainer.epoch) == (5, len(epochs))
    assert [(r.epoch, r.iteration, r.samples) for r in recorder.epochs] == epochs


def test_the_average_at_the_end_counts_in_the_rate():
    """Worker 0 waits there for the others; without that time the rate would be its own, times the workers."""

    class Slow(Callback):
        every_rank = True

        def on_iteration_end(self, trainer):
            if trainer.communicator.rank == 1 and trainer.iteration > 10:
                others_done.wait(30)

        def on_epoch_end(self, trainer, record):
            records[trainer.communicator.rank] = record

    class Waiting(ParameterAveraging):
        def finish(self, replica, moment):
            if self.communicator.rank == 0:
                rounds_s.append(trainers[0].clock.timed_s)
                others_done.set()
            return super().finish(replica, moment)

    others_done, records, trainers, rounds_s = threading.Event(), {}, {}, []

    def task(communicator):
        averaging = Waiting(communicator, "end")
        trainer = Trainer(
            small_model(), SGD(0.01), communicator=communicator, synchronizer=averaging, callbacks=[Slow()]
        )
        trainers[communicator.rank] = trainer
        trainer.fit(Loader(small_dataset(20 * 8), 4, seed=1), 1)
        return trainer.clock

    with WorkerTeam(2, timeout_s=60, limit_blas=False) as team:
        clock = team.run(task)[0]
    assert clock.timed_s > rounds_s[0] and clock.averaging_s > 0
    assert records[0].train_s == clock.rounds_s


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_worker_is_named_with_its_batch_and_device(rank):
    class Break(Recorder):
        def on_iteration_end(self, trainer):
            if trainer.communicator.rank == rank and trainer.iteration == 3:
                raise ZeroDivisionError("on purpose")

    wrapper = ParallelWrapper(small_model(), 3, callbacks=[Break()], prefetch_buffer=6)
    with wrapper, pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        wrapper.fit(Loader(small_dataset(200), 4), 1)
    assert caught.value.__notes__ == [f"worker {rank} (numpy, device 0), epoch 1, at batch {6 + rank}"]
    assert not [t for t in threading.enumerate() if t.name.startswith("cupynet-prefetch")]


def test_a_failing_loader_is_a_failing_worker():
    class Broken(Loader):
        def epoch(self, epoch, backend, rank=0, size=1):
            for batch in super().epoch(epoch, backend, rank, size):
                if batch.index == 5:
                    raise OSError("the disk is gone")
                yield batch

    with ParallelWrapper(small_model(), 2) as wrapper, pytest.raises(OSError, match="the disk is gone"):
        wrapper.fit(Broken(small_dataset(200), 4), 1)


def test_warming_up_changes_nothing():
    model = small_model("float", "numba")
    before = fingerprint(model)
    assert warm_up(model, Nesterov(OneCycle(0.1)), 4) > 0
    assert fingerprint(model) == before
    assert not model.params.grad.any()
    assert model.backend.workspace.on_loan == 0


def test_a_history_lets_go_of_its_file_after_an_error(tmp_path):
    class Break(Callback):
        def on_epoch_end(self, trainer, record):
            raise ZeroDivisionError("on purpose")

    history = History(tmp_path / "history.jsonl")
    trainer = Trainer(small_model(), SGD(0.01), callbacks=[history, Break()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Loader(small_dataset(12), 4), 1)
    history.close()
    history.close()
    assert history._file is None and (tmp_path / "history.jsonl").read_text().count("\n") == 1
