"""Early stopping: the conditions that end a fit, the best epoch, and the weights that are restored.

Several tests are about what Deeplearning4j's EarlyStoppingParallelTrainer gets wrong; their docstrings say so.
"""

from __future__ import annotations

import copy
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from cupynet.core.errors import DivergedError
from cupynet.data import Loader
from cupynet.optim import SGD, Nesterov
from cupynet.parallel import Groups, ParameterAveraging
from cupynet.training import Callback, EarlyStopping, ParallelWrapper, Replica, StopReason, Trainer
from cupynet.training.callbacks import early_stopping
from cupynet.training.callbacks.early_stopping import DIRECTIONS
from cupynet.training.evaluation import Evaluation
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import At, KeepState, Seen, StopAfter, fingerprint, on_threads, small_dataset, small_model

HELD_OUT = Loader(small_dataset(30, seed=7), 10, shuffle=False)
TRAIN = Loader(small_dataset(20), 4, seed=3)


@pytest.fixture
def scripted(monkeypatch):
    """Replace evaluations by given scores: `scripted([0.5, 0.9])` for epochs 1 and 2."""

    def use(scores, name="loss"):
        def evaluate(trainer, loader):
            figures = {**dict.fromkeys(DIRECTIONS, 0.5), name: scores[trainer.epoch - 1]}
            return type("Scripted", (Evaluation,), figures)(classes=2)

        monkeypatch.setattr(Trainer, "evaluate", evaluate)

    return use


def fit(stopping, epochs=10, workers=1, frequency=2, callbacks=(), train=TRAIN, model=None, **options):
    """Fit with early stopping, and return the trainer and the fingerprints of each epoch."""
    weights = Seen()
    everybody = [weights, stopping, *callbacks]
    model = small_model() if model is None else model
    with ParallelWrapper(model, workers, frequency, optimizer=SGD(0.05), callbacks=everybody) as wrapper:
        options = {"evaluate_on": HELD_OUT, "split": "validation", **options}
        wrapper.fit(train, epochs, **options)
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1
        return wrapper.trainer, dict(enumerate(weights.epochs, 1))


# which epoch is the best ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("monitor", "scores", "best", "workers"),
    [
        ("loss", [0.9, 0.4, 0.6, 0.5, 0.7], 2, 3),
        ("accuracy", [0.5, 0.9, 0.7, 0.8, 0.6], 2, 1),
        ("accuracy", [0.5, 0.6, 0.7, 0.8, 0.9], 5, 3),
    ],
)
def test_the_best_weights_are_restored_on_every_worker(scripted, monitor, scores, best, workers):
    """Deeplearning4j's minimises every score, and so keeps the worst accuracy (5459, 5760)."""
    scripted(scores, monitor)
    stopping = EarlyStopping(monitor, patience=None)
    trainer, weights = fit(stopping, 5, workers)
    result = stopping.result
    assert (result.best_epoch, result.best_score, result.restored) == (best, scores[best - 1], True)
    assert fingerprint(trainer.model) == weights[best] and len(set(weights.values())) == 5
    assert getattr(trainer.evaluation, monitor) is not None and trainer.stopped is None
    assert (result.reason, result.epochs) == ("epochs", 5)


def test_the_first_of_equal_scores_is_the_best(scripted):
    scripted([0.5, 0.3, 0.3, 0.4])
    stopping = EarlyStopping()
    fit(stopping, 4)
    assert stopping.result.best_epoch == 2


@pytest.mark.parametrize(("monitor", "bad"), [("loss", -math.inf), ("accuracy", math.nan)])
def test_a_score_that_is_not_finite_is_never_the_best_and_ends_the_fit(scripted, monitor, bad):
    """Deeplearning4j's does not flag NaN."""
    scripted([0.5, bad, 0.1], monitor)
    stopping = EarlyStopping(monitor)
    trainer, weights = fit(stopping, 3)
    assert stopping.result.best_epoch == 1 and fingerprint(trainer.model) == weights[1]
    assert (stopping.result.reason, trainer.epoch) == ("invalid_score", 2)
    assert stopping.result.to_dict()["scores"] == {"1": 0.5, "2": None}


