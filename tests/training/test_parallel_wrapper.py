"""The ParallelWrapper API."""

from __future__ import annotations

import copy
import dataclasses
import gc
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from cupynet.backend import PixelScale, create_backend
from cupynet.core.errors import ConfigError
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Dense, Flatten, Image, Model, Sequential
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import ElasticAveraging, ParameterAveraging, Synchronizer, placement
from cupynet.parallel.launchers import threads as launch
from cupynet.runs.run import Run
from cupynet.training import Callback, Checkpoint, History, ParallelWrapper, Replica, Trainer
from tests.support.refusals import refused
from tests.support.training import At, Poisoned, Recorder, fingerprint, network_with, small_dataset, small_model, train


def test_the_documented_call_trains_the_model_itself():
    model, dataset = small_model("float"), small_dataset(200)
    test = Loader(dataset, 50, shuffle=False)
    with ParallelWrapper(
        model, workers=2, averaging_frequency=3, prefetch_buffer=24, report_score_after_averaging=True
    ) as wrapper:
        before = wrapper.evaluate(test).loss
        wrapper.fit(Loader(dataset, 8, seed=1), epochs=3)
        after = wrapper.evaluate(test)
        assert after.loss < before and after.samples == 200
        assert len({fingerprint(m) for m in wrapper.replicas()}) == 1 and wrapper.replicas()[0] is model
    assert model.predict(dataset.images[:5]).shape == (5, 3)


def test_the_wrapper_equals_workers_made_by_hand():
    by_hand = train(3, lambda: Nesterov(0.05, l2=1e-3), samples=61, epochs=2, frequency=2, dtype="float")
    with ParallelWrapper(small_model("float"), 3, 2, optimizer=Nesterov(0.05, l2=1e-3)) as wrapper:
        wrapper.fit(Loader(small_dataset(61), 4, seed=3), 2, evaluate_on=Loader(small_dataset(61), 20, shuffle=False))
        assert fingerprint(wrapper.replicas()[0]) == fingerprint(by_hand.trainers[0].model)


def test_two_fits_equal_one():
    loader = Loader(small_dataset(40), 4, seed=3)
    with ParallelWrapper(small_model(), 2, 1, optimizer=SGD(0.05)) as once:
        once.fit(loader, 3)
        with ParallelWrapper(small_model(), 2, 1, optimizer=SGD(0.05)) as twice:
            twice.fit(loader, 1).fit(loader, 2)
            assert fingerprint(once.replicas()[0]) == fingerprint(twice.replicas()[0])


def test_the_first_device_must_be_the_models(monkeypatch):
    model = small_model()
    model.backend.name = "cupy"
    monkeypatch.setattr(placement, "device_count", lambda name: 2)
    with refused("devices", "[1, 0]"):
        ParallelWrapper(model, devices=[1, 0])


def test_stop_ends_a_fit_from_a_callback():
    stop = At(4, lambda: wrapper.stop())
    with ParallelWrapper(small_model(), 2, 2, callbacks=[stop]) as wrapper:
        wrapper.fit(Loader(small_dataset(400), 4), 10)
        assert wrapper.trainer.iteration in (4, 6)
        wrapper.fit(Loader(small_dataset(40), 4), 1)  # a stop is for one fit
        assert wrapper.trainer.epoch == 1


def test_a_stop_while_workers_are_leaving_does_not_end_the_next_fit(monkeypatch):
    """Rank 1 has left the fit, and gets the request once more."""
    run, left = Trainer.fit, threading.Event()

    def leave(trainer, fit):
        run(trainer, fit)
        if trainer.rank == 1:
            left.set()

    class Late(Recorder):
        every_rank = False

        def on_fit_end(self, trainer):
            if trainer.epoch == 1:
                assert left.wait(20)
                wrapper.stop("too late")

    monkeypatch.setattr(Trainer, "fit", leave)
    with ParallelWrapper(small_model(), 2, 2, callbacks=[Late()]) as wrapper:
        wrapper.fit(Loader(small_dataset(40), 4), 1)
        wrapper.fit(Loader(small_dataset(40), 4), 2)
        assert wrapper.trainer.epoch == 3 and wrapper.trainer.stopped is None


