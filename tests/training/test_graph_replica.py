"""Training steps captured as a graph and launched ahead of the host give the results of single launches.

They run on the stand-in of CuPy, which replays captured steps and rejects what cannot be captured.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.backend.cuda import cublas, launch
from cupynet.core.errors import DivergedError
from cupynet.data import Dataset, Loader
from cupynet.nn import (
    INFERENCE,
    Activation,
    AvgPool2D,
    Concat,
    Conv2D,
    Dense,
    GlobalAvgPool2D,
    Huber,
    Image,
    Layer,
    MaxPool2D,
    Model,
    Residual,
    Sequential,
    SoftmaxNLL,
)
from cupynet.nn.layer import no_backward
from cupynet.optim import (
    LAMB,
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    Momentum,
    Nadam,
    Nesterov,
    OneCycle,
)
from cupynet.parallel import ParameterAveraging
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import (
    Callback,
    Checkpoint,
    NonFinite,
    ParallelWrapper,
    Replica,
    Trainer,
    WeightAverage,
    graph_replica,
    parallel_wrapper,
)
from cupynet.training import loss_scaling as scaling
from cupynet.training.fit import Fit
from tests.support.device_runs import Seen, assert_same, train_on_device
from tests.support.training import WAYS, At, small_dataset, small_model, small_network

on_devices = pytest.mark.usefixtures("devices")  # on the stand-in, and on a GPU if there is one
on_standin = pytest.mark.standin
DATA = small_dataset(97)
IMAGE = Image(*DATA.images.shape[1:])


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call a function with replicas that launch each operation by itself."""

    def called(function: Any, *arguments: Any, **named: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(parallel_wrapper, "replica_of", Replica)
            return function(*arguments, **named)

    return called


@on_standin
@pytest.mark.parametrize("on_device", [True, False])
def test_later_fits_train_on_the_inputs_of_the_first(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step copies its labels and no images, also after evaluations with batches of the same size."""
    copies, load = list[int](), graph_replica.Inputs.load

    def counted(self: Any, batch: Any) -> int:
        size = load(self, batch)
        images, _, _ = self.of(size)
        copies.append(images.data.ptr != batch.images.data.ptr)
        return size

    monkeypatch.setattr(graph_replica.Inputs, "load", counted)
    with ParallelWrapper(small_model(backend="cupy"), 2, data_on_device=on_device, devices=[0]) as wrapper:
        for _ in range(2):
            wrapper.fit(Loader(DATA, 8, seed=1), 2, evaluate_on=Loader(DATA, 8, shuffle=False))
            wrapper.evaluate(DATA, 8)
    assert copies and not any(copies)


OPTIMIZERS = {
    "momentum, decayed": lambda: Momentum(0.05, 0.8, l2=0.01),
    "nesterov, clipped": lambda: Nesterov(0.05, max_grad_norm=0.5),
    "all limits": lambda: SGD(0.05, max_grad_norm=2.0, clip_layer_norm=0.5, clip_value=0.1, l1=0.001),
    "adam": lambda: Adam(OneCycle(0.01), l2=0.01),
    "adamw": lambda: AdamW(0.01, max_grad_norm=0.5),
    "nadam": lambda: Nadam(0.01, clip_value=0.1),
    "adagrad": lambda: AdaGrad(0.02, weight_decay=0.1),
    "lamb": lambda: LAMB(OneCycle(0.02), clip_layer_norm=0.5),
}


# Half adds a loss scale and weights of two precisions, so every second rule runs in half.
STEPS = list(zip(OPTIMIZERS, itertools.cycle(["half", "float", "half", "double"]), strict=False))


@on_devices
@pytest.mark.parametrize(("optimizer", "dtype"), STEPS)
def test_captured_steps_equal_single_launches(dtype: str, optimizer: str, plainly: Any) -> None:
    """Seven batches for two workers, the last one short: in the last round one worker has none."""
    found = train_on_device(dtype, optimizer=OPTIMIZERS[optimizer]())
    assert found["ahead"] and found["refused"] == ""
    assert_same(found, plainly(train_on_device, dtype, optimizer=OPTIMIZERS[optimizer]()))


@on_devices
@pytest.mark.parametrize(("dtype", "accumulate"), [("half", 8)])
def test_parts_of_a_batch_are_not_captured(dtype: str, accumulate: int, plainly: Any) -> None:
    found = train_on_device(dtype, accumulate=accumulate)
    assert not found["ahead"]
    assert_same(found, plainly(train_on_device, dtype, accumulate=accumulate))


LOSSES = {
    "smoothed": SoftmaxNLL(0.1, [0.5, 1.0, 2.0]),
    "huber": Huber(0.5),
}


@on_devices
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_read_the_loss_scale_on_the_device(loss: str, plainly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts far too large and so changes while steps run ahead. A mean of the weights is taken too."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)

    def model() -> Model:
        return Model(small_network(), Image(8, 8, 1), create_backend("cupy", "half"), 1, LOSSES[loss])

    options: dict[str, Any] = {"scale": 2.0**24, "optimizer": Adam(0.01)}
    found = train_on_device(network=model(), callbacks=[WeightAverage(0.9)], **options)
    assert found["ahead"] and found["skipped"] >= 1
    assert_same(found, plainly(train_on_device, network=model(), callbacks=[WeightAverage(0.9)], **options))


@on_devices
@pytest.mark.parametrize(
    ("way", "workers"),
    [
        *[(way, 3) for way in ("every 3", "half", "post-local", "diloco", "elastic", "threshold")],
        ("every 3", 1),
    ],
    ids=lambda value: str(value).replace("gradients", "sharing"),
)
def test_every_synchronizer_trains_with_captured_steps(way: str, workers: int, plainly: Any) -> None:
    """Eight batches for three workers, the last one short: in the last round one worker has none."""
    data = small_dataset(61)
    found = train_on_device("half", workers, synchronizer=WAYS[way], data=data)
    assert found["ahead"] == (way not in ("gradients", "threshold"))
    again = plainly(train_on_device, "half", workers, synchronizer=WAYS[way], data=data)
    assert_same(found, again, scores=workers > 1)


@on_devices
@pytest.mark.parametrize("way", ["every 3", "gradients"], ids=["averaging", "sharing"])
def test_the_loss_scale_is_found_on_the_device(way: str, plainly: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts far too large, so steps are skipped and it is halved; then it grows every fifth step."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    options: dict[str, Any] = {"scale": 2.0**24, "synchronizer": WAYS[way], "data": small_dataset(97)}
    found = train_on_device("half", **options)
    assert found["skipped"] >= 1 and found["scales"][-1] < 2.0**24
    assert any(later > earlier for earlier, later in itertools.pairwise(found["scales"])), "it grew in no epoch"
    assert_same(found, plainly(train_on_device, "half", **options))


@on_standin
def test_from_the_third_time_a_step_is_one_graph_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.standin.machine import active
    from tests.standin.streams import Graph

    launches: list[int] = []
    counted = Graph.launch
    monkeypatch.setattr(Graph, "launch", lambda *given: (launches.append(1), counted(*given))[1])
    found, machine = train_on_device(workers=1, data=small_dataset(40), epochs=4), active()
    assert len(launches) == 20 - 1 and found["updates"] == 20
    assert machine.launches["judge_float"] == 2  # the first, and when it is recorded
    assert machine.launches["nesterov_update_float"] == 3 * 2  # weights and biases; the warm-up too
    assert machine.launches["steer_double"] == 1  # the learning rate is constant


@on_devices
def test_time_waiting_for_the_device_counts_as_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted at a report or at the end of an epoch, when the host first waits."""
    read, slow = graph_replica.GraphReplica._read, 0.05

    def slowly(self: Any) -> Any:
        time.sleep(slow * len(self._launched))
        return read(self)

    monkeypatch.setattr(graph_replica.GraphReplica, "_read", slowly)
    with ParallelWrapper(small_model("float", "cupy"), 1, "epoch", report_every=0, timeout_s=60) as training:
        training.fit(Loader(small_dataset(64), 8, seed=3), 2)
        clock = training.trainer.statistics.clock
        assert clock.rounds_s > 16 * slow and clock.compute_s > 16 * slow and clock.rounds_s - clock.warm_s > 6 * slow


@on_standin
def test_capture_refuses_allocations() -> None:
    """CuPy would allow it, and the next launch would write to memory that has been freed."""
    import cupy

    backend = create_backend("cupy")
    backend.activate()
    recorder = backend.recorder()
    assert recorder is not None
    with pytest.raises(RuntimeError, match="12 bytes"):
        recorder.record(lambda: cupy.empty(3, np.float32))
    x = backend.allocate((3,), np.float32)
    x[...] = 1
    backend.relu(x)
    recorder.record(lambda: backend.relu(x))()
    backend.synchronize()
    backend.deactivate()


@on_standin
def test_training_in_the_callers_thread_restores_its_stream_and_device() -> None:
    import cupy

    before = cupy.cuda.get_current_stream().ptr, cupy.cuda.runtime.getDevice()
    for device in (0, 1):
        model = Model(small_network(), Image(8, 8, 1), create_backend("cupy", device=device), 1)
        with ParallelWrapper(model, 1, 3, devices=[device], timeout_s=60) as training:
            training.fit(Loader(DATA, 8, seed=3), 1)
            assert cupy.cuda.get_current_stream().ptr != before[0]
        assert (cupy.cuda.get_current_stream().ptr, cupy.cuda.runtime.getDevice()) == before
        assert np.isfinite(model.predict(DATA.images[:3])).all()


@on_devices
def test_a_callback_may_use_its_own_stream() -> None:
    """Its predictions are still ordered with the work of the worker's stream."""
    import cupy

    class Beside(Callback):
        def on_iteration_end(self, trainer: Any) -> None:
            with cupy.cuda.Stream(non_blocking=True):
                assert np.isfinite(trainer.model.predict(DATA.images[:3])).all()

    found = train_on_device("float", 2, callbacks=[Beside()])
    assert_same(found, train_on_device("float", 2))


def many_layers() -> Sequential:
    """All kinds of layers that LeNet lacks."""
    return Sequential(
        {
            "stem": Conv2D(4, 3, padding="same", activation="gelu"),
            "down": Residual(
                {
                    "deep": Conv2D(8, 3, 2, "same", "silu", groups=4),
                    "gaps": Conv2D(8, 3, padding="same", dilation=2, activation="leaky_relu"),
                    "parts": Conv2D(6, 1, groups=2, bias=False),
                },
                shortcut=Conv2D(6, 1, 2),
            ),
            "act": Activation("elu"),
            "mixed": Concat(
                {
                    "largest": [Conv2D(4, 3, padding=1, activation="tanh"), MaxPool2D(3, 3, 1)],
                    "mean": [AvgPool2D(3, 3, "same"), Activation("softplus")],
                }
            ),
            "mean": GlobalAvgPool2D(),
            "hidden": Dense(6, "sigmoid"),
            "output": Dense(3),
        }
    )


@on_devices
@pytest.mark.parametrize("dtype", ["half"])
def test_a_network_of_all_layers_is_captured(dtype: str, plainly: Any) -> None:
    def network() -> Model:
        return Model(many_layers(), IMAGE, create_backend("cupy", dtype), seed=1)

    data = small_dataset(29)
    found = train_on_device(dtype, 1, network=network(), data=data)
    assert found["ahead"]
    assert_same(found, plainly(train_on_device, dtype, 1, network=network(), data=data), scores=False)


def marked(samples: int, *which: int) -> Dataset:
    """Images of which only the chosen ones have a first pixel of 255."""
    data = small_dataset(samples)
    images = np.array(data.images)
    images[list(which), 0, 0, 0] = 255
    return Dataset("marked", images, data.labels, 3)


class Breaks(Layer):
    """Divides by 1 minus the first pixel, which is 0 for a marked image."""

    recordable = True

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        return input

    def forward(self, x: Any, context: Any) -> Any:
        backend, xp = self.backend, self.backend.xp
        y, rest = backend.borrow(x.shape), backend.borrow((len(x), 1, 1, 1))
        xp.subtract(1, x[:, :1, :1], out=rest)
        xp.divide(x, rest, out=y)

        def backward(dy: Any) -> Any:
            return None

        return y, backward if context.train else no_backward


def breaking(dtype: str = "float") -> Model:
    layers = {"breaks": Breaks(), "conv1": Conv2D(3, 3), "pool1": MaxPool2D(2), "output": Dense(3)}
    return Model(Sequential(layers), Image(8, 8, 1), create_backend("cupy", dtype), 1)


@on_devices
@pytest.mark.parametrize(("dtype", "workers", "frequency"), [("float", 1, "end"), ("half", 3, "end"), ("float", 3, 1)])
def test_a_loss_that_is_not_finite_is_reported_as_in_single_launches(
    dtype: str, workers: int, frequency: Any, plainly: Any
) -> None:
    """The message names the same worker, batch, sample and layer; the weights are those before that batch."""

    def failed() -> tuple[str, dict[str, Any]]:
        model = breaking(dtype)
        with (
            pytest.raises(DivergedError) as caught,
            ParallelWrapper(model, workers, frequency, optimizer=Nesterov(0.05), timeout_s=60) as training,
        ):
            training.fit(Loader(marked(97, 17), 8, seed=3), 2)
        return str(caught.value), model.weights()

    found, weights = failed()
    expected, others = plainly(failed)
    assert found == expected and "sample 17, first in the output of layer 'breaks'" in found
    assert all(np.isfinite(weight).all() for weight in weights.values())
    if workers == 1:
        for name, weight in others.items():
            np.testing.assert_array_equal(weights[name], weight)


class Explodes(Layer):
    """The identity with a derivative that is 1e76 times too large."""

    recordable = True

    def build(self, input: Any, params: Any, backend: Any) -> Any:
        return input

    def forward(self, x: Any, context: Any) -> Any:
        y = self.backend.borrow(x.shape)
        y[...] = x

        def backward(dy: Any) -> Any:
            dy *= 1e38
            dy *= 1e38
            return dy

        return y, backward if context.train else no_backward


@on_devices
def test_a_gradient_that_is_not_finite_names_its_batch() -> None:
    network = Sequential({"conv1": Conv2D(3, 3), "explodes": Explodes(), "output": Dense(3)})
    with pytest.raises(DivergedError, match="worker 0 at batch 0 of epoch 1"):
        train_on_device(network=Model(network, Image(8, 8, 1), create_backend("cupy"), 1), workers=1)


@on_devices
def test_a_failed_fit_leaves_no_steps_to_the_next() -> None:
    """Steps that ran ahead and were never checked do not count in the next fit."""

    def fail() -> None:
        raise InterruptedError

    backend = create_backend("cupy")
    backend.activate()
    replica = graph_replica.replica_of(Model(small_network(), Image(8, 8, 1), backend, 1), Nesterov(0.05))
    trainer = Trainer(replica, callbacks=[At(3, fail)], synchronizer=ParameterAveraging("end"), report_every=0)
    with pytest.raises(InterruptedError):
        trainer.fit(Fit(Loader(DATA, 8, seed=3), 1))
    before = trainer.statistics.clock.samples
    trainer.fit(Fit(Loader(DATA, 8, seed=3), 1))
    assert trainer.statistics.clock.samples - before == 97 - 3 * 8  # the epoch continues where it failed


@on_devices
def test_a_fit_in_another_thread_does_not_write_to_borrowed_buffers() -> None:
    """The graphs of the first fit write to buffers that this thread has borrowed since."""
    model = small_model("float", "cupy")
    with ParallelWrapper(model, 1, prefetch_buffer=0) as training:
        training.fit(Loader(DATA, 8, seed=3), 1)
        logits, _ = model.forward(model.backend.load_images(DATA.images, np.arange(8)), INFERENCE)
        before = np.array(model.backend.to_host(logits))
        other = threading.Thread(target=training.fit, args=(Loader(DATA, 8, seed=3), 1))
        other.start()
        other.join()
        assert training.trainer.epoch == 2
        np.testing.assert_array_equal(model.backend.to_host(logits), before)
        del logits


@on_devices
def test_skipping_batches_waits_for_each_step(plainly: Any) -> None:
    def guarded() -> dict[str, Any]:
        return train_on_device(network=breaking(), data=marked(97, 17), callbacks=[NonFinite("skip")])

    found = guarded()
    assert not found["ahead"]
    assert_same(found, plainly(guarded))


@on_devices
def test_a_layer_that_is_not_recordable_is_not_captured() -> None:
    class Own(Dense):
        """Does not say whether it is recordable."""

    network = Sequential({"own": Own(8), "output": Dense(3)})
    assert not train_on_device(network=Model(network, Image(8, 8, 1), create_backend("cupy"), 1), workers=1)["ahead"]


@on_standin
def test_a_step_that_cannot_be_captured_runs_uncaptured(plainly: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A layer claims to be recordable and reads a number on the host."""
    from tests.standin.errors import InCapture
    from tests.standin.machine import active

    class Reads(Breaks):
        recordable = True

        def forward(self, x: Any, context: Any) -> Any:
            assert float(x[0, 0, 0, 0]) < 1
            return super().forward(x, context)

    def network() -> Model:
        layers = {"reads": Reads(), "output": Dense(3)}
        return Model(Sequential(layers), Image(8, 8, 1), create_backend("cupy"), 1)

    found = train_on_device(network=network(), workers=1)
    assert found["ahead"] and [record.levelname for record in caplog.records] == ["WARNING"]
    machine = active()
    assert machine.misuses and all(isinstance(each, InCapture) for each in machine.misuses)
    machine.misuses.clear()
    assert_same(found, plainly(train_on_device, network=network(), workers=1), scores=False)


@on_devices
def test_a_checkpoint_includes_steps_that_ran_ahead(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken between two averages and two reports; a run resumed from it ends with the same bits."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)

    def wrapped(seen: Seen) -> ParallelWrapper:
        model = small_model("half", "cupy")
        model.backend.loss_scale = 2.0**22
        watching = [seen, Checkpoint(every_iterations=5, keep_last=100, path=tmp_path)]
        return ParallelWrapper(model, 2, 3, optimizer=Nesterov(0.05), callbacks=watching, report_every=4, timeout_s=60)

    seen, seen_again = Seen(), Seen()
    with wrapped(seen) as whole:
        whole.fit(Loader(DATA, 8, seed=3), 3)
        expected, skipped = whole.model.weights(), whole.trainer.statistics.skipped_steps
    assert skipped > 0
    with wrapped(seen_again) as again:
        again.restore(Checkpoints(tmp_path).path(10))
        assert again.trainer.iteration == 10
        again.fit(Loader(DATA, 8, seed=3), 3 - again.trainer.epoch)
        assert again.trainer.statistics.skipped_steps == skipped
        for name, weight in again.model.weights().items():
            np.testing.assert_array_equal(weight, expected[name])
    assert len(seen_again.epochs) == 2 and seen_again.epochs == seen.epochs[1:]


@on_devices
def test_a_second_fit_sees_weights_changed_in_between(plainly: Any) -> None:
    def twice() -> dict[str, Any]:
        model = small_model("half", "cupy")
        with ParallelWrapper(model, 2, 3, optimizer=Nesterov(0.05), timeout_s=60) as training:
            training.fit(Loader(DATA, 8, seed=3), 1)
            model.load_weights({name: weight * 0.5 for name, weight in model.weights().items()})
            training.fit(Loader(DATA, 8, seed=3), 1)
            return model.weights()

    expected = plainly(twice)
    for name, weight in twice().items():
        np.testing.assert_array_equal(weight, expected[name])


@on_standin
def test_no_kernel_or_handle_is_created_during_another_threads_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a library synchronizes the device, which invalidates a capture."""
    import cupy

    capturing, wrong = set(), []
    begin, end = cupy.cuda.Stream.begin_capture, cupy.cuda.Stream.end_capture

    def begun(stream: Any, *mode: Any) -> None:
        begin(stream, *mode)
        capturing.add(threading.get_ident())
        time.sleep(0.05)  # others come to their first steps meanwhile

    def ended(stream: Any) -> Any:
        capturing.discard(threading.get_ident())
        return end(stream)

    def alone(original: Any, what: str) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            if capturing - {threading.get_ident()}:
                wrong.append(what)
            return original(*arguments, **named)

        return called

    monkeypatch.setattr(cupy.cuda.Stream, "begin_capture", begun)
    monkeypatch.setattr(cupy.cuda.Stream, "end_capture", ended)
    monkeypatch.setattr(cublas.Library, "handle", alone(cublas.Library.handle, "a handle"))
    monkeypatch.setattr(cupy.RawModule, "get_function", alone(cupy.RawModule.get_function, "a kernel"))
    monkeypatch.setattr(
        graph_replica.GraphReplica, "_gradient", alone(graph_replica.GraphReplica._gradient, "a first step")
    )
    data = small_dataset(64)

    class Late(Callback):
        """Delays each worker more than the one before."""

        every_rank = True

        def on_fit_start(self, trainer: Any) -> None:
            time.sleep(0.03 * trainer.rank)

    with ParallelWrapper(small_model("float", "cupy"), 3, callbacks=[Late()], devices=[0], report_every=0) as wrapper:
        wrapper.fit(Loader(data, 4, shuffle=False), 1)
        assert all(replica.graphs.refused == "" for replica in [wrapper.trainer.replica])  # type: ignore[attr-defined]
    assert wrong == []


@on_standin
@pytest.mark.parametrize("what", ["a kernel", "a handle"])
def test_creating_a_kernel_or_handle_waits_for_a_capture(what: str) -> None:
    """Also in threads that take no steps, such as prefetchers."""
    backend, done = create_backend("cupy"), threading.Event()
    x, y = backend.asarray(np.ones((2, 2), np.float32)), backend.allocate((2, 2), np.float32)

    def work() -> None:
        if what == "a kernel":
            backend.relu(x)
        else:
            backend._gemm(x, x, y)
        done.set()

    thread = threading.Thread(target=work)
    with launch.first_use:
        thread.start()
        assert not done.wait(0.2)
    thread.join(20)
    assert done.is_set()