def test_scores_that_are_not_finite_can_be_ignored(scripted):
    scripted([math.nan, 0.5, math.inf, 0.1])
    stopping = EarlyStopping(invalid_score=False)
    fit(stopping, 4)
    assert (stopping.result.reason, stopping.result.best_epoch) == ("epochs", 4)


def test_a_fit_without_any_finite_score_keeps_its_weights(scripted):
    scripted([math.nan, math.nan])
    stopping = EarlyStopping(invalid_score=False)
    trainer, weights = fit(stopping, 2)
    result = stopping.result
    assert (result.best_epoch, result.best_score, result.restored) == (None, None, False)
    assert fingerprint(trainer.model) == weights[2]


# conditions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "scores", "patience", "least", "epochs", "best"),
    [
        (1, [0.9, 0.8, 0.8, 0.9, 0.1], 2, 0.0, 4, 2),
        (2, [0.9, 0.8, 0.9, 0.7, 0.8, 0.9, 0.1], 2, 0.0, 6, 4),
        (2, [1.0, 0.75, 0.8, 0.1], 2, 0.25, 3, 2),  # exactly 0.25 better is no improvement, but the best
        (1, [1.0, 0.75, 0.4, 0.39, 0.38, 0.1], 2, 0.25, 5, 5),  # from the last improvement, not the last score
    ],
)
def test_patience(scripted, workers, scores, patience, least, epochs, best):
    scripted(scores)
    stopping = EarlyStopping(patience=patience, min_improvement=least)
    trainer, weights = fit(stopping, len(scores), workers)
    assert (trainer.epoch, stopping.result.best_epoch) == (epochs, best)
    assert trainer.stopped.reason == StopReason.EARLY and stopping.result.reason == "patience"
    assert fingerprint(trainer.model) == weights[best]


def test_small_steps_add_up_to_an_improvement(scripted):
    scripted([1.0, 0.9, 0.8, 0.7, 0.6, 0.5])
    stopping = EarlyStopping(patience=3, min_improvement=0.25)
    fit(stopping, 6)
    assert (stopping.result.reason, stopping.result.epochs) == ("epochs", 6)


@pytest.mark.parametrize(
    ("monitor", "scores", "wanted", "epochs"),
    [("accuracy", [0.5, 0.9, 0.95, 0.99], 0.95, 3), ("loss", [0.5, 0.2, 0.19], 0.2, 2), ("loss", [0.5, 0.4], 0.2, 2)],
)
def test_a_target_score_ends_the_fit(scripted, monitor, scores, wanted, epochs):
    scripted(scores, monitor)
    stopping = EarlyStopping(monitor, best_score=wanted)
    trainer, _ = fit(stopping, len(scores))
    assert trainer.epoch == epochs
    assert stopping.result.reason == ("best_score" if wanted in scores else "epochs")


def test_patience_counts_evaluations_and_max_epochs_counts_epochs(scripted):
    """Deeplearning4j's checks its epoch conditions only when it evaluates: at most 5 epochs were 7."""
    scripted([0.5] * 20)
    stopping = EarlyStopping(patience=None, max_epochs=5)
    trainer, _ = fit(stopping, 20, evaluate_every=3)
    assert (trainer.epoch, stopping.result.reason) == (5, "max_epochs")
    assert list(stopping.result.scores) == [3]
    stopping = EarlyStopping(patience=2)
    trainer, _ = fit(stopping, 20, evaluate_every=3)
    assert trainer.epoch == 9 and list(stopping.result.scores) == [3, 6, 9]