@pytest.mark.parametrize(
    "arguments", [{"epochs": 1.5}, {"epochs": 0}, {"evaluate_every": 0}, {"batch_size": 0}, {"split": "dev"}]
)
def test_bad_arguments_of_fit_are_refused_and_nothing_is_trained(arguments):
    model = small_model()
    before = fingerprint(model)
    with ParallelWrapper(model, 2) as wrapper, refused(*arguments):
        wrapper.fit(small_dataset(20), **arguments)
    assert fingerprint(model) == before


def test_an_empty_data_set_is_refused():
    with ParallelWrapper(small_model(), 2) as wrapper, refused(""):
        wrapper.fit(small_dataset(20).take(slice(0)))


def test_a_run_folder_is_created(tmp_path):
    with ParallelWrapper(small_model(), 1, callbacks=[History()], run=tmp_path / "new" / "run") as wrapper:
        wrapper.fit(small_dataset(20))
    assert len(Run(tmp_path / "new" / "run").history()) == 1


def test_data_may_be_a_loader_a_data_set_or_arrays():
    data = small_dataset(40)
    prints = set()
    grey = data.images[..., 0]
    for given in (Loader(data, 8, seed=12345), data, (data.images, data.labels), (grey, data.labels)):
        with ParallelWrapper(small_model(), np.int64(2), np.int32(2)) as wrapper:
            wrapper.fit(given, np.int64(2), batch_size=8)
            assert wrapper.evaluate(data if given is data else Loader(data, 8)).samples == 40
            prints.add(fingerprint(wrapper.model))
    assert len(prints) == 1


def test_data_are_released_after_use():
    with ParallelWrapper(small_model(), 2, progress="none") as wrapper:
        for use in (wrapper.fit, wrapper.evaluate):
            data = small_dataset(20)
            released = weakref.ref(data)
            use(data, batch_size=4)
            del data
            gc.collect()
            assert released() is None


def test_a_synchronizer_is_copied_once_per_wrapper():
    class Counting(Synchronizer):
        shares_gradients = False

        def __init__(self):
            self.rounds = 0

        def before_update(self, replica, samples):
            self.rounds += 1

    described = Counting()
    with ParallelWrapper(small_model(), 2, synchronizer=described) as wrapper:
        wrapper.fit(Loader(small_dataset(20), 4), 1).fit(Loader(small_dataset(20), 4), 2)
        assert wrapper.trainer.synchronizer.rounds == 9
    assert described.rounds == 0  # a description, of which each worker has a copy


def test_callbacks_are_the_users_on_rank_0_and_copies_elsewhere():
    class Everywhere(Recorder):
        started = 0

        def start(self, trainer, run):
            self.started += 1
            self.rank = trainer.rank
            everybody.append(self)

    everybody, mine = [], Everywhere()
    with ParallelWrapper(small_model(), 3, callbacks=[mine]) as wrapper:
        wrapper.fit(Loader(small_dataset(24), 4), 1).fit(Loader(small_dataset(24), 4), 1)
    assert len({id(each) for each in everybody}) == 3 and mine.rank == 0
    assert {(each.rank, each.started, len(each.weights)) for each in everybody} == {(r, 1, 4) for r in range(3)}


def test_a_wrapper_is_usable_after_a_refused_argument():
    odd = np.zeros((4, 9, 9), np.uint8), np.zeros(4, np.int64)
    with ParallelWrapper(small_model(), 3) as wrapper:
        for wrong in (
            lambda: wrapper.fit(small_dataset(20), 0),
            lambda: wrapper.fit(odd),
            lambda: wrapper.evaluate(odd),
        ):
            with pytest.raises(ConfigError):
                wrong()
        wrapper.fit(small_dataset(20), batch_size=4)
        assert wrapper.trainer.epoch == 1


