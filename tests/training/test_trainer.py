"""The training loop: events, reports, stops, failures, interrupted epochs, warm-up."""

import logging
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Adam, Loader, Nesterov, OneCycle, ParameterAveraging, Scaled, Schedule, StepDecay, Warmup
from cupynet.backend.cpu.numba_backend import NumbaBackend
from cupynet.training import Callback, EpochRecord, ParallelWrapper, Replica, Stop, StopReason, Trainer, consensus
from cupynet.training.clock import Clock
from cupynet.training.fit import Fit
from cupynet.training.replica import warm_up
from tests.support.calls import watch
from tests.support.trainers import fit_on_threads
from tests.support.training import At, On, Recorder, StopAfter, alone, fingerprint, small_dataset, small_model


def loader(samples: int = 40, batch_size: int = 4) -> Loader:
    return Loader(small_dataset(samples), batch_size, seed=1)


def test_the_time_of_training_is_divided_among_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves only during slow parts: loading, gradients, averages, callbacks, evaluations."""
    now = [0.0]
    monkeypatch.setattr("cupynet.training.clock.time.perf_counter", lambda: now[0])

    def slow(part: Any, name: str, seconds: float) -> None:
        watch(monkeypatch, part, name, lambda *_: now.append(now.pop() + seconds))

    replica, averaging = Replica(small_model(), SGD(0.01)), ParameterAveraging(1)
    callback, recorder = Callback(), Recorder()
    slow(callback, "on_iteration_end", 1.0)
    slow(replica.backend, "load_images", 2.0)
    slow(replica, "update", 4.0)
    slow(replica, "backpropagate", 8.0)
    slow(replica, "scores", 16.0)
    slow(averaging, "after_update", 32.0)
    slow(averaging, "finish", 64.0)
    trainer = Trainer(replica, synchronizer=averaging, callbacks=[callback, recorder], prefetch_buffer=0)
    trainer.fit(Fit(Loader(small_dataset(12), 4), 1, Loader(small_dataset(4), 4, shuffle=False)))
    clock = trainer.statistics.clock
    assert (clock.data_s, clock.compute_s, clock.averaging_s) == (3 * 2, 3 * (4 + 8), 3 * 32 + 64)
    assert (clock.callbacks_s, clock.evaluate_s) == (3, 2 + 16)
    assert clock.rounds_s == recorder.epochs[0].train_s == 3 * (2 + 4 + 8 + 32) + 64


def test_images_per_s_leave_out_the_first_ten_iterations() -> None:
    """Ten rounds of 8 images take a second each, then two rounds half a second."""
    clock = Clock()
    for iteration in range(1, 13):
        clock.compute_s += 1.0 if iteration <= 10 else 0.5
        clock.count(iteration, 8)
        assert clock.images_per_s == (8 if iteration <= 10 else 16)


def noted(log: list[str]) -> list[Callback]:
    """Return callbacks that log a fit's events in order, and the last row of the history at each epoch's end."""

    def epoch(trainer: Trainer, record: EpochRecord) -> None:
        row = trainer.callbacks[0].kept[-1]["epoch"]
        log.append(f"epoch {record.epoch}, evaluated {record.evaluation is not None}, row {row}")

    return [
        On("on_fit_end", lambda trainer: log.append("last"), last=True),
        On("on_fit_start", lambda trainer: log.append("fit start")),
        On("on_iteration_end", lambda trainer: log.append(f"iteration {trainer.iteration}")),
        On("on_log", lambda trainer, report: log.append(f"report {report.iteration}")),
        On("on_epoch_end", epoch),
        On("on_stop", lambda trainer: log.append("stop")),
        On("after_finish", lambda trainer: log.append("after finish")),
        On("on_fit_end", lambda trainer: log.append("fit end")),
    ]


def test_callbacks_receive_the_events_of_a_fit_in_order() -> None:
    """A fit has two epochs of two rounds, the second one evaluated. Another fit is stopped in its first round."""
    data, log = small_dataset(16), list[str]()
    with ParallelWrapper(small_model(), 2, 2, callbacks=noted(log), log_every=2, progress="none") as wrapper:
        wrapper.fit(data, epochs=2, batch_size=4, evaluate_on=data, evaluate_every=3)
        first = ["fit start", "iteration 1", "report 2", "iteration 2", "epoch 1, evaluated False, row 1"]
        second = ["iteration 3", "report 4", "iteration 4", "epoch 2, evaluated True, row 2"]
        assert log == [*first, *second, "after finish", "fit end", "last"]
        log.clear()
        wrapper.stop()
        wrapper.fit(data, epochs=1, batch_size=4)
    assert log == ["fit start", "stop", "after finish", "fit end", "last"]


@pytest.mark.parametrize("answer", [None, True, False])
def test_weights_are_evaluated_again_unless_after_finish_returns_false(answer: bool | None) -> None:
    def clear(trainer: Trainer) -> bool | None:
        trainer.params.master[...] = 0  # equal scores of all classes
        trainer.params.publish()
        return answer

    data, clears = small_dataset(16), On("after_finish", clear, every_rank=True)
    with ParallelWrapper(small_model(), 2, callbacks=[clears, Recorder()]) as wrapper:
        wrapper.fit(data, batch_size=4, evaluate_on=data)
        evaluation = wrapper.trainer.evaluation
    assert evaluation is not None
    assert (evaluation.loss == pytest.approx(np.log(data.classes))) == (answer is not False)


@pytest.mark.parametrize(
    ("event", "frequency"), [("on_iteration_end", 9), ("on_log", 3), ("on_epoch_end", 3), ("on_epoch_end", "end")]
)
def test_replicas_of_a_stopped_fit_are_averaged_before_after_finish(event: str, frequency: int | str) -> None:
    found: list[bytes] = []
    stop = On(event, lambda trainer, *record: trainer.stop(event))
    last = On("after_finish", lambda trainer: found.append(trainer.params.master.tobytes()), every_rank=True)
    with ParallelWrapper(small_model(), 2, frequency, callbacks=[last, stop], log_every=2) as wrapper:
        wrapper.fit(loader(60), epochs=3)
        assert wrapper.trainer.stopped == Stop(StopReason.REQUEST, event) and wrapper.trainer.epoch < 3
    assert len(found) == 2 and found[0] == found[1]


def test_the_first_request_to_stop_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    callbacks = [StopAfter(3, text="first"), StopAfter(3, text="second", reason=StopReason.EARLY)]
    with ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper:
        wrapper.fit(loader(), epochs=1)
        assert wrapper.trainer.stopped == Stop(StopReason.REQUEST, "first")


def test_the_request_to_stop_of_the_lowest_rank_is_reported() -> None:
    stops = [StopAfter(3, rank, f"worker {rank}", StopReason(rank)) for rank in (1, 2, 3)]
    way, data = ParameterAveraging("end"), loader(600, 2)
    found = fit_on_threads(4, lambda c: Replica(small_model(), SGD(0.01)), way, data, *stops, epochs=5)
    assert [trainer.stopped for trainer in found] == [Stop(StopReason.REQUEST, "worker 1")] * 4


def test_a_stop_takes_effect_within_ten_iterations_or_at_once_if_they_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster kills a job half a minute after its signal."""
    sent, ended = [], []
    for slow_s in (0.0, 60.0):
        monkeypatch.setattr(consensus, "SLOW_S", slow_s)
        traffic = At(31, lambda: sent.append(wrapper.trainer.world.traffic.bytes_sent))
        with ParallelWrapper(small_model(), 3, "end", callbacks=[StopAfter(31, rank=1), traffic]) as wrapper:
            wrapper.fit(loader(600, 2), epochs=1)
            ended.append(wrapper.trainer.iteration)
    assert ended == [31, 40]
    assert sent[0] == sent[1]  # requests for a stop are not counted as traffic


