"""The training loop: reports, stops, failures, interrupted epochs; also on devices."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

import cupynet.training.clock as clock_module
from cupynet.backend import create_backend
from cupynet.backend.cpu.numba_backend import Numba16Backend
from cupynet.core.errors import OutputError
from cupynet.data import Dataset, Loader
from cupynet.nn import Image, Model, SoftmaxNLL
from cupynet.optim import SGD, Adam, Nesterov, OneCycle
from cupynet.parallel import Groups, ParameterAveraging, SerialCommunicator
from cupynet.runs.run import Run
from cupynet.training import Callback, History, ParallelWrapper, Replica, Stop, StopReason, Trainer, consensus
from cupynet.training.fit import Fit
from cupynet.training.warm_up import warm_up
from tests.support.refusals import refused
from tests.support.training import (
    At,
    Recorder,
    Seen,
    StopAfter,
    alone,
    fingerprint,
    model_of,
    on_backends,
    on_threads,
    small_dataset,
    small_model,
    small_network,
    train,
)


@on_backends("numba", "cupy")
def test_half_learns_as_float_does(backend):
    losses = {}
    for dtype in ("half", "float"):
        recorder, model = Recorder(), model_of(SerialCommunicator(), dtype, backend)
        trainer = alone(model, Nesterov(0.05), callbacks=[recorder], report_every=5)
        trainer.fit(Fit(Loader(small_dataset(200), 8, seed=1), 4))
        model.backend.deactivate()
        losses[dtype] = recorder.reports[-1].loss
        assert recorder.reports[-1].loss < recorder.reports[0].loss / 2
    assert losses["half"] == pytest.approx(losses["float"], abs=0.05)


@on_backends("numba", "cupy")
@pytest.mark.usefixtures("no_garbage_collector")
def test_a_step_leaves_nothing_on_loan_and_allocates_once(backend):
    model = model_of(SerialCommunicator(), "float", backend)
    trainer = alone(model, SGD(0.01), prefetch_buffer=0, report_every=0)
    batches = list(Loader(small_dataset(50), 8, seed=1).epoch(0, model.backend))

    def step(batch):
        trainer.replica.gradient(batch)
        trainer.replica.update(0)

    step(batches[0])
    allocated = model.backend.workspace.allocated_bytes
    for batch in batches:  # the last one is short
        step(batch)
        assert model.backend.workspace.on_loan == 0
    assert model.backend.workspace.allocated_bytes == allocated
    trainer.evaluate(Loader(small_dataset(50), 8, shuffle=False))
    assert model.backend.workspace.on_loan == 0
    model.backend.deactivate()


@pytest.mark.parametrize("method", ["gradient", "scores"])
def test_a_loss_that_fails_leaves_nothing_on_loan(method):
    class Broken(SoftmaxNLL):
        def __call__(self, backend, prediction, target):
            raise ZeroDivisionError("on purpose")

    backend = create_backend("numba")
    model = Model(small_network(), Image(8, 8, 1), backend, loss=Broken())
    batch = next(Loader(small_dataset(8), 8).epoch(0, backend))
    with pytest.raises(ZeroDivisionError):
        getattr(Replica(model, SGD(0.1)), method)(batch)
    assert backend.workspace.on_loan == 0


def test_reports_add_up():
    run = train(2, lambda: SGD(0.05), samples=64, batch_size=4, epochs=2, frequency=2)
    reports = run.recorders[0].reports
    assert [r.iteration for r in reports] == [2, 4, 6, 8, 10, 12, 14, 16]
    for report in reports:
        assert report.images_per_s > 0 and report.compute_s > 0 and report.averaging_s > 0
        assert report.divergence > 0 and report.score_after_averaging > 0
    clock = run.trainers[0].statistics.clock
    assert clock.images == 128
    assert clock.images - clock.warm_images == (16 - 10) * 8


def test_the_time_of_a_round_is_divided_among_its_parts(monkeypatch):
    """Seconds of a clock that only moves where something is slow: loading, gradients, averages, callbacks, tests."""
    now = [0.0]
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: now[0])

    def slow(seconds, call):
        def slowly(*args, **kwargs):
            now[0] += seconds
            return call(*args, **kwargs)

        return slowly

    class Slow(Callback):
        on_iteration_end = slow(1.0, Callback.on_iteration_end)

    class SlowLoader(Loader):
        def load(self, *given):
            return (slow(2.0, lambda made: made)(each) for each in super().load(*given))

    replica, averaging, recorder = Replica(small_model(), SGD(0.01)), ParameterAveraging(1), Recorder()
    replica.update, replica.backpropagate = slow(4.0, replica.update), slow(8.0, replica.backpropagate)
    replica.scores = slow(16.0, replica.scores)
    averaging.after_update, averaging.finish = slow(32.0, averaging.after_update), slow(64.0, averaging.finish)
    trainer = Trainer(replica, synchronizer=averaging, callbacks=[Slow(), recorder], prefetch_buffer=0)
    held_out = Loader(small_dataset(4), 4, shuffle=False)
    trainer.fit(Fit(SlowLoader(small_dataset(12), 4), 1, held_out))
    clock = trainer.statistics.clock
    assert (clock.data_s, clock.compute_s, clock.averaging_s) == (3 * 2, 3 * (4 + 8), 3 * 32 + 64)
    assert (clock.callbacks_s, clock.evaluate_s) == (3, 16)
    assert clock.rounds_s == recorder.epochs[0].train_s == 3 * (2 + 4 + 8 + 32) + 64


def test_callbacks_run_on_rank_0_unless_they_ask_for_every_rank():
    quiet, loud = [], []

    class Quiet(Callback):
        def on_fit_end(self, trainer):
            quiet.append(trainer.rank)

    class Loud(Callback):
        every_rank = True

        def on_fit_end(self, trainer):
            loud.append(trainer.rank)

    with ParallelWrapper(small_model(), 3, callbacks=[Quiet(), Loud()]) as wrapper:
        wrapper.fit(Loader(small_dataset(30), 4), 1)
    assert (quiet, sorted(loud)) == ([0], [0, 1, 2])


def test_the_speed_leaves_out_the_first_rounds():
    """Ten rounds of a second for 8 images each; then two rounds of half a second."""
    clock = clock_module.Clock()
    for iteration in range(1, 13):
        clock.compute_s += 1.0 if iteration <= 10 else 0.5
        clock.count(iteration, 8)
        assert clock.images_per_s == (8 if iteration <= 10 else 16)


def test_the_first_request_to_stop_counts():
    callbacks = [StopAfter(3, text="first"), StopAfter(3, text="second", reason=StopReason.EARLY)]
    with ParallelWrapper(small_model(), 2, callbacks=callbacks) as wrapper:
        wrapper.fit(small_dataset(40), 1, batch_size=4)
        assert wrapper.trainer.stopped == Stop(StopReason.REQUEST, "first")


def test_a_stop_after_the_last_round_is_no_event():
    log: list[str] = []
    with ParallelWrapper(small_model(), 1, callbacks=[Events(log), StopAfter(2)], progress="none") as wrapper:
        wrapper.fit(small_dataset(8), 1, batch_size=4)
    assert "stop" not in log and log[-1] == "fit end"


def test_the_events_of_a_fit():
    """Two epochs of two rounds, the second one evaluated; then a fit that is stopped in its first round."""
    log: list[str] = []
    data, callbacks = small_dataset(16), [Last(log), Events(log)]
    with ParallelWrapper(small_model(), 2, 2, callbacks=callbacks, report_every=2, progress="none") as wrapper:
        wrapper.fit(data, 2, batch_size=4, evaluate_on=data, evaluate_every=3)
        complete = ["epoch 1, evaluated False, row 1", "iteration 3", "report 4", "iteration 4"]
        complete += ["epoch 2, evaluated True, row 2", "after finish", "fit end", "last"]
        assert log == ["fit start", "iteration 1", "report 2", "iteration 2", *complete]
        log.clear()
        wrapper.stop()
        wrapper.fit(data, 1, batch_size=4)
    assert log == ["fit start", "stop", "after finish", "fit end", "last"]


class Last(Callback):
    last = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def on_fit_end(self, trainer):
        self.log.append("last")


class Events(Callback):
    """Notes the events of a fit in their order, and how many rows the history has at each epoch's end."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def on_fit_start(self, trainer):
        self.log.append("fit start")

    def on_iteration_end(self, trainer):
        self.log.append(f"iteration {trainer.iteration}")

    def on_report(self, trainer, report):
        self.log.append(f"report {report.iteration}")

    def on_epoch_end(self, trainer, record):
        kept = trainer.callbacks[0].kept[-1]["epoch"]
        self.log.append(f"epoch {record.epoch}, evaluated {record.evaluation is not None}, row {kept}")

    def on_stop(self, trainer):
        self.log.append("stop")

    def after_finish(self, trainer):
        self.log.append("after finish")

    def on_fit_end(self, trainer):
        self.log.append("fit end")


