"""Injected failures in any part and worker: the fit ends with that error and leaves no threads or files behind."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from cupynet.core.errors import OutputError
from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.parallel import WorkerTimeout
from cupynet.parallel.launchers import threads as launch
from cupynet.runs import checkpoints
from cupynet.runs.checkpoints import Checkpoints, read
from cupynet.training import Callback, Checkpoint, History, ParallelWrapper
from tests.support.training import WAYS, small_dataset, small_model

WORKERS, EPOCHS, ROUNDS = 3, 2, 4  # rounds per epoch: 44 samples in batches of 4
PLACE = r"worker {rank} \(numpy, device 0\)"
IN_A_ROUND = PLACE + r", epoch {epoch}, at batch \d+"
NAMES = ("cupynet worker", "cupynet-prefetch")


class Injected(Exception):
    """On purpose."""


class Fault:
    """Raises on one worker, the n-th time that it is asked. All workers share one object.

    Attributes:
        struck: the errors raised.
    """

    def __init__(self, rank: int, moment: int, kind: str) -> None:
        self.rank, self.moment, self.kind = rank, moment, kind
        self.struck: list[BaseException] = []
        self.release = threading.Event()  # of a worker that hangs
        self.trainer = None
        self._asked = 0

    def __deepcopy__(self, memo) -> Fault:
        return self

    def strike(self, rank: int) -> None:
        if rank != self.rank:
            return
        self._asked += 1
        if self._asked == self.moment:
            if self.kind == "hang":
                self.hang_here()
                return
            self.struck.append(SystemExit(7) if self.kind == "exit" else Injected(self.kind))
            raise self.struck[0]

    def hang_here(self) -> None:
        self.release.wait(60)


class Faulty(Callback):
    """Fails in one event."""

    every_rank = True

    def __init__(self, fault: Fault, event: str) -> None:
        self.fault, self.event = fault, event
        setattr(self, event, self._strike)

    def __deepcopy__(self, memo) -> Faulty:
        return Faulty(self.fault, self.event)

    def _strike(self, trainer, *arguments) -> None:
        self.fault.strike(trainer.rank)


def faulty(described, method: str, fault: Fault):
    """Return a copy of a part whose `method` fails in the thread of the faulty worker."""

    class Failing(type(described)):
        pass

    def strike(self, *arguments, **options):
        fault.strike(int(threading.current_thread().name.rsplit(" ", 1)[1]))
        return getattr(super(Failing, self), method)(*arguments, **options)

    setattr(Failing, method, strike)
    made = copy.copy(described)
    made.__class__ = Failing
    return made


class FaultyLoader(Loader):
    """Fails in the prefetch threads."""

    fault: Fault

    def load(self, *arguments):
        for index, *made in super().load(*arguments):
            self.fault.strike(index % WORKERS)
            yield index, *made


# fault -> how often it is asked in a fit, and the note that names the place
ROUND = ROUNDS * EPOCHS - EPOCHS  # the last round of an epoch has no batch for some
KINDS: dict[str, tuple[int, str]] = {
    "callback": (ROUND, IN_A_ROUND),
    "report": (ROUND // 2, IN_A_ROUND),
    "exit": (ROUND, ""),
    "epoch": (EPOCHS, "worker {rank}"),
    "start": (1, "worker {rank}"),
    "finish": (1, "worker {rank}"),
    "optimizer": (ROUND, IN_A_ROUND),
    "synchronizer": (ROUND, IN_A_ROUND),
    "average": (EPOCHS, "worker {rank}"),
    "prefetcher": (ROUND, PLACE + ", epoch {epoch}, loading a batch"),
    "evaluation": (4, PLACE + ", evaluating, loading a batch"),
    "scores": (4, PLACE + r", evaluating, at batch \d+"),
    "disk": (3, ""),
    "hang": (ROUND, ""),
}
EVENTS = {
    "callback": "on_iteration_end",
    "exit": "on_iteration_end",
    "hang": "on_iteration_end",
    "report": "on_report",
    "epoch": "on_epoch_end",
    "start": "on_fit_start",
    "finish": "after_finish",
}


def wrapper_with(fault: Fault, way: str, folder, monkeypatch) -> ParallelWrapper:
    """A wrapper in which `fault` strikes."""
    kind, synchronizer, optimizer = fault.kind, WAYS[way], Nesterov(0.05, 0.9)
    callbacks: list[Callback] = [Checkpoint(every_iterations=3), History()]
    if kind in EVENTS:
        callbacks.append(Faulty(fault, EVENTS[kind]))
    if kind == "optimizer":
        optimizer = faulty(optimizer, "update", fault)
    if kind in ("synchronizer", "average"):
        synchronizer = faulty(synchronizer, "after_update" if kind == "synchronizer" else "finish", fault)
    model = small_model()
    if kind == "scores":
        model.loss = faulty(model.loss, "scores", fault)
    if kind == "disk":
        real, fault.rank = os.rename, 0

        def rename(source, target) -> None:
            if ".tmp-" in str(source):
                fault._asked += 1
                if fault._asked == fault.moment:
                    raise OSError(errno.ENOSPC, "No space left on device")
            real(source, target)

        monkeypatch.setattr(checkpoints.os, "rename", rename)
    return ParallelWrapper(
        model,
        WORKERS,
        synchronizer=synchronizer,
        optimizer=optimizer,
        callbacks=callbacks,
        prefetch_buffer=6,
        report_every=2,
        timeout_s=0.5 if kind == "hang" else 60.0,
        run=folder,
    )


def ours() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(NAMES))


def gone(seconds: float = 10.0) -> list[str]:
    """The threads of ours that are left after a while."""
    deadline = time.monotonic() + seconds
    while ours() and time.monotonic() < deadline:
        time.sleep(0.005)
    return ours()


def check_error(error: BaseException, fault: Fault, folder) -> None:
    """It is the one that was raised, and says where."""
    _, place = KINDS[fault.kind]
    notes = getattr(error, "__notes__", [])
    if fault.kind == "disk":
        assert isinstance(error, OutputError) and isinstance(error.__cause__, OSError)
        for step in Checkpoints(folder / "checkpoints").steps():
            read(Checkpoints(folder / "checkpoints").path(step))  # those of before are whole
        assert all("." not in entry.name for entry in (folder / "checkpoints").iterdir())
        return
    if fault.kind == "hang":
        assert isinstance(error, WorkerTimeout)
        return
    assert fault.struck and error is fault.struck[0]
    epochs = {place.format(rank=fault.rank, epoch=epoch) for epoch in range(1, EPOCHS + 1)}
    if place:
        assert len(notes) == 1 and any(re.fullmatch(each, notes[0]) for each in epochs), notes


def end_in_failure(kind: str, way: str, rank: int, moment: int, folder) -> None:
    """Run a fit that fails, and check its error and that nothing is left behind."""
    fault = Fault(rank, moment, kind)
    data = small_dataset(44)
    train, held_out = FaultyLoader(data, 4, seed=3), FaultyLoader(small_dataset(24), 4, shuffle=False)
    nothing = Fault(-1, 1, "none")
    train.fault, held_out.fault = (fault if kind == name else nothing for name in ("prefetcher", "evaluation"))
    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        wrapper = wrapper_with(fault, way, folder, patch)
        model = wrapper.model
        with wrapper, pytest.raises(BaseException) as caught:
            wrapper.fit(train, EPOCHS, evaluate_on=held_out)
    check_error(caught.value, fault, folder)
    with pytest.raises(RuntimeError):
        wrapper.fit(train, 1)
    fault.release.set()
    assert gone() == []
    with ParallelWrapper(model, WORKERS, synchronizer=WAYS[way]) as again:
        again.fit(small_dataset(12), 1, batch_size=4)
    assert np.isfinite(model.params.master).all()
    assert time.monotonic() - began < 30


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Do not wait five seconds for a hanging worker."""
    monkeypatch.setattr(launch, "GRACE_S", 0.5)


