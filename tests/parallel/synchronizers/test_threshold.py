"""Threshold encoding: messages and residuals add up to the updates."""

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
from cupynet.parallel.synchronizers.threshold import Message, Threshold
from cupynet.training import ParallelWrapper
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model


def started(algorithm: Threshold, count: int, dtype: Any = np.float32, clip_every: int = 0) -> ThresholdEncoding:
    encoder = ThresholdEncoding(algorithm, clip_residual_every=clip_every)
    encoder.start(count, count, dtype)
    return encoder


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    count=st.integers(1, 200),
    density=st.floats(0, 1),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_messages_and_residuals_add_up_to_the_updates(count: int, density: float, seed: int, dtype: Any) -> None:
    """The numbers are multiples of an eighth, so all sums are exact."""
    rng = np.random.default_rng(seed)
    encoder, weights, total = started(FixedThreshold(0.5), count, dtype), np.zeros(count, dtype), np.zeros(count, dtype)
    for _ in range(4):
        update = (rng.integers(-8, 9, count) * (rng.random(count) < density) / 8).astype(dtype)
        total += update
        message = Message.of(encoder.encode(update, 7).vector())
        assert (message.samples, message.finite, message.threshold) == (7, True, 0.5)
        message.add_to(weights, 1.0)
    np.testing.assert_array_equal(weights + encoder.residual, total)


def test_only_residuals_that_reach_the_threshold_are_sent() -> None:
    encoder, update = started(FixedThreshold(0.25), 64), np.zeros(64, np.float32)
    update[[3, 5, 60]] = [0.25, -0.5, 0.2]
    assert encoder.encode(update, 1).body.tolist() == [4, -6]
    assert encoder.residual[[3, 5, 60]].tolist() == pytest.approx([0, -0.25, 0.2])
    assert encoder.encode(update, 1).body.tolist() == [4, -6, 61]  # residuals have accumulated


def test_a_worker_without_a_batch_sends_nothing_and_keeps_its_residual() -> None:
    encoder = started(AdaptiveThreshold(0.5), 100)
    encoder.residual[:] = 9.0
    message = encoder.encode(np.zeros(100, np.float32), 0)
    assert (len(message.body), message.samples, encoder.algorithm.threshold) == (0, 0, 0.5)
    assert (encoder.residual == 9.0).all()


def test_residuals_are_clipped_to_five_thresholds_every_clip_residual_every_iterations() -> None:
    encoder, update = started(FixedThreshold(0.5), 20, clip_every=2), np.full(20, 10.0, np.float32)
    encoder.encode(update, 1)
    assert encoder.residual[0] == 9.5
    encoder.encode(update, 1)
    assert encoder.residual[0] == 2.5  # 5 thresholds


@pytest.mark.parametrize(
    ("algorithm", "thresholds"),
    [
        (FixedThreshold(0.5), [0.5, 0.5, 0.5, 0.5]),
        (TargetSparsity(0.1, 1.0, 0.5), [2.0, 1.0, 2.0, 1.0]),
        (AdaptiveThreshold(1.0, 0.01, 0.1, 0.5), [2.0, 2.0, 2.0, 1.0]),
    ],
)
def test_thresholds_are_fixed_or_adapt_to_the_share_sent(algorithm: Threshold, thresholds: list[float]) -> None:
    found = []
    for share in (0.5, 0.05, 0.1, 0.001):
        algorithm.sent(share)
        found.append(algorithm.threshold)
    assert found == thresholds


@pytest.mark.parametrize("dtype", ["double", "half"])
def test_the_share_sent_does_not_count_padding_between_weights(dtype: str) -> None:
    class Shares(Threshold):
        def sent(self, share: float) -> None:
            found.append(share)

    found: list[float] = []
    way = GradientSharing(ThresholdEncoding(Shares(1e-30)))  # sends every change
    model = Model(Sequential([Dense(5, "tanh"), Dense(3)]), Image(8, 8, 1), create_backend("numpy", dtype), seed=1)
    with ParallelWrapper(model, 2, synchronizer=way, optimizer=SGD(0.1), progress="none") as wrapper:
        wrapper.fit(Loader(small_dataset(16), 4, seed=1))
    assert found == [1.0] * 4


def test_threshold_encoding_learns_in_a_short_training_with_its_defaults() -> None:
    """In 45 iterations, a threshold that starts at 1e-4 would hardly change the weights."""
    data, way = small_dataset(120), GradientSharing("threshold")
    with ParallelWrapper(small_model(), 2, synchronizer=way, optimizer=Nesterov(0.05), progress="none") as wrapper:
        before = wrapper.evaluate(data)
        wrapper.fit(Loader(data, 4, seed=1), epochs=3)
        assert wrapper.evaluate(data).loss < 0.85 * before.loss


def test_invalid_arguments_of_gradient_sharing_and_threshold_encoding_are_refused() -> None:
    with refused("threshold"):
        FixedThreshold(0.0)
    with refused("min_fraction"):
        AdaptiveThreshold(min_fraction=0.2, max_fraction=0.1)
    with refused("clip_residual"):
        ThresholdEncoding(clip_residual=0.5)
    with refused("encoding"):
        GradientSharing("treshold")
    with refused("reduce"):
        GradientSharing(reduce="max")
    with refused("transfer_dtype"):
        GradientSharing("threshold", transfer_dtype="half")
