"""Threshold encoding: messages and residuals add up to the updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.backend import create_backend
from cupynet.data import Loader
from cupynet.nn import Dense, Image, Model, Sequential
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import AdaptiveThreshold, FixedThreshold, GradientSharing, TargetSparsity, ThresholdEncoding
from cupynet.parallel.synchronizers.threshold import Message, Threshold, encoding
from cupynet.training import ParallelWrapper
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


def started(algorithm: Any = None, *, count: int = 100, dtype: Any = np.float32, every: int = 0) -> ThresholdEncoding:
    found = ThresholdEncoding(algorithm, clip_residual_every=every)
    found.start(count, count, dtype)
    return found


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    count=st.integers(1, 200),
    large=st.floats(0, 1),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_messages_and_residuals_add_up_to_the_updates(count: int, large: float, seed: int, dtype: Any) -> None:
    """For sparse and dense messages. The numbers are sums of eighths, so all sums are exact."""
    rng = np.random.default_rng(seed)
    encoder, weights = started(FixedThreshold(0.5), count=count, dtype=dtype), np.zeros(count, dtype)
    total = np.zeros(count, dtype)
    for _ in range(4):
        update = (rng.integers(-8, 9, count) * (rng.random(count) < large) / 8).astype(dtype)
        total += update
        vector = encoder.encode(update, 7).vector()
        assert vector.dtype == np.int32
        message = Message.of(vector)
        assert (message.samples, message.finite, message.threshold) == (7, True, 0.5)
        message.add_to(weights, 1.0)
    np.testing.assert_array_equal(weights + encoder.residual, total)


def test_only_values_above_the_threshold_are_sent() -> None:
    encoder = started(FixedThreshold(0.25), count=64)
    update = np.zeros(64, np.float32)
    update[[3, 5, 60]] = [0.25, -0.5, 0.2]
    message = encoder.encode(update, 1)
    assert message.body.tolist() == [4, -6]
    assert (encoder.residual[3], encoder.residual[5], encoder.residual[60]) == (0, -0.25, np.float32(0.2))
    again = encoder.encode(update, 1)
    assert again.body.tolist() == [4, -6, 61]  # what waited has added up


def test_a_worker_without_a_batch_sends_nothing_and_keeps_its_residual() -> None:
    encoder = started(AdaptiveThreshold(0.5))
    encoder.residual[:] = 9.0
    message = encoder.encode(np.zeros(100, np.float32), 0)
    assert (len(message.body), message.samples, encoder.algorithm.threshold) == (0, 0, 0.5)
    assert (encoder.residual == 9.0).all()


@pytest.mark.parametrize("poison", [np.nan, -np.inf])
def test_a_message_says_that_its_sender_is_not_finite(poison: float) -> None:
    update = np.zeros(100, np.float32)
    update[7] = poison
    with np.errstate(invalid="ignore"):
        assert not Message.of(started().encode(update, 1).vector()).finite


def test_residuals_are_cut_now_and_then() -> None:
    encoder = started(FixedThreshold(0.5), count=20, every=2)
    update = np.full(20, 10.0, np.float32)
    encoder.encode(update, 1)
    assert encoder.residual[0] == 9.5
    encoder.encode(update, 1)
    assert encoder.residual[0] == 2.5  # 5 thresholds


def test_a_threshold_adapts_by_its_rule() -> None:
    fixed, target = FixedThreshold(0.5), TargetSparsity(0.1, 1.0, 0.5)
    adaptive = AdaptiveThreshold(1.0, 0.01, 0.1, 0.5)
    found: dict[str, list[float]] = {}
    for share in (0.5, 0.05, 0.1, 0.001):
        for rule in (fixed, target, adaptive):
            rule.sent(share)
            found.setdefault(type(rule).__name__, []).append(rule.threshold)
    assert found == {
        "FixedThreshold": [0.5] * 4,
        "TargetSparsity": [2.0, 1.0, 2.0, 1.0],
        "AdaptiveThreshold": [2.0, 2.0, 2.0, 1.0],
    }


@pytest.mark.parametrize("dtype", ["double", "half"])
def test_the_share_sent_is_one_of_the_weights(dtype: str) -> None:
    """The share is of the weights, not of the flat vector with its padding."""

    class Shares(Threshold):
        def sent(self, share: float) -> None:
            found.append(share)

    found: list[float] = []
    way = GradientSharing(ThresholdEncoding(Shares(1e-30)))  # every change is sent
    data = Loader(small_dataset(16), 4, seed=1)
    network = Sequential([Dense(5, "tanh"), Dense(3)])
    model = Model(network, Image(8, 8, 1), create_backend("numpy", dtype), seed=1)
    with ParallelWrapper(model, 2, synchronizer=way, optimizer=SGD(0.1), progress="none") as wrapper:
        wrapper.fit(data)
    assert len(found) == 4 and set(found) == {1.0}


def test_the_defaults_suit_a_short_training() -> None:
    """45 iterations, in which a threshold that begins at 1e-4 would hardly change the weights."""
    data = small_dataset(120)
    way = GradientSharing("threshold")
    with ParallelWrapper(small_model(), 2, synchronizer=way, optimizer=Nesterov(0.05), progress="none") as wrapper:
        before = wrapper.evaluate(data)
        wrapper.fit(Loader(data, 4, seed=1), 3)
        after = wrapper.evaluate(data)
    assert after.loss < 0.85 * before.loss


def test_an_encoding_resumes_from_its_state() -> None:
    rng = np.random.default_rng(3)
    updates = rng.normal(size=(12, 100)).astype(np.float32)
    whole, first = (started(TargetSparsity(0.05, 1.0), every=5) for _ in range(2))
    expected = [whole.encode(update, 1).vector() for update in updates]
    for update in updates[:7]:
        first.encode(update, 1)
    second = started(TargetSparsity(0.05, 1.0), every=5)
    second.restore(first.state())
    second.residual[...] = first.residual
    for update, vector in zip(updates[7:], expected[7:], strict=True):
        np.testing.assert_array_equal(second.encode(update, 1).vector(), vector)


def test_invalid_arguments_are_refused() -> None:
    with refused("threshold"):
        FixedThreshold(0.0)
    with refused("fewest"):
        AdaptiveThreshold(fewest=0.2, most=0.1)
    with refused("clip_residual"):
        ThresholdEncoding(clip_residual=0.5)
    with refused("encoding"):
        encoding("treshold")
