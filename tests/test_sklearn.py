"""The estimators for scikit-learn, checked by scikit-learn itself."""

import pickle
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.utils.estimator_checks import check_estimator

from cupynet import Conv2D, Dense, EarlyStopping, MaxPool2D, Nesterov, WeightAverage
from cupynet.sklearn import Classifier, Regressor
from tests.guides.extending.lion import Lion
from tests.support.refusals import refused
from tests.support.training import small_dataset

DATA = small_dataset(90)
LABELS = np.array(["none", "some", "all"])[DATA.labels]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@pytest.mark.parametrize("kind", [Classifier, Regressor])
def test_estimators_pass_the_checks_of_scikit_learn(kind: type[Classifier | Regressor]) -> None:
    weights = {"check_sample_weight_equivalence_on_dense_data": "other samples are other batches"}  # as in scikit-learn
    quick = kind(backend="numpy", epochs=5, learning_rate=0.01)
    found = check_estimator(quick, on_fail=None, expected_failed_checks=weights)
    unusual = [each["check_name"] for each in found if each["status"] not in ("passed", "skipped", "xfail")]
    assert unusual == []
    assert len(found) > 50


def test_a_classifier_learns_images_with_text_labels_and_can_be_pickled() -> None:
    classifier = Classifier([Conv2D(4, 3), MaxPool2D(2)], epochs=40, backend="numpy", workers=2)
    classifier.fit(DATA.images, LABELS)
    assert classifier.score(DATA.images, LABELS) > 0.9
    assert set(classifier.predict(DATA.images)) <= set(LABELS)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict_proba(DATA.images), classifier.predict_proba(DATA.images))


def test_probabilities_in_half_precision_sum_to_one() -> None:
    classifier = Classifier(epochs=1, dtype="half", backend="numpy").fit(DATA.images, LABELS)
    np.testing.assert_allclose(classifier.predict_proba(DATA.images).sum(axis=1), 1, rtol=1e-6)


def test_a_fitted_estimator_with_a_weight_average_can_be_pickled_cloned_and_fitted_again() -> None:
    classifier = Classifier(epochs=1, backend="numpy", workers=2, callbacks=[WeightAverage(0.9)])
    classifier.fit(DATA.images, LABELS)
    again = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(again.predict(DATA.images), classifier.predict(DATA.images))
    assert again.fit(DATA.images, LABELS).callbacks[0].added and clone(classifier).callbacks[0].decay == 0.9


def test_a_grid_search_varies_workers_and_averaging_frequency() -> None:
    flat = DATA.images.reshape(len(DATA), -1)
    classifier = Classifier([Conv2D(4, 3), MaxPool2D(2)], input=(8, 8, 1), backend="numpy", epochs=2)
    search = GridSearchCV(classifier, {"workers": [1, 2], "averaging_frequency": [1, 5]}, cv=2).fit(flat, LABELS)
    assert len(search.cv_results_["params"]) == 4
    assert search.best_estimator_.model_.input.shape == (8, 8, 1)


def test_a_grid_search_varies_optimizers_and_learning_rates() -> None:
    grid = {"optimizer": [None, "sgd", Nesterov()], "learning_rate": [None, 0.01, "cosine"]}
    search = GridSearchCV(Classifier(backend="numpy", epochs=1), grid, cv=2).fit(DATA.images, LABELS)
    assert len({*search.cv_results_["mean_test_score"]}) > 3


def test_early_stopping_requires_validation_split() -> None:
    with refused("validation_split"):
        Classifier(callbacks=[EarlyStopping()]).fit(DATA.images, LABELS)
    Classifier(backend="numpy", epochs=1, callbacks=[EarlyStopping()], validation_split=0.2).fit(DATA.images, LABELS)


def test_learning_rate_is_set_in_a_copy_of_the_optimizer() -> None:
    lion = Lion(1e-4)
    found = Classifier(backend="numpy", epochs=1, optimizer=lion, learning_rate=0.01).fit(DATA.images, LABELS)
    expected = Classifier(backend="numpy", epochs=1, optimizer=Lion(0.01)).fit(DATA.images, LABELS)
    np.testing.assert_array_equal(found.predict_proba(DATA.images), expected.predict_proba(DATA.images))
    assert lion.learning_rate(0) == 1e-4


def test_sample_weight_determines_which_samples_are_learned() -> None:
    classifier = Classifier(backend="numpy", epochs=3)
    assert {*classifier.fit(DATA.images, LABELS, sample_weight=LABELS == "all").predict(DATA.images)} == {"all"}


def test_predicted_targets_have_the_shape_of_the_targets_of_fit() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 4))
    y = x @ rng.normal(size=(4, 2))
    regressor = Regressor(backend="numpy", workers=2).fit(x, y)
    assert regressor.predict(x[:3]).shape == (3, 2) and regressor.score(x, y) > 0.9
    assert regressor.fit(x, y[:, 0]).predict(x[:3]).shape == (3,)


def test_integers_in_a_table_are_features_and_not_pixels() -> None:
    table = DATA.images.reshape(len(DATA), -1) // 16
    classifier = Classifier(backend="numpy", epochs=2).fit(table, LABELS)
    expected = classifier.predict_proba(table.astype(float))
    np.testing.assert_array_equal(classifier.predict_proba(table), expected)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        pytest.param({"layers": [Dense(4), Dense(3)]}, "layers", id="a second output layer"),
        pytest.param({"layers": {"output": Dense(4)}}, "layers", id="name of the output layer"),
        pytest.param({"input": (7, 7, 1)}, "input", id="another size"),
        pytest.param({"input": 64}, "input", id="no shape"),
        pytest.param({"layers": [Conv2D(4, 3)]}, "input", id="images without a shape"),
        pytest.param({"callbacks": None}, "callbacks", id="no callbacks"),
        pytest.param({"callbacks": EarlyStopping()}, "callbacks", id="no list of callbacks"),
        pytest.param({"callbacks": [print]}, "callbacks", id="a function as callback"),
        pytest.param({"optimizer": "adamm"}, "optimizer", id="unknown optimizer"),
    ],
)
def test_invalid_arguments_of_an_estimator_are_refused_with_their_names(arguments: Any, setting: str) -> None:
    with refused(setting):
        Classifier(**arguments, backend="numpy").fit(DATA.images.reshape(len(DATA), -1), LABELS)
