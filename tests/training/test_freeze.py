"""Frozen weights stay as they are, bit for bit, in every way of training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from cupynet import LAMB, AdamW, Nesterov, ParallelWrapper, Pipeline, load
from cupynet.optim import Optimizer
from cupynet.parallel import ElasticAveraging, GradientSharing, ParameterAveraging, Synchronizer
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


@pytest.mark.parametrize("dtype", ["float", "half"])
@pytest.mark.parametrize("optimizer", [Nesterov(0.1, l2=0.1), AdamW(0.1, weight_decay=0.1), LAMB(0.1)], ids=repr)
def test_frozen_layers_do_not_change_and_others_do(optimizer: Optimizer, dtype: str) -> None:
    model = small_model(dtype)
    model.freeze("conv*", "dense1.bias")
    before = model.weights()
    with ParallelWrapper(model, 2, optimizer=optimizer) as wrapper:
        wrapper.fit(small_dataset(40), epochs=2, batch_size=4)
    after = model.weights()
    for name, weight in before.items():
        frozen = name.startswith("conv1") or name == "dense1.bias"
        assert np.array_equal(after[name], weight) == frozen, name


@pytest.mark.parametrize(
    ("synchronizer", "options"),
    [
        (GradientSharing(), {}),
        (ParameterAveraging(3, transfer_dtype="half", outer_optimizer="diloco"), {}),
        (ParameterAveraging(1), {"pipeline": Pipeline(2)}),
        (ParameterAveraging(1), {"accumulation_steps": 2}),
        (ElasticAveraging(2), {}),
    ],
)
def test_all_ways_of_training_respect_it(synchronizer: Synchronizer, options: dict[str, Any]) -> None:
    model = small_model()
    model.freeze("conv1")
    before = model.weights()
    with ParallelWrapper(model, 3, synchronizer=synchronizer, **options) as wrapper:
        wrapper.fit(small_dataset(40), epochs=6, batch_size=4)
    after = model.weights()
    assert [name for name in before if np.array_equal(before[name], after[name])] == ["conv1.weight", "conv1.bias"]


def test_the_gradient_norm_is_that_of_the_trained_weights() -> None:
    model = small_model()
    model.freeze("conv1", "dense1")
    with ParallelWrapper(model, 1, optimizer=Nesterov(0.1)) as wrapper:
        wrapper.fit(small_dataset(4), batch_size=4)
        assert {name for name, _ in model.params.named()} > set(model.params.frozen)
        frozen = [view for name, view in model.params.views(model.params.grad) if name in model.params.frozen]
    assert not any(view.any() for view in frozen)


def test_frozen_weights_stay_frozen_in_copies_and_files(tmp_path: Any) -> None:
    model = small_model()
    model.freeze("conv1.weight")
    model.save(tmp_path / "model.safetensors")
    for other in (copy.deepcopy(model), load(tmp_path / "model.safetensors", "numpy"), model.replicate(model.backend)):
        assert other.params.frozen == ("conv1.weight",)
    model.unfreeze()
    assert model.params.frozen == ()
    assert [each.part for each in model.params.segments] == [each.part for each in small_model().params.segments]


def test_a_pattern_without_a_weight_is_refused() -> None:
    with refused(""):
        small_model().freeze("con")


def test_weights_are_frozen_before_a_wrapper_is_made() -> None:
    model = small_model()
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(small_dataset(8), batch_size=4)
        model.freeze("conv1")
        with refused(""):
            wrapper.fit(small_dataset(8), batch_size=4)
        model.unfreeze()
        wrapper.fit(small_dataset(8), batch_size=4)