def test_max_epochs_count_for_each_fit(scripted):
    """Deeplearning4j's is of single use."""
    scripted([0.5, 0.4, 0.3, 0.9, 0.8, 0.7])
    stopping = EarlyStopping(max_epochs=3)
    with ParallelWrapper(small_model(), 2, callbacks=[stopping]) as wrapper:
        for best, scores in ((3, {1: 0.5, 2: 0.4, 3: 0.3}), (6, {4: 0.9, 5: 0.8, 6: 0.7})):
            wrapper.fit(TRAIN, 6, evaluate_on=HELD_OUT, split="validation")
            assert stopping.result.scores == scores and stopping.result.best_epoch == best
            assert (stopping.result.reason, stopping.result.epochs) == ("max_epochs", 3)


def test_the_time_limit_ends_a_fit_within_an_epoch():
    stopping, slow = EarlyStopping(max_time_s=0.25), At(8, lambda: time.sleep(0.3))
    trainer, _ = fit(stopping, 3, 2, callbacks=[slow], train=Loader(small_dataset(400), 4))
    assert stopping.result.reason == "max_time_s" and stopping.result.epochs == trainer.epoch == 0
    assert 8 <= trainer.iteration <= 10 and not stopping.result.restored and stopping.result.scores == {}


def test_the_time_limit_is_checked_after_epochs_without_evaluation():
    class Slow(Callback):
        def on_epoch_end(self, trainer, record):
            time.sleep(0.3)

    stopping = EarlyStopping(max_time_s=0.25)
    with ParallelWrapper(small_model(), 1, callbacks=[Slow(), stopping]) as wrapper:
        wrapper.fit(TRAIN, 9, evaluate_on=HELD_OUT, split="validation", evaluate_every=9)
        assert wrapper.trainer.epoch == 1


def test_a_loss_that_grows_ends_the_fit():
    stopping = EarlyStopping(max_score=1e-3)
    options = {"optimizer": SGD(0.05), "callbacks": [stopping], "report_every": 4}
    with ParallelWrapper(small_model(), 3, 2, **options) as wrapper:
        wrapper.fit(Loader(small_dataset(400), 4), 3, evaluate_on=HELD_OUT, split="validation")
        assert wrapper.trainer.iteration == 4
    assert stopping.result.reason == "max_score" and not stopping.result.restored


def test_the_loss_is_one_of_all_replicas():
    """Deeplearning4j's feeds each replica's own, of its last batch, to one condition, in racing order."""
    losses = {"loss": 50.0, "score_after_averaging": 5.0}  # of this replica; of all
    trainer = Trainer(Replica(small_model(), SGD(0.01)))
    for most, reason in ((10, None), (4, StopReason.EARLY)):
        EarlyStopping(max_score=most).on_report(trainer, SimpleNamespace(**losses))
        assert (trainer.consensus.request and trainer.consensus.request.reason) == reason


def test_any_rank_that_has_the_loss_can_end_the_fit():
    """The last stage of a pipeline has it; rank 0 then knows of none."""
    losses = {0: math.nan, 1: 50.0}

    def task(communicator):
        class Hidden(EarlyStopping):
            def on_report(self, trainer, report):
                report = copy.copy(report)
                object.__setattr__(report, "score_after_averaging", math.nan)
                object.__setattr__(report, "loss", losses[trainer.rank])
                super().on_report(trainer, report)

        stopping = Hidden(max_score=10)
        averaging, groups = ParameterAveraging(2), Groups.of(communicator)
        replica = Replica(small_model(), SGD(0.01))
        trainer = Trainer(replica, groups=groups, synchronizer=averaging, callbacks=[stopping], report_every=2)
        trainer.fit(Fit(TRAIN, 3, evaluate_on=HELD_OUT, split="validation"))
        return stopping.result

    results = on_threads(2, task)
    assert results[0] == results[1] and results[0].reason == "max_score" and "is 50, above 10" in results[0].details


def test_the_first_condition_that_is_met_is_the_reason(scripted):
    scripted([0.5, 0.1, 0.1])
    stopping = EarlyStopping(best_score=0.2, max_epochs=2, patience=1)
    trainer, _ = fit(stopping, 3)
    assert stopping.result.reason == "best_score"


