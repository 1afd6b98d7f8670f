"""Metrics equal scikit-learn's for any number of workers and any batches."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, Dataset, Dense, EarlyStopping, Loader, Model, ParallelWrapper, Pipeline, ReduceOnPlateau
from cupynet.runs.checkpoints import Checkpoints
from cupynet.training import Checkpoint, RegressionEvaluation
from cupynet.training.metrics import Metric, auc
from tests.support.refusals import refused
from tests.support.training import small_dataset, small_model

sklearn = pytest.importorskip("sklearn.metrics")

CASES = pytest.mark.parametrize("case", range(20))


def log_loss(labels: Any, scores: Any) -> Any:
    return -np.log(scores[np.arange(len(labels)), labels])


def hits(labels: Any, scores: Any) -> float:
    """Return a single number for a batch."""
    return float((scores.argmax(axis=1) == labels).mean())


def doubt(labels: Any, scores: Any) -> Any:
    return 1 - scores.max(axis=1)


def largest_error(labels: Any, scores: Any) -> Any:
    return abs(scores - labels).max(axis=1)


@contextmanager
def wrapped(case: int, outputs: int, loss: str, *metrics: Metric, **options: Any) -> Iterator[ParallelWrapper]:
    """Yield a wrapper of a model whose weights do not change."""
    model = Model([Dense(outputs)], (4, 3), "numpy", case, loss, dtype="double")
    model.set_learning_rate_factors({"*": 5e-324})  # times the learning rate, this is 0
    with ParallelWrapper(model, 1 + case % 4, metrics=metrics, progress="none", log_every=3, **options) as wrapper:
        yield wrapper


def images(rng: np.random.Generator, count: int) -> Any:
    return rng.normal(0, 0.7, (count, 4, 3)).astype(np.float32)


def approx(value: Any) -> Any:
    return pytest.approx(float(value), rel=1e-10, abs=1e-12)


@CASES
def test_metrics_of_a_classification_equal_scikit_learns(case: int) -> None:
    rng = np.random.default_rng(case)
    classes, count, size = 2 + case % 5, int(rng.integers(20, 70)), int(rng.integers(1, 9))
    x, y = images(rng, count), rng.permutation(np.arange(count) % classes)
    with wrapped(case, classes, "softmax", "macro_f1", "auc", "top_2_accuracy", log_loss, hits) as wrapper:
        found, scores = wrapper.evaluate(x, y, batch_size=size), wrapper.predict(x)
        history = wrapper.fit(Loader(Dataset("images", x, y, classes), size), evaluate_on=(x, y))
    best = scores.argmax(axis=1)
    given = scores[:, 1] if classes == 2 else scores
    expected = {
        "macro_f1": sklearn.f1_score(y, best, average="macro"),
        "auc": sklearn.roc_auc_score(y, given, multi_class="ovr", average="macro"),
        "top_2_accuracy": 1.0 if classes == 2 else sklearn.top_k_accuracy_score(y, scores, k=2),
        "log_loss": sklearn.log_loss(y, scores),
        "hits": sklearn.accuracy_score(y, best),
    }
    assert found.metrics == {name: approx(value) for name, value in expected.items()}
    assert history.epochs["accuracy"] == [found.accuracy] == [sklearn.accuracy_score(y, best)]
    assert history.epochs["test_auc"] == [approx(expected["auc"])]


@CASES
def test_figures_of_a_regression_equal_scikit_learns(case: int) -> None:
    rng = np.random.default_rng(case)
    targets, count, size = 1 + case % 3, int(rng.integers(5, 70)), int(rng.integers(1, 9))
    x, y = images(rng, count), rng.normal(1e4 * (case % 2), 1, (count, targets)).astype(np.float32)
    y[:, -1] = 7.0 if case % 5 == 4 else y[:, -1]
    with wrapped(case, targets, "mean_squared_error", largest_error) as wrapper:
        found, scores = wrapper.evaluate(x, y, batch_size=size), wrapper.predict(x)
    assert isinstance(found, RegressionEvaluation) and found.samples == count
    expected = {
        "loss": sklearn.mean_squared_error(y.astype(float), scores),
        "mean_absolute_error": sklearn.mean_absolute_error(y.astype(float), scores),
        "r2": sklearn.r2_score(y.astype(float), scores),
        "largest_error": abs(scores - y).max(axis=1).mean(),
    }
    assert found.figures() == {name: approx(value) for name, value in expected.items()}
    assert found.to_dict()["metrics"] == found.metrics and all(name in found.stats() for name in expected)


@pytest.mark.parametrize("options", [{}, {"pipeline": Pipeline(2)}], ids=["whole", "stages"])
def test_the_history_of_a_regression_has_its_figures_and_no_accuracy(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4, 3)), rng.normal(size=40)
    stopping = EarlyStopping("mean_absolute_error", patience=1)
    model = Model([Dense(4), Dense(1)], (4, 3), "numpy", loss="huber")
    with ParallelWrapper(model, 2, callbacks=[stopping], **options) as wrapper:
        history = wrapper.fit(x, y, epochs=3, batch_size=8, validation_split=0.25)
    assert {"loss", "validation_loss", "validation_mean_absolute_error", "validation_r2"} <= history.epochs.keys()
    assert not [name for name in history.epochs if "accuracy" in name] and "confusion" not in history.epochs
    assert set(history.reports.get("accuracy", [None])) == {None}
    assert stopping.result is not None
    assert stopping.result.best_score == min(history.epochs["validation_mean_absolute_error"])
    assert "validation_r2" in repr(history) and "validation_r2" in history._repr_html_()


def test_the_accuracy_of_soft_labels_uses_their_largest_class() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4, 3)), rng.dirichlet(np.ones(3), 40)
    with wrapped(2, 3, "softmax", hits) as wrapper:
        history = wrapper.fit(x, y, batch_size=8, evaluate_on=(x, y))
        predicted = wrapper.predict(x).argmax(axis=1)
    assert history.epochs["accuracy"] == history.epochs["test_accuracy"] == [(predicted == y.argmax(axis=1)).mean()]
    assert history.epochs["test_hits"] == [approx(history.epochs["accuracy"][0])]


def test_r2_of_constant_targets_or_one_sample_matches_scikit_learn() -> None:
    for scores, r2 in (([[2.0], [2.0]], 1.0), ([[2.0], [3.0]], 0.0), ([[2.0]], math.nan)):
        found = RegressionEvaluation(1)
        found.add(scores, [[2.0]] * len(scores), np.zeros(len(scores)))
        assert found.r2 == pytest.approx(r2, nan_ok=True)


@pytest.mark.parametrize("classes", [2, 3])
def test_auc_gives_equal_scores_their_mean_rank(classes: int) -> None:
    rng = np.random.default_rng(classes)
    targets, scores = np.arange(60) % classes, rng.dirichlet(np.ones(classes), 6)[rng.integers(0, 6, 60)]
    given = scores[:, 1] if classes == 2 else scores
    assert auc(targets, scores) == approx(sklearn.roc_auc_score(targets, given, multi_class="ovr"))


def test_auc_of_targets_is_scikit_learns_and_of_one_class_nan() -> None:
    targets, scores = np.array([[1, 0], [0, 1], [1, 1], [0, 0]]), np.random.default_rng(0).normal(size=(4, 2))
    assert auc(targets, scores) == approx(sklearn.roc_auc_score(targets, scores))
    assert math.isnan(auc(np.zeros(4, int), scores)) and math.isnan(auc(targets, scores * np.nan))


BAD: dict[str, Any] = {
    "a name": "macro_f1",
    "a number": [3],
    "unknown": ["acuracy"],
    "twice": [hits, hits],
    "no class": ["top_0_accuracy"],
    "no number": ["top_n_accuracy"],
    "a name that is taken": [auc, "auc"],
}


@pytest.mark.parametrize("metrics", BAD.values(), ids=BAD)
def test_bad_metrics_are_refused(metrics: Any) -> None:
    with refused("metrics"):
        ParallelWrapper(Model([Dense(3)], (4, 3), "numpy"), 1, metrics=metrics)


@pytest.mark.parametrize(
    ("loss", "y", "metrics"),
    [
        ("huber", np.ones((8, 3)), ["macro_f1"]),
        ("huber", np.ones((8, 3)), ["accuracy"]),
        ("softmax", np.ones(8, int), ["r2"]),
        ("huber", np.full((8, 3), 0.7), ["auc"]),
    ],
)
def test_metrics_of_the_other_task_are_refused(loss: str, y: Any, metrics: list[Metric]) -> None:
    x = np.ones((8, 4, 3))
    with wrapped(0, 3, loss, *metrics) as wrapper:
        for call in (lambda: wrapper.fit(x, y, validation_data=(x, y)), lambda: wrapper.evaluate(x, y)):
            with refused("metrics"):
                call()
    assert not wrapper.history.epochs


def test_a_monitor_must_be_a_figure_of_the_evaluation() -> None:
    x, y = np.ones((8, 4, 3)), np.arange(8) % 3
    for monitor in ("hits", "val_hits", "validation_loss", "acuracy", "r2"):
        plateau = SGD(ReduceOnPlateau(0.1, monitor=monitor))
        unknown = refused("EarlyStopping.monitor") if monitor in ("acuracy", "r2") else nullcontext()
        with wrapped(0, 3, "softmax", hits, callbacks=[EarlyStopping(monitor)], optimizer=plateau) as wrapper, unknown:
            wrapper.fit(x, y, validation_split=0.5)
    schedule = SGD(ReduceOnPlateau(0.1, monitor="accuracy"))
    with wrapped(0, 1, "huber", optimizer=schedule) as wrapper, refused("optimizer.learning_rate.monitor"):
        wrapper.fit(x, np.ones(8), validation_split=0.5)


def test_the_best_checkpoint_may_be_chosen_by_any_metric(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(8, 4, 3)), np.arange(8) % 3
    for best in ("doubt", "val_doubt", "auc"):
        saving = Checkpoint(best=best, keep_last=1, path=tmp_path / best)
        unknown = refused("Checkpoint.best") if best == "auc" else nullcontext()
        with ParallelWrapper(Model([Dense(3)], (4, 3)), 1, metrics=[doubt], callbacks=[saving]) as wrapper, unknown:
            found = wrapper.fit(x, y, epochs=4, batch_size=8, evaluate_on=(x, y)).epochs["test_doubt"]
            assert Checkpoints(tmp_path / best).steps() == sorted({4, 1 + int(np.argmax(found))})


@pytest.mark.parametrize("metric", [lambda labels, scores: scores, lambda labels, scores: None], ids=["rows", "none"])
def test_a_metric_with_another_result_is_refused(metric: Any) -> None:
    with wrapped(0, 3, "softmax", metric) as wrapper, refused("metrics"):
        wrapper.evaluate(np.ones((8, 4, 3)), np.zeros(8, int))


def test_a_metric_cannot_change_what_is_evaluated() -> None:
    def binary(labels: Any, scores: Any) -> float:
        labels[labels > 0], scores[:] = 1, 0
        return 0.0

    x, y = np.random.default_rng(0).normal(size=(8, 4, 3)), np.arange(8) % 3
    found = []
    for metrics in ([], [binary]):
        with wrapped(0, 3, "softmax", *metrics) as wrapper:
            found.append(wrapper.evaluate(x, y).confusion.tolist())
    assert found[0] == found[1]


def loss_of_sklearn(labels: Any, scores: Any) -> Any:
    return sklearn.log_loss(labels, scores, labels=[0, 1, 2])


def auc_of_sklearn(labels: Any, scores: Any) -> Any:
    return sklearn.roc_auc_score(labels, scores, multi_class="ovr")


@pytest.mark.parametrize("dtype", ["half", "float", "double"])
def test_metrics_of_scikit_learn_take_the_probabilities_of_any_dtype_without_a_warning(dtype: str) -> None:
    """They check that the sums are 1 up to rounding errors."""
    data, metrics = small_dataset(60), [loss_of_sklearn, auc_of_sklearn]
    with warnings.catch_warnings(), ParallelWrapper(small_model(dtype), 1, metrics=metrics) as wrapper:
        warnings.simplefilter("error")
        found = wrapper.evaluate(data).metrics
        for metric in metrics:
            expected = metric(data.labels, wrapper.model.predict(data.images))
            assert found[metric.__name__] == pytest.approx(expected, rel=1e-3 if dtype == "half" else 1e-6)
