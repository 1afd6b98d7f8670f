"""Early stopping: the conditions that end a fit, the best epoch, and the weights that are restored.

Several tests cover mistakes of Deeplearning4j's EarlyStoppingParallelTrainer; their docstrings say so.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, DivergedError, Evaluation, Loader, Model, ParameterAveraging, Pipeline
from cupynet.training import Callback, Checkpoint, EarlyStopping, ParallelWrapper, Trainer, consensus
from cupynet.training.callbacks import early_stopping
from cupynet.training.fit import Fit
from tests.support.refusals import refused
from tests.support.training import At, On, Seen, StopAfter, alone, fingerprint, small_dataset, small_model

HELD_OUT = Loader(small_dataset(30, seed=7), 10, shuffle=False)
TRAIN = Loader(small_dataset(20), 4, seed=3)  # five batches
VALIDATION: dict[str, Any] = {"validation_data": HELD_OUT}
BAD = math.nan

Script = Callable[..., None]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Replace evaluations by given scores: `scripted([0.5, 0.9])` for epochs 1 and 2."""

    def use(scores: Sequence[float], name: str = "loss") -> None:
        def evaluate(trainer: Trainer, loader: Loader) -> Any:
            figures = {**dict.fromkeys(Evaluation.FIGURES, 0.5), name: scores[trainer.epoch - 1]}
            return type("Scripted", (Evaluation,), figures)(classes=2)

        monkeypatch.setattr(Trainer, "evaluate", evaluate)

    return use


def fit(
    stopping: EarlyStopping,
    epochs: int,
    *callbacks: Callback,
    model: Model | None = None,
    restore: Path | None = None,
    **options: Any,
) -> tuple[Trainer, dict[int, str]]:
    """Train up to an epoch, by default on two workers. Return the trainer and each epoch's fingerprint."""
    weights = Seen()
    options = {"workers": 2, "averaging_frequency": 2, "optimizer": SGD(0.05), **options}
    with ParallelWrapper(model or small_model(), callbacks=[weights, stopping, *callbacks], **options) as wrapper:
        if restore is not None:
            wrapper.restore(restore)
            epochs -= wrapper.trainer.epoch
        wrapper.fit(TRAIN, epochs=epochs, **VALIDATION)
        assert len({fingerprint(each) for each in wrapper.replicas()}) == 1
        return wrapper.trainer, dict(enumerate(weights.epochs, 1))


def outcome(stopping: EarlyStopping) -> tuple[str, int | None]:
    assert stopping.result is not None
    return stopping.result.reason, stopping.result.best_epoch


@pytest.mark.parametrize(
    ("arguments", "scores", "reason", "best", "epochs"),
    [
        pytest.param({"patience": None}, [0.9, 0.4, 0.6, 0.5, 0.7], "epochs", 2, 5, id="the least loss"),
        pytest.param({"monitor": "accuracy"}, [0.5, 0.9, 0.7], "epochs", 2, 3, id="the greatest accuracy"),
        pytest.param({}, [0.5, 0.3, 0.3, 0.4], "epochs", 2, 4, id="the first of equal scores"),
        pytest.param({"patience": 2}, [0.9, 0.8, 0.9, 0.7, 0.8, 0.9, 0.1], "patience", 4, 6, id="patience"),
        pytest.param({"patience": 2, "min_delta": 0.25}, [1, 0.75, 0.8, 0.1], "patience", 2, 3, id="too little"),
        pytest.param({"patience": 2, "min_delta": 0.25}, [1, 0.9, 0.7, 0.6], "epochs", 4, 4, id="small steps"),
        pytest.param({"best_score": 0.2}, [0.5, 0.4, 0.2, 0.1], "best_score", 3, 3, id="target reached"),
        pytest.param({"monitor": "f1", "best_score": 0.9}, [0.5, 0.95, 1], "best_score", 2, 2, id="target exceeded"),
        pytest.param({}, [0.5, -math.inf, 0.1], "invalid_score", 1, 2, id="infinite"),
        pytest.param({"monitor": "accuracy"}, [0.5, BAD, 0.9], "invalid_score", 1, 2, id="not a number"),
        pytest.param({"invalid_score": False}, [BAD, 0.5, math.inf, 0.1], "epochs", 4, 4, id="invalid scores ignored"),
        pytest.param({"invalid_score": False}, [BAD, BAD], "epochs", None, 2, id="no finite score"),
        pytest.param({"best_score": 0.2, "max_epochs": 2}, [0.5, 0.1, 0], "best_score", 2, 2, id="the first condition"),
        pytest.param({"max_epochs": 2}, [0.5, 0.1], "max_epochs", 2, 2, id="a condition in the last epoch"),
    ],
)
def test_scores_decide_when_a_fit_ends_and_which_weights_are_restored(
    scripted: Script, arguments: dict[str, Any], scores: list[float], reason: str, best: int | None, epochs: int
) -> None:
    """Deeplearning4j minimizes every score, so it keeps the worst accuracy (5459, 5760), and does not detect NaN."""
    scripted(scores, arguments.get("monitor", "loss"))
    stopping = EarlyStopping(**arguments)
    trainer, weights = fit(stopping, len(scores))
    assert outcome(stopping) == (reason, best) and trainer.epoch == epochs
    assert fingerprint(trainer.model) == weights[best or epochs]
    assert (trainer.stopped is None) == (epochs == len(scores))