def test_a_condition_met_in_the_last_epoch_is_the_reason_too(scripted):
    scripted([0.5, 0.1])
    stopping = EarlyStopping(max_epochs=2)
    trainer, _ = fit(stopping, 2)
    assert stopping.result.reason == "max_epochs" and trainer.stopped is None


# the weights that are restored ----------------------------------------------------------------------------------------


def test_the_last_evaluation_is_of_the_restored_weights():
    """Not scripted: real evaluations, before and after."""
    records = []

    class Keep(Callback):
        def on_epoch_end(self, trainer, record):
            records.append(record.evaluation)

    stopping = EarlyStopping("loss", "max", patience=2)  # the worst on purpose: it is not the last
    trainer, weights = fit(stopping, 8, 2, callbacks=[Keep()])
    best = stopping.result.best_epoch
    assert best < trainer.epoch and fingerprint(trainer.model) == weights[best]
    assert isinstance(trainer.evaluation, Evaluation)
    assert trainer.evaluation.to_dict() == records[best - 1].to_dict() != records[-1].to_dict()


def test_half_precision_layers_see_the_restored_weights(scripted):
    scripted([0.1, 0.5, 0.6])
    model = small_model("half")
    trainer, weights = fit(EarlyStopping(patience=2), 3, 2, model=model)
    assert fingerprint(model) == weights[1]
    np.testing.assert_array_equal(model.params.data, model.params.master.astype(np.float16))


def test_no_outer_step_follows_the_restored_weights(scripted):
    """A synchronizer that steps beyond the mean, as SlowMo and DiLoCo do, would if the average came after it."""

    class Beyond(ParameterAveraging):
        def finish(self, replica, moment):
            average = super().finish(replica, moment)
            if moment == "fit":
                replica.params.master[...] *= 1.5
            return average

    scripted([0.1, 0.5, 0.6])
    weights, stopping = Seen(), EarlyStopping(patience=None)
    with ParallelWrapper(small_model(), 2, synchronizer=Beyond(2), callbacks=[weights, stopping]) as wrapper:
        wrapper.fit(TRAIN, 3, evaluate_on=HELD_OUT, split="validation")
        assert fingerprint(wrapper.model) == weights.epochs[0]


def test_replicas_that_differ_between_averages_restore_the_evaluated_weights():
    """With a frequency far beyond the epoch the evaluated epochs alone bring the replicas together (Deeplearning4j's
    takes the score of worker 0 before the average).
    """
    stopping = EarlyStopping("loss", "max", patience=2)
    trainer, weights = fit(stopping, 8, 3, frequency=1000)
    best = stopping.result.best_epoch
    assert fingerprint(trainer.model) == weights[best] and stopping.result.restored
    assert trainer.evaluation.loss == stopping.result.best_score


@pytest.mark.parametrize(
    ("workers", "restore", "reason"),
    [(1, False, StopReason.REQUEST), (2, True, StopReason.REQUEST), (2, True, StopReason.SIGNAL)],
)
def test_the_best_weights_are_restored_after_another_stop(scripted, workers, restore, reason):
    """After a signal there is no time for an evaluation. The stop is in the third epoch."""
    scripted([0.1, 0.5, 0.6])
    stopping = EarlyStopping(restore_when_stopped=restore)
    iteration = 2 * TRAIN.rounds(workers) + 2
    trainer, weights = fit(stopping, 9, workers, callbacks=[StopAfter(iteration, reason=reason)])
    assert (stopping.result.reason, stopping.result.restored) == ("stopped", restore)
    assert (fingerprint(trainer.model) == weights[1]) == restore
    assert (trainer.evaluation is not None) == (restore and reason is StopReason.REQUEST)


def test_restoring_can_be_turned_off(scripted):
    scripted([0.1, 0.5, 0.6])
    stopping = EarlyStopping(restore_best=False)
    trainer, weights = fit(stopping, 3)
    assert fingerprint(trainer.model) == weights[3]
    assert (stopping.result.best_epoch, stopping.result.restored) == (1, False)


