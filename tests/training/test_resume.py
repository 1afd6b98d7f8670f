"""What a trainer's state promises: one that takes it over goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from cupynet.core.errors import ConfigError
from cupynet.data import Loader
from cupynet.optim import SGD, Momentum, Nesterov, OneCycle
from cupynet.parallel import Adaptive, ElasticAveraging, GradientSharing, Groups, ParameterAveraging
from cupynet.training import Callback, Replica, Trainer
from tests.guides.extending.gradient_mean import GradientMean
from tests.support.training import WAYS, Recorder, fingerprint, on_threads, small_dataset, small_model

EPOCHS, ROUNDS = 2, 5


class Keep(Callback):
    """Takes every worker's state after one round."""

    every_rank = True

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration_end(self, trainer):
        if trainer.iteration == self.iteration:
            self.state = copy.deepcopy(trainer.state())


def trainer_of(communicator, synchronizer, callbacks) -> Trainer:
    return Trainer(
        Replica(small_model("float", seed=1), Nesterov(OneCycle(0.1), max_grad_norm=1.0)),
        groups=Groups.of(communicator),
        synchronizer=copy.deepcopy(synchronizer),
        callbacks=callbacks,
        report_every=2,
    )


def rows(recorder: Recorder, after: int) -> list:
    """What was reported after an iteration; not the times, nor what was sent: a resumed fit sends its weights once."""
    timed = ("images_per_s", "compute_s", "data_s", "averaging_s", "waiting_s", "train_s", "spent", "bytes_sent")
    found = [{k: v for k, v in vars(row).items() if k not in timed} for row in (*recorder.reports, *recorder.epochs)]
    for row in found:
        row["evaluation"] = row.get("evaluation") and row["evaluation"].to_dict()
    return [row for row in found if row["iteration"] > after]


@pytest.mark.parametrize("iteration", range(1, EPOCHS * ROUNDS))
@pytest.mark.parametrize("synchronizer", [*WAYS.values(), GradientMean()], ids=[*WAYS, "gradient mean"])
def test_a_run_goes_on_from_any_round(synchronizer, iteration):
    data = small_dataset(57)  # 15 batches for 3 workers, the last of one sample
    loader, held_out = Loader(data, 4, seed=3), Loader(data, 7, shuffle=False)

    def whole(communicator):
        keep, recorder = Keep(iteration), Recorder()
        trainer = trainer_of(communicator, synchronizer, [keep, recorder])
        trainer.fit(loader, EPOCHS, evaluate_on=held_out)
        return fingerprint(trainer.model), rows(recorder, iteration), keep.state

    uninterrupted = on_threads(3, whole)

    def rest(communicator):
        recorder = Recorder()
        trainer = trainer_of(communicator, synchronizer, [recorder])
        trainer.restore(uninterrupted[communicator.rank][2])
        trainer.fit(loader, EPOCHS - trainer.epoch, evaluate_on=held_out)
        return fingerprint(trainer.model), rows(recorder, iteration)

    for (weights, reported), (again, reported_again) in zip(
        (each[:2] for each in uninterrupted), on_threads(3, rest), strict=True
    ):
        assert again == weights
        np.testing.assert_equal(reported_again, reported)


@pytest.mark.parametrize("synchronizer", WAYS.values(), ids=WAYS)
def test_a_state_is_arrays_and_numbers_by_name(synchronizer):
    def leaves(node):
        for value in node.values():
            yield from leaves(value) if isinstance(value, dict) else [value]

    def task(communicator):
        trainer = trainer_of(communicator, synchronizer, [])
        trainer.fit(Loader(small_dataset(20), 4), 1)
        return trainer.state(), {name for name, _ in trainer.model.params.named()}

    for state, names in on_threads(2, task):
        assert {type(value) for value in leaves(state)} <= {int, float, np.ndarray}
        assert set(state["replica"]["optimizer"]["velocity"]) == names


@pytest.mark.parametrize(("saved", "taken"), [(SGD, Momentum), (Momentum, SGD)])
def test_a_state_of_another_optimizer_is_refused(saved, taken):
    state = Replica(small_model(), saved(0.1)).state()
    with pytest.raises(ConfigError, match="this state is of another optimizer: it holds .*, and .* needs"):
        Replica(small_model(), taken(0.1)).restore(state)


@pytest.mark.parametrize(
    ("saved", "workers", "taken", "lacking"),
    [
        (
            ParameterAveraging(3),
            2,
            ParameterAveraging(3, wire="half"),
            "common.0, common.1 for 2 workers averaged every",
        ),
        (ParameterAveraging(3), 2, ParameterAveraging(3, outer="slowmo"), "outer.velocity, common.0 for 2 workers"),
        (ParameterAveraging(3, wire="half"), 1, ParameterAveraging(3, wire="half"), "common.0, common.1 for 2 workers"),
        (ParameterAveraging(3), 2, ParameterAveraging(Adaptive(0.1)), "when.period, when.rounds for 2 workers"),
        (ParameterAveraging(3), 2, ElasticAveraging(3), "common.0, apart, seen for 2 workers pulled to a centre by"),
        (ParameterAveraging(3), 2, GradientSharing(), "next for 2 workers gradients, averaged in every iteration"),
        (GradientSharing(), 2, GradientSharing("threshold"), "encoding for 2 workers updates encoded with"),
    ],
)
def test_a_state_of_another_synchronizer_is_refused(saved, workers, taken, lacking):
    def fitted(communicator):
        trainer = trainer_of(communicator, saved, [])
        trainer.fit(Loader(small_dataset(20), 4), 1)
        return trainer.state()

    states = on_threads(workers, fitted)

    def task(communicator):
        trainer = trainer_of(communicator, taken, [])
        before = fingerprint(trainer.model)
        with pytest.raises(ConfigError, match=f"^this state has no {lacking}") as refused:
            trainer.restore(states[0])
        assert "\n" not in str(refused.value) and fingerprint(trainer.model) == before

    on_threads(2, task)


def test_a_state_of_another_precision_is_taken():
    double = Replica(small_model("double"), Nesterov(0.1))
    single = Replica(small_model("float", seed=2), Nesterov(0.1))
    single.restore(double.state())
    for name, array in single.state()["weights"].items():
        np.testing.assert_array_equal(array, double.state()["weights"][name].astype(np.float32))
