"""The ParallelWrapper API."""

import copy
import dataclasses
import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from cupynet import ClosedError, ConfigError, Dense, Dropout, Loader, Model, Run
from cupynet.backend import PixelScale, create_backend
from cupynet.optim import Constant, Nesterov, OneCycle, ReduceOnPlateau
from cupynet.parallel import ElasticAveraging, ParameterAveraging, Synchronizer, placement
from cupynet.parallel.launchers import threads as launch
from cupynet.training import Callback, Checkpoint, ParallelWrapper, Trainer, checkpointing
from tests.support.calls import watch
from tests.support.refusals import refused
from tests.support.trainers import fitted
from tests.support.training import At, On, fingerprint, on_backends, small_dataset, small_model


def loader(samples: int = 40) -> Loader:
    return Loader(small_dataset(samples), 4, seed=3)


def workers_alive() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cupynet worker")]


def test_two_fits_equal_one_fit_of_all_epochs() -> None:
    once = fitted(small_model(), loader(), 2, epochs=3, averaging_frequency=1)
    with ParallelWrapper(small_model(), 2, 1) as wrapper:
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=2)
    assert fingerprint(wrapper.model) == fingerprint(once)


def test_a_stop_while_workers_are_leaving_does_not_end_the_next_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has left the fit when it gets the request again."""
    left = threading.Event()

    def stop_late(trainer: Trainer) -> None:
        if trainer.epoch == 1:
            assert left.wait(20)
            wrapper.stop("too late")

    watch(monkeypatch, Trainer, "fit", lambda _, trainer, fit: left.set() if trainer.rank == 1 else None)
    with ParallelWrapper(small_model(), 2, 2, callbacks=[On("on_fit_end", stop_late)]) as wrapper:
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=2)
        assert wrapper.trainer.epoch == 3 and wrapper.trainer.stopped is None


def test_the_first_device_must_be_the_device_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    model.backend.name = "cupy"
    monkeypatch.setattr(placement, "device_count", lambda name: 2)
    with refused("devices", "[1, 0]"):
        ParallelWrapper(model, devices=[1, 0])


@on_backends("numpy", "cupy")
def test_the_data_of_a_fit_and_an_evaluation_are_released_afterwards(backend: str) -> None:
    with ParallelWrapper(small_model(backend=backend), 2, progress="none") as wrapper:
        for use in (wrapper.fit, wrapper.evaluate):
            data = small_dataset(20)
            images = weakref.ref(data.images)
            use(data, batch_size=4)
            del data
            gc.collect()
            assert images() is None


def test_workers_without_batches_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    for workers, warnings in ((5, 0), (6, 1)):
        fitted(small_model(), loader(20), workers)
        assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_evaluation_arrays_are_normalized_like_the_training_data() -> None:
    dataset, pixels, model = small_dataset(60), PixelScale.of([0.2], [0.3]), small_model("float")
    pair, normalized = (dataset.images, dataset.labels), dataclasses.replace(dataset, pixels=pixels)
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(Loader(normalized, 8, seed=1), epochs=2, evaluate_on=pair)
        found = wrapper.evaluate(pair)
        assert found.to_dict() == wrapper.evaluate(normalized).to_dict()
        assert found.accuracy == (model.predict(dataset.images).argmax(1) == dataset.labels).mean()
        with refused(""):
            wrapper.evaluate(dataset)
        with refused("evaluate_on"):
            wrapper.fit(normalized, epochs=1, evaluate_on=Loader(dataset, 8, shuffle=False))
        wrapper.fit(pair, epochs=1)
        assert model.pixels == pixels
        wrapper.fit(dataset, epochs=1)  # determined by the training data
        assert model.pixels == dataset.pixels
        with refused(""):
            wrapper.evaluate(normalized)


@pytest.mark.parametrize("way", [ParameterAveraging(3), ElasticAveraging(3)])
def test_an_evaluation_between_two_averages_is_refused(tmp_path: Path, way: Synchronizer) -> None:
    checkpoint = Checkpoint(every_iterations=4, keep_last=9, path=tmp_path)
    fitted(small_model(), loader(60), 2, synchronizer=copy.deepcopy(way), callbacks=[checkpoint])
    with ParallelWrapper(small_model(), 2, synchronizer=copy.deepcopy(way)) as wrapper:
        wrapper.restore(tmp_path / "step-00000004")
        with refused(""):
            wrapper.evaluate(loader(60))
        wrapper.fit(loader(60), epochs=1)
        assert wrapper.evaluate(loader(60)).samples == 60


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


def test_a_wrapper_that_is_garbage_collected_closes_itself() -> None:
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
def test_callbacks_that_started_are_closed_once_in_reverse_order_whatever_fails(fails: str) -> None:
    log: list[str] = []
    callbacks = [Closing("a", log), Closing("b", log, fails), Closing("c", log)]
    with pytest.raises(OSError), ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper:
        wrapper.fit(small_dataset(20))
    wrapper.close()
    last = ["c"] * (fails == "close")
    assert log == [f"start {name}" for name in ("a", "b", *last)] + [f"close {name}" for name in (*last, "b", "a")]


@pytest.mark.parametrize("workers", [1, 2])
def test_other_calls_are_refused_during_a_fit_and_after_close(workers: int) -> None:
    """Otherwise, workers would deadlock until the timeout. A refused fit does not change the model."""
    other = np.zeros((4, 8, 8, 1), np.float32), np.arange(4) % 3

    def interfere() -> None:
        for call in (lambda: wrapper.evaluate(loader()), lambda: wrapper.fit(other), lambda: wrapper.close()):
            with pytest.raises(RuntimeError):
                call()

    with ParallelWrapper(small_model(), workers, callbacks=[At(1, interfere)]) as wrapper:
        wrapper.fit(loader())
    assert wrapper.model.trained_on == "pixels"
    with pytest.raises(ClosedError, match="closed"):
        wrapper.evaluate(loader())
    assert len(wrapper.predict(small_dataset(3).images)) == 3


def test_attributes_of_the_wrapper_cannot_be_set() -> None:
    with ParallelWrapper(small_model(), 2) as wrapper:
        for name in ("optimizer", "workers", "callbacks", "warm", "bogus"):
            with pytest.raises(AttributeError):
                setattr(wrapper, name, None)
        assert isinstance(wrapper.callbacks, tuple)  # a list would ignore callbacks appended after the first fit


def test_a_callback_may_use_any_names_and_keeps_only_what_it_stores() -> None:
    class Mine(Callback):
        every_rank = True

        def __init__(self, images: Any, limit: int = 3, name: str = "mine") -> None:
            self.limit, self.name = limit, name

        def _call(self) -> None:
            raise AssertionError

    images = np.zeros(5)
    callback, kept = Mine(images, 4), weakref.ref(images)
    del images
    assert kept() is None and repr(callback) == "Mine(limit=4)"
    fitted(small_model(), loader(), 2, callbacks=[callback])


@pytest.mark.parametrize("rate", [0.5, {"name": "constant", "value": 0.5}, Constant(0.5)], ids=type)
def test_the_learning_rate_may_be_changed_between_fits(rate: Any) -> None:
    """It is not scaled by the number of workers, and the state of the optimizer is kept."""
    schedules, started, ended = list[Any](), list[Any](), list[Any]()
    looks = [
        On(event, lambda trainer, seen=seen: seen.append(trainer.replica.optimizer_state["velocity"].copy()))
        for event, seen in (("on_fit_start", started), ("on_fit_end", ended))
    ]
    options: dict[str, Any] = {"learning_rate_scale": "linear", "callbacks": looks}
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.01), **options) as wrapper:
        wrapper.fit(loader(), epochs=1)
        with refused("learning_rate", "-1"):
            wrapper.optimizer.learning_rate = -1
        wrapper.optimizer.learning_rate = rate
        wrapper.fit(loader(), epochs=1)
        wrapper.fit(loader(), epochs=1)
        wrapper.on_workers(lambda trainer: schedules.append(trainer.schedule))
    assert wrapper.history["learning_rate"] == [0.02, 0.5, 0.5]
    assert not started[0].any() and ended[0].any()
    np.testing.assert_array_equal(started[1:], ended[:2])
    assert len({id(schedule) for schedule in schedules}) == 2


@pytest.mark.parametrize(("name", "value"), [("l2", 0.5), ("max_grad_norm", 1.0), ("learningrate", 0.1)])
def test_other_arguments_of_the_optimizer_cannot_be_changed(name: str, value: float) -> None:
    with ParallelWrapper(small_model(), 1, progress="none") as wrapper:
        wrapper.fit(loader(), epochs=1)
        setattr(wrapper.optimizer, name, value)
        with refused(f"optimizer.{name}"):
            wrapper.fit(loader(), epochs=1)
        assert len(wrapper.history["epoch"]) == 1


@pytest.mark.parametrize("scale", ["none", "linear"])
def test_a_schedule_cannot_be_changed_in_place(scale: str) -> None:
    schedule = OneCycle(0.1)  # the workers have copies
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(schedule), learning_rate_scale=scale) as wrapper:
        wrapper.fit(loader(), epochs=1)
        schedule.peak = 0.2
        with refused("optimizer.learning_rate.peak"):
            wrapper.fit(loader(), epochs=1)


def test_a_schedule_set_before_a_restore_continues_as_restored(tmp_path: Path) -> None:
    """The rate is reduced in each epoch after the second."""
    plateau, held_out = ReduceOnPlateau(0.1, patience=0, min_delta=1e9), loader()
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(copy.copy(plateau)), progress="none") as wrapper:
        wrapper.fit(loader(), epochs=3, validation_data=held_out)
        path = wrapper.checkpoint(tmp_path)
    with ParallelWrapper(small_model(), 2, optimizer=Nesterov(0.5), progress="none") as wrapper:
        wrapper.warm_up(4)
        wrapper.optimizer.learning_rate = copy.copy(plateau)
        wrapper.restore(path)
        wrapper.fit(loader(), validation_data=held_out)
        assert wrapper.history["learning_rate"] == pytest.approx([0.1, 0.1, 0.01, 0.001])
        wrapper.restore(path)
        wrapper.optimizer.learning_rate = 0.2
        wrapper.fit(loader())
        assert wrapper.history["learning_rate"][-1] == 0.2
        constant = wrapper.checkpoint(tmp_path)
        wrapper.optimizer.learning_rate = plateau
        wrapper.restore(wrapper.checkpoint(tmp_path / "plateau"))  # has the state of the new schedule
        with pytest.raises(ConfigError, match="ReduceOnPlateau"):
            wrapper.restore(constant)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_restored_model_scales_pixels_as_in_training(tmp_path: Path, workers: int) -> None:
    scale, names = PixelScale.of([0.2], [0.4]), ("a", "b", "c")
    data = dataclasses.replace(small_dataset(20), pixels=scale, class_names=names)
    trained, model = small_model(), small_model()
    with ParallelWrapper(trained, 2) as wrapper:
        wrapper.fit(data, batch_size=5)
        wrapper.checkpoint(tmp_path)
    with ParallelWrapper(model, workers) as wrapper:
        wrapper.restore(tmp_path)
        np.testing.assert_array_equal(wrapper.predict(data.images), trained.predict(data.images))
        assert {each.pixels for each in wrapper.replicas()} == {scale}
    assert model.class_names == names


def test_a_checkpoint_without_a_pixel_scale_keeps_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 0.1.0 saved none."""
    monkeypatch.setattr(checkpointing, "seen_by", lambda model: {})
    with ParallelWrapper(small_model(), 1) as wrapper:
        wrapper.fit(loader())
        wrapper.checkpoint(tmp_path)
        wrapper.model.pixels = scale = PixelScale.of([0.2], [0.4])
        wrapper.restore(tmp_path)
        assert wrapper.model.pixels == scale


