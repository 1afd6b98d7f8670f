"""Regression targets, soft labels, and weights of samples and classes."""

import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupynet import SGD, ConfigError, Dataset, EarlyStopping, Loader, Model, ParallelWrapper, Pipeline, create_backend
from cupynet.nn import BatchNorm, Dense, Image, Loss, MeanSquaredError, SoftmaxNLL
from cupynet.parallel import GradientSharing
from cupynet.training.graph_replica import GraphReplica
from tests.support.backends import WORKING
from tests.support.refusals import refused
from tests.support.shards import write_shards
from tests.support.trainers import fitted
from tests.support.training import assert_close, fingerprint, on_backends, small_dataset, small_model, small_network

RNG = np.random.default_rng(5)
DATA = small_dataset(61)
X, Y = DATA.images, DATA.labels
NUMBERS = RNG.normal(0, 1, (61, 3)).astype(np.float32)
SOFT = RNG.dirichlet(np.ones(3), 61).astype(np.float32)
WEIGHTS = RNG.uniform(0, 2, 61).astype(np.float32)
SOME, BALANCED = np.array([2, 1, 0.5], np.float32)[Y], (61 / 3 / np.bincount(Y)).astype(np.float32)[Y]
WEIGHTED = replace(DATA, weights=WEIGHTS)
TARGETS: dict[str, tuple[str, Dataset]] = {
    "regression": ("mean_squared_error", Dataset("numbers", X, NUMBERS, 3)),
    "multi-label": ("binary_cross_entropy", Dataset("several", X, (NUMBERS > 0).astype(np.float32), 3)),
    "soft": ("softmax", Dataset("soft", X, SOFT, 3)),
    "weighted": ("softmax", WEIGHTED),
    "weighted regression": ("huber", Dataset("numbers", X, NUMBERS, 3, weights=WEIGHTS)),
}
Weights = dict[str, Any]


def model_for(loss: str | Loss, backend: str = "numpy", dtype: str = "double") -> Model:
    return Model(small_network(), Image(8, 8, 1), create_backend(backend, dtype), 1, loss)


class Counting(SoftmaxNLL):
    calls = 0

    def __call__(self, *arguments: Any) -> tuple[Any, Any]:
        self.calls += 1
        return super().__call__(*arguments)


@pytest.mark.parametrize("pipeline", [None, Pipeline(2, micro_batches=1)], ids=["replicas", "pipeline"])
def test_every_worker_has_a_copy_of_the_loss(pipeline: Pipeline | None) -> None:
    with ParallelWrapper(model_for(Counting()), 2, pipeline=pipeline) as wrapper:
        wrapper.fit(DATA, batch_size=8)  # eight batches
        losses = [replica.loss for replica in wrapper.replicas()]
        assert [loss.calls for loss in losses if isinstance(loss, Counting)] == [4, 4]


def test_a_loss_that_cannot_be_copied_is_refused() -> None:
    loss = Counting()
    loss.lock = threading.Lock()  # type: ignore[attr-defined]
    with ParallelWrapper(model_for(loss), 2) as wrapper, refused("loss"):
        wrapper.fit(DATA, batch_size=8)


@cache
def weights_of_one_replica(kind: str, batch_size: int) -> Weights:
    loss, data = TARGETS[kind]
    return fitted(model_for(loss), Loader(data, batch_size, seed=3), epochs=2, optimizer=SGD(0.05)).weights()


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize(
    ("backend", "workers", "options"),
    [
        *(pytest.param(each.values[0], 2, {}, id=each.id, marks=each.marks) for each in WORKING),
        pytest.param("numpy", 3, {}, id="three workers"),
        pytest.param("numpy", 2, {"accumulation_steps": 3}, id="parts"),
        pytest.param("numpy", 2, {"pipeline": Pipeline(2, micro_batches=3)}, id="pipeline"),
    ],
)
def test_averaging_every_iteration_equals_one_replica_for_all_kinds_of_targets(
    kind: str, backend: str, workers: int, options: dict[str, Any]
) -> None:
    loss, data = TARGETS[kind]
    model = model_for(loss, backend, "float" if backend == "cupy" else "double")
    with ParallelWrapper(model, workers, 1, optimizer=SGD(0.05), log_every=0, **options) as wrapper:
        wrapper.fit(Loader(data, 8, seed=3), epochs=2)
        for replica in (trainer.replica for trainer in wrapper._trainers if trainer is not None):
            assert not isinstance(replica, GraphReplica) or replica.graphs.refused == ""
    assert_close(model.weights(), weights_of_one_replica(kind, 8 * workers), 1e-5 if backend == "cupy" else 1e-12)


