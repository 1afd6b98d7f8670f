"""The ParallelWrapper API."""

import copy
import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from cupynet.backend import PixelScale, create_backend
from cupynet.core.errors import ClosedError, ConfigError
from cupynet.data import Loader
from cupynet.nn import BatchNorm, Dense, Flatten, Image, Model, Sequential
from cupynet.optim import Constant, Nesterov, ReduceOnPlateau
from cupynet.parallel import ElasticAveraging, ParameterAveraging, Synchronizer, placement
from cupynet.parallel.launchers import threads as launch
from cupynet.runs.run import Run
from cupynet.training import Callback, Checkpoint, ParallelWrapper, Trainer
from cupynet.training.fit import Fit
from tests.support.calls import watch
from tests.support.refusals import refused
from tests.support.trainers import fitted
from tests.support.training import At, On, StopAfter, fingerprint, small_dataset, small_model


def loader(samples: int = 40, batch_size: int = 4) -> Loader:
    return Loader(small_dataset(samples), batch_size, seed=3)


def workers_alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cupynet worker")]


def test_the_documented_call_trains_the_model_itself() -> None:
    model, dataset = small_model("float"), small_dataset(200)
    test = Loader(dataset, 50, shuffle=False)
    with ParallelWrapper(
        model, workers=2, averaging_frequency=3, prefetch_buffer=24, report_score_after_averaging=True
    ) as wrapper:
        before = wrapper.evaluate(test).loss
        wrapper.fit(Loader(dataset, 8, seed=1), epochs=3)
        after = wrapper.evaluate(test)
        assert after.loss < before and after.samples == 200
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1
        assert wrapper.replicas()[0] is model
    assert model.predict(dataset.images[:5]).shape == (5, 3)


def test_two_fits_equal_one() -> None:
    once = fitted(small_model(), loader(), 2, epochs=3, averaging_frequency=1)
    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=2)
    assert fingerprint(wrapper.model) == fingerprint(once)


