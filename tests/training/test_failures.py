"""Failures injected into any part and worker: the fit ends with that error and leaves no threads or files behind."""

import errno
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet.core.errors import OutputError
from cupynet.data import Loader
from cupynet.nn import SoftmaxNLL
from cupynet.optim import Nesterov
from cupynet.parallel import WorkerTimeout
from cupynet.parallel.launchers import threads as launch
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training import Callback, Checkpoint, HistoryWriter, ParallelWrapper
from tests.support.trainers import fitted
from tests.support.training import WAYS, On, small_dataset, small_model

WORKERS, EPOCHS = 3, 2  # epochs of four rounds: 44 samples in batches of 4
THREADS = ("cupynet worker", "cupynet-prefetch")

# How often, at least, a worker reaches each injection point in a fit. One has no batch in an epoch's last round.
KINDS = {
    "on_iteration_end": 6,
    "on_log": 3,
    "on_epoch_end": 2,
    "on_fit_start": 1,
    "after_finish": 1,
    "exit": 6,
    "hang": 6,
    "optimizer": 6,
    "synchronizer": 6,
    "average": 2,
    "loading": 6,
    "scores": 2,  # with averaging only at the end of a fit, there is only one evaluation
    "disk": 3,
}
PLACES = {"on_iteration_end": ", at batch ", "loading": ", loading a batch", "scores": ", evaluating, at batch "}


class Injected(Exception):
    """Raised on purpose."""


class Fault:
    """Fails on one worker, at its n-th call of `strike`. All workers share one object.

    Attributes:
        raised: the raised error; None before.
        release: lets a worker that hangs continue.
    """

    def __init__(self, kind: str, rank: int, moment: int) -> None:
        self.kind, self.rank, self.moment = kind, rank, moment
        self.raised: BaseException | None = None
        self.release = threading.Event()
        self._asked = 0

    def strike(self, rank: int | None = None) -> None:
        if self.rank != (int(threading.current_thread().name.rsplit(" ", 1)[1]) if rank is None else rank):
            return
        self._asked += 1
        if self._asked == self.moment and self.kind == "hang":
            self.release.wait(60)
        elif self._asked == self.moment:
            errors = {"exit": SystemExit(7), "disk": OSError(errno.ENOSPC, "No space left on device")}
            self.raised = errors.get(self.kind, Injected(self.kind))
            raise self.raised


class FaultyLoader(Loader):
    """Fails in the prefetch threads."""

    fault: Fault

    def load(self, *arguments: Any) -> Iterator[Any]:
        for index, *made in super().load(*arguments):
            if self.fault.kind == "loading":
                self.fault.strike(index % WORKERS)
            yield index, *made


def inject(fault: Fault, way: str, patch: pytest.MonkeyPatch) -> list[Callback]:
    places: dict[str, tuple[Any, str]] = {
        "optimizer": (Nesterov, "update"),
        "synchronizer": (type(WAYS[way]), "after_update"),
        "average": (type(WAYS[way]), "finish"),
        "scores": (SoftmaxNLL, "scores"),
        "disk": (os, "rename"),
    }
    if fault.kind not in places:
        event = fault.kind if hasattr(Callback, fault.kind) else "on_iteration_end"
        strikes = fault.kind != "loading"
        return [On(event, lambda trainer, *record: fault.strike(), every_rank=True)] if strikes else []
    owner, name = places[fault.kind]
    original: Callable[..., Any] = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if owner is not os:
            fault.strike()
        elif ".tmp-" in str(arguments[0]):
            fault.strike(fault.rank)
        return original(*arguments, **named)

    patch.setattr(owner, name, call)
    return []


def threads_left(seconds: float = 10.0) -> list[str]:
    """Return the names of our threads still alive after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith(THREADS)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def check_error(error: BaseException, fault: Fault, checkpoints: Path) -> None:
    """Check that the error is the injected one, or follows from it, and names the place."""
    if fault.kind == "hang":
        assert isinstance(error, WorkerTimeout)
    elif fault.kind == "disk":
        assert isinstance(error, OutputError) and error.__cause__ is fault.raised
        for step in Checkpoints(checkpoints).steps():
            read(Checkpoints(checkpoints).path(step))  # earlier checkpoints are intact
        assert all("." not in entry.name for entry in checkpoints.iterdir())
    else:
        assert fault.raised is not None and error is fault.raised
    if fault.kind in PLACES:
        (note,) = getattr(error, "__notes__", [])
        assert note.startswith(f"worker {fault.rank} (numpy, device 0), ") and PLACES[fault.kind] in note


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait five seconds for a hanging worker."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_a_fit_with_its_own_error(kind: str, tmp_path: Path) -> None:
    rng = random.Random(kind)
    way, fault = rng.choice(list(WAYS)), Fault(kind, rng.randrange(WORKERS), rng.randint(1, KINDS[kind]))
    train, held_out = FaultyLoader(small_dataset(44), 4, seed=3), Loader(small_dataset(24), 4, shuffle=False)
    train.fault, model = fault, small_model()
    options: dict[str, Any] = {"synchronizer": WAYS[way], "optimizer": Nesterov(0.05, 0.9), "run": tmp_path}
    options |= {"prefetch_buffer": 6, "log_every": 2, "timeout_s": 0.5 if kind == "hang" else 60.0}
    with pytest.MonkeyPatch.context() as patch:
        callbacks = [Checkpoint(every_iterations=3), HistoryWriter(), *inject(fault, way, patch)]
        wrapper = ParallelWrapper(model, WORKERS, callbacks=callbacks, **options)
        with wrapper, pytest.raises(BaseException) as caught:
            wrapper.fit(train, epochs=EPOCHS, evaluate_on=held_out)
    check_error(caught.value, fault, tmp_path / "checkpoints")
    fault.release.set()
    assert threads_left() == []
    fitted(model, small_dataset(12), WORKERS, batch_size=4, synchronizer=WAYS[way])
    assert np.isfinite(model.params.master).all()


def held() -> tuple[int, list[str], int]:
    """Return the threads, open files and bytes of memory of this process."""
    gc.collect()
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return threading.active_count(), sorted(files), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count open files")
def test_wrappers_leave_no_threads_or_files_behind(tmp_path: Path) -> None:
    """A third of the wrappers fail."""
    data = small_dataset(16)

    def fail(trainer: Any) -> None:
        raise Injected

    def use(number: int) -> None:
        callbacks = [Checkpoint(keep_last=1), HistoryWriter(), *([On("on_fit_end", fail)] if number % 3 == 0 else [])]
        with ParallelWrapper(small_model(), 2, callbacks=callbacks, run=tmp_path / str(number)) as wrapper:
            for _ in range(2):
                wrapper.fit(Loader(data, 4, seed=3), epochs=1, evaluate_on=Loader(data, 4, shuffle=False))

    for number in range(13):
        with suppress(Injected):
            use(number)
        if number == 2:
            threads, files, memory = held()
    assert threads_left() == []
    after = held()
    assert (after[0], after[1]) == (threads, files)
    assert after[2] - memory < 12e6  # kept by the allocator; a model and its state take 10 kB, its run much more
