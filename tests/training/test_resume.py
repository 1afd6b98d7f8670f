"""The state of a trainer: another trainer that restores it continues bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Nesterov, OneCycle
from cupynet.parallel import GradientSharing, Groups, ParameterAveraging
from cupynet.training import Replica, Trainer
from cupynet.training.fit import Fit
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.refusals import refused
from tests.support.training import (
    KINDS_OF_WAYS,
    WAYS,
    KeepState,
    Recorder,
    fingerprint,
    on_threads,
    reported_rows,
    small_dataset,
    small_model,
)

EPOCHS = 2  # of five rounds


def trainer_of(communicator, synchronizer, callbacks) -> Trainer:
    return Trainer(
        Replica(small_model("float", seed=1), Nesterov(OneCycle(0.1), max_grad_norm=1.0)),
        groups=Groups.of(communicator),
        synchronizer=copy.deepcopy(synchronizer),
        callbacks=callbacks,
        report_every=2,
    )


@pytest.mark.parametrize("synchronizer", [*WAYS.values(), GradientMean()], ids=[*WAYS, "gradient mean"])
def test_training_resumes_bit_for_bit(synchronizer):
    """From the end of the first epoch, where workers differ in their samples, and from the middle of the second.

    At iteration 7 the ways with a period of 2, 3 or 4 are between averages. "every 3" also resumes from iteration 2.
    """
    data = small_dataset(57)  # 15 batches for 3 workers, the last of one sample
    loader, held_out = Loader(data, 4, seed=3), Loader(data, 20, shuffle=False)
    iterations = (2, 5, 7) if synchronizer is WAYS["every 3"] else (5, 7)

    def fit(states=None):
        """Return each worker's weights and last divergence, its reports, and the states after `iterations`."""

        def task(communicator):
            recorder, keeps = Recorder(), {} if states else {at: KeepState(at) for at in iterations}
            trainer = trainer_of(communicator, synchronizer, [recorder, *keeps.values()])
            if states is not None:
                trainer.restore(states[communicator.rank])
            trainer.fit(Fit(loader, EPOCHS - trainer.epoch, evaluate_on=held_out))
            measured = trainer.statistics.measured
            found = fingerprint(trainer.model), measured and (measured.divergence, measured.by_layer)
            return found, recorder, {at: keep.kept for at, keep in keeps.items()}

        return on_threads(3, task)

    whole = fit()
    for iteration in iterations:
        again = fit([states[iteration] for *_, states in whole])
        for (found, reported, _), (expected, wanted, _) in zip(again, whole, strict=True):
            assert found == expected, f"resumed after iteration {iteration}"
            assert reported_rows(reported, iteration) == reported_rows(wanted, iteration)


@pytest.mark.parametrize("synchronizer", KINDS_OF_WAYS.values(), ids=KINDS_OF_WAYS)
def test_a_state_holds_only_arrays_and_numbers(synchronizer):
    def leaves(node):
        for value in node.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    def task(communicator):
        trainer = trainer_of(communicator, synchronizer, [])
        trainer.fit(Fit(Loader(small_dataset(20), 4), 1))
        return trainer.state(), {name for name, _ in trainer.model.params.named()}

    for state, names in on_threads(2, task):
        assert {type(value) for value in leaves(state)} <= {int, float, np.ndarray}
        assert set(state["replica"]["optimizer"]["velocity"]) == names


@pytest.mark.parametrize(("saved", "taken"), [(SGD, Momentum), (Momentum, SGD)])
def test_a_state_of_another_optimizer_is_refused(saved, taken):
    state = Replica(small_model(), saved(0.1)).state()
    with refused(""):
        Replica(small_model(), taken(0.1)).restore(state)


@pytest.mark.parametrize(
    ("saved", "workers", "taken"),
    [
        (ParameterAveraging(3), 2, ParameterAveraging(3, outer="slowmo")),
        (ParameterAveraging(3, wire="half"), 1, ParameterAveraging(3, wire="half")),
        (ParameterAveraging(3), 2, GradientSharing()),
        (GradientSharing(), 2, GradientSharing("threshold")),
    ],
)
def test_a_state_of_another_synchronizer_is_refused(saved, workers, taken):
    def fitted(communicator):
        trainer = trainer_of(communicator, saved, [])
        trainer.fit(Fit(Loader(small_dataset(20), 4), 1))
        return trainer.state()

    states = on_threads(workers, fitted)

    def task(communicator):
        trainer = trainer_of(communicator, taken, [])
        with refused(""):
            trainer.restore(states[0])

    on_threads(2, task)


def test_a_state_of_another_dtype_is_converted():
    double = Replica(small_model("double"), Nesterov(0.1))
    single = Replica(small_model("float", seed=2), Nesterov(0.1))
    single.restore(double.state())
    for name, array in single.state()["weights"].items():
        np.testing.assert_array_equal(array, double.state()["weights"][name].astype(np.float32))
