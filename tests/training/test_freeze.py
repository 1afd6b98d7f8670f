"""Learning-rate factors of layers. Frozen weights stay the same, bit for bit, in every way of training."""

import copy
from typing import Any

import numpy as np
import pytest

from cupynet import Activation, BatchNorm, Conv2D, Dense, MaxPool2D, Model, ParallelWrapper, Pipeline, Sequential, load
from cupynet.nn import Backward, Context, Layer, SoftmaxNLL
from cupynet.optim import LAMB, SGD, AdamW, Nesterov, Optimizer
from cupynet.optim.named import KINDS
from cupynet.parallel import ElasticAveraging, GradientSharing, ParameterAveraging
from tests.support.device_runs import Run, train_on_device
from tests.support.refusals import refused
from tests.support.trainers import fitted
from tests.support.training import Identity, assert_close, on_backends, small_dataset, small_model

WAYS: dict[str, dict[str, Any]] = {
    "l2": {"optimizer": Nesterov(0.1, l2=0.1)},
    "decay": {"optimizer": AdamW(0.1, weight_decay=0.1)},
    "lamb": {"optimizer": LAMB(0.1)},
    "sharing": {"synchronizer": GradientSharing()},
    "diloco": {"synchronizer": ParameterAveraging(3, transfer_dtype="half", outer_optimizer="diloco")},
    "elastic": {"synchronizer": ElasticAveraging(2)},
    "pipeline": {"averaging_frequency": 1, "pipeline": Pipeline(2)},
    "parts": {"averaging_frequency": 1, "accumulation_steps": 2},
}


@pytest.mark.parametrize("dtype", ["double", "half"])
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_frozen_weights_do_not_change_and_have_no_gradient(options: dict[str, Any], dtype: str) -> None:
    """Only trained weights count in the norm of the gradient."""
    model = small_model(dtype)
    model.freeze("conv*", "dense1.bias")
    before = model.weights()
    after = fitted(model, small_dataset(40), 3, epochs=6, batch_size=4, **options).weights()
    frozen = [name for name in before if np.array_equal(before[name], after[name])]
    assert frozen == ["conv1.weight", "conv1.bias", "dense1.bias"]
    gradients = dict(model.params.views(model.params.grad))
    assert not any(gradients[name].any() for name in frozen)


@on_backends("numpy", "numba", "cupy")
@pytest.mark.parametrize("activation", ["relu", "tanh"])  # a ReLU is fused
def test_a_frozen_batch_norm_uses_its_running_statistics_and_keeps_them(backend: str, activation: str) -> None:
    data = small_dataset(24)
    layers = [Dense(4), BatchNorm(), Activation(activation), Dense(3)]
    model = Model(layers, (8, 8, 1), backend, 5, dtype="float" if backend == "cupy" else "double")
    fitted(model, data, epochs=3, batch_size=8, optimizer=SGD(0.5))
    model.freeze("batchnorm1")
    before, name, step = model.weights(), "dense1.bias", np.array([0, 1e-2, 0, 0])
    with ParallelWrapper(model, 1, optimizer=SGD(1e-2)) as wrapper:
        losses = []
        for moved in (step, -step, 0):
            model.load_weights({**before, name: before[name] + moved})
            losses.append(wrapper.evaluate(data).loss)
        wrapper.fit(data, batch_size=24)
    after = model.weights()
    assert (before[name] - after[name])[1] == pytest.approx((losses[0] - losses[1]) / 2, rel=0.02)
    trained = [each for each in before if not np.array_equal(before[each], after[each])]
    assert trained == ["dense1.weight", "dense1.bias", "dense2.weight", "dense2.bias"]


def test_frozen_weights_stay_frozen_in_copies_and_files(tmp_path: Any) -> None:
    model = small_model()
    model.set_learning_rate_factors({"*": 0.5, "conv1.weight": 0, "conv1.bias": 1, "output": 1})
    model.save(tmp_path / "model.safetensors")
    for other in (copy.deepcopy(model), load(tmp_path / "model.safetensors", "numpy"), model.replicate(model.backend)):
        assert other.params.rates == {"conv1.weight": 0.0, "dense1.weight": 0.5, "dense1.bias": 0.5}
    model.unfreeze("conv1")
    assert {*model.params.rates} == {"dense1.weight", "dense1.bias"}
    model.unfreeze()
    assert not model.params.rates
    assert [each.part for each in model.params.segments] == [each.part for each in small_model().params.segments]


