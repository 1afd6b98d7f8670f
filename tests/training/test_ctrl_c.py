"""Ctrl-C and `stop` in a user's program."""

import builtins
import os
import signal
import time
from typing import Any

import pytest

from cupynet import Batch, Callback, ClosedError, ParallelWrapper, Pipeline
from cupynet.training import Replica, Stop, StopReason, Trainer, consensus
from tests.support.calls import watch
from tests.support.trainers import fitted
from tests.support.training import At, On, StopAfter, fingerprint, small_dataset, small_model

DATA = small_dataset(60)


def interrupts(times: int = 1) -> Callback:
    """Press Ctrl-C after the third round of the first fit, `times` times."""

    def press() -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)  # lets the main thread handle the signal

    return At(3, press)


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stops_and_averages_workers_and_fit_may_continue(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    with ParallelWrapper(small_model(), workers, averaging_frequency=2, callbacks=[interrupts()]) as wrapper:
        with pytest.raises(KeyboardInterrupt):
            wrapper.fit(DATA, epochs=3, batch_size=4)
        assert 3 <= wrapper.trainer.iteration < 15
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1
        assert wrapper.evaluate(DATA).samples == 60
        complete = wrapper.trainer.epoch  # the signal may be handled after the end of an epoch
        wrapper.fit(DATA, epochs=3, batch_size=4)
        assert wrapper.trainer.epoch == complete + 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_stop_ends_a_fit_within_ten_iterations_with_equal_replicas_and_without_an_exception() -> None:
    with ParallelWrapper(small_model(), 2, "end", callbacks=[At(3, lambda: wrapper.stop("enough"))]) as wrapper:
        wrapper.fit(DATA, epochs=9, batch_size=4)
        assert 3 <= wrapper.trainer.iteration <= 13 and wrapper.trainer.stopped == Stop(StopReason.REQUEST, "enough")
        assert len({fingerprint(replica) for replica in wrapper.replicas()}) == 1


@pytest.mark.parametrize(
    "options", [{"workers": 1}, {"workers": 2}, {"workers": 1, "pipeline": Pipeline(2)}], ids=["one", "two", "stages"]
)
def test_ctrl_c_ends_an_evaluation_and_leaves_a_usable_wrapper(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []

    def press(_: object, replica: Replica, batch: Batch) -> None:
        evaluated.append(batch.index)
        if batch.index == 2 and evaluated.count(2) == 1:  # only the first of several stages
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    with ParallelWrapper(small_model(), **options) as wrapper:
        wrapper.fit(DATA, batch_size=4)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            watch(patch, type(wrapper.trainer.replica), "scores", press)
            wrapper.evaluate(DATA, batch_size=1)
        assert len(evaluated) < 60 or "pipeline" in options
        assert wrapper.evaluate(DATA).samples == 60
        wrapper.fit(DATA, batch_size=4)


def test_weights_that_a_callback_replaces_after_a_signal_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job has little time after SIGTERM. `after_finish` returns None if it may have changed the weights."""
    evaluations: list[Any] = []
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    watch(monkeypatch, Trainer, "evaluate", lambda evaluation, *_: evaluations.append(evaluation))
    callbacks = [StopAfter(2, reason=StopReason.SIGNAL), On("after_finish", lambda trainer: None)]
    with ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper:
        wrapper.fit(DATA, batch_size=4, evaluate_on=DATA)
    assert not evaluations


def test_ctrl_c_in_ipython_returns_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    with ParallelWrapper(small_model(), 1, callbacks=[interrupts()], log_every=1) as wrapper:
        history = wrapper.fit(DATA, epochs=3, batch_size=4)
    assert history.reports["iteration"] == [1, 2, 3]


def test_the_second_ctrl_c_is_raised_at_once_and_closes_the_wrapper() -> None:
    with ParallelWrapper(small_model(), 2, callbacks=[interrupts(times=2)]) as wrapper:
        with pytest.raises(KeyboardInterrupt):
            wrapper.fit(DATA, epochs=3, batch_size=4)
        with pytest.raises(ClosedError, match="interrupted"):
            wrapper.fit(DATA)


def test_a_sigint_handler_of_the_program_is_left_alone() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        fitted(small_model(), DATA, 1, epochs=2, batch_size=4, callbacks=[interrupts()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]
