"""What a run needs is known before it begins, about; what cannot fit is refused, and nothing that fits is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cupynet import experiment as experiment_module
from cupynet.backend import Shared, create_backend, cuda
from cupynet.data import Feeding, Loader, Synthetic
from cupynet.errors import ConfigError
from cupynet.experiment import Experiment
from cupynet.nn import Image, Model
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import DiLoCo, ElasticAveraging, GradientSharing, ParameterAveraging, Placement, Synchronizer
from cupynet.training import Checkpoint, ParallelWrapper, Replica, Trainer, WeightAverage, wrapper
from cupynet.training.memory import MARGIN, PROCESS, Demand, vectors_of, verdict
from tests.nn.networks import SMALL, examples, lenet, small_networks, train_step
from tests.test_conf_files import settings_of
from tests.training.conftest import small_dataset, small_model

NETWORKS = {**small_networks(), "wide lenet": lenet((8, 12), 40)}
NAMES = {"batch_size": "batch_size", "workers": "workers", "prefetch": "buffer", "train": "data.train", "layer": "l "}


@pytest.mark.parametrize("dtype", ["half", "float", "double"])
@pytest.mark.parametrize("backend", ["numpy", "numba"])
@pytest.mark.parametrize("name", NETWORKS)
def test_layers_know_what_they_borrow(name: str, backend: str, dtype: str) -> None:
    """The estimate of each is near what a step really takes, large enough a batch that weights do not count."""
    count, image, classes = (64, Image(28, 28, 1), 10) if name == "wide lenet" else (64, SMALL, 3)
    made = create_backend(backend, dtype)
    model = Model(NETWORKS[name], image, made, 1)
    x, labels = examples(made, count, image, classes)
    train_step(model, x, labels)
    small = train_bytes(NETWORKS[name], image, backend, dtype, 1, classes)
    taken = (made.workspace.allocated_bytes - small) / (count - 1)
    assert taken / 1.6 < model.network.buffers() < 1.6 * taken


def train_bytes(network: Any, image: Image, backend: str, dtype: str, count: int, classes: int) -> int:
    made = create_backend(backend, dtype)
    train_step(Model(network, image, made, 1), *examples(made, count, image, classes))
    return made.workspace.allocated_bytes


def demand(**changes: Any) -> Demand:
    model = small_model("float")
    given = {"network": model.network, "weights": model.params.count, "policy": model.backend.policy, "vectors": 1}
    return Demand(**{**given, "batch_size": 100, **changes})


def test_what_grows_with_what() -> None:
    one, parts = demand(workers=2, prefetch=4, trained=10**6, images={"train": 1000}), ("activations", "batches ahead")
    for part in parts:
        assert replace(one, batch_size=200).parts()[part] == 2 * one.parts()[part]
    assert replace(one, workers=4).parts()["activations"] == 2 * one.parts()["activations"]
    assert replace(one, workers=4).parts()["weights"] == 2 * one.parts()["weights"]
    assert replace(one, prefetch=8).parts()["batches ahead"] == 2 * one.parts()["batches ahead"]
    assert replace(one, trained=300, prefetch=10**5).parts()["batches ahead"] == 3 * 100 * (64 * 4 + 16)
    assert one.parts()["images"] == 1000 * (64 + 8) and one.parts()["the program"] == PROCESS
    assert replace(one, where="device").total() + replace(one, where="host").total() == one.total()
    assert replace(one, stages=2, micro_batches=8).parts()["activations"] < one.parts()["activations"]


def test_vectors_beside_the_weights() -> None:
    alone = Synchronizer()
    assert (vectors_of(SGD(0.1), alone, [], 1), vectors_of(Nesterov(0.1), alone, [], 1)) == (0, 1)
    callbacks = [WeightAverage(), Checkpoint(), WeightAverage(decay=None)]
    assert vectors_of(Nesterov(0.1), ElasticAveraging(3), callbacks, 4) == 1 + 2 + 2
    for synchronizer in (Synchronizer(), ParameterAveraging(3), ElasticAveraging(3), GradientSharing()):
        assert synchronizer.vectors(1) == 0
    exact = ParameterAveraging(3, measure_every=0)
    assert (exact.vectors(4), ParameterAveraging(3, measure_every=0, wire="half").vectors(4)) == (0, 2)
    assert (ParameterAveraging(3, outer=DiLoCo()).vectors(4), ElasticAveraging(3).vectors(4)) == (3, 2)
    assert (GradientSharing().vectors(4), GradientSharing(encoding="threshold").vectors(4)) == (0, 3)


def test_a_mean_of_weights_takes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = small_model("float"), []
    trainer = Trainer(Replica(model, SGD(0.1)))
    made = model.backend.allocate

    def allocate(shape: Any, dtype: Any) -> Any:
        taken.append(made(shape, dtype))
        return taken[-1]

    monkeypatch.setattr(model.backend, "allocate", allocate)
    average = WeightAverage()
    average.start(trainer, None)
    assert sum(each.nbytes for each in taken) == average.vectors * model.params.master.nbytes


def test_callbacks_of_the_settings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for more in ((), ("callbacks=weight_average",)):
        one = Experiment(settings_of("data=synthetic", "workers=2", "backend=numpy", *more))
        asked += [demand for demand, _ in one._demands()]
    assert asked[1].vectors == asked[0].vectors + 1 and asked[1].total() > asked[0].total() + 2 * 4 * asked[0].weights
    found = []

    def noted(demand: Demand, *others: Any) -> Any:
        found.append(demand)
        return verdict(demand, *others)

    monkeypatch.setattr(wrapper, "verdict", noted)
    with ParallelWrapper(small_model(), 1, 1, callbacks=[WeightAverage()]) as training:
        training.fit(small_dataset(12))
    assert found[0].vectors == 2  # and the momentum


@pytest.mark.standin
def test_what_products_are_made_in_is_counted() -> None:
    """Each backend gives cuBLAS its own."""
    import cupy

    pool = cupy.get_default_memory_pool()
    asked = demand(workers=3, stages=1, products=cuda.product_bytes([0, 1]), where="device")
    backends = [create_backend("cupy", "float") for _ in range(3)]
    for backend in backends:
        backend.activate()
        factor = backend.asarray(np.ones((2, 2), np.float32))
        backend.dense(factor, factor, None)
    assert pool.used_bytes() == pytest.approx(asked.parts()["products"], rel=0.01)
    assert replace(asked, workers=2, stages=2, micro_batches=2).parts()["products"] == 4 * asked.products
    assert replace(asked, devices=3).parts()["products"] == asked.products
    assert "products" not in demand().parts() and "products" not in replace(asked, where="host").parts()


def test_what_fits_is_not_refused_and_what_may_not_is_told() -> None:
    asked = demand(batch_size=10**6)
    total = asked.total()
    assert verdict(asked, total, "here is", NAMES).text == ""
    tight = verdict(asked, int(total / MARGIN) + 1, "here is", NAMES)
    assert not tight.refused and tight.text.endswith("it may be killed for that")
    assert verdict(asked, int(total / MARGIN) - 1, "here is", NAMES).refused


@pytest.mark.parametrize(
    ("changes", "said", "knob"),
    [
        ({"batch_size": 10**9}, "batch_size=1000000000: needs about ", "batch_size"),
        ({"workers": 10**5}, "workers=100000: needs about ", "workers"),
        ({"prefetch": 10**6, "trained": 10**9}, "buffer=1000000: needs about ", "prefetch"),
        ({"images": {"train": 10**9, "test": 5}}, "data.train=1000000000: needs about ", "train"),
        ({"batch_size": 10**9, "workers": 8}, "batch_size=1000000000: needs about ", "batch_size"),
    ],
)
def test_the_setting_that_weighs_most_is_named_with_one_that_fits(changes: Any, said: str, knob: str) -> None:
    asked, there = demand(**changes), 2 * 10**9
    found = verdict(asked, there, "this machine has", NAMES)
    assert found.refused and found.text.startswith(said) and "and this machine has 2.0 GB: lower it, to " in found.text
    fits = int(found.text.split("lower it, to ")[1].split()[0])
    lower = {"images": {**asked.images, "train": fits}} if knob == "train" else {knob: fits}
    assert replace(asked, **lower).total() <= there < replace(asked, **lower).total() * 1.2


def test_a_network_that_is_too_large_by_itself_is_named_by_its_layer() -> None:
    for layer, override in (("conv1", "filters=1000000"), ("conv1", "padding=100000"), ("dense1", "units=100000000")):
        one = Experiment(settings_of("data=synthetic", "workers=2", f"model.layers.{layer}.{override}"))
        number = override.split("=")[1]
        with pytest.raises(
            ConfigError, match=rf"^model.layers.{layer} \(.*{number}.*\): needs about .*: make it small"
        ):
            one.check_memory()


def test_the_settings_are_named_as_on_the_command_line() -> None:
    for setting in (
        "batch_size=1000000000",
        "data.train=1000000000",
        "data.test=1000000000",
        "batch_size=1" + "0" * 18,
    ):
        one = Experiment(settings_of("data=synthetic", "workers=1", setting))
        with pytest.raises(ConfigError, match=f"^{setting}: needs about .* this (machine has|process may use)"):
            one.check_memory()


def test_devices_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Experiment(settings_of("data=synthetic", "workers=4", "backend=numpy", "batch_size=100000"))
    one.placement = Placement(4, (0, 1))
    monkeypatch.setattr(cuda, "product_bytes", lambda devices: 1 << 25)
    monkeypatch.setattr(cuda, "memory", lambda devices: 10**9)
    with pytest.raises(ConfigError, match=r"^batch_size=100000: needs about .* the device has 1.0 GB: lower it, to "):
        one.check_memory()
    monkeypatch.setattr(cuda, "memory", lambda devices: 10**12)
    monkeypatch.setattr(experiment_module, "memory", lambda: (10**9, "this machine has"))
    one.check_memory()  # what lies on the devices does not count here


@pytest.mark.standin
@pytest.mark.parametrize("feeds", ["resident", "ring"])
def test_what_batches_take_of_a_device_is_counted(feeds: Any) -> None:
    """Those of a training and of its evaluation, which are both open then."""
    import cupy

    backend, shared = create_backend("cupy", "half"), Shared()
    backend.activate()
    train, test = small_dataset(2000), small_dataset(500)
    opened = [
        Feeding(Loader(data, 100), backend, ahead=6, on_device=feeds == "resident", shared=shared)
        for data in (train, test)
    ]
    pool = cupy.get_default_memory_pool()
    asked = demand(prefetch=6, trained=2000, images={"train": 2000, "test": 500}, feeds=feeds, where="device")
    asked = replace(asked, policy=backend.policy)
    parts = asked.parts()
    counted = parts["batches ahead"] + parts.get("images that stay", 0)
    assert pool.used_bytes() == pytest.approx(counted, rel=0.1)
    if feeds == "resident":
        assert replace(asked, devices=2).parts()["images that stay"] > 2000 * 64  # each has them all
        assert "batches on their way" not in replace(asked, where="host").parts()
    else:
        pinned = replace(asked, where="host").parts()["batches on their way"]
        assert pinned == 2 * 2 * 8192  # 6400 bytes, rounded to a power of two
    for feeding in opened:
        feeding.close()


@pytest.mark.parametrize(
    ("setting", "memory", "feeds"),
    [("auto", 10**9, "resident"), ("auto", 10**6, "ring"), ("true", 10**6, "resident"), ("false", 10**9, "ring")],
)
def test_data_that_stay_on_devices_are_counted_there(
    setting: str, memory: int, feeds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """784 kB of images."""
    settings = settings_of("data=synthetic", "workers=4", "backend=numpy", "data.train=900", "data.test=100")
    one = Experiment(settings)
    kept = settings_of(f"memory.data_on_device={setting}").memory  # which a CPU has not
    one.settings = replace(settings, memory=kept)
    one.placement = Placement(4, (0, 1))
    monkeypatch.setattr(cuda, "memory", lambda devices: memory)
    monkeypatch.setattr(cuda, "product_bytes", lambda devices: 1 << 25)
    asked = [demand for demand, _ in one._demands()]
    assert (asked[0].products, asked[1].products) == (1 << 25, 0)
    assert {each.feeds for each in asked} == {feeds} and asked[0].where == "device"
    stays = asked[0].parts().get("images that stay")
    assert (stays is None) == (feeds == "ring") and (stays is None or stays > 784_000)


def test_every_rank_hears_the_refusal_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        machines, rank = ("n01", "n02"), 0

        def first_word(self, text: str) -> str:
            assert text == ""
            return "batch_size=5: told by another"

    one = Experiment(settings_of("data=synthetic", "workers=2"))
    one.job = Job()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="^batch_size=5: told by another$"):
        one.check_memory()


def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment_module, "memory", lambda: None)
    Experiment(settings_of("data=synthetic", "workers=1", "batch_size=1000000000")).check_memory()


def test_a_fit_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapper, "memory", lambda: (PROCESS // 2, "this machine has"))
    with (
        ParallelWrapper(small_model(), 1, 1) as one,
        pytest.raises(ConfigError, match=r"^layer .* needs about 170.* of memory, 170 MB of it for the program"),
    ):
        one.fit(small_dataset(12), batch_size=10**9)
    monkeypatch.undo()
    with ParallelWrapper(small_model(), 1, 1) as one:
        one.fit(small_dataset(12), batch_size=10**9)  # no batch is larger than the data


def test_sources_know_what_they_load() -> None:
    for validation in (0, 30):
        source = Synthetic(train=100, test=50, limit=40, validation=validation)
        data = source.load()
        held = len(data.train) + (0 if data.validation is None else len(data.validation))
        assert source.expected() == {"train": 100 if validation else held, "test": len(data.test)}
