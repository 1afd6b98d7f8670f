"""Training steps captured as graphs, with the host running ahead of the GPU, give the results of single launches.

They run on CuPy's stand-in, which replays captured steps and rejects operations that cannot be captured.
"""

import copy
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import DivergedError, Loader, ParameterAveraging, create_backend, nn, optim
from cupynet.backend.cuda import launch
from cupynet.nn.layer import no_backward
from cupynet.training import Callback, ParallelWrapper, Trainer, WeightAverage, graph_replica
from cupynet.training import loss_scaling as scaling
from cupynet.training.fit import Fit
from cupynet.training.graph_replica import GraphReplica, Graphs
from tests.support.calls import watch
from tests.support.device_runs import Run, compared, single_launches, train_on_device
from tests.support.networks import small_networks
from tests.support.shards import write_shards
from tests.support.trainers import assert_resumes
from tests.support.training import KINDS_OF_WAYS, WAYS, At, Identity, On, small_dataset, small_model, small_network

on_devices = pytest.mark.usefixtures("devices")  # on the stand-in, and on a GPU if there is one
on_standin = pytest.mark.standin
DATA = small_dataset(97)
IMAGE = nn.Image(8, 8, 1)


def on_cupy(layers: dict[str, nn.Layer], dtype: str = "float") -> nn.Model:
    return nn.Model(nn.Sequential(layers), IMAGE, create_backend("cupy", dtype), 1)


OPTIMIZERS: dict[str, tuple[str, Callable[[], optim.Optimizer]]] = {
    "momentum, decayed, all layers": ("half", lambda: optim.Momentum(optim.OneCycle(0.05), 0.8, l2=0.01)),
    "nesterov, clipped": ("float", lambda: optim.Nesterov(0.05, max_grad_norm=0.5)),
    "all limits": ("half", lambda: optim.SGD(0.05, max_grad_norm=2.0, clip_layer_norm=0.5, clip_value=0.1, l1=0.001)),
    "adam": ("double", lambda: optim.Adam(optim.OneCycle(0.01), l2=0.01)),
    "adamw": ("half", lambda: optim.AdamW(0.01, max_grad_norm=0.5)),
    "nadam": ("float", lambda: optim.Nadam(0.01, clip_value=0.1)),
    "adagrad": ("half", lambda: optim.AdaGrad(0.02, weight_decay=0.1)),
    "lamb": ("double", lambda: optim.LAMB(optim.OneCycle(0.02), clip_layer_norm=0.5)),
}


@on_devices
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_captured_steps_of_several_optimizers_equal_single_launches(name: str) -> None:
    """Two workers share seven batches. The last one is short, and one worker has no batch in the last round."""
    dtype, optimizer = OPTIMIZERS[name]

    def train() -> Run:
        network = small_networks()["blocks"] if "all layers" in name else small_network()
        model = nn.Model(network, IMAGE, create_backend("cupy", dtype), 1)
        return train_on_device(network=model, optimizer=optimizer())

    found = compared(train)
    assert found["ahead"] and found["refused"] == ""


