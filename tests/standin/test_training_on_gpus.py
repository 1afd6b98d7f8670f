"""Training on several GPUs, or on devices of the stand-in for CuPy, compared with training on the CPU."""

import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import nn
from cupynet.backend import create_backend
from cupynet.backend.cuda.gpus import pool
from cupynet.backend.cuda.transfer import Resident
from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.parallel import Pipeline
from cupynet.training import ParallelWrapper
from tests.standin.machine import active
from tests.support import warm
from tests.support.backends import on_devices
from tests.support.calls import watch
from tests.support.commands import ROOT, SMALL, environment
from tests.support.training import assert_close, on_threads, stripes, stripes_network

TRAINED_ON, HELD_OUT = 134, 20  # images: nine batches, the last one short, and two batches
Weights = dict[str, Any]


def trained(name: str, dtype: str, workers: int, devices: Any = None, reduce: str = "auto", **options: Any) -> Weights:
    model = nn.Model(stripes_network(), nn.Image(8, 8, 1), create_backend(name, dtype), seed=3)
    settings = {"averaging_frequency": 3, "prefetch_buffer": 2, "devices": devices, "reduce": reduce, "timeout_s": 60}
    with ParallelWrapper(model, workers=workers, optimizer=Nesterov(0.02), **settings | options) as wrapper:
        held_out = stripes(HELD_OUT)
        wrapper.fit(Loader(stripes(TRAINED_ON), 16, seed=1), epochs=2, evaluate_on=held_out)
        in_training = wrapper.trainer.evaluation
        assert in_training is not None
        assert wrapper.evaluate(held_out, batch_size=16).loss == pytest.approx(in_training.loss, rel=1e-3)
    return model.weights()


@pytest.mark.parametrize(
    ("reduce", "workers", "devices"),
    [
        *on_devices(("nccl", 4, [0, 1]), ("device", 4, [0, 1]), ("device", 3, [0, 1]), ("host", 3, [0, 1]), count=2),
        *on_devices(("nccl", 2, [0]), ("device", 2, [0]), ("host", 1, [0])),
    ],
)
def test_workers_on_gpus_train_the_weights_of_workers_on_the_cpu_with_every_reduce(
    reduce: str, workers: int, devices: Any
) -> None:
    """All operations are ordered, and nothing is allocated or loaded while one device waits for another."""
    assert_close(trained("cupy", "double", workers, devices, reduce), trained("numpy", "double", workers))


@pytest.mark.parametrize(
    ("reduce", "stages", "devices"),
    on_devices(("auto", 2, [0, 1]), ("device", 3, [0, 1]), ("host", 2, [0, 1]), count=2),
)
def test_pipeline_stages_on_gpus_train_the_weights_of_stages_on_the_cpu_without_nccl(
    reduce: str, stages: int, devices: Any
) -> None:
    """Each stage averages at its own time while the others allocate, and allocations wait for collectives."""
    pipeline = Pipeline(stages=stages)
    found = trained("cupy", "double", 2, devices, reduce, pipeline=pipeline)
    assert_close(found, trained("numpy", "double", 2, pipeline=pipeline))


@pytest.mark.standin
@pytest.mark.parametrize("workers", [2, 4])
def test_a_mean_between_gpus_begins_after_all_workers_have_fetched_the_last_one(workers: int) -> None:
    """The host reads nothing in between, so only the streams order the operations."""

    def task(communicator: Any) -> Any:
        own = create_backend("cupy", "double", communicator.rank % 2)
        own.activate()
        communicator.attach(own, "device")
        array = own.asarray(np.full(1000, float(communicator.rank)))
        for _ in range(3):
            communicator.allreduce_mean([array], 1)
        return np.array(own.to_host(array))

    for found in on_threads(workers, task):
        np.testing.assert_array_equal(found, np.full(1000, (workers - 1) / 2))


def mixed_network() -> nn.Sequential:
    branches = nn.Concat([[nn.Conv2D(4, 3, groups=2)], [nn.Conv2D(2, 3), nn.Activation("relu")]])
    return nn.Sequential(
        [nn.Conv2D(4, 3), nn.BatchNorm(), nn.Residual([nn.Conv2D(4, 3, padding="same")]), branches, nn.Dense(3)]
    )