@pytest.mark.parametrize(
    ("workers", "frequency", "rank", "backend"),
    [
        (1, "end", 0, "numpy"),
        (3, 2, 2, "numpy"),
        (3, "end", 0, "numpy"),
        pytest.param(3, 2, 2, "cupy", id="standin", marks=pytest.mark.standin),
    ],
)
def test_a_stop_ends_all_workers_after_the_same_iteration(workers, frequency, rank, backend):
    def task(communicator):
        trainer = Trainer(
            Replica(model_of(communicator, backend=backend), SGD(0.01)),
            groups=Groups.of(communicator),
            synchronizer=ParameterAveraging(frequency),
            callbacks=[StopAfter(7, rank, "seen enough, naïvely", StopReason.EARLY)],
        )
        trainer.fit(Fit(Loader(small_dataset(600), 2, seed=1), 5))
        return trainer

    trainers = on_threads(workers, task)
    assert {t.stopped for t in trainers} == {Stop(StopReason.EARLY, "seen enough, naïvely")}
    assert len({t.iteration for t in trainers}) == 1 and 7 <= trainers[0].iteration <= 10
    assert trainers[0].epoch == 0 and trainers[0].round == trainers[0].iteration
    assert len({fingerprint(t.model) for t in trainers}) == 1


def test_the_stop_of_the_lowest_rank_is_reported():
    def task(communicator):
        stops = [StopAfter(3, rank, f"worker {rank}", StopReason(rank)) for rank in (1, 2, 3)]
        replica, averaging = Replica(small_model(), SGD(0.01)), ParameterAveraging("end")
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=averaging, callbacks=stops)
        trainer.fit(Fit(Loader(small_dataset(600), 2, seed=1), 5))
        return trainer.stopped

    assert on_threads(4, task) == [Stop(StopReason.REQUEST, "worker 1")] * 4