def test_bad_patterns_of_freeze_and_bad_learning_rate_factors_are_refused() -> None:
    with refused(""):
        small_model().freeze("con")
    with refused("factors['conv1']"):
        small_model().set_learning_rate_factors({"conv1": -1})
    with refused("factors"):
        small_model().set_learning_rate_factors(["conv1"])  # type: ignore[arg-type]


def test_a_network_without_trainable_weights_is_not_trained() -> None:
    model, data = small_model(), small_dataset(8)
    model.freeze("*")
    with ParallelWrapper(model, 1) as wrapper:
        assert wrapper.evaluate(data).samples == 8
        with refused(""):
            wrapper.fit(data)
    model.unfreeze("output")
    fitted(model, data)


@pytest.mark.parametrize("kind", KINDS)
def test_learning_rate_factors_scale_the_steps_of_their_layers_and_the_last_match_applies(
    kind: type[Optimizer],
) -> None:
    def moved(factors: dict[str, float]) -> dict[str, Any]:
        model = small_model()
        model.set_learning_rate_factors(factors)
        before = model.weights()
        fitted(model, small_dataset(8), batch_size=8, optimizer=kind(0.1, max_grad_norm=0.5))
        return {name: after - before[name] for name, after in model.weights().items()}

    plain = moved({})
    for name, step in moved({"conv*": 0.25, "conv1.bias": 3, "dense1.weight": 2}).items():
        factor = {"conv1.weight": 0.25, "conv1.bias": 3, "dense1.weight": 2}.get(name, 1)
        np.testing.assert_allclose(step, factor * plain[name], rtol=1e-10, err_msg=name)


@pytest.mark.parametrize("factors", [{"conv1": 0}, {"conv1": 0.25, "output": 0}, {"conv1": 0, "dense1": 0}], ids=str)
@pytest.mark.standin
def test_captured_steps_use_the_learning_rate_factors(factors: dict[str, float]) -> None:
    def trained(backend: str) -> Run:
        model = small_model("double", backend)
        model.set_learning_rate_factors(factors)
        return train_on_device(network=model, optimizer=LAMB(0.02))

    found = trained("cupy")
    assert found["ahead"] and not found["refused"]
    assert_close(found["weights"], trained("numpy")["weights"], 1e-9)


class NotDifferentiated(Identity):
    def forward(self, x: Any, context: Context) -> tuple[Any, Backward]:
        return x, lambda dy: pytest.fail("its derivative is not needed")


def test_nothing_below_the_first_trained_layer_is_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(*layers: Layer) -> Any:
        network = [Conv2D(4, 3), MaxPool2D(2), *layers, Sequential([Dense(6, "relu")]), Dense(3)]
        model = Model(network, (8, 8, 1), "numba")
        model.freeze("conv2d1")
        optimizer = Nesterov(0.1, max_grad_norm=0.1)
        return fitted(model, small_dataset(16), 2, epochs=2, batch_size=4, optimizer=optimizer).params.master

    found = trained(NotDifferentiated())
    monkeypatch.setattr(Sequential, "train_only", lambda self, names: None)
    assert np.array_equal(found, trained())


def test_freezing_weights_or_changing_the_loss_requires_a_new_wrapper() -> None:
    model = small_model()
    model.loss = loss = SoftmaxNLL()
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(small_dataset(8), batch_size=4)
        model.freeze("conv1")
        with refused(""):
            wrapper.fit(small_dataset(8), batch_size=4)
        model.unfreeze()
        model.loss = SoftmaxNLL(0.1)  # other replicas would keep theirs
        with refused(""):
            wrapper.fit(small_dataset(8), batch_size=4)
        model.loss, loss.label_smoothing = loss, 0.1
        with refused("loss.label_smoothing"):
            wrapper.fit(small_dataset(8), batch_size=4)
        loss.label_smoothing = 0.0
        wrapper.fit(small_dataset(8), batch_size=4)
