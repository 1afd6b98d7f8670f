"""Failures injected into any part of a fit: it ends with that error and leaves no threads or files behind."""

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import Callback, Checkpoint, ConfigError, HistoryWriter, Loader, Nesterov, OutputError, ParallelWrapper
from cupynet.nn import Backward, Context, Dense, Model, SoftmaxNLL
from cupynet.parallel import ElasticAveraging, GradientSharing, Groups, ParameterAveraging, SerialCommunicator
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training.fit import Fit
from tests.support.trainers import fitted
from tests.support.training import WAYS, Identity, On, alone, fingerprint, network_with, small_dataset, small_model

FULL = OSError(errno.ENOSPC, "No space left on device")


class Injected(Exception):
    """Raised on purpose."""


def fail(trainer: Any) -> None:
    raise Injected


class Reader(Loader):
    """Its `read` is called for each batch in a prefetch thread."""

    def load(self, *arguments: Any) -> Iterator[Any]:
        for made in super().load(*arguments):
            yield self.read(made)

    def read(self, made: Any) -> Any:
        return made


def failing(method: Callable[..., Any], error: BaseException, failed: list[str]) -> Callable[..., Any]:
    """Return the method, except that its second call appends its thread's name to `failed` and raises the error."""
    calls = count(1)

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 2:
            failed.append(threading.current_thread().name)
            raise error
        return method(*arguments, **named)

    return call