def test_a_worker_without_a_batch_exchanges_statistics_of_targets() -> None:
    data = TARGETS["multi-label"][1]
    layers = {"norm": BatchNorm(sync=True), "output": Dense(3)}

    def train(workers: int, batch_size: int) -> Weights:
        model = Model(layers, (8, 8, 1), create_backend("numpy", "double"), 1, "binary_cross_entropy")
        loader = Loader(data, batch_size, seed=3)  # of 8 batches, the third worker has two
        return fitted(model, loader, workers, synchronizer=GradientSharing(), optimizer=SGD(0.05)).weights()

    assert_close(train(3, 8), train(1, 24), 1e-12)


@pytest.mark.parametrize("pipeline", [None, Pipeline(2)])
def test_a_loss_may_require_targets(pipeline: Pipeline | None) -> None:
    class OfTargets(MeanSquaredError):
        def __call__(self, backend: Any, prediction: Any, target: Any) -> tuple[Any, Any]:
            assert target.ndim == 2
            return super().__call__(backend, prediction, target)

    data = TARGETS["regression"][1]
    options: dict[str, Any] = {"pipeline": pipeline, "optimizer": SGD(0.05)}
    found = fitted(model_for(OfTargets(), "numba"), data, **options)
    expected = fitted(model_for("mean_squared_error", "numba"), data, **options)
    assert fingerprint(found) == fingerprint(expected)


@pytest.mark.standin
def test_steps_are_captured_again_for_another_kind_of_labels() -> None:
    models = []
    for backend in ("cupy", "numpy"):
        models.append(model_for("softmax", backend, "float"))
        with ParallelWrapper(models[-1], 2, 1, optimizer=SGD(0.05), devices=[0] if backend == "cupy" else None) as both:
            for data in (DATA, WEIGHTED, Dataset("soft", X, SOFT, 3), DATA):
                both.fit(Loader(data, 8, seed=3), epochs=2)
    assert_close(models[0].weights(), models[1].weights(), 1e-5)


@on_backends("numpy", "numba", "cupy")
@pytest.mark.parametrize(("outputs", "options"), [(1, {}), (3, {}), (3, {"pipeline": Pipeline(2)})])
def test_the_accuracy_of_targets_0_and_1_is_the_fraction_of_correct_outputs(
    backend: str, outputs: int, options: dict[str, Any]
) -> None:
    y = (NUMBERS[:, :outputs] > 0).astype(np.float32)
    model = Model([Dense(4), Dense(outputs)], (8, 8, 1), backend, 1, "binary_cross_entropy")
    model.set_learning_rate_factors({"*": 5e-324})  # times the learning rate, this is 0
    stopping = EarlyStopping("accuracy")
    with ParallelWrapper(model, 2, callbacks=[stopping], devices=[0] if backend == "cupy" else None, **options) as both:
        history = both.fit(X, y, epochs=3, batch_size=8, sample_weight=WEIGHTS, validation_data=(X, y))
        right = ((both.predict(X) > 0.5) == (y > 0.5)).mean()
        assert both.evaluate(X, y).accuracy == pytest.approx(right)
    assert 0 < right < 1 and history.epochs["validation_accuracy"] == pytest.approx([right] * 3)
    assert history.epochs["accuracy"] == pytest.approx([right] * 3)
    assert stopping.result is not None and stopping.result.best_score == pytest.approx(right)


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        ("huber", (NUMBERS[:, :1], NUMBERS[:, 0].astype(np.float64), NUMBERS[:, 0].tolist())),
        ("binary_cross_entropy", ((Y == 1).astype(np.float32), Y == 1, (Y == 1).astype(np.uint8)[:, None])),
    ],
)
def test_targets_of_one_output_may_be_a_vector_or_integers(loss: str, targets: tuple[Any, ...]) -> None:
    found = set()
    for y in targets:
        with ParallelWrapper(Model([Dense(1)], (8, 8, 1), "numpy", 1, loss), 2) as wrapper:
            wrapper.fit(X, y, batch_size=8, validation_data=(X, y))
            assert wrapper.evaluate(X, y).samples == 61
            found.add(fingerprint(wrapper.model))
            with pytest.raises(ConfigError, match="float32"):  # in a Loader, integers are class indices
                wrapper.fit(Loader((X, Y), 8))
    assert len(found) == 1