def test_a_stop_while_workers_are_leaving_does_not_end_the_next_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has left the fit when it gets the request again."""
    left = threading.Event()

    def leave(_: None, trainer: Trainer, fit: Fit) -> None:
        if trainer.rank == 1:
            left.set()

    def stop_late(trainer: Trainer) -> None:
        if trainer.epoch == 1:
            assert left.wait(20)
            wrapper.stop("too late")

    watch(monkeypatch, Trainer, "fit", leave)
    with ParallelWrapper(small_model(), 2, 2, callbacks=[On("on_fit_end", stop_late)]) as wrapper:
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=2)
        assert wrapper.trainer.epoch == 3 and wrapper.trainer.stopped is None


# arguments ------------------------------------------------------------------------------------------------------------


def test_the_first_device_must_be_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    model.backend.name = "cupy"
    monkeypatch.setattr(placement, "device_count", lambda name: 2)
    with refused("devices", "[1, 0]"):
        ParallelWrapper(model, devices=[1, 0])


def test_data_are_released_after_use() -> None:
    with ParallelWrapper(small_model(), 2, progress="none") as wrapper:
        for use in (wrapper.fit, wrapper.evaluate):
            data = small_dataset(20)
            released = weakref.ref(data)
            use(data, batch_size=4)
            del data
            gc.collect()
            assert released() is None


def test_batches_of_one_vector_are_refused_before_a_batch_normalization() -> None:
    """The running estimates would never change."""

    def fit(workers: int, batch_size: int, parts: int = 1, *, sync: bool = False) -> None:
        network = Sequential({"flat": Flatten(), "norm": BatchNorm(sync=sync), "out": Dense(3)})
        model = Model(network, Image(8, 8, 1), create_backend("numpy"))
        fitted(model, small_dataset(5), workers, batch_size=batch_size, accumulation_steps=parts)

    for batch_size, parts in ((1, 1), (2, 2), (9, 5)):
        with refused("batch_size"):
            fit(1, batch_size, parts)
    fit(1, 3, 2)
    fit(2, 1, sync=True)


def test_a_warning_if_workers_have_no_batches(caplog: pytest.LogCaptureFixture) -> None:
    for workers, warnings in ((5, 0), (6, 1)):
        fitted(small_model(), loader(20), workers)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_arrays_are_normalised_like_the_training_data() -> None:
    dataset, pixels, model = small_dataset(60), PixelScale.of([0.2], [0.3]), small_model("float")
    pair, normalised = (dataset.images, dataset.labels), dataclasses.replace(dataset, pixels=pixels)
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(Loader(normalised, 8, seed=1), epochs=2, evaluate_on=pair)
        found = wrapper.evaluate(pair)
        assert found.to_dict() == wrapper.evaluate(normalised).to_dict()
        assert found.accuracy == (model.predict(dataset.images).argmax(1) == dataset.labels).mean()
        with refused(""):
            wrapper.evaluate(dataset)
        with refused("evaluate_on"):
            wrapper.fit(normalised, epochs=1, evaluate_on=Loader(dataset, 8, shuffle=False))
        wrapper.fit(pair, epochs=1)
        assert model.pixels == pixels
        wrapper.fit(dataset, epochs=1)  # determined by the training data
        assert model.pixels == dataset.pixels


@pytest.mark.parametrize("way", [ParameterAveraging(3), ElasticAveraging(3)])
def test_evaluation_between_two_averages_is_refused(tmp_path: Path, way: Synchronizer) -> None:
    checkpoint = Checkpoint(every_iterations=4, keep_last=9, path=tmp_path)
    fitted(small_model(), loader(60), 2, synchronizer=copy.deepcopy(way), callbacks=[checkpoint])
    with ParallelWrapper(small_model(), 2, synchronizer=copy.deepcopy(way)) as wrapper:
        wrapper.restore(tmp_path / "step-00000004")
        with refused(""):
            wrapper.evaluate(loader(60))
        wrapper.fit(loader(60), epochs=1)
        assert wrapper.evaluate(loader(60)).samples == 60


# closing --------------------------------------------------------------------------------------------------------------


def blas_threads() -> set[int]:
    return {info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"}


class Closing(Callback):
    """Logs its start and its end, one of which may fail."""

    def __init__(self, name: str, log: list[str], fails: str = "") -> None:
        self.name, self.log, self.fails = name, log, fails

    def start(self, trainer: Trainer, run: Run | None) -> None:
        self._note("start")

    def close(self) -> None:
        self._note("close")

    def _note(self, event: str) -> None:
        self.log.append(f"{event} {self.name}")
        if self.fails == event:
            raise OSError(event)


def test_a_dropped_wrapper_closes_itself() -> None:
    before, log = blas_threads(), list[str]()
    wrapper = ParallelWrapper(small_model(), 3, blas_threads=1, callbacks=[Closing("a", log)])
    wrapper.fit(small_dataset(20))
    del wrapper
    gc.collect()
    assert not workers_alive() and log == ["start a", "close a"]
    assert blas_threads() == before


def test_an_error_during_close_does_not_hide_the_users_error(caplog: pytest.LogCaptureFixture) -> None:
    closing = Closing("a", [], "close")
    with pytest.raises(ZeroDivisionError), ParallelWrapper(small_model(), 1, callbacks=[closing]) as wrapper:
        wrapper.fit(small_dataset(20))
        raise ZeroDivisionError
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize("fails", ["close", "start"])
def test_callbacks_that_started_are_closed_once_whatever_fails(fails: str) -> None:
    log: list[str] = []
    callbacks = [Closing("a", log), Closing("b", log, fails), Closing("c", log)]
    with pytest.raises(OSError), ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper:
        wrapper.fit(small_dataset(20))
    wrapper.close()
    last = ["c"] * (fails == "close")
    assert log == [f"start {name}" for name in ("a", "b", *last)] + [f"close {name}" for name in (*last, "b", "a")]


class Following(Callback):
    """Logs iterations and `close`, and calls `then` in the first iteration. It ends a fit that takes too long."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.log: list[str] = []
        self.begun, self.then = threading.Event(), then

    def on_iteration_end(self, trainer: Trainer) -> None:
        if trainer.iteration == 1:
            self.begun.set()
            time.sleep(0.1)  # `close` is called during this event
            self.then()
        self.log.append("iteration")
        if trainer.iteration == 1000:
            trainer.stop()

    def close(self) -> None:
        self.log.append("closed")


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_ends_a_fit_of_another_thread_before_callbacks(workers: int) -> None:
    def fit() -> None:
        with pytest.raises(RuntimeError):
            wrapper.fit(loader(), epochs=1000)

    following, thread = Following(), threading.Thread(target=fit)
    wrapper = ParallelWrapper(small_model(), workers, callbacks=[following], progress="none")
    thread.start()
    assert following.begun.wait(60)
    wrapper.close()
    log = list(following.log)
    thread.join(60)
    assert log == following.log
    assert log.index("closed") == len(log) - 1 < 999