def threads_left() -> list[str]:
    deadline = time.monotonic() + 10
    while True:
        names = [thread.name for thread in threading.enumerate()]
        left = [name for name in names if name.startswith(("cupynet worker", "cupynet-prefetch"))]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("owner", "method", "error", "way", "place"),
    [
        (Checkpoint, "on_fit_start", Injected(), "every 3", ""),
        (Checkpoint, "on_iteration_end", Injected(), "elastic", ", at batch "),
        (Checkpoint, "on_iteration_end", SystemExit(7), "gradients", ""),
        (Checkpoint, "on_log", Injected(), "every 3", ""),
        (Checkpoint, "on_epoch_end", Injected(), "threshold", ""),
        (Checkpoint, "after_finish", Injected(), "end", ""),
        (Nesterov, "update", Injected(), "slowmo", ""),
        (GradientSharing, "after_update", Injected(), "threshold", ""),
        (ElasticAveraging, "after_update", Injected(), "elastic", ""),
        (ParameterAveraging, "finish", Injected(), "diloco, half", ""),
        (SoftmaxNLL, "scores", Injected(), "every 3", ", evaluating, at batch "),
        (Reader, "read", Injected(), "every 3", ", loading a batch"),
        (os, "rename", FULL, "adaptive", ""),
    ],
)
def test_a_failure_in_one_worker_ends_the_fit_with_its_own_error_and_place(
    owner: Any, method: str, error: BaseException, way: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three workers fails. The wrapper's model can be trained again."""
    model, failed, checkpoints = small_model(), list[str](), Checkpoints(tmp_path / "checkpoints")
    train, held_out = Reader(small_dataset(44), 4, seed=3), Loader(small_dataset(24), 4, shuffle=False)
    callbacks = [Checkpoint(every_iterations=3), HistoryWriter()]
    options: dict[str, Any] = {"callbacks": callbacks, "optimizer": Nesterov(0.05), "run": tmp_path, "log_every": 2}
    with monkeypatch.context() as patch, ParallelWrapper(model, 3, synchronizer=WAYS[way], **options) as wrapper:
        patch.setattr(owner, method, failing(getattr(owner, method), error, failed))
        with pytest.raises(OutputError if error is FULL else type(error)) as caught:
            wrapper.fit(train, epochs=2, evaluate_on=held_out)
    assert error in (caught.value, caught.value.__cause__)
    if place:
        (note,) = getattr(caught.value, "__notes__", [])
        assert note.startswith("worker" if owner is Reader else failed[0].removeprefix("cupynet ")) and place in note
    for step in checkpoints.steps():
        read(checkpoints.path(step))  # earlier checkpoints are intact
    assert error is not FULL or not [*checkpoints.folder.glob("*.*")]
    assert threads_left() == []
    fitted(model, small_dataset(12), 3, batch_size=4, synchronizer=WAYS[way])
    assert np.isfinite(model.params.master).all()


def test_a_worker_abandoned_while_it_loads_a_batch_does_not_compute_on_the_model() -> None:
    computed: list[int] = []

    class Recording(Identity):
        def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
            computed.append(len(x))
            return super().forward(x, context)

    class Abandoned(SerialCommunicator):
        def check(self) -> None:
            raise Injected

    trainer = alone(network_with(Recording()), Nesterov(0.05), groups=Groups.of(Abandoned()))
    with pytest.raises(Injected):
        trainer.fit(Fit(Loader(small_dataset(8), 4), 1))
    assert computed == []


def held() -> tuple[int, list[str]]:
    gc.collect()
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    return threading.active_count(), sorted(files)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count open files")
def test_wrappers_leave_no_threads_files_or_models_behind(tmp_path: Path) -> None:
    """A third of the wrappers fail."""
    data, models, before = small_dataset(16), list[Any](), held()
    for number in range(6):
        callbacks = [Checkpoint(keep_last=1), HistoryWriter(), *([On("on_fit_end", fail)] if number % 3 == 0 else [])]
        wrapper = ParallelWrapper(small_model(), 2, callbacks=callbacks, run=tmp_path / str(number))
        models.append(weakref.ref(wrapper.model))
        with suppress(Injected), wrapper:
            wrapper.fit(Loader(data, 4, seed=3), epochs=1, evaluate_on=Loader(data, 4, shuffle=False))
    del wrapper
    assert threads_left() == [] and held() == before
    assert not any(model() for model in models)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failed_wrapper_that_is_garbage_collected_is_closed(workers: int, tmp_path: Path) -> None:
    """Otherwise, it would keep its replicas in memory, and a callback object that it uses could not be used again."""

    def fit(*callbacks: Any, run: str) -> None:
        wrapper = ParallelWrapper(small_model(), workers, callbacks=callbacks, run=tmp_path / run)
        wrapper.fit(Loader(small_dataset(16), 4, seed=3), epochs=1)

    checkpoint = Checkpoint()
    with suppress(Injected):
        fit(checkpoint, On("on_fit_end", fail), run="a")
    gc.collect()
    assert not checkpoint.in_use
    fit(checkpoint, run="b")


DATA = small_dataset(40)


def wrapper_of(model: Model, workers: int, *callbacks: Callback) -> ParallelWrapper:
    return ParallelWrapper(model, workers, progress="none", timeout_s=20, callbacks=callbacks)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrapper_remains_usable_after_a_checkpoint_that_cannot_be_restored(workers: int, tmp_path: Path) -> None:
    others = {"network": Model([Dense(3)], (8, 8, 1), "numpy"), "optimizer": small_model()}
    for name, model in others.items():
        optimizer = "adam" if name == "optimizer" else "nesterov"
        with ParallelWrapper(model, workers, optimizer=optimizer, progress="none") as other:
            other.fit(DATA, epochs=2, batch_size=4)
            other.checkpoint(tmp_path / name)
    history = HistoryWriter(tmp_path / "history.jsonl")
    with wrapper_of(small_model(), workers, history) as wrapper, wrapper_of(small_model(), workers) as expected:
        wrapper.fit(DATA, batch_size=4)
        for wrong in (tmp_path / "typo", tmp_path / "network", tmp_path / "optimizer", None):
            with pytest.raises(ConfigError):
                wrapper.restore(wrong)  # type: ignore[arg-type]
        wrapper.fit(DATA, batch_size=4)
        for _ in range(2):
            expected.fit(DATA, batch_size=4)
    assert fingerprint(wrapper.model) == fingerprint(expected.model)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_wrapper_remains_usable_after_a_checkpoint_that_cannot_be_written(workers: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with wrapper_of(small_model(), workers) as wrapper:
        wrapper.fit(DATA, batch_size=4)
        with pytest.raises(OutputError):
            wrapper.checkpoint(tmp_path / "file" / "below")
        wrapper.restore(wrapper.checkpoint(tmp_path / "elsewhere"))
        wrapper.fit(DATA, batch_size=4)