def blas_threads() -> set[int]:
    return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}


def test_a_refused_wrapper_leaves_blas_alone():
    before = blas_threads()
    with refused("timeout_s"):
        ParallelWrapper(small_model(), 2, timeout_s=0)
    assert blas_threads() == before


def test_a_dropped_wrapper_has_no_threads_and_restores_blas():
    before = blas_threads()
    wrapper = ParallelWrapper(small_model(), 3, blas_threads=1)
    wrapper.fit(small_dataset(20))
    del wrapper
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name.startswith("cupynet worker")]
    assert blas_threads() == before


class Closing(Callback):
    def __init__(self, name, log, fails=""):
        self.name, self.log, self.fails = name, log, fails

    def start(self, trainer, run):
        self.log.append(f"{self.name} starts")
        if self.fails == "start":
            raise OSError("cannot start")

    def close(self):
        self.log.append(f"{self.name} closes")
        if self.fails == "close":
            raise OSError("cannot close")


def test_an_error_during_close_does_not_hide_the_users_error(caplog):
    closing = Closing("a", [], "close")
    with pytest.raises(ZeroDivisionError), ParallelWrapper(small_model(), 1, callbacks=[closing]) as wrapper:
        wrapper.fit(small_dataset(20))
        raise ZeroDivisionError
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_callbacks_are_closed_once_and_all_of_them():
    log = []
    wrapper = ParallelWrapper(small_model(), 2, callbacks=[Closing("a", log), Closing("b", log, "close")])
    wrapper.fit(small_dataset(20))
    with pytest.raises(OSError):
        wrapper.close()
    wrapper.close()
    assert log == ["a starts", "b starts", "b closes", "a closes"]


class Following(Callback):
    """Logs iterations and its end, and calls `then` in the first iteration. It ends a fit that takes too long."""

    def __init__(self, then=lambda: None):
        self.log, self.begun, self.then = [], threading.Event(), then

    def on_iteration_end(self, trainer):
        if trainer.iteration == 1:
            self.begun.set()
            time.sleep(0.1)  # `close` begins in the middle of this event
            self.then()
        self.log.append("iteration")
        if trainer.iteration == 1000:
            trainer.stop()

    def close(self):
        self.log.append("closed")


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_ends_a_fit_of_another_thread_before_callbacks(workers):
    following, failures = Following(), []
    wrapper = ParallelWrapper(small_model(), workers, callbacks=[following], progress="none")

    def fit():
        try:
            wrapper.fit(small_dataset(40), 1000, batch_size=4)
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=fit)
    thread.start()
    assert following.begun.wait(60)
    wrapper.close()
    log = list(following.log)
    thread.join(60)
    assert log == following.log and len(log) < 1000 and len(failures) == 1
    assert log.index("closed") == len(log) - 1


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_in_a_callback_ends_the_fit_before_callbacks(workers):
    following = Following(lambda: wrapper.close())
    wrapper = ParallelWrapper(small_model(), workers, callbacks=[following], progress="none")
    with pytest.raises(RuntimeError):
        wrapper.fit(small_dataset(40), 1000, batch_size=4)
    assert following.log.index("closed") == len(following.log) - 1 < 1000
    with pytest.raises(RuntimeError):
        wrapper.evaluate(small_dataset(40))


def test_callbacks_of_a_fit_that_does_not_end_in_time_are_closed_at_its_end():
    released = threading.Event()
    following = Following(lambda: released.wait(60))
    wrapper = ParallelWrapper(small_model(), 1, callbacks=[following], progress="none", timeout_s=0.01)

    def fit():
        with pytest.raises(RuntimeError):
            wrapper.fit(small_dataset(40), 1000, batch_size=4)

    thread = threading.Thread(target=fit)
    thread.start()
    assert following.begun.wait(60)
    wrapper.close()
    assert following.log == []
    released.set()
    thread.join(60)
    assert following.log == ["iteration", "closed"]