@pytest.mark.parametrize("rows", [[0, 1, 3], [2, 5]], ids=["multi-hot", "one-hot"])
def test_integer_targets_are_evaluated_like_floats(rows: list[int]) -> None:
    y = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])[np.resize(rows, 61)]
    model = Model([Dense(3)], (8, 8, 1), "numpy", 1, "binary_cross_entropy")
    with ParallelWrapper(model, 2) as wrapper:
        wrapper.fit(X, y, batch_size=8)
        found, expected = (wrapper.evaluate(X, each) for each in (y, y.astype(np.float32)))
    assert type(found) is type(expected) and found.figures() == expected.figures()


@pytest.mark.parametrize(
    ("loss", "weights", "same"),
    [
        ("softmax", {"sample_weight": np.full(61, 2)}, {"rate": 0.02}),
        ("softmax", {"sample_weight": WEIGHTS, "class_weight": {0: 2.0, 2: 0.5}}, {"sample_weight": SOME * WEIGHTS}),
        ("softmax", {"sample_weight": WEIGHTS, "class_weight": "balanced"}, {"sample_weight": BALANCED * WEIGHTS}),
        ("softmax", {"class_weight": {False: 2.0, True: 0.5}}, {"class_weight": {0: 2.0, 1: 0.5}}),
        (SoftmaxNLL(class_weights=[2, 1, 0.5]), {}, {"class_weight": {0: 2, 2: 0.5}}),
    ],
    ids=["twice the learning rate", "of some classes", "balanced", "of booleans", "of the loss"],
)
def test_class_and_sample_weights_scale_losses(loss: str | Loss, weights: dict[str, Any], same: dict[str, Any]) -> None:
    """Class weights and sample weights are multiplied."""

    def trained(loss: str | Loss, rate: float = 0.01, **weights: Any) -> Weights:
        with ParallelWrapper(model_for(loss), 2, 1, optimizer=SGD(rate)) as wrapper:
            wrapper.fit(X, Y, epochs=2, batch_size=8, **weights)
        return wrapper.model.weights()

    assert_close(trained(loss, **weights), trained("softmax", **same), 1e-7)


def test_doubled_sample_weights_double_the_training_loss() -> None:
    losses = []
    for weight in (1.0, 2.0):
        with ParallelWrapper(small_model("double"), 1, optimizer=SGD(1e-9)) as wrapper:
            losses.append(wrapper.fit(X, Y, batch_size=8, sample_weight=np.full(61, weight))["loss"])
    assert losses[1] == pytest.approx([2 * loss for loss in losses[0]], rel=1e-6)


def test_sample_weights_do_not_apply_to_the_validation_split() -> None:
    with ParallelWrapper(small_model(), 1) as wrapper:
        wrapper.fit(X, Y, batch_size=61, sample_weight=np.full(61, 1e-6), validation_split=0.2)
        evaluation = wrapper.trainer.evaluation
    assert evaluation is not None and evaluation.loss > 0.5