@pytest.mark.parametrize("event", ["on_iteration_end", "on_epoch_end"])
def test_a_stop_in_or_after_the_last_iteration_has_no_effect(event: str) -> None:
    log: list[str] = []
    late = On(event, lambda trainer, *record: trainer.stop() if trainer.iteration == 4 else None)
    with ParallelWrapper(small_model(), 2, callbacks=[*noted(log), late]) as wrapper:
        wrapper.fit(loader(16), epochs=2)
        assert (wrapper.trainer.epoch, wrapper.trainer.epoch_iteration, wrapper.trainer.stopped) == (2, 0, None)
        assert "stop" not in log and log[-1] == "last"
        wrapper.fit(loader(16), epochs=1)
        assert wrapper.trainer.epoch == 3


def test_a_schedule_that_spans_a_fit_restarts_in_the_next_and_others_continue() -> None:
    def rates_of(schedule: Schedule) -> list[Any]:
        with ParallelWrapper(small_model(), 1, optimizer=Nesterov(schedule), log_every=1) as wrapper:
            for epochs in (1, 2):
                wrapper.fit(loader(), epochs=epochs)
        return wrapper.history.reports["learning_rate"]

    assert rates_of(StepDecay(0.1, factor=0.5, every=15)) == [0.1] * 15 + [0.05] * 15
    rates = rates_of(OneCycle(0.1))
    assert rates[0] == rates[10] == pytest.approx(0.1 / 25)
    assert rates[9] == rates[29] == pytest.approx(0.1 / 1000)
    assert max(rates[:10]) == pytest.approx(0.1, rel=0.05) and max(rates[10:]) == pytest.approx(0.1, rel=0.05)