def test_early_stopping_that_never_triggers_changes_nothing():
    """If the last epoch is the best, weights and evaluation are those of a fit without it, bit for bit."""
    found = []
    for callbacks in ([], [EarlyStopping(patience=None)]):
        with ParallelWrapper(small_model(), 2, callbacks=callbacks, optimizer=Nesterov(0.02)) as wrapper:
            wrapper.fit(TRAIN, 6, evaluate_on=HELD_OUT, split="validation")
            found.append((fingerprint(wrapper.model), wrapper.trainer.evaluation.to_dict()))
    assert callbacks[0].result.best_epoch == 6
    assert found[0] == found[1]


def test_a_fit_without_validation_is_refused_before_it_begins():
    """Deeplearning4j's checks nothing: without a calculator it fails later, on a null pointer."""
    model = small_model()
    before = fingerprint(model)
    with ParallelWrapper(model, 2, callbacks=[EarlyStopping()]) as wrapper:
        with refused("EarlyStopping"):
            wrapper.fit(TRAIN, 1, evaluate_on=HELD_OUT, split="test")
        assert fingerprint(model) == before
        wrapper.fit(TRAIN, 1, evaluate_on=HELD_OUT, split="validation")  # no harm was done


@pytest.mark.parametrize(
    "arguments", [{"monitor": "acuracy"}, {"patience": 0}, {"best_score": math.nan}, {"restore_best": None}]
)
def test_bad_arguments_are_refused(arguments):
    with refused(*arguments):
        EarlyStopping(**arguments)


def test_a_failed_fit_has_no_result(scripted):
    """Deeplearning4j's swallows it into its result, and leaves the workers running."""

    def fail():
        raise ZeroDivisionError

    scripted([0.5, 0.4])
    stopping = EarlyStopping()
    wrapper = ParallelWrapper(small_model(), 1, callbacks=[At(7, fail), stopping])
    with wrapper, pytest.raises(ZeroDivisionError):
        wrapper.fit(TRAIN, 2, evaluate_on=HELD_OUT, split="validation")
    assert stopping.result is None


class Poison(Callback):
    """Sets a weight of the last worker to NaN in the fourth epoch. Rank 0 records the best weights."""

    every_rank = True

    def __init__(self, model):
        self.model, self.best = model, ""

    def __deepcopy__(self, memo):
        return Poison(self.model)

    def on_epoch_end(self, trainer, record):
        if (trainer.rank, record.epoch) == (0, 2):
            self.best = fingerprint(self.model)

    def on_iteration_end(self, trainer):
        if trainer.epoch == 3 and trainer.rank == trainer.world.size - 1:
            trainer.params.master[0] = np.nan


@pytest.mark.parametrize(("workers", "frequency"), [(1, 2), (2, 100)])
def test_a_fit_that_diverges_leaves_the_best_weights(scripted, workers, frequency):
    """All workers may see it at an average, or one alone in a report."""
    scripted([0.5, 0.2, 0.3, 0.1])
    model, stopping = small_model(), EarlyStopping()
    poison = Poison(model)
    options = {"callbacks": [poison, stopping], "report_every": 2}
    with ParallelWrapper(model, workers, frequency, optimizer=SGD(0.05), **options) as wrapper:
        with pytest.raises(DivergedError):
            wrapper.fit(TRAIN, 6, evaluate_on=HELD_OUT, split="validation")
        assert fingerprint(model) == poison.best
        assert all(np.isfinite(each.params.master).all() for each in wrapper.replicas())
    result = stopping.result
    assert (result.reason, result.restored, result.best_epoch, result.epochs) == ("diverged", True, 2, 3)


@pytest.mark.parametrize("arguments", [{"restore_best": False}, {}])
def test_a_fit_that_diverges_without_any_best_weights(scripted, arguments):
    scripted([math.nan] * 3)
    stopping = EarlyStopping(invalid_score=False, patience=None, **arguments)
    model = small_model()
    with ParallelWrapper(model, 1, callbacks=[Poison(model), stopping]) as wrapper, pytest.raises(DivergedError):
        wrapper.fit(TRAIN, 6, evaluate_on=HELD_OUT, split="validation")
    assert (stopping.result.reason, stopping.result.restored) == ("diverged", False)


