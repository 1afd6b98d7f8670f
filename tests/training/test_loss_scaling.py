"""The loss scale for half precision: halved when a gradient overflows, doubled after enough steps without overflow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import BatchNorm, Conv2D, Dense, DivergedError, Loader, Model, Nesterov, Pipeline, create_backend
from cupynet.parallel import GradientSharing, ParameterAveraging, SerialCommunicator, Synchronizer
from cupynet.training import Callback, ParallelWrapper, Replica, Trainer
from cupynet.training import loss_scaling as scaling
from cupynet.training.fit import Fit
from cupynet.training.loss_scaling import LossScaler
from tests.support.trainers import callback_of, fit_on_threads, fitted
from tests.support.training import WAYS, On, Poisoned, Seen, fingerprint, network_with, small_dataset, small_model

LOADER = Loader(small_dataset(97), 4, seed=3)  # 25 batches


def overflowing() -> Model:
    """Return a network in which one batch of each epoch overflows at every scale."""
    return network_with(Poisoned(17, backwards=True), "half")


def scaler_of(trainer: Trainer) -> LossScaler:
    assert trainer.replica.scaler is not None
    return trainer.replica.scaler


def scales_seen() -> Seen:
    return Seen(lambda trainer: scaler_of(trainer).scale)


def test_the_loss_scale_is_halved_at_an_overflow_and_the_step_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles after every 5 rounds until a gradient overflows. Then it is halved and that step is skipped."""
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    scales = scales_seen()
    trainer = Trainer(Replica(small_model("half"), Nesterov(0.01)), callbacks=[scales])
    trainer.fit(Fit(LOADER, 4))
    assert scales.iterations[3:5] == [1024.0, 2048.0] and scales.iterations[9] == 4096.0
    found = np.array(scales.iterations)
    falls = np.flatnonzero(found[1:] < found[:-1])
    assert 0 < len(falls) == trainer.statistics.skipped_steps and (found[falls + 1] == found[falls] / 2).all()
    assert np.isfinite(trainer.params.master).all() and trainer.iteration == 100


def test_the_loss_scale_doubles_after_2000_iterations_up_to_a_limit() -> None:
    scaler, scales = LossScaler(create_backend("numpy", dtype="half"), SerialCommunicator()), []
    for _ in range(30_000):
        scaler.grow()
        scaler.skips(overflow=False, failed=False)
        scales.append(scaler.scale)
    assert (scales[1998], scales[1999], scales[3999], scales[-1]) == (2.0**10, 2.0**11, 2.0**12, 2.0**24)


def test_an_overflow_restarts_the_count_to_2000() -> None:
    scaler, scales = LossScaler(create_backend("numpy", dtype="half"), SerialCommunicator()), []
    for iteration in range(4001):
        scaler.grow()
        scaler.skips(overflow=iteration == 1500, failed=False)
        scales.append(scaler.scale)
    assert (scales[1499], scales[1500], scales[3499], scales[3501]) == (2.0**10, 2.0**9, 2.0**9, 2.0**10)


@pytest.mark.parametrize(
    ("poisoned", "skipped", "scale"),
    [(Poisoned(*range(97)), 0, 1024.0), (Poisoned(*range(97), backwards=True), 10, 1.0)],
    ids=["losses", "gradients"],
)
def test_losses_that_are_not_finite_and_overflows_at_the_lowest_scale_end_the_fit(
    poisoned: Poisoned, skipped: int, scale: float
) -> None:
    """A scale of 1024 can be halved ten times."""
    trainer = Trainer(Replica(network_with(poisoned, "half"), Nesterov(0.05)))
    with pytest.raises(DivergedError):
        trainer.fit(Fit(LOADER, 1))
    assert (scaler_of(trainer).skipped, scaler_of(trainer).scale) == (skipped, scale)


@pytest.mark.parametrize(
    ("way", "equal"),
    [(ParameterAveraging(7), False), (GradientSharing(), True), (GradientSharing("threshold"), False)],
    ids=["averaging", "sharing", "encoding"],
)
def test_loss_scales_of_replicas_differ_unless_gradients_are_shared(way: Synchronizer, equal: bool) -> None:
    found = fit_on_threads(3, lambda c: Replica(overflowing(), Nesterov(0.05)), way, LOADER, scales_seen())
    assert {trainer.statistics.skipped_steps for trainer in found} == {1}  # known on every worker, counted once
    scales = [callback_of(trainer, Seen).iterations for trainer in found]
    iterations = [set(each) for each in zip(*scales, strict=True)]
    assert {min(each) for each in iterations} == {1024.0, 512.0}
    assert any(len(each) > 1 for each in iterations) != equal


def test_replicas_that_share_gradients_begin_at_the_loss_scale_of_the_model() -> None:
    model = small_model("half")
    model.backend.loss_scale = 4096.0
    with ParallelWrapper(model, 3, synchronizer=GradientSharing()) as wrapper:
        wrapper.on_workers(lambda trainer: None)
        assert {each.backend.loss_scale for each in wrapper.replicas()} == {4096.0}


