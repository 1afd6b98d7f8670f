"""A trainer's state: another trainer that restores it continues bit for bit."""

from functools import partial
from typing import Any

import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Nesterov, OneCycle, Optimizer
from cupynet.parallel import Communicator, GradientSharing, ParameterAveraging, Synchronizer
from cupynet.training import Callback, Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support import trainers
from tests.support.refusals import refused
from tests.support.training import (
    WAYS,
    KeepState,
    Recorder,
    fingerprint,
    on_threads,
    reported_rows,
    small_dataset,
    small_model,
)

EPOCHS = 2  # of five rounds each


def trainer_of(communicator: Communicator, synchronizer: Synchronizer, *callbacks: Callback) -> Trainer:
    optimizer = Nesterov(OneCycle(0.1), max_grad_norm=1.0)
    replica = Replica(small_model("float", seed=1), optimizer)
    return trainers.trainer_of(communicator, replica, synchronizer, *callbacks, log_every=2)


def state_of(communicator: Communicator, synchronizer: Synchronizer) -> dict[str, Any]:
    trainer = trainer_of(communicator, synchronizer)
    trainer.fit(Fit(Loader(small_dataset(20), 4), 1))
    return trainer.state()


@pytest.mark.parametrize("synchronizer", [*WAYS.values(), GradientMean()], ids=[*WAYS, "gradient mean"])
def test_training_with_every_parallel_method_resumes_bit_for_bit(synchronizer: Synchronizer) -> None:
    """Training resumes from the end of the first epoch, where workers' sample counts differ, and from mid-epoch.

    At iteration 7, synchronizers with period 2, 3 or 4 are between averages. "every 3" also resumes from iteration 2.
    """
    data = small_dataset(57)  # 15 batches for 3 workers, the last of one sample
    loader, held_out = Loader(data, 4, seed=3), Loader(data, 20, shuffle=False)
    iterations = (2, 5, 7) if synchronizer is WAYS["every 3"] else (5, 7)

    def fit(communicator: Communicator, states: list[Any] | None = None) -> tuple[Any, Recorder, dict[int, KeepState]]:
        """Return a worker's weights, last drift and reports, and its states after `iterations`."""
        recorder, keeps = Recorder(), {} if states else {at: KeepState(at) for at in iterations}
        trainer = trainer_of(communicator, synchronizer, recorder, *keeps.values())
        if states is not None:
            trainer.restore(states[communicator.rank])
        trainer.fit(Fit(loader, EPOCHS - trainer.epoch, evaluate_on=held_out))
        measured = trainer.statistics.measured
        found = fingerprint(trainer.model), measured and (measured.drift, measured.drift_by_layer)
        return found, recorder, keeps

    whole = on_threads(3, fit)
    for iteration in iterations:
        states = [keeps[iteration].kept for *_, keeps in whole]
        again = on_threads(3, partial(fit, states=states))
        for (found, reported, _), (expected, wanted, _) in zip(again, whole, strict=True):
            assert found == expected, f"resumed after iteration {iteration}"
            assert reported_rows(reported, iteration) == reported_rows(wanted, iteration)


@pytest.mark.parametrize(("saved", "taken"), [(SGD, Momentum), (Momentum, SGD)])
def test_a_state_of_another_optimizer_is_refused(saved: type[Optimizer], taken: type[Optimizer]) -> None:
    state = Replica(small_model(), saved(0.1)).state()
    with refused(""):
        Replica(small_model(), taken(0.1)).restore(state)


@pytest.mark.parametrize(
    ("saved", "workers", "taken"),
    [
        (ParameterAveraging(3), 2, ParameterAveraging(3, outer_optimizer="slowmo")),
        (ParameterAveraging(3, transfer_dtype="half"), 1, ParameterAveraging(3, transfer_dtype="half")),
        (GradientSharing(), 2, GradientSharing("threshold")),
    ],
)
def test_a_state_of_another_synchronizer_is_refused(saved: Synchronizer, workers: int, taken: Synchronizer) -> None:
    state = on_threads(workers, lambda communicator: state_of(communicator, saved))[0]

    def task(communicator: Communicator) -> None:
        with refused(""):
            trainer_of(communicator, taken).restore(state)

    on_threads(2, task)