def at_random(kind: str, rng: random.Random) -> tuple[str, str, int, int]:
    """Draw the arguments of `end_in_failure`."""
    return kind, rng.choice(list(WAYS)), rng.randrange(WORKERS), rng.randint(1, KINDS[kind][0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_ends_a_fit_with_its_own_error(kind, tmp_path):
    end_in_failure(*at_random(kind, random.Random(kind)), tmp_path)


@pytest.mark.slow
def test_a_hundred_failures_at_random_moments_never_hang(tmp_path):
    rng = random.Random(17)
    for number in range(100):
        (tmp_path / str(number)).mkdir()
        end_in_failure(*at_random(list(KINDS)[number % len(KINDS)], rng), tmp_path / str(number))


def held() -> tuple[int, list[str], int]:
    """Return the threads, open files and bytes of memory of this process."""
    gc.collect()
    files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return threading.active_count(), sorted(files), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to count open files")
def test_wrappers_leave_no_threads_or_files_behind(tmp_path):
    """Threads and open files to the last one; a third of the wrappers fail."""

    def use(number: int) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        callbacks = [Checkpoint(keep_last=1), History(), *([Faulty(fault, "on_fit_end")] if number % 3 == 0 else [])]
        with suppress(Injected), ParallelWrapper(small_model(), 2, callbacks=callbacks, run=folder) as wrapper:
            for _ in range(2):
                wrapper.fit(Loader(data, 4, seed=3), 1, evaluate_on=held_out)
            completed.append(number)

    data, completed = small_dataset(16), []
    held_out = Loader(data, 4, shuffle=False)
    for number in range(13):
        fault = Fault(number % 2, 2, "callback")
        use(number)
        if number == 2:
            threads, files, memory = held()
    assert len(completed) == 8 and gone() == []
    after = held()
    assert (after[0], after[1]) == (threads, files)
    assert after[2] - memory < 12e6  # what the allocator keeps; a model with its states has 10 kB, its run much more