def test_a_fit_does_not_save_a_model_whose_layer_was_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The model cannot be saved, because the file would contain the original argument."""
    model = Model([Dropout(0.5), Dense(3)], (8, 8, 1), create_backend("numpy"), 1)
    anneal = On("on_epoch_end", lambda trainer, record: setattr([*model.network.walk()][1], "rate", 0.1))
    with ParallelWrapper(model, 1, callbacks=[anneal], run=tmp_path / "run") as wrapper:
        assert len(wrapper.fit(loader())["epoch"]) == 1
    assert "rate" in caplog.text and not (tmp_path / "run/model.safetensors").exists()


def test_a_worker_that_is_late_after_a_failure_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient is complete only after the fit has ended with another worker's error."""
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    computing, over = threading.Event(), threading.Event()

    def delay(trainer: Trainer) -> None:
        def wait(*_: object) -> None:
            if trainer.rank == 1:
                assert computing.wait(20)
                raise ZeroDivisionError
            computing.set()
            assert over.wait(20)

        watch(monkeypatch, trainer.replica, "gradient", wait)

    with ParallelWrapper(small_model(), 2, callbacks=[On("on_fit_start", delay, every_rank=True)]) as wrapper:
        with pytest.raises(ZeroDivisionError):
            wrapper.fit(loader(60), epochs=1)
        (late,) = workers_alive()
        over.set()
    late.join(20)
    assert not late.is_alive() and fingerprint(wrapper.model) == fingerprint(small_model())


@pytest.mark.parametrize(("backend", "workers"), [("numpy", 1), ("numba", 2)])
def test_predictions_during_a_fit_do_not_change_training(backend: str, workers: int) -> None:
    """Threads may interrupt each other between any two instructions."""
    expected = fingerprint(fitted(small_model("float", backend), loader(60), workers))
    model, images, over = small_model("float", backend), small_dataset(7).images, threading.Event()

    def predict(_: int) -> None:
        while not over.is_set():
            scores = model.predict(images)
            assert scores.shape == (7, 3) and np.allclose(scores.sum(axis=1), 1, atol=1e-5)

    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(4) as threads:
        predictions = threads.map(predict, range(4))
        try:
            sys.setswitchinterval(1e-6)
            fitted(model, loader(60), workers)
        finally:
            sys.setswitchinterval(interval)
            over.set()
    assert len(list(predictions)) == 4 and fingerprint(model) == expected