@on_devices
@pytest.mark.parametrize(
    ("loss", "way"),
    [(nn.SoftmaxNLL(0.1, [0.5, 1.0, 2.0]), "every 3"), (nn.Huber(0.5), "every 3"), (None, "gradients")],
    ids=["smoothed", "huber", "gradients"],
)
def test_captured_steps_change_the_loss_scale(loss: nn.Loss | None, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale starts far too large, so steps are skipped while it is halved. Then it grows every fifth step."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)

    def train() -> Run:
        model = nn.Model(small_network(), IMAGE, create_backend("cupy", "half"), 1, loss or "softmax")
        return train_on_device(
            network=model, synchronizer=WAYS[way], callbacks=[WeightAverage(0.9)], scale=2.0**24, data=DATA
        )

    found = compared(train)
    assert found["skipped"] >= 1 and found["scales"][-1] < 2.0**24
    assert any(later > earlier for earlier, later in itertools.pairwise(found["scales"]))


@on_devices
@pytest.mark.parametrize(
    ("way", "workers"), [("every 3", 1), *((way, 3) for way in (*KINDS_OF_WAYS, "half", "post-local", "diloco"))]
)
def test_captured_steps_of_every_kind_of_synchronizer_equal_single_launches(way: str, workers: int) -> None:
    """Three workers share eight batches. The last one is short, and one worker has no batch in the last round."""
    data = small_dataset(61)
    found = compared(lambda: train_on_device("half", workers, synchronizer=WAYS[way], data=data), scores=workers > 1)
    assert found["ahead"] == (way not in ("gradients, half", "threshold"))


@on_devices
def test_a_checkpoint_includes_steps_that_ran_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    skipped: list[int] = []

    def wrapper_of(*callbacks: Callback) -> ParallelWrapper:
        model = small_model("half", "cupy")
        model.backend.loss_scale = 2.0**22
        end = On("on_fit_end", lambda trainer: skipped.append(trainer.statistics.skipped_steps))
        options: dict[str, Any] = {"callbacks": [end, *callbacks], "log_every": 4, "timeout_s": 60}
        return ParallelWrapper(model, 2, 3, optimizer=optim.Nesterov(0.05), **options)

    assert_resumes(wrapper_of, 10, tmp_path, Loader(DATA, 8, seed=3))
    assert skipped[0] == skipped[1] > 0


@on_standin
@pytest.mark.parametrize("on_device", [True, False])
def test_a_captured_step_copies_no_images(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes steps after evaluations with batches of the same size, and later fits."""
    copied: list[bool] = []

    def note(shape: graph_replica.Shape, inputs: graph_replica.Inputs, batch: Any, *source: Any) -> None:
        copied.append(inputs.of(shape)[0].data.ptr != batch.images.data.ptr)

    watch(monkeypatch, graph_replica.Inputs, "load", note)
    with ParallelWrapper(small_model(backend="cupy"), 2, data_on_device=on_device, devices=[0]) as wrapper:
        for _ in range(2):
            wrapper.fit(Loader(DATA, 8, seed=1), epochs=2, evaluate_on=Loader(DATA, 8, shuffle=False))
            wrapper.evaluate(DATA, batch_size=8)
    assert copied and not any(copied)


@on_devices
def test_time_waiting_for_the_device_counts_as_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time counts when the host first waits, at a report or at an epoch's end. The clock moves only then."""
    now, read = [0.0], GraphReplica._read
    monkeypatch.setattr("cupynet.training.clock.time.perf_counter", lambda: now[0])

    def slowly(self: GraphReplica) -> int:
        now[0] += len(self._launched)
        return read(self)

    monkeypatch.setattr(GraphReplica, "_read", slowly)
    with ParallelWrapper(small_model("float", "cupy"), 1, "epoch", log_every=0, timeout_s=60) as training:
        training.fit(Loader(small_dataset(64), 8, seed=3), epochs=2)
        clock = training.trainer.statistics.clock
    assert clock.rounds_s == clock.compute_s == 16
    assert clock.rounds_s - clock.warm_s > 6


@on_devices
def test_a_fit_in_another_thread_does_not_write_to_borrowed_buffers() -> None:
    """The first fit's graphs write to buffers that this thread has borrowed since then."""
    model = small_model("float", "cupy")
    with ParallelWrapper(model, 1, prefetch_buffer=0) as training:
        training.fit(Loader(DATA, 8, seed=3), epochs=1)
        logits, _ = model.forward(model.backend.load_images(DATA.images, np.arange(8)), nn.INFERENCE)
        before = np.array(model.backend.to_host(logits))
        other = threading.Thread(target=training.fit, args=(Loader(DATA, 8, seed=3),))
        other.start()
        other.join()
        assert training.trainer.epoch == 2
        np.testing.assert_array_equal(model.backend.to_host(logits), before)
        del logits


MARKED = small_dataset(97)
MARKED.images[17, 0, 0, 0] = 255


class Breaks(Identity):
    """Divides by 1 minus the first pixel, which is 0 for the marked image."""

    capturable = True

    def forward(self, x: Any, context: nn.Context) -> tuple[Any, nn.Backward]:
        y, rest = self.backend.borrow(x.shape), self.backend.borrow((len(x), 1, 1, 1))
        self.backend.xp.subtract(1, x[:, :1, :1], out=rest)
        self.backend.xp.divide(x, rest, out=y)
        return y, (lambda dy: None) if context.train else no_backward


def breaking(dtype: str = "float") -> nn.Model:
    layers = {"breaks": Breaks(), "conv1": nn.Conv2D(3, 3), "pool1": nn.MaxPool2D(2), "output": nn.Dense(3)}
    return on_cupy(layers, dtype)


@on_devices
@pytest.mark.parametrize(("dtype", "workers", "frequency"), [("float", 1, "end"), ("half", 3, "end"), ("float", 3, 1)])
def test_captured_steps_report_losses_that_are_not_finite(dtype: str, workers: int, frequency: int | str) -> None:
    """The error names the same worker, batch, sample and layer. The weights are as they were before that batch."""

    def failed() -> tuple[str, dict[str, Any]]:
        model = breaking(dtype)
        with (
            pytest.raises(DivergedError, match="sample 17, .*'breaks'") as caught,
            ParallelWrapper(model, workers, frequency, optimizer=optim.Nesterov(0.05), timeout_s=60) as training,
        ):
            training.fit(Loader(MARKED, 8, seed=3), epochs=2)
        return str(caught.value), model.weights()

    found, weights = failed()
    with single_launches():
        expected, others = failed()
    assert found == expected
    assert all(np.isfinite(weight).all() for weight in weights.values())
    if workers == 1:
        np.testing.assert_equal(weights, others)


@on_devices
def test_a_failed_fit_leaves_no_steps_to_the_next() -> None:
    def fail() -> None:
        raise InterruptedError

    backend = create_backend("cupy")
    backend.activate()
    replica = graph_replica.replica_of(nn.Model(small_network(), IMAGE, backend, 1), optim.Nesterov(0.05))
    trainer = Trainer(replica, callbacks=[At(3, fail)], synchronizer=ParameterAveraging("end"), log_every=0)
    with pytest.raises(InterruptedError):
        trainer.fit(Fit(Loader(DATA, 8, seed=3), 1))
    before = trainer.statistics.clock.samples
    trainer.fit(Fit(Loader(DATA, 8, seed=3), 1))
    assert trainer.statistics.clock.samples - before == 97 - 3 * 8  # the epoch continues where it failed


class Own(nn.Dense):
    """A layer without the attribute `capturable`."""


NOT_CAPTURED: dict[str, Callable[[], Run]] = {
    "parts of a batch": lambda: train_on_device("half", accumulation_steps=8),
    "a user's layer": lambda: train_on_device(network=on_cupy({"own": Own(8), "output": nn.Dense(3)})),
}


@on_devices
@pytest.mark.parametrize("train", NOT_CAPTURED.values(), ids=NOT_CAPTURED)
def test_parts_of_a_batch_and_layers_without_capturable_are_launched_singly(train: Callable[[], Run]) -> None:
    assert not compared(train)["ahead"]


@on_standin
def test_a_step_that_fails_to_be_captured_runs_uncaptured_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The layer claims to be capturable, but reads a number on the host."""
    from tests.standin.errors import InCapture
    from tests.standin.machine import active

    class Reads(Breaks):
        capturable = True

        def forward(self, x: Any, context: nn.Context) -> tuple[Any, nn.Backward]:
            assert float(x[0, 0, 0, 0]) < 1
            return super().forward(x, context)

    layers = {"reads": Reads(), "output": nn.Dense(3)}
    found = compared(lambda: train_on_device(network=on_cupy(layers), workers=1), scores=False)
    assert found["ahead"] and [record.levelname for record in caplog.records] == ["WARNING"]
    misuses = active().misuses
    assert misuses and all(isinstance(each, InCapture) for each in misuses)
    misuses.clear()


@on_standin
def test_graph_capture_refuses_allocations() -> None:
    """CuPy would allow them, and the next launch would write to freed memory."""
    import cupy

    backend = create_backend("cupy")
    backend.activate()
    recorder = backend.recorder()
    assert recorder is not None
    with pytest.raises(RuntimeError):
        recorder.record(lambda: cupy.empty(3, np.float32))
    x = backend.asarray(np.ones(3, np.float32))
    backend.relu(x)
    recorder.record(lambda: backend.relu(x))()
    backend.synchronize()
    backend.deactivate()


@on_standin
def test_the_first_step_of_a_thread_waits_for_the_capture_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """First steps load libraries, which synchronizes the device and thus invalidates a capture.

    In the second round, one worker has its first batch of two samples while the others capture steps of four.
    """
    capturing: set[int] = set()
    intruders: list[int] = []
    capture, step = Graphs._capture, GraphReplica._step

    def captured(graphs: Graphs, key: tuple[str, graph_replica.Shape], work: Callable[[], None]) -> None:
        def slowly() -> None:
            capturing.add(threading.get_ident())
            time.sleep(0.1)
            work()
            capturing.discard(threading.get_ident())

        capture(graphs, key, slowly)

    def stepped(replica: GraphReplica, shape: graph_replica.Shape) -> None:
        time.sleep(0.05 if shape == (2,) else 0)
        intruders.extend(capturing - {threading.get_ident()})
        step(replica, shape)

    monkeypatch.setattr(Graphs, "_capture", captured)
    monkeypatch.setattr(GraphReplica, "_step", stepped)
    with ParallelWrapper(small_model("float", "cupy"), 3, devices=[0], log_every=0) as wrapper:
        wrapper.fit(Loader(small_dataset(22), 4, shuffle=False), epochs=1)
    assert intruders == []


@on_standin
def test_creating_a_kernel_or_handle_waits_for_a_capture() -> None:
    """This includes threads that take no steps, such as prefetchers."""
    backend = create_backend("cupy")
    x, y = backend.asarray(np.ones((2, 2), np.float32)), backend.allocate((2, 2), np.float32)
    with ThreadPoolExecutor(2) as threads:
        with launch.first_use:
            uses = threads.submit(backend.relu, x), threads.submit(backend._gemm, x, x, y)
            assert not wait(uses, timeout=0.2).done
        assert wait(uses, timeout=20).done == {*uses} and not any(use.exception() for use in uses)


def dropping() -> nn.Model:
    return on_cupy({"conv1": nn.Conv2D(3, 3), "drop": nn.Dropout(0.3), "output": nn.Dense(3)})


@pytest.mark.standin
@pytest.mark.parametrize("model", [dropping, lambda: small_model("half", "cupy")], ids=["dropout", "half"])
def test_the_host_makes_one_call_per_iteration(model: Callable[[], nn.Model], monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.standin.machine import Machine
    from tests.standin.streams import Graph

    calls = [0]
    watch(monkeypatch, Machine, "run", lambda *_: calls.append(calls.pop() + 1))
    watch(monkeypatch, Graph, "launch", lambda _, graph: calls.append(calls.pop() - len(graph.operations) + 1))
    end = On("on_iteration_end", lambda _: calls.append(0))
    options: dict[str, Any] = {"optimizer": optim.Nesterov(optim.OneCycle(0.1)), "callbacks": [end], "log_every": 0}
    with ParallelWrapper(model(), 1, "epoch", **options) as training:
        training.fit(Loader(small_dataset(160), 8, seed=3), epochs=3)
    later = calls[22:40], calls[42:60]  # without the first iterations of the epochs
    assert [sum(each) for each in later] == [18 + 1, 18 + 1]  # the rates of many iterations are sent together


class Counts(optim.Schedule):
    """A schedule that depends on the number of calls, though it should not."""

    calls = 0

    def __call__(self, iteration: int) -> float:
        self.calls += 1
        return 0.1 / self.calls


class SetByCallback(optim.Schedule):
    """A schedule whose next rate is set by a callback after each iteration."""

    def __init__(self) -> None:
        self.rates = [0.05]

    def __call__(self, iteration: int) -> float:
        return self.rates[iteration]


def tell(trainer: Trainer) -> None:
    trainer.schedule.rates.append(0.05 / trainer.iteration)  # type: ignore[attr-defined]


def lower(trainer: Trainer) -> None:
    if trainer.iteration in (4, 5, 12):
        trainer.replica.optimizer.learning_rate = optim.Constant(0.05 / trainer.iteration)


def launch_singly(trainer: Trainer) -> None:
    trainer.replica.launch_singly(trainer.iteration in (3, 4, 11))


@on_devices
@pytest.mark.parametrize(
    ("change", "rate"),
    [(lower, 0.05), (launch_singly, optim.OneCycle(0.05)), (lambda _: None, Counts()), (tell, SetByCallback())],
    ids=["rates set by a callback", "single launches in between", "rates that depend on calls", "rates not yet known"],
)
def test_captured_steps_take_the_right_batch_and_rate(change: Callable[[Trainer], None], rate: Any) -> None:
    def train() -> Run:
        optimizer, callback = optim.Nesterov(copy.deepcopy(rate)), On("on_iteration_end", change)
        return train_on_device("half", 1, optimizer=optimizer, callbacks=[callback], data=small_dataset(61))

    assert compared(train, scores=False)["ahead"]


@on_devices
def test_captured_steps_of_several_fits_equal_single_launches() -> None:
    """Each fit has new arrays on the device; float images are sent. The rate changes at each evaluation."""

    def train() -> dict[str, Any]:
        model, rate = small_model("half", "cupy"), optim.ReduceOnPlateau(0.05, 0.5, patience=0, min_delta=9)
        with ParallelWrapper(model, 1, 3, optimizer=optim.Nesterov(rate), timeout_s=60) as training:
            for samples, dtype in ((97, np.uint8), (61, np.uint8), (97, np.float32)):
                data = small_dataset(samples)
                images = data.images.astype(dtype)
                training.fit((images, data.labels), epochs=3, batch_size=8, validation_split=0.2)
        return model.weights()

    found = train()
    with single_launches():
        np.testing.assert_equal(found, train())


@on_devices
def test_captured_dropout_of_shards_depends_on_samples_of_the_whole_data_set(tmp_path: Path) -> None:
    shards = write_shards(small_dataset(97), tmp_path, 2)
    assert compared(lambda: train_on_device(network=dropping(), data=shards))["ahead"]
