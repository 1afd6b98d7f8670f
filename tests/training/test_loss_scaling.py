"""The loss scale of half precision: halved when a gradient overflows, doubled after a while, shared by replicas."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from cupynet.backend import create_backend
from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.optim import Nesterov
from cupynet.parallel import (
    GradientSharing,
    Groups,
    ParameterAveraging,
    Pipeline,
    SerialCommunicator,
    ThresholdEncoding,
)
from cupynet.training import Checkpoint, NonFinite, ParallelWrapper, Replica, Trainer
from cupynet.training import loss_scaling as scaling
from cupynet.training.fit import Fit
from cupynet.training.loss_scaling import LossScaler
from tests.support.training import (
    Poisoned,
    Seen,
    alone,
    fingerprint,
    network_with,
    on_threads,
    small_dataset,
    small_model,
)

DATA = small_dataset(97)


def loader(samples: int = 97) -> Loader:
    return Loader(small_dataset(samples), 4, seed=3)


def test_the_loss_scale_grows_and_shrinks(monkeypatch):
    """Doubled after every 5 rounds until a gradient overflows: then halved, and that step is left out."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    scales = Seen(lambda trainer: trainer.replica.scaler.scale)
    trainer = alone(small_model("half"), Nesterov(0.01), callbacks=[scales])
    trainer.fit(Fit(loader(), 4))
    assert scales.iterations[3:5] == [1024.0, 2048.0] and scales.iterations[9] == 4096.0
    found = np.array(scales.iterations)
    falls = np.flatnonzero(found[1:] < found[:-1])
    assert 0 < len(falls) == trainer.statistics.skipped_steps and (found[falls + 1] == found[falls] / 2).all()
    assert np.isfinite(trainer.params.master).all() and trainer.iteration == 100


def test_a_skipped_step_changes_no_weight():
    """One batch in each epoch overflows at every scale; training is as without it."""
    poisoned = alone(network_with(Poisoned(17, backwards=True), "half"), Nesterov(0.01))
    poisoned.fit(Fit(loader(), 2))
    assert poisoned.statistics.skipped_steps == 2 and poisoned.replica.scaler.scale == 256.0
    guarded = alone(network_with(Poisoned(17, backwards=True), "float"), Nesterov(0.01), callbacks=[NonFinite("skip")])
    guarded.fit(Fit(loader(), 2))
    for name, weights in poisoned.model.weights().items():
        np.testing.assert_allclose(weights, guarded.model.weights()[name], atol=0.02)


def test_overflows_at_every_scale_and_losses_that_are_not_finite_fail():
    with pytest.raises(DivergedError):
        alone(network_with(Poisoned(17), "half"), Nesterov(0.05)).fit(Fit(loader(), 1))
    every = alone(network_with(Poisoned(*range(97), backwards=True), "half"), Nesterov(0.05))
    with pytest.raises(DivergedError, match="worker 0 at batch 10 of epoch 1"):
        every.fit(Fit(loader(), 1))
    assert every.replica.scaler.scale == 1.0 and every.replica.scaler.skipped == 10  # 1024 halved ten times


@pytest.mark.parametrize(
    ("way", "equal"),
    [(ParameterAveraging(7), False), (GradientSharing(), True), (GradientSharing(ThresholdEncoding()), False)],
)
def test_loss_scales_of_replicas_differ_between_averages_unless_gradients_are_shared(way, equal):
    scales = {}

    def task(communicator):
        mine = Seen(lambda trainer: trainer.replica.scaler.scale)
        replica = Replica(network_with(Poisoned(17, backwards=True), "half"), Nesterov(0.05))
        trainer = Trainer(replica, groups=Groups.of(communicator), synchronizer=copy.deepcopy(way), callbacks=[mine])
        trainer.fit(Fit(loader(), 1))
        scales[communicator.rank] = mine.iterations
        return fingerprint(trainer.model), trainer.statistics.skipped_steps

    found = on_threads(3, task)
    assert len(set(found)) == 1 and found[0][1] == 1  # known on every worker, counted once
    rounds = list(zip(*(scales[rank] for rank in range(3)), strict=True))
    assert {min(each) for each in rounds} == {1024.0, 512.0}
    apart = [len(set(each)) > 1 for each in rounds]
    assert any(apart) != equal
    if isinstance(way, ParameterAveraging):
        assert not apart[6]  # the least at each average


def test_replicas_take_the_least_at_an_average():
    def task(communicator):
        backend = create_backend("numpy", "half")
        backend.loss_scale = [1024.0, 256.0, 512.0][communicator.rank]
        LossScaler(backend, SerialCommunicator()).agree(communicator)
        return backend.loss_scale

    assert on_threads(3, task) == [256.0] * 3


def test_the_loss_scale_resumes_from_its_state(monkeypatch):
    """After a resume the scale grows in the same round as without an interruption."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    before, after = (LossScaler(create_backend("numpy", "half"), SerialCommunicator()) for _ in range(2))
    for _ in range(3):
        before.skips(overflow=False, failed=False)
    after.restore(before.state())
    for scale in (1024.0, 2048.0, 2048.0):
        for each in (before, after):
            each.skips(overflow=False, failed=False)
            assert each.scale == scale


def test_an_overflow_takes_precedence_over_growth(monkeypatch):
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    scaler = LossScaler(create_backend("numpy", "half"), SerialCommunicator())
    for _ in range(4):
        scaler.skips(overflow=False, failed=False)
    assert scaler.skips(overflow=True, failed=False)
    assert scaler.scale == 512.0


def test_stages_leave_a_step_out_together():
    seen = []
    with ParallelWrapper(
        network_with(Poisoned(17, backwards=True), "half"), 2, 3, pipeline=Pipeline(2, 2), timeout_s=20
    ) as wrapper:
        wrapper.fit(loader(), 2)
        wrapper.on_workers(
            lambda trainer: seen.append((trainer.replica.scaler.skipped, trainer.statistics.skipped_steps))
        )
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())
    assert sum(skipped for skipped, _ in seen) == 4 and {steps for _, steps in seen} == {2}


def test_a_checkpoint_holds_the_loss_scale(tmp_path):
    def wrapper(workers, *callbacks):
        model = network_with(Poisoned(17, backwards=True), "half")
        return ParallelWrapper(model, workers, 3, callbacks=callbacks)

    with wrapper(2, Checkpoint(every_iterations=24, keep_last=100, path=tmp_path)) as whole:
        whole.fit(loader(), 2)
        wanted, steps = fingerprint(whole.model), whole.trainer.statistics.skipped_steps
    for workers in (2, 3):
        with wrapper(workers) as again:
            again.restore(tmp_path / "step-00000024")
            assert again.trainer.replica.scaler.scale < 1024.0
            again.fit(loader(), 2 - again.trainer.epoch)
            if workers == 2:
                assert fingerprint(again.model) == wanted and again.trainer.statistics.skipped_steps == steps == 2