@pytest.mark.parametrize(
    ("setting", "loss", "y", "options"),
    [
        ("", "softmax", NUMBERS, {}),
        ("", "softmax", abs(NUMBERS), {}),
        ("", "softmax", Y.astype(float), {}),
        ("", "hinge", NUMBERS, {}),
        ("", "binary_cross_entropy", NUMBERS, {}),
        ("", "huber", NUMBERS[:, :2], {}),
        ("", "huber", np.where(NUMBERS > 2, np.nan, NUMBERS), {}),
        ("", "huber", NUMBERS[:60], {}),
        ("", Loss(), NUMBERS, {}),
        ("", Loss(), Y, {"sample_weight": WEIGHTS}),
        ("sample_weight", "softmax", Y, {"sample_weight": WEIGHTS[:60]}),
        ("sample_weight", "softmax", Y, {"sample_weight": -WEIGHTS}),
        ("sample_weight", "softmax", Y, {"sample_weight": WEIGHTS * np.nan}),
        ("sample_weight", "softmax", Y, {"sample_weight": 0 * WEIGHTS}),
        ("class_weight", "softmax", Y, {"class_weight": {0: 0, 1: 0, 2: 0}}),
        ("class_weight", "softmax", Y, {"class_weight": {3: 1.0}}),
        ("class_weight[0]", "softmax", Y, {"class_weight": {0: -1.0}}),
        ("sample_weight", "softmax", Y, {"sample_weight": np.full(len(Y), 1e300)}),
        ("class_weight", "softmax", Y, {"class_weight": [1.0, 2.0, 3.0]}),
        ("class_weight", "softmax", Y, {"class_weight": np.ones(3)}),
        ("class_weight", "softmax", np.minimum(Y, 1), {"class_weight": "balanced"}),
        ("class_weight", "huber", NUMBERS, {"class_weight": "balanced"}),
    ],
)
def test_bad_targets_and_weights_are_refused(setting: str, loss: str | Loss, y: Any, options: dict[str, Any]) -> None:
    with ParallelWrapper(model_for(loss), 1) as wrapper, refused(setting):
        wrapper.fit(X, y, **options)


def test_class_weights_of_shards_are_refused(tmp_path: Path) -> None:
    with ParallelWrapper(small_model(), 2) as wrapper, refused("class_weight"):
        wrapper.fit(write_shards(DATA, tmp_path, 2), class_weight="balanced")


LOSSES: dict[str, Any] = {
    "only a loss": lambda losses, gradient: losses,
    "the mean": lambda losses, gradient: (losses.mean(), gradient),
    "a column": lambda losses, gradient: (losses[:, None], gradient),
    "a gradient of one example": lambda losses, gradient: (losses, gradient[:1]),
    "a number as the gradient": lambda losses, gradient: (losses, 0.1),
}


class Mistaken(SoftmaxNLL):
    """A user's loss. `mistake` names what it returns instead."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def __call__(self, *arguments: Any) -> Any:
        return LOSSES[self.mistake](*super().__call__(*arguments))


@pytest.mark.parametrize("pipeline", [None, Pipeline(2)], ids=["replicas", "pipeline"])
@pytest.mark.parametrize("mistake", LOSSES)
def test_a_loss_with_other_results_is_refused(mistake: str, pipeline: Pipeline | None) -> None:
    with ParallelWrapper(model_for(Mistaken(mistake)), 2, pipeline=pipeline) as wrapper, refused("loss"):
        wrapper.fit(DATA, batch_size=8)
    assert not wrapper.history.epochs


@pytest.mark.parametrize("mistake", [None, 0.5, np.zeros((1, 3))], ids=["nothing", "a number", "a row"])
def test_scores_of_another_shape_are_refused(mistake: Any) -> None:
    class Scoring(SoftmaxNLL):
        def scores(self, backend: Any, prediction: Any) -> Any:
            return mistake

    with refused("loss"):
        model_for(Scoring()).predict(DATA.images)