@pytest.mark.usefixtures("devices")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_model_trained_on_a_gpu_predicts_in_the_thread_of_the_caller(workers: int) -> None:
    """Predictions run on the stream of the worker that trained it, during and after the workers' lifetime."""
    backend, some, found = create_backend("cupy", "double"), stripes(20).images, []
    model = nn.Model(mixed_network(), nn.Image(8, 8, 1), backend, seed=3)
    with ParallelWrapper(model, workers, devices=[0], optimizer=Nesterov(0.02), timeout_s=60) as wrapper:
        wrapper.fit(Loader(stripes(64), 16, seed=1), epochs=1)
        found.append(model.predict(some))
    found.append(model.predict(some))
    expected = model.replicate(create_backend("numpy", "double")).predict(some)
    for scores in found:
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", on_devices(nn.SoftmaxNLL(), nn.BinaryCrossEntropy(), count=2))
def test_a_model_predicts_on_a_gpu_that_is_not_the_first(loss: nn.Loss) -> None:
    backends = create_backend("cupy", "double", 1), create_backend("numpy", "double")
    models = [nn.Model(mixed_network(), nn.Image(8, 8, 1), backend, seed=3, loss=loss) for backend in backends]
    found, expected = (model.predict(stripes(20).images) for model in models)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.standin
def test_other_threads_wait_while_a_graph_is_captured() -> None:
    """Operations and synchronizations of another thread are not captured, and do not end the capture."""
    backend = create_backend("cupy", "double")
    backend.activate()
    recorder, vector, seen = backend.recorder(), backend.asarray(np.arange(3.0)), []
    assert recorder is not None

    def look() -> None:
        backend.synchronize()
        seen.append(backend.to_host(vector).tolist())

    def step() -> None:
        other.start()
        time.sleep(0.05)
        backend.weighted_sum(vector, [vector], [2.0])

    other = threading.Thread(target=look)
    backend.weighted_sum(vector, [vector], [1.0])
    launch = recorder.record(step)
    other.join()
    launch()
    assert seen == [[0.0, 1.0, 2.0]] and backend.to_host(vector).tolist() == [0.0, 2.0, 4.0]
    backend.deactivate()


WAYS = ({"data_on_device": True}, {"data_on_device": False}, {"data_on_device": False, "prefetch_buffer": 0})


@pytest.mark.standin
@pytest.mark.parametrize(("workers", "devices"), [(2, [0]), (4, [0, 1])])
def test_prefetching_and_data_on_device_do_not_change_the_weights_of_workers_on_gpus(
    workers: int, devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploaded images are shared by a device's workers, and nothing is left on the device."""
    uploads, weights = list[int](), list[Weights]()
    watch(monkeypatch, Resident, "__init__", lambda _, resident, *given: uploads.append(len(given[2])))
    for way in WAYS:
        weights.append(trained("cupy", "float", workers, devices, "device", **way))
        gc.collect()
        assert [pool(device).used for device in (0, 1)] == [0, 0] and active().pinned.used == {}
        assert_close(weights[-1], weights[0], tolerance=0)
    # evaluated in both epochs and afterwards
    assert sorted(uploads) == sorted([TRAINED_ON] * len(devices) + [HELD_OUT] * 2 * len(devices))


# commands -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["parallel=gradients", "dtype=half", "memory.data_on_device=false"]])
def test_cupynet_train_runs_on_two_gpus_and_reports_the_memory_of_each(arguments: list[str], tmp_path: Path) -> None:
    line = ["-m", "cupynet", "train", "data=synthetic", "data.train=96", "data.test=32", "batch_size=32", "epochs=1"]
    line += ["backend=cupy", "workers=2", "memory.device_pool_limit=800MiB", "memory.device_pool_trim_above=1"]
    line += [*SMALL, *arguments, f"hydra.run.dir={tmp_path / 'run'}"]
    done = warm.command("tests.standin", line, ROOT, environment(), 300)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["devices"] == [each["device"] for each in summary["memory"]] == ["cuda:0", "cuda:1"]
    for number, each in enumerate(summary["memory"]):
        assert (each["rank"], each["limit_bytes"]) == (number, 800 << 20)
        assert 4 * summary["parameters"] < each["used_bytes"] <= each["held_bytes"] < 800 << 20