def test_iterations_without_a_batch_do_not_count_for_the_loss_scale_of_a_worker() -> None:
    """As with captured steps, which are not launched without a batch."""
    found = fit_on_threads(2, lambda c: Replica(small_model("half"), Nesterov(0.05)), ParameterAveraging(3), LOADER)
    assert [scaler_of(trainer).steady for trainer in found] == [13, 12]


def test_all_stages_of_a_pipeline_skip_a_step_that_overflows() -> None:
    seen: list[tuple[int, int]] = []
    with ParallelWrapper(overflowing(), 2, 3, pipeline=Pipeline(2, 2), timeout_s=20) as wrapper:
        wrapper.fit(LOADER, epochs=2)
        wrapper.on_workers(lambda trainer: seen.append((scaler_of(trainer).skipped, trainer.statistics.skipped_steps)))
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())
    assert sum(skipped for skipped, _ in seen) == 4 and {steps for _, steps in seen} == {2}


def test_a_skipped_step_changes_no_running_statistics_in_any_stage() -> None:
    """Only the gradient of the first stage overflows; the second has already updated its running statistics."""

    def weights(samples: int, *poisoned: int) -> dict[str, Any]:
        last = {"norm": BatchNorm(), "output": Dense(3)}
        layers = {"conv": Conv2D(3, 3), "poisoned": Poisoned(*poisoned, backwards=True), **last}
        model = Model(layers, (8, 8, 1), "numpy", 1, dtype="half")
        data = Loader(small_dataset(97).take(slice(samples)), 4, shuffle=False)
        return fitted(model, data, pipeline=Pipeline([["conv", "poisoned"], [*last]], 2), timeout_s=20).weights()

    np.testing.assert_equal(weights(96, 93), weights(92))  # the last batch is skipped


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_replicas_stay_equal_if_the_last_step_is_skipped_with_every_synchronizer(way: Synchronizer) -> None:
    """The last iteration has one batch."""
    model = network_with(Poisoned(96, backwards=True), "half")
    with ParallelWrapper(model, 3, synchronizer=way, timeout_s=20) as wrapper:
        wrapper.fit(Loader(small_dataset(97), 4, shuffle=False), epochs=1)
        assert wrapper.trainer.statistics.skipped_steps == 1
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1
    assert np.isfinite(model.params.master).all()


@pytest.mark.parametrize("way", [ParameterAveraging(2), GradientSharing("threshold")], ids=str)
def test_replicas_with_synchronized_statistics_skip_steps_together(way: Synchronizer) -> None:
    """Only the first worker has a batch in the last iteration, in which all have updated their running statistics."""
    layers = {"conv": Conv2D(3, 3), "norm": BatchNorm(sync=True), "poisoned": Poisoned(96, backwards=True)}
    model = Model({**layers, "output": Dense(3)}, (8, 8, 1), "numpy", 1, dtype="half")
    with ParallelWrapper(model, 3, synchronizer=way, timeout_s=20) as wrapper:
        wrapper.fit(Loader(small_dataset(97), 4, shuffle=False), epochs=1)
        assert wrapper.trainer.statistics.skipped_steps == 1
        assert len({each.params.buffers.tobytes() for each in wrapper.replicas()}) == 1


def test_replicas_agree_on_a_loss_scale_when_they_resume(tmp_path: Path) -> None:
    """Without synchronized statistics, and in earlier versions, replicas adapt their scales separately."""

    def differ(trainer: Trainer) -> None:
        trainer.backend.loss_scale, scaler_of(trainer).steady = ((1024.0, 3), (64.0, 9), (64.0, 3))[trainer.rank]

    def wrapper_of(*callbacks: Callback, sync: bool) -> ParallelWrapper:
        layers = {"conv": Conv2D(3, 3), "norm": BatchNorm(sync=sync), "output": Dense(3)}
        return ParallelWrapper(Model(layers, (8, 8, 1), "numpy", 1, dtype="half"), 3, callbacks=callbacks)

    with wrapper_of(On("on_fit_start", differ, every_rank=True), sync=False) as wrapper:
        wrapper.fit(LOADER, epochs=1)
        wrapper.checkpoint(tmp_path / "saved")
    with wrapper_of(sync=True) as wrapper:
        wrapper.restore(tmp_path / "saved")
        found = set[tuple[float, int]]()
        wrapper.on_workers(lambda trainer: found.add((scaler_of(trainer).scale, scaler_of(trainer).steady)))
        assert len(found) == 1 and found.pop()[0] == 64


def test_the_loss_scale_resumes_from_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "GROW_AFTER", 5)
    before, after = (LossScaler(create_backend("numpy", "half"), SerialCommunicator()) for _ in range(2))
    for _ in range(3):
        before.skips(overflow=False, failed=False)
    after.restore(before.state())
    for scale in (1024.0, 2048.0):
        after.skips(overflow=False, failed=False)
        assert after.scale == scale