def test_a_failed_iteration_leaves_no_gradient_and_no_request_to_stop() -> None:
    class FailsOnce(ParameterAveraging):
        failed = False

        def before_update(self, replica: Any, samples: int) -> None:
            if not self.failed:
                self.failed = True
                trainer.stop()
                raise ZeroDivisionError

    trainer = alone(small_model(), Nesterov(OneCycle(0.1)), synchronizer=FailsOnce(3))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fit(loader(), 1))
    trainer.fit(Fit(loader(), 1))
    whole = alone(small_model(), Nesterov(OneCycle(0.1)))
    whole.fit(Fit(loader(), 1))
    assert trainer.stopped is None and trainer.iteration == 10
    assert fingerprint(trainer.model) == fingerprint(whole.model)


def test_the_warm_up_changes_nothing() -> None:
    class Filling(Nesterov):
        def init(self, params: Any, backend: Any) -> None:
            """Fill the existing dictionary instead of creating one."""
            self.backend = backend
            self.state["velocity"] = np.zeros_like(params.master)

    counted, cycle = Warmup(2, StepDecay(0.1, 0.5, 1, by="epoch")), Scaled(OneCycle(0.1), 2.0)
    cycle.begin_fit(0, 10)  # `counted` does not have its epoch length yet
    before, rates = fingerprint(small_model("float", "numba")), [cycle(i) for i in range(10)]
    for optimizer in (Nesterov(counted), Filling(cycle)):
        model = small_model("float", "numba")
        replica = Replica(model, optimizer)
        assert warm_up(replica, 4) > 0
        assert fingerprint(model) == before and replica.updates == 0
        assert [cycle(i) for i in range(10)] == rates
        assert not any(vector.any() for vector in (model.params.grad, *replica.optimizer_state.values()))
        assert model.backend.workspace.on_loan == 0


def test_compiling_is_logged_once_per_dtype(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("cupynet.training.parallel_wrapper._compiled", set())
    caplog.set_level(logging.INFO, "cupynet.training.parallel_wrapper")
    counts = []
    for dtype in ("float", "float", "double"):
        with ParallelWrapper(small_model(dtype), 1) as wrapper:
            wrapper.warm_up(4)
        counts.append(len(caplog.records))
    assert 0 < counts[0] == counts[1] < counts[2]


def test_the_warm_up_includes_the_kernels_of_averaging(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they were compiled in the first round, they would count as training and averaging time."""
    averaged: set[tuple[int, Any]] = set()

    def note(_: None, backend: Any, parts: Any, shares: Any) -> None:
        averaged.add((len(parts), parts[0].dtype))

    watch(monkeypatch, NumbaBackend, "mean_in_place", note)
    with ParallelWrapper(small_model("half", "numba"), 2, optimizer=Adam(0.1), progress="none") as wrapper:
        wrapper.warm_up(4)
        warm = set(averaged)
        assert warm and wrapper.trainer.world.traffic.bytes_sent == 0
        wrapper.fit(loader(), epochs=1)
    assert averaged == warm