def test_a_stop_in_slow_rounds_does_not_wait_for_the_tenth(monkeypatch):
    """A cluster kills a job half a minute after its signal."""
    sent, ended = [], []
    for slow_s in (0.0, 60.0):
        monkeypatch.setattr(consensus, "SLOW_S", slow_s)
        traffic = At(31, lambda: sent.append(wrapper.trainer.world.traffic.bytes_sent))
        with ParallelWrapper(small_model(), 3, "end", callbacks=[StopAfter(31, rank=1), traffic]) as wrapper:
            wrapper.fit(Loader(small_dataset(600), 2, seed=1), 1)
            ended.append(wrapper.trainer.iteration)
    assert ended == [31, 40]
    assert sent[0] == sent[1]  # what is sent only to ask is not in the figures


@pytest.mark.parametrize(
    ("event", "frequency", "backend"),
    [
        ("on_iteration_end", 3, "numpy"),
        ("on_report", 1, "numpy"),
        ("on_epoch_end", "end", "numpy"),
        pytest.param("on_epoch_end", "end", "cupy", id="standin", marks=pytest.mark.standin),
    ],
)
def test_a_stop_from_any_event_leaves_identical_replicas_and_one_end(event, frequency, backend):
    """With frequency `end`, a stop from `on_epoch_end` once left replicas that were never averaged."""
    finishes = []

    class Counting(ParameterAveraging):
        def finish(self, replica, moment):
            finishes.append((self.communicator.rank, moment))
            return super().finish(replica, moment)

    stopping, model = Callback(), small_model(backend=backend)
    setattr(stopping, event, lambda trainer, *record: trainer.stop(event))
    with ParallelWrapper(model, 3, synchronizer=Counting(frequency), callbacks=[stopping], report_every=2) as wrapper:
        wrapper.fit(Loader(small_dataset(60), 4), 3)
        assert len({fingerprint(model) for model in wrapper.replicas()}) == 1
        assert wrapper.trainer.stopped == Stop(StopReason.REQUEST, event)
        assert wrapper.trainer.epoch < 3
    assert sorted(rank for rank, moment in finishes if moment == "fit") == [0, 1, 2]


def test_a_stop_at_the_end_of_the_last_epoch_has_no_effect():
    class Late(Callback):
        def on_epoch_end(self, trainer, record):
            if record.epoch == 2:
                trainer.stop()

    with ParallelWrapper(small_model(), 2, callbacks=[Late()]) as wrapper:
        wrapper.fit(Loader(small_dataset(40), 4), 2)
        assert (wrapper.trainer.epoch, wrapper.trainer.round, wrapper.trainer.stopped) == (2, 0, None)
        wrapper.fit(Loader(small_dataset(40), 4), 1)
        assert wrapper.trainer.epoch == 3