def test_a_monitor_that_is_changed_between_fits_changes_the_direction(scripted: Script) -> None:
    stopping = EarlyStopping("accuracy", patience=None)
    with ParallelWrapper(small_model(), 1, callbacks=[stopping]) as wrapper:
        for stopping.monitor, best in (("accuracy", 2), ("loss", 5)):
            scripted([0.5, 0.9, 0.7, 0.5, 0.3, 0.7], stopping.monitor)
            wrapper.fit(TRAIN, epochs=3, **VALIDATION)
            assert outcome(stopping) == ("epochs", best)


def test_the_details_of_the_result_name_min_delta(scripted: Script) -> None:
    """The best epoch may be better than the reference, but not by more than `min_delta`."""
    scripted([1, 0.7, 0.6])
    stopping = EarlyStopping(patience=1, min_delta=0.25)
    fit(stopping, 3)
    assert outcome(stopping) == ("patience", 3)
    assert stopping.result is not None and "0.25" in stopping.result.details


def test_max_epochs_counts_epochs_without_evaluations_and_starts_again_in_each_fit(scripted: Script) -> None:
    """Deeplearning4j's trainer can be used once, and checks its epoch conditions only when it evaluates."""
    scripted([0.5] * 20)
    stopping = EarlyStopping(max_epochs=5)
    with ParallelWrapper(small_model(), 2, callbacks=[stopping]) as wrapper:
        for epochs, best in ((5, 3), (10, 6)):
            wrapper.fit(TRAIN, epochs=20, evaluate_every=3, **VALIDATION)
            assert outcome(stopping) == ("max_epochs", best) and wrapper.trainer.epoch == epochs