def test_closing_ends_an_evaluation():
    class Counting(Poisoned):
        def forward(self, x, context):
            batches.append(len(x))
            if len(batches) == 3:
                wrapper.close()
            return super().forward(x, context)

    batches: list[int] = []
    wrapper = ParallelWrapper(network_with(Counting()), 1, progress="none")
    with pytest.raises(RuntimeError):
        wrapper.evaluate(small_dataset(40), batch_size=4)
    assert len(batches) == 3


def test_callbacks_that_started_are_closed_if_another_cannot_start():
    log = []
    callbacks = [Closing("a", log), Closing("b", log, "start"), Closing("c", log)]
    with ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper, pytest.raises(OSError):
        wrapper.fit(small_dataset(20))
    assert log == ["a starts", "b starts", "b closes", "a closes"]


def test_one_history_for_two_runs(tmp_path):
    history = History()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with ParallelWrapper(small_model(), 1, callbacks=[history], run=tmp_path / name) as wrapper:
            wrapper.fit(small_dataset(20))
    assert [len(Run(tmp_path / name).history()) for name in ("a", "b")] == [1, 1]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_in_the_middle_of_another_is_refused(workers):
    """Workers that wait for workers would wait until the time-out."""
    evaluate = At(1, lambda: wrapper.evaluate(small_dataset(20)))
    with ParallelWrapper(small_model(), workers, callbacks=[evaluate]) as wrapper, pytest.raises(RuntimeError):
        wrapper.fit(small_dataset(20))


def test_all_workers_end_after_an_interruption():
    """Ctrl-C reaches the main thread alone."""
    model = small_model()
    interrupt = At(3, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT))
    wrapper = ParallelWrapper(model, 2, callbacks=[interrupt])
    with pytest.raises(KeyboardInterrupt):
        wrapper.fit(small_dataset(4000), 50, batch_size=4)
    before = fingerprint(model)
    time.sleep(0.1)
    assert fingerprint(model) == before
    wrapper.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cupynet worker")]


def test_a_warning_if_workers_have_no_batches(caplog):
    for workers, warnings in ((5, 0), (6, 1)):
        with ParallelWrapper(small_model(), workers, optimizer=SGD(0.05)) as wrapper:
            wrapper.fit(Loader(small_dataset(20), 4), 1)
        assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings


def test_arrays_are_normalised_like_the_training_data():
    """A model that was trained on normalized images takes images as they are, in training, tests and predictions."""
    dataset, pixels, model = small_dataset(60), PixelScale.of([0.2], [0.3]), small_model("float")
    pair, normalised = (dataset.images, dataset.labels), dataclasses.replace(dataset, pixels=pixels)
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(Loader(normalised, 8, seed=1), 2, evaluate_on=pair)
        assert wrapper.evaluate(pair).loss == pytest.approx(wrapper.trainer.evaluation.loss)
        assert wrapper.evaluate(pair).to_dict() == wrapper.evaluate(normalised).to_dict()
        assert wrapper.evaluate(pair).accuracy == (model.predict(dataset.images).argmax(1) == dataset.labels).mean()
        wrapper.fit(pair, 1)
        assert model.pixels == pixels
        with refused(""):
            wrapper.evaluate(dataset)
        with refused(""):
            wrapper.fit(normalised, 1, evaluate_on=Loader(dataset, 8, shuffle=False))
        wrapper.fit(dataset, 1)  # the training data decide
        assert model.pixels == dataset.pixels