@pytest.mark.parametrize(("samples", "epochs"), [(40, [(1, 5, 40)]), (48, [])])
def test_a_stop_at_the_last_round_completes_the_epoch_and_an_earlier_one_does_not(samples, epochs):
    recorder = Recorder()
    with ParallelWrapper(small_model(), 2, 1, callbacks=[recorder, StopAfter(5)]) as wrapper:
        wrapper.fit(Loader(small_dataset(samples), 4), 3)
        assert (wrapper.trainer.iteration, wrapper.trainer.epoch) == (5, len(epochs))
    assert [(r.epoch, r.iteration, r.samples) for r in recorder.epochs] == epochs


def test_a_failing_worker_is_named_with_its_batch_and_device():
    def fail():
        raise ZeroDivisionError("on purpose")

    wrapper = ParallelWrapper(small_model(), 3, callbacks=[At(3, fail, rank=2)], prefetch_buffer=6)
    with wrapper, pytest.raises(ZeroDivisionError) as caught:
        wrapper.fit(Loader(small_dataset(200), 4), 1)
    assert caught.value.__notes__ == ["worker 2 (numpy, device 0), epoch 1, at batch 8"]
    assert not [t for t in threading.enumerate() if t.name.startswith("cupynet-prefetch")]


class Filling(Nesterov):
    """Fills the dictionary that is there, in place of making one."""

    def init(self, params, backend):
        self.backend = backend
        self.state["velocity"] = np.zeros_like(params.master)


@pytest.mark.parametrize("optimizer", [Nesterov, Filling])
def test_warming_up_changes_nothing(optimizer):
    model = small_model("float", "numba")
    before = fingerprint(model)
    replica = Replica(model, optimizer(OneCycle(0.1)))
    assert warm_up(replica, 4) > 0
    assert fingerprint(model) == before and replica.updates == 0
    assert not any(vector.any() for vector in replica.optimizer_state.values())
    assert not model.params.grad.any()
    assert model.backend.workspace.on_loan == 0


@pytest.mark.parametrize("dtype", ["float", "half"])
def test_warming_up_includes_the_kernels_of_averaging(dtype, monkeypatch):
    """If compiled in the first round, they would count as training and averaging time."""
    averaged, mean_in_place = [], Numba16Backend.mean_in_place

    def recorded(backend, parts, shares):
        averaged.append((len(parts), parts[0].dtype))
        mean_in_place(backend, parts, shares)

    monkeypatch.setattr(Numba16Backend, "mean_in_place", recorded)
    model = small_model(dtype, "numba")
    before = fingerprint(model)
    with ParallelWrapper(model, 2, optimizer=Adam(0.1), progress="none") as wrapper:
        wrapper.warm_up(4)
        warm = set(averaged)
        assert warm and fingerprint(model) == before and wrapper.trainer.world.traffic.bytes_sent == 0
        wrapper.fit(small_dataset(40), 1, batch_size=4)
        assert {*averaged} == warm


def test_a_second_fit_appends_to_the_history(tmp_path):
    run = Run(tmp_path)
    with ParallelWrapper(small_model(), 2, callbacks=[History()], run=run, report_every=2) as wrapper:
        wrapper.fit(Loader(small_dataset(40), 4), 1).fit(Loader(small_dataset(40), 4), 1)
    rows = [(row["kind"], row["iteration"]) for row in run.history()]
    assert rows == [
        ("report", 2),
        ("report", 4),
        ("epoch", 5),
        ("report", 6),
        ("report", 8),
        ("report", 10),
        ("epoch", 10),
    ]


def test_a_history_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "history.jsonl")
    history = History(tmp_path / "history.jsonl")
    with ParallelWrapper(small_model(), 1, callbacks=[history]) as wrapper, pytest.raises(OutputError):
        wrapper.warm_up(4)


def test_an_interrupted_epoch_is_continued():
    """Every sample is still seen once, and the end is known."""
    seen, ends = [], Seen(lambda trainer: trainer.plan.iterations)

    class Seeing(Loader):
        def load(self, *arguments):
            for index, made, samples in super().load(*arguments):
                seen.extend(samples.tolist())
                yield index, made, samples

    loader = Seeing(small_dataset(20), 4, seed=1)
    trainer = alone(small_model(), SGD(0.01), callbacks=[StopAfter(2), ends], prefetch_buffer=0)
    trainer.fit(Fit(loader, 1))
    assert (trainer.iteration, trainer.epoch, trainer.round) == (2, 0, 2)
    trainer.fit(Fit(loader, 1))
    assert (trainer.iteration, trainer.epoch, trainer.round) == (5, 1, 0)
    assert ends.iterations == [5] * 5
    assert sorted(seen) == list(range(20))