@pytest.mark.parametrize("pipeline", [None, Pipeline(2, 2)])
def test_a_loss_above_max_score_ends_a_fit_at_once(pipeline: Pipeline | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pipelines, where rank 0 does not have the loss, and regardless of the interval between exchanges."""
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1000)
    stopping = EarlyStopping(max_score=1e-3)
    with ParallelWrapper(small_model(), 1, pipeline=pipeline, callbacks=[stopping], log_every=2) as wrapper:
        wrapper.fit(TRAIN, epochs=9, **VALIDATION)
        assert outcome(stopping)[0] == "max_score" and wrapper.trainer.iteration == 2


def test_max_score_limits_the_loss_of_all_replicas() -> None:
    """In Deeplearning4j, all replicas race to pass the loss of their last batch to one condition."""
    report: Any = SimpleNamespace(loss=50.0, score_after_averaging=5.0)  # of this replica, and of all
    trainer = alone(small_model(), SGD(0.01))
    EarlyStopping(max_score=10).on_log(trainer, report)
    assert trainer.consensus.request is None
    EarlyStopping(max_score=4).on_log(trainer, report)
    assert trainer.consensus.request is not None


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("double", {"workers": 1}),
        ("double", {"workers": 3, "averaging_frequency": 1000}),
        ("half", {}),
        ("double", {"averaging_frequency": None, "synchronizer": ParameterAveraging(2, outer_optimizer="slowmo")}),
    ],
    ids=["one", "rarely averaged", "half", "outer step"],
)
def test_best_weights_are_restored_on_all_workers_with_their_evaluation(dtype: str, options: dict[str, Any]) -> None:
    """An evaluation averages the replicas first, whereas Deeplearning4j takes worker 0's score before the average."""
    stopping = EarlyStopping("loss", "max", patience=2)  # selects the worst epoch, which is not the last
    trainer, weights = fit(stopping, 8, model=small_model(dtype), **options)
    assert stopping.result is not None and trainer.evaluation is not None
    best = stopping.result.best_epoch
    assert best is not None and best < trainer.epoch and fingerprint(trainer.model) == weights[best]
    assert trainer.evaluation.loss == stopping.result.best_score
    np.testing.assert_array_equal(trainer.params.data, trainer.params.master.astype(trainer.params.data.dtype))


def test_a_stop_on_request_does_not_restore_the_best_weights(scripted: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consensus, "AGREE_EVERY", 1)
    scripted([0.1, 0.5, 0.6])
    stopping = EarlyStopping()
    trainer, weights = fit(stopping, 9, StopAfter(8))  # in the third epoch
    assert outcome(stopping) == ("stopped", 1)
    assert fingerprint(trainer.model) != weights[1] and trainer.evaluation is None


@pytest.mark.parametrize("arguments", [{"monitor": 3}, {"patience": 0}, {"best_score": math.nan}])
def test_bad_arguments_of_early_stopping_are_refused(arguments: dict[str, Any]) -> None:
    with refused(*arguments):
        EarlyStopping(**arguments)


@pytest.mark.parametrize(("workers", "frequency"), [(1, 2), (2, 100)])
def test_a_fit_that_diverges_restores_the_best_weights(scripted: Script, workers: int, frequency: int) -> None:
    """Either all workers detect it at an average, or a single one in a report."""

    def poison(trainer: Trainer) -> None:
        if trainer.epoch == 3 and trainer.rank == workers - 1:
            trainer.params.master[0] = np.nan

    scripted([0.5, 0.2, 0.3, 0.1])
    stopping, weights = EarlyStopping(), Seen()
    callbacks = [weights, On("on_iteration_end", poison, every_rank=True), stopping]
    with ParallelWrapper(small_model(), workers, frequency, callbacks=callbacks, log_every=2) as wrapper:
        with pytest.raises(DivergedError):
            wrapper.fit(TRAIN, epochs=6, **VALIDATION)
        assert outcome(stopping) == ("diverged", 2)
        assert [fingerprint(each) for each in wrapper.replicas()] == [weights.epochs[1]] * workers


@pytest.mark.parametrize(
    ("scores", "first", "second", "epoch"),
    [
        ([0.5, 0.6, 0.7, 0.8], {"patience": 2}, {"patience": 2}, 3),
        ([0.5, 0.6, 0.7, 0.8], {"patience": 2}, {"patience": 3}, 4),
        ([0.5, 0.6, 0.7, 0.8], {"patience": 2, "max_epochs": 2}, {"patience": 2, "max_epochs": 4}, 3),
        ([0.5, 0.6, 0.7, 0.8], {"best_score": 0.5}, {"best_score": 0.5}, 1),
        ([0.5, 0.6, 0.7, 0.1], {"best_score": 0.5}, {"best_score": 0.2}, 4),
        ([0.5, 0.6, 0.7, 0.8], {"max_score": 0.01}, {"max_score": 0.02}, 0),
        ([0.5, 0.6, 0.7, 0.8], {"max_score": 0.01}, {"max_score": 100}, 4),
        ([0.5, 0.6, 0.7, 0.8], {"max_time_s": 1e-9}, {"max_time_s": 1e-9}, 0),
        ([0.5, 0.6, 0.7, 0.8], {"max_time_s": 1e-9}, {"max_time_s": 1e9}, 4),
        ([BAD, 0.6, 0.7, 0.1], {}, {"invalid_score": False}, 4),
    ],
    ids=str,
)
def test_a_resumed_fit_that_had_stopped_early_continues_only_if_its_limit_was_raised(
    scripted: Script, tmp_path: Path, scores: list[float], first: dict[str, Any], second: dict[str, Any], epoch: int
) -> None:
    scripted(scores)
    stopped, _ = fit(EarlyStopping(**first), 4, Checkpoint(path=tmp_path), log_every=1)
    continued, _ = fit(EarlyStopping(**second), 4, restore=tmp_path, log_every=1)
    assert stopped.epoch <= continued.epoch == epoch


def test_scores_of_another_metric_are_discarded_on_resume(tmp_path: Path) -> None:
    fit(EarlyStopping("accuracy"), 2, Checkpoint(path=tmp_path))
    stopping = EarlyStopping("loss", max_epochs=3)
    fit(stopping, 4, restore=tmp_path)
    assert stopping.result is not None and stopping.result.scores.keys() == {3}


def test_max_epochs_still_counts_if_a_resumed_run_monitors_another_metric(tmp_path: Path) -> None:
    fit(EarlyStopping("accuracy", max_epochs=1), 3, Checkpoint(path=tmp_path))
    trainer, _ = fit(EarlyStopping("loss", max_epochs=1), 3, restore=tmp_path)
    assert trainer.epoch == 1


@pytest.mark.parametrize(("limit", "reason", "iteration"), [(52, "epochs", 10), (50, "max_time_s", 3)])
def test_max_time_s_includes_earlier_processes_but_not_pauses(
    monkeypatch: pytest.MonkeyPatch, limit: float, reason: str, iteration: int
) -> None:
    """It ends a fit within an epoch."""
    passed = [100.0]  # seconds
    monkeypatch.setattr(early_stopping, "time", SimpleNamespace(monotonic=lambda: sum(passed)))
    states: list[dict[str, Any]] = []
    spends, saves = At(1, lambda: passed.append(50)), At(2, lambda: states.append(earlier.state()))
    planned = Fit(TRAIN, 2, HELD_OUT, split="validation")
    earlier = alone(small_model(), SGD(0.05), callbacks=[EarlyStopping(), spends, saves])
    earlier.fit(planned)
    stopping = EarlyStopping(max_time_s=limit)
    trainer = alone(small_model(), SGD(0.05), callbacks=[stopping])
    trainer.restore(*states)
    passed.append(9000)
    trainer.fit(planned)
    assert outcome(stopping)[0] == reason and trainer.iteration == iteration