@pytest.mark.parametrize("workers", [1, 2])
def test_closing_in_a_callback_ends_the_fit_before_callbacks(workers: int) -> None:
    following = Following(lambda: wrapper.close())
    wrapper = ParallelWrapper(small_model(), workers, callbacks=[following], progress="none")
    with pytest.raises(RuntimeError):
        wrapper.fit(loader(), epochs=1000)
    assert following.log.index("closed") == len(following.log) - 1 < 999
    with pytest.raises(ClosedError, match="closed"):
        wrapper.evaluate(loader())
    assert len(wrapper.predict(small_dataset(3).images)) == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_only_several_workers_are_shown_as_averaged(workers: int) -> None:
    with ParallelWrapper(small_model(), workers) as wrapper:
        assert (str(wrapper.synchronizer) in repr(wrapper)) == (workers > 1)


def test_attributes_cannot_be_set() -> None:
    with ParallelWrapper(small_model(), 2) as wrapper:
        for name in ("optimizer", "workers", "callbacks", "warm", "bogus"):
            with pytest.raises(AttributeError):
                setattr(wrapper, name, None)
        assert isinstance(wrapper.callbacks, tuple)  # a list would ignore callbacks appended after the first fit


def test_a_callback_may_use_any_names_and_keeps_only_what_it_stores() -> None:
    class Mine(Callback):
        every_rank = True

        def __init__(self, images: Any, limit: int = 3, name: str = "mine") -> None:
            self.limit, self.name, self.calls = limit, name, 0

        def _call(self) -> None:
            self.calls += 1

        def on_epoch_end(self, trainer: Trainer, record: Any) -> None:
            self._call()

    images = np.zeros(5)
    callback, kept = Mine(images, 4), weakref.ref(images)
    del images
    assert kept() is None and repr(callback) == "Mine(limit=4)"
    fitted(small_model(), loader(), 2, epochs=1, callbacks=[callback])
    assert callback.calls == 1


@pytest.mark.parametrize("rate", [0.5, {"name": "constant", "value": 0.5}, Constant(0.5)], ids=type)
def test_the_learning_rate_may_be_changed_between_fits(rate: Any) -> None:
    schedules: list[Any] = []
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.01), progress="none") as wrapper:
        wrapper.fit(loader(), epochs=1)
        with refused("learning_rate", "-1"):
            wrapper.optimizer.learning_rate = -1
        wrapper.optimizer.learning_rate = rate
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=1)
        wrapper.on_workers(lambda trainer: schedules.append(trainer.schedule))
    assert wrapper.history["learning_rate"] == [0.01, 0.5, 0.5]
    assert len({id(schedule) for schedule in schedules}) == 2


@pytest.mark.parametrize(("name", "value"), [("l2", 0.5), ("max_grad_norm", 1.0), ("learningrate", 0.1)])
def test_other_arguments_of_the_optimizer_cannot_be_changed(name: str, value: float) -> None:
    with ParallelWrapper(small_model(), 1, progress="none") as wrapper:
        wrapper.fit(loader(), epochs=1)
        setattr(wrapper.optimizer, name, value)
        with refused(f"optimizer.{name}"):
            wrapper.fit(loader(), epochs=1)
        assert len(wrapper.history["epoch"]) == 1