def test_a_schedule_spans_each_fit():
    class Rates(Callback):
        def on_report(self, trainer, report):
            rates.append(report.learning_rate)

    rates = []
    trainer = alone(small_model(), Nesterov(OneCycle(0.1)), callbacks=[Rates()], report_every=1)
    trainer.fit(Fit(Loader(small_dataset(40), 4), 1))
    trainer.fit(Fit(Loader(small_dataset(40), 4), 2))
    assert rates[0] == rates[10] == pytest.approx(0.1 / 25)
    assert rates[9] == rates[29] == pytest.approx(0.1 / 1000)
    assert max(rates[:10]) == pytest.approx(0.1, rel=0.05) and max(rates[10:]) == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize(
    ("name", "images", "classes"), [("fit", (8, 8, 3), 3), ("evaluate", (9, 8, 1), 3), ("fit", (8, 8, 1), 4)]
)
def test_data_that_do_not_fit_the_model_are_refused(name, images, classes):
    """With three channels for one, compiled kernels once read beyond their arrays."""
    data = Dataset("odd", np.zeros((12, *images), np.uint8), np.arange(12) % 3, classes)
    with ParallelWrapper(small_model("float", "numba"), 2) as wrapper, refused(""):
        getattr(wrapper, name)(Loader(data, 4))


def test_evaluation_data_that_do_not_fit_are_refused_before_training():
    model = small_model()
    before = fingerprint(model)
    odd = Dataset("odd", np.zeros((12, 8, 8, 3), np.uint8), np.arange(12) % 3, 3)
    with ParallelWrapper(model, 2) as wrapper, refused(""):
        wrapper.fit(small_dataset(20), 1, evaluate_on=odd)
    assert fingerprint(model) == before


def test_an_evaluation_of_older_weights_is_dropped():
    """A stop in the middle of an epoch: the evaluation of the one before is of other weights."""
    data = small_dataset(40)
    with ParallelWrapper(small_model(), 2, 1, callbacks=[StopAfter(7)]) as wrapper:
        wrapper.fit(data, 3, batch_size=4, evaluate_on=data)
        assert (wrapper.trainer.epoch, wrapper.trainer.round) == (1, 2)
        assert wrapper.trainer.evaluation is None


def test_a_failed_round_leaves_no_gradient_and_no_stop():
    class FailsOnce(ParameterAveraging):
        failed = False

        def before_update(self, replica, samples):
            if not self.failed:
                self.failed = True
                trainer.stop()
                raise ZeroDivisionError("on purpose")
            return super().before_update(replica, samples)

    loader = Loader(small_dataset(40), 4, seed=1)
    trainer = alone(small_model(), Nesterov(OneCycle(0.1)), synchronizer=FailsOnce(3))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fit(loader, 1))
    trainer.fit(Fit(loader, 1))
    whole = alone(small_model(), Nesterov(OneCycle(0.1)))
    whole.fit(Fit(loader, 1))
    assert trainer.stopped is None and trainer.iteration == 10
    np.testing.assert_array_equal(trainer.model.params.master, whole.model.params.master)


def test_the_norm_of_the_gradient_is_computed_once_in_a_round(monkeypatch):
    norms, replica = [], Replica(small_model("float"), Nesterov(0.01, max_grad_norm=1.0))
    squared_norm = type(replica.backend).squared_norm

    def counted(grad):
        norms.append(grad)
        return squared_norm(replica.backend, grad)

    monkeypatch.setattr(replica.backend, "squared_norm", counted)
    Trainer(replica, synchronizer=ParameterAveraging(3), prefetch_buffer=0).fit(Fit(Loader(small_dataset(24), 8), 1))
    assert len(norms) == 3


def test_other_data_after_a_stop_start_a_new_epoch():
    trainer = alone(small_model(), SGD(0.01), callbacks=[StopAfter(2)])
    trainer.fit(Fit(Loader(small_dataset(20), 4), 1))
    trainer.fit(Fit(Loader(small_dataset(12), 4), 1))
    assert (trainer.iteration, trainer.plan.iterations) == (5, 5)