@pytest.mark.parametrize("way", [ParameterAveraging(3), ElasticAveraging(3)])
def test_evaluation_between_two_averages_is_refused(tmp_path, way):
    dataset, checkpoint = small_dataset(60), Checkpoint(every_iterations=4, keep_last=9, path=tmp_path)
    with ParallelWrapper(small_model(), 2, synchronizer=copy.deepcopy(way), callbacks=[checkpoint]) as wrapper:
        wrapper.fit(Loader(dataset, 4, seed=1), 1)
    with ParallelWrapper(small_model(), 2, synchronizer=copy.deepcopy(way)) as wrapper:
        wrapper.restore(tmp_path / "step-00000004")
        with refused(""):
            wrapper.evaluate(dataset)
        wrapper.fit(Loader(dataset, 4, seed=1), 1)
        assert wrapper.evaluate(dataset).samples == 60


def test_a_worker_that_timed_out_does_not_change_the_users_model(monkeypatch):
    """Its gradient arrives after the fit has ended with another worker's error."""
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    model, computing, over = small_model(), threading.Event(), threading.Event()

    class Fails(Callback):
        every_rank = True

        def on_fit_start(self, trainer):
            original = trainer.replica.gradient

            def gradient(batch):
                found = original(batch)
                if trainer.rank == 0:
                    computing.set()
                    assert over.wait(20)
                else:
                    assert computing.wait(20)
                    raise ZeroDivisionError("on purpose")
                return found

            trainer.replica.gradient = gradient

    with ParallelWrapper(model, 2, callbacks=[Fails()]) as wrapper:
        before = fingerprint(model)
        with pytest.raises(ZeroDivisionError):
            wrapper.fit(Loader(small_dataset(60), 4, seed=1), 1)
        left = [thread for thread in threading.enumerate() if thread.name == "cupynet worker 0"]
        over.set()
    for thread in left:
        thread.join(20)
        assert not thread.is_alive()
    assert left and fingerprint(model) == before


@pytest.mark.parametrize(("backend", "expected"), [("numpy", 0), ("numba", 2)])
def test_kernels_are_compiled_once_before_the_first_fit(backend, expected, monkeypatch):
    warmed, rehearse = [], Replica.rehearse

    def counted(replica, scratch, batch_size):
        warmed.append(batch_size)
        rehearse(replica, scratch, batch_size)

    monkeypatch.setattr(Replica, "rehearse", counted)
    with ParallelWrapper(small_model("float", backend), 2) as wrapper:
        for _ in range(2):
            wrapper.fit(small_dataset(20), 1)
    assert warmed == [20] * expected


def test_compiling_is_counted_in_all_processes_of_a_run(monkeypatch, tmp_path):
    with ParallelWrapper(small_model("float", "numba"), 2) as wrapper:
        wrapper.fit(small_dataset(20), 1)
        wrapper.checkpoint(tmp_path)
        first_s = wrapper.trainer.statistics.clock.compile_s
    with ParallelWrapper(small_model("float", "numba"), 2) as wrapper:
        wrapper.restore(tmp_path)
        assert wrapper.trainer.statistics.clock.compile_s == first_s > 0
        second_s = wrapper.warm_up(4)
        assert wrapper.trainer.statistics.clock.compile_s == pytest.approx(first_s + second_s)


def test_batches_of_one_vector_are_refused_before_a_batch_normalization():
    """Its running estimates would never change."""

    def fit(workers=1, batch_size=1, sync=False, **options):
        network = Sequential({"flat": Flatten(), "norm": BatchNorm(sync=sync), "out": Dense(3)})
        model = Model(network, Image(8, 8, 1), create_backend("numpy"))
        with ParallelWrapper(model, workers, **options) as wrapper:
            wrapper.fit(small_dataset(5), batch_size=batch_size)

    for wrong in ({}, {"workers": 2}, {"batch_size": 2, "accumulate": 2}, {"batch_size": 9, "accumulate": 5}):
        with refused("batch_size"):
            fit(**wrong)
    for taken in ({"batch_size": 2}, {"batch_size": 3, "accumulate": 2}, {"workers": 2, "sync": True}):
        fit(**taken)