# resuming -------------------------------------------------------------------------------------------------------------


def test_early_stopping_resumes_from_its_state(scripted):
    """Every worker's trainer and callback are new, as after loading a checkpoint."""
    scripted([0.5, 0.2, 0.3, 0.4, 0.4, 0.1])

    class Keep(Callback):
        every_rank = True

        def on_epoch_end(self, trainer, record):
            if record.epoch == 3:
                self.kept = copy.deepcopy(trainer.state())

    def task(communicator, state=None):
        stopping, keep = EarlyStopping(patience=3, max_epochs=5), Keep()
        replica, averaging = Replica(small_model(), Nesterov(0.05)), ParameterAveraging(3)
        groups = Groups.of(communicator)
        trainer = Trainer(replica, groups=groups, synchronizer=averaging, callbacks=[stopping, keep])
        if state is not None:
            trainer.restore(state)
        trainer.fit(Fit(TRAIN, 6 - trainer.epoch, evaluate_on=HELD_OUT, split="validation"))
        return stopping.result, fingerprint(trainer.model), getattr(keep, "kept", None)

    whole = on_threads(2, task)
    assert whole[0][0].reason == "patience" and whole[0][0].best_epoch == 2
    again = on_threads(2, lambda communicator: task(communicator, whole[communicator.rank][2]))
    assert [each[:2] for each in again] == [each[:2] for each in whole]


@pytest.mark.parametrize(("limit", "reason"), [(52, "epochs"), (50, "max_time_s")])
def test_the_time_limit_includes_earlier_processes_and_no_pauses(monkeypatch, limit, reason):
    now = 100.0
    monkeypatch.setattr(early_stopping, "time", SimpleNamespace(monotonic=lambda: now))

    def trainer_of(*callbacks):
        return Trainer(Replica(small_model(), SGD(0.05)), callbacks=callbacks)

    keep, stopping = KeepState(2), EarlyStopping(max_time_s=limit)
    trainer_of(EarlyStopping(), keep).fit(Fit(TRAIN, 2, evaluate_on=HELD_OUT, split="validation"))
    keep.kept["callbacks"]["EarlyStopping"]["spent_s"] += 50.0
    trainer = trainer_of(stopping)
    trainer.restore(keep.kept)
    assert stopping.state()["spent_s"] == 50
    now = 9000.0
    trainer.fit(Fit(TRAIN, 2, evaluate_on=HELD_OUT, split="validation"))
    assert stopping.result.reason == reason


def test_a_stop_by_another_callback_is_not_early_stopping(scripted):
    """Such as the pruning of a search: its best weights are not chosen, as the fit has no result."""

    class Prune(Callback):
        def on_epoch_end(self, trainer, record):
            if record.epoch == 2:
                trainer.stop("pruned: other trials were better", StopReason.EARLY)

    scripted([0.1, 0.9, 0.8])
    stopping = EarlyStopping()
    fit(stopping, 3, callbacks=[Prune()])
    assert (stopping.result.reason, stopping.result.restored) == ("stopped", False)


def test_a_fit_after_a_restored_one_that_was_complete_starts_afresh(scripted, tmp_path):
    """As it does without the checkpoint."""

    def wrapper_of():
        stopping = EarlyStopping(patience=1)
        return stopping, ParallelWrapper(small_model(), 1, optimizer=SGD(0.05), callbacks=[stopping])

    scripted([0.1, 0.9, 0.8, 0.7, 0.6])
    _, first = wrapper_of()
    with first:
        first.fit(TRAIN, 5, evaluate_on=HELD_OUT, split="validation")
        first.checkpoint(tmp_path)
    stopping, second = wrapper_of()
    with second:
        second.restore(tmp_path)
        second.fit(TRAIN, 3, evaluate_on=HELD_OUT, split="validation")
    assert (stopping.result.reason, sorted(stopping.result.scores)) == ("epochs", [3, 4, 5])