def test_a_schedule_set_before_restore_continues_as_restored(tmp_path: Path) -> None:
    def plateau() -> ReduceOnPlateau:
        return ReduceOnPlateau(0.1, patience=0, min_delta=1e9)  # reduces the rate in each epoch after the first

    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(plateau()), progress="none") as wrapper:
        wrapper.fit(loader(), epochs=3, validation_data=loader())
        path = wrapper.checkpoint(tmp_path)
        wrapper.fit(loader(), epochs=1, validation_data=loader())
        expected = wrapper.history["learning_rate"]
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.5), progress="none") as wrapper:
        wrapper.warm_up(4)
        wrapper.optimizer.learning_rate = plateau()
        wrapper.restore(path)
        wrapper.fit(loader(), epochs=1, validation_data=loader())
        assert wrapper.history["learning_rate"][-1] == pytest.approx(0.001)
        assert wrapper.history["learning_rate"] == expected
        wrapper.restore(path)
        wrapper.optimizer.learning_rate = 0.2
        wrapper.fit(loader(), epochs=1)
        assert wrapper.history["learning_rate"][-1] == 0.2
        constant = wrapper.checkpoint(tmp_path)
        wrapper.optimizer.learning_rate = plateau()
        with pytest.raises(ConfigError, match="ReduceOnPlateau"):
            wrapper.restore(constant)


def test_an_interrupted_wrapper_shows_where_it_stopped() -> None:
    wrapper = ParallelWrapper(small_model(), 1, callbacks=[StopAfter(13)], progress="none")
    assert "0 epochs complete>" in repr(wrapper)
    with wrapper:
        wrapper.fit(loader(), epochs=3)
        where = repr(wrapper)
        assert "1 epoch complete, stopped after iteration 3 of epoch 2>" in where
    assert repr(wrapper) == where


# tasks and threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_task_in_the_middle_of_another_is_refused(workers: int) -> None:
    """Otherwise, workers would wait for workers until the time-out."""
    evaluate = At(1, lambda: wrapper.evaluate(small_dataset(20)))
    with ParallelWrapper(small_model(), workers, callbacks=[evaluate]) as wrapper, pytest.raises(RuntimeError):
        wrapper.fit(small_dataset(20))


def test_a_worker_that_timed_out_does_not_change_the_users_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is complete only after the fit has ended with another worker's error."""
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    computing, over = threading.Event(), threading.Event()

    def delay(trainer: Trainer) -> None:
        original = trainer.replica.gradient

        def gradient(batch: Any) -> Any:
            found = original(batch)
            if trainer.rank == 1:
                assert computing.wait(20)
                raise ZeroDivisionError
            computing.set()
            assert over.wait(20)
            return found

        monkeypatch.setattr(trainer.replica, "gradient", gradient)

    with ParallelWrapper(small_model(), 2, callbacks=[On("on_fit_start", delay, every_rank=True)]) as wrapper:
        with pytest.raises(ZeroDivisionError):
            wrapper.fit(loader(60), epochs=1)
        late = [thread for thread in workers_alive() if thread.name == "cupynet worker 0"]
        over.set()
    for thread in late:
        thread.join(20)
        assert not thread.is_alive()
    assert late and fingerprint(wrapper.model) == fingerprint(small_model())


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads interrupt each other between any two instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(("backend", "workers"), [("numpy", 1), ("numba", 2)])
@pytest.mark.usefixtures("frequent_switches")
def test_prediction_during_a_fit_does_not_change_what_is_trained(backend: str, workers: int) -> None:
    expected = fingerprint(fitted(small_model("float", backend), loader(60), workers))
    model, images, over = small_model("float", backend), small_dataset(7).images, threading.Event()

    def predict(_: int) -> list[Any]:
        found = []
        while not over.is_set():
            found.append(model.predict(images))
        return found

    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(predict, range(4))
        try:
            fitted(model, loader(60), workers)
        finally:
            over.set()
    for scores in chain(*answers):
        assert scores.shape == (7, 3) and np.allclose(scores.sum(axis=1), 1, atol=1e-5)
    assert fingerprint(model) == expected
