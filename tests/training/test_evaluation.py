"""Evaluations against values computed by hand, and properties for any scores and any split of them."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupynet.training.evaluation import FEW_CLASSES, Evaluation
from tests.support.refusals import refused

# Eight samples of three classes:   confusion   predicted 0 1 2      precision     recall      F1
#   actual 0: four, two right                  0 | 2 1 1             2/3           2/4         4/7
#   actual 1: three, two right                 1 | 1 2 0             2/3           2/3         4/6
#   actual 2: one, right                       2 | 0 0 1             1/2           1/1         2/3
TARGETS = [0, 0, 0, 0, 1, 1, 1, 2]
PREDICTED = [0, 0, 1, 2, 1, 1, 0, 2]


def one_hot(predicted: list[int], classes: int = 3) -> np.ndarray[Any, Any]:
    return np.eye(classes)[predicted]


def small() -> Evaluation:
    evaluation = Evaluation(3, top_n=2)
    evaluation.add(one_hot(PREDICTED), TARGETS, np.arange(8) / 8)
    return evaluation


def undefined() -> Evaluation:
    """Four classes: 2 occurs but is never predicted, 3 is predicted but never occurs."""
    evaluation = Evaluation(4)
    evaluation.add(one_hot([0, 0, 1, 3, 0], 4), [0, 0, 1, 1, 2], np.zeros(5))
    return evaluation


def test_small_example_by_hand() -> None:
    evaluation = small()
    assert evaluation.samples == 8
    assert evaluation.confusion.tolist() == [[2, 1, 1], [1, 2, 0], [0, 0, 1]]
    assert evaluation.confusion.dtype == np.int64
    assert evaluation.accuracy == 5 / 8
    assert evaluation.precision == pytest.approx((2 / 3 + 2 / 3 + 1 / 2) / 3, abs=1e-15)
    assert evaluation.recall == pytest.approx((1 / 2 + 2 / 3 + 1) / 3, abs=1e-15)
    assert evaluation.f1 == pytest.approx((4 / 7 + 2 / 3 + 2 / 3) / 3, abs=1e-15)
    assert evaluation.loss == 28 / 64
    # ties at 0 are broken by index: true class 0 or 1 comes second behind a wrong one; 2 was right
    assert evaluation.top_n_accuracy == 1.0
    rows = evaluation.per_class()
    assert rows[0] == {"class": 0, "precision": 2 / 3, "recall": 0.5, "f1": 4 / 7, "support": 4, "predicted": 3}
    assert [row["support"] for row in rows] == [4, 3, 1]


def test_classes_with_0_over_0_are_left_out_of_the_averages() -> None:
    evaluation = undefined()
    rows = evaluation.per_class()
    assert math.isnan(rows[2]["precision"]) and rows[2]["recall"] == rows[2]["f1"] == 0
    assert rows[3]["precision"] == rows[3]["f1"] == 0 and math.isnan(rows[3]["recall"])
    assert evaluation.precision == pytest.approx((2 / 3 + 1 + 0) / 3, abs=1e-15)
    assert evaluation.recall == pytest.approx((1 + 1 / 2 + 0) / 3, abs=1e-15)
    assert evaluation.f1 == pytest.approx((4 / 5 + 2 / 3 + 0 + 0) / 4, abs=1e-15)  # 0/0 for no class


def test_f1_is_0_for_a_class_never_predicted_and_undefined_for_an_absent_one() -> None:
    """Otherwise a network that always answers one class would have a good F1."""
    collapsed = Evaluation(11)
    collapsed.add(one_hot([0] * 100, 11), [n % 10 for n in range(100)], np.zeros(100))
    rows = collapsed.per_class()
    assert rows[0]["f1"] == 2 * 10 / (2 * 10 + 90) and [row["f1"] for row in rows[1:10]] == [0] * 9
    assert math.isnan(rows[10]["f1"])
    assert collapsed.f1 == pytest.approx(2 * 10 / (2 * 10 + 90) / 10, abs=1e-15)
    assert collapsed.precision == 0.1  # as Deeplearning4j has it


def test_ties_are_decided_by_the_smaller_index() -> None:
    for top_n, right in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 4)):
        evaluation = Evaluation(4, top_n)
        evaluation.add(np.zeros((4, 4)), [0, 1, 2, 3], np.zeros(4))
        assert evaluation.confusion.sum(axis=0).tolist() == [4, 0, 0, 0]
        assert evaluation.top_n_accuracy == right / 4
    evaluation = Evaluation(4, top_n=2)
    evaluation.add([[1, 3, 1, 3], [1, 3, 1, 3], [5, 3, 1, 3], [5, 3, 1, 3]], [1, 3, 1, 3], np.zeros(4))
    assert evaluation.top_n_hits == 3  # ranks 0, 1, 1 and 2


def test_nan_scores_are_wrong_and_reported() -> None:
    evaluation = Evaluation(3)
    scores = [[1, 0, 0], [np.nan, 0, 0], [1, np.nan, 0], [0, 0, np.nan]]
    evaluation.add(scores, [0, 0, 0, 2], [0.5, np.nan, 0.5, 0.5])
    assert evaluation.samples == 4
    assert evaluation.confusion.sum() == 1 and evaluation.undecided.tolist() == [2, 0, 1]
    assert evaluation.accuracy == 0.25 and evaluation.top_n_accuracy == 0.25
    assert evaluation.per_class()[0]["recall"] == 1 / 3
    assert math.isnan(evaluation.loss)
    assert evaluation.to_dict()["undecided"] == 3


@pytest.mark.parametrize(
    ("losses", "mean"),
    [([-np.inf, 1.0], -np.inf), ([1.0, np.nan], np.nan)],
)
def test_losses_that_are_not_finite_are_shown(losses: list[float], mean: float) -> None:
    evaluation = Evaluation(1)
    evaluation.add(np.zeros((2, 1)), [0, 0], losses)
    assert np.array_equal(evaluation.loss, mean, equal_nan=True)
    assert evaluation.to_dict()["loss"] is None


def test_an_empty_evaluation_is_nan() -> None:
    evaluation = Evaluation(3)
    evaluation.add(np.zeros((0, 3)), [], [])
    assert evaluation.samples == 0
    for name in ("accuracy", "top_n_accuracy", "precision", "recall", "f1", "loss"):
        assert math.isnan(getattr(evaluation, name)), name
        assert evaluation.to_dict()[name] is None


def test_stats_report() -> None:
    """The figures, a line for each class, and the matrix."""
    figures, classes, matrix = small().stats(("cat", "d\x1bog", "eel")).split("\n\n")
    for figure in ("0.4375", "0.6250", "1.0000", "0.6111", "0.7222", "0.6349"):
        assert f" {figure}\n" in figures + "\n"
    assert classes.splitlines()[1].split() == ["0", "0.6667", "0.5000", "0.5714", "4", "cat"]
    rows = [line.split(" | ") for line in matrix.splitlines() if " | " in line]
    assert rows == [[" 2 1 1", "0  cat"], [" 1 2 0", "1  d\ufffdog"], [" 0 0 1", "2  eel"]]
    assert len(Evaluation(FEW_CLASSES + 1).stats().split("\n\n")) == 2  # without a matrix


def test_bad_arguments_are_refused() -> None:
    for classes, top_n, setting in ((0, 3, "classes"), (3, 1.5, "top_n")):
        with refused(setting):
            Evaluation(classes, top_n)  # type: ignore[arg-type]
    with refused(""):
        Evaluation(3).add(np.zeros((2, 3)), [0], [0.0, 0.0])


def test_narrow_targets_do_not_overflow() -> None:
    evaluation = Evaluation(200)
    evaluation.add(np.eye(200, dtype=np.float16), np.arange(200, dtype=np.uint8), np.zeros(200, np.float32))
    assert evaluation.accuracy == 1.0


Samples = tuple[int, list[tuple[list[float], int, float]]]


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    """(classes, [(scores, target, loss) ...]); few distinct scores, so that ties are common, and NaN now and then."""
    classes = draw(st.integers(1, 5))
    score = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0, math.nan])
    row = st.tuples(
        st.lists(score, min_size=classes, max_size=classes), st.integers(0, classes - 1), st.floats(-1e9, 1e9, width=32)
    )
    return classes, draw(st.lists(row, max_size=30))


def evaluate(classes: int, rows: list[tuple[list[float], int, float]], top_n: int = 2) -> Evaluation:
    evaluation = Evaluation(classes, top_n)
    scores = np.array([row[0] for row in rows]).reshape(len(rows), classes)
    evaluation.add(scores, np.array([row[1] for row in rows], np.int64), [row[2] for row in rows])
    return evaluation


@settings(deadline=None, max_examples=40, derandomize=True)
@given(samples(), st.lists(st.integers(0, 30), max_size=4), st.randoms(use_true_random=False))
def test_parts_merged_in_any_order_equal_the_whole(drawn: Samples, cuts: list[int], random: Any) -> None:
    classes, rows = drawn
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    parts = [evaluate(classes, rows[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    random.shuffle(parts)
    merged = Evaluation(classes, 2)
    for part in parts:
        merged.merge(part.pack())
    whole = evaluate(classes, rows)
    assert {**merged.to_dict(), "loss": None} == {**whole.to_dict(), "loss": None}
    np.testing.assert_allclose(merged.loss, whole.loss, rtol=1e-9, atol=1e-3)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(samples(), st.integers(1, 6))
def test_figures_follow_from_their_definitions(drawn: Samples, top_n: int) -> None:
    classes, rows = drawn
    evaluation = evaluate(classes, rows, top_n)
    right = hits = 0
    for scores, target, _ in rows:
        if not any(map(math.isnan, scores)):
            order = sorted(range(classes), key=lambda k, scores=scores: (-scores[k], k))  # type: ignore[misc]
            right += order[0] == target
            hits += target in order[:top_n]
    assert evaluation.samples == len(rows)
    assert evaluation.confusion.trace() == right and evaluation.top_n_hits == hits
    if rows:
        assert evaluation.accuracy == right / len(rows)
        exact = sum(Fraction(loss) for _, _, loss in rows)
        assert evaluation.loss == float(exact) / len(rows)
    support = [sum(target == k for _, target, _ in rows) for k in range(classes)]
    assert [row["support"] for row in evaluation.per_class()] == support
    for row in evaluation.per_class():
        if not math.isnan(row["f1"]) and row["precision"] + row["recall"] > 0:
            harmonic = 2 * row["precision"] * row["recall"] / (row["precision"] + row["recall"])
            assert row["f1"] == pytest.approx(harmonic, rel=1e-14)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(samples())
def test_to_dict_is_json_without_nan(drawn: Samples) -> None:
    values = evaluate(*drawn).to_dict()
    assert json.loads(json.dumps(values, allow_nan=False)) == values


@pytest.mark.parametrize("losses", [[0.25, 1e-300, 1e200, 3.5], [0.1, math.nan, 2.0, 1.0], [math.inf, 0.5, 0.25, 1.0]])
def test_merging_a_packed_evaluation_gives_it_back(losses):
    """Workers exchange evaluations without losing a bit."""
    evaluation = Evaluation(3)
    scores = np.array([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1], [np.nan, 0.0, 1.0], [0.2, 0.2, 0.6]])
    evaluation.add(scores, np.array([0, 2, 1, 2]), np.array(losses))
    again = Evaluation(3)
    again.merge(evaluation.pack())
    np.testing.assert_equal(again.to_dict(), evaluation.to_dict())
    np.testing.assert_equal(again.loss, evaluation.loss)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(samples(), st.lists(st.integers(0, 30), max_size=4), st.randoms(use_true_random=False))
def test_the_most_confident_mistakes_are_the_same_however_samples_are_split(
    drawn: Samples, cuts: list[int], random: Any
) -> None:
    """Of more than are kept; equal scores are frequent here, and tell nothing of the order."""
    classes, rows = drawn
    numbered = [(sample, *row) for sample, row in enumerate(rows * 4)]
    wrong = []
    for sample, scores, target, _ in numbered:
        if not any(map(math.isnan, scores)):
            guess = min(range(classes), key=lambda k, scores=scores: (-scores[k], k))  # type: ignore[misc]
            wrong += [(-scores[guess], sample, target, guess)] if guess != target else []
    random.shuffle(numbered)
    edges = [0, *sorted(min(cut, len(numbered)) for cut in cuts), len(numbered)]
    merged = Evaluation(classes)
    for a, b in zip(edges, edges[1:], strict=False):
        part, some = Evaluation(classes), numbered[a:b]
        scores = np.array([row[1] for row in some]).reshape(len(some), classes)
        part.add(scores, np.array([row[2] for row in some], np.int64), np.zeros(len(some)), [row[0] for row in some])
        merged.merge(part.pack())
    assert merged.mistakes == sorted(wrong)[:24]
