"""Evaluations compared with values computed by hand, and properties for any scores, however they are split."""

import io
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupynet.training.evaluation import FEW_CLASSES, Evaluation
from tests.support.refusals import refused

# Eight samples of three classes:   confusion   predicted 0 1 2      precision     recall      F1
#   actual 0: four, two right                  0 | 2 1 1             2/3           2/4         4/7
#   actual 1: three, two right                 1 | 1 2 0             2/3           2/3         4/6
#   actual 2: one, right                       2 | 0 0 1             1/2           1/1         2/3


def one_hot(predicted: list[int], classes: int = 3) -> np.ndarray[Any, Any]:
    return np.eye(classes)[predicted]


def small() -> Evaluation:
    evaluation = Evaluation(3, top_n=2)
    evaluation.add(one_hot([0, 0, 1, 2, 1, 1, 0, 2]), [0, 0, 0, 0, 1, 1, 1, 2], np.arange(8) / 8)
    return evaluation


def test_figures_of_a_small_example_equal_values_computed_by_hand() -> None:
    evaluation = small()
    assert (evaluation.samples, evaluation.accuracy, evaluation.loss) == (8, 5 / 8, 28 / 64)
    assert evaluation.confusion.tolist() == [[2, 1, 1], [1, 2, 0], [0, 0, 1]]
    assert evaluation.precision == pytest.approx((2 / 3 + 2 / 3 + 1 / 2) / 3, abs=1e-15)
    assert evaluation.recall == pytest.approx((1 / 2 + 2 / 3 + 1) / 3, abs=1e-15)
    assert evaluation.f1 == pytest.approx((4 / 7 + 2 / 3 + 2 / 3) / 3, abs=1e-15)
    # ties at 0 are broken by index: true class 0 or 1 ranks second, after a wrong one; 2 was right
    assert evaluation.top_n_accuracy == 1.0
    rows = evaluation.per_class()
    assert rows[0] == {"class": 0, "precision": 2 / 3, "recall": 0.5, "f1": 4 / 7, "support": 4, "predicted": 3}
    assert [row["support"] for row in rows] == [4, 3, 1]


def test_precision_excludes_classes_never_predicted_and_recall_those_without_samples() -> None:
    """Class 2 occurs but is never predicted; class 3 is predicted but never occurs."""
    evaluation = Evaluation(4)
    evaluation.add(one_hot([0, 0, 1, 3, 0], 4), [0, 0, 1, 1, 2], np.zeros(5))
    rows = evaluation.per_class()
    assert math.isnan(rows[2]["precision"]) and rows[2]["recall"] == rows[2]["f1"] == 0
    assert rows[3]["precision"] == rows[3]["f1"] == 0 and math.isnan(rows[3]["recall"])
    assert evaluation.precision == pytest.approx((2 / 3 + 1 + 0) / 3, abs=1e-15)
    assert evaluation.recall == pytest.approx((1 + 1 / 2 + 0) / 3, abs=1e-15)
    assert evaluation.f1 == pytest.approx((4 / 5 + 2 / 3 + 0 + 0) / 4, abs=1e-15)  # no class has 0/0
    assert [line.split()[0] for line in evaluation.stats().splitlines() if "omits" in line] == ["Precision", "Recall"]


def test_stats_print_the_figures_the_classes_and_the_confusion_matrix() -> None:
    figures, classes, matrix = small().stats(("cat", "d\x1bog", "eel")).split("\n\n")
    for figure in ("0.4375", "0.6250", "1.0000", "0.6111", "0.7222", "0.6349"):
        assert f" {figure}\n" in figures + "\n"
    assert classes.splitlines()[1].split() == ["0", "0.6667", "0.5000", "0.5714", "4", "cat"]
    rows = [line.split(" | ") for line in matrix.splitlines() if " | " in line]
    assert rows == [[" 2 1 1", "0  cat"], [" 1 2 0", "1  d\ufffdog"], [" 0 0 1", "2  eel"]]
    assert "omits" not in figures
    assert len(Evaluation(FEW_CLASSES + 1).stats().split("\n\n")) == 2  # without a matrix


def test_class_names_with_dollar_signs_are_no_mathematics_in_a_plot() -> None:
    pytest.importorskip("matplotlib")
    figure = small().plot(("$\\foo$", "$5 to $10", "c"))
    figure.savefig(io.BytesIO())
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["$\\foo$", "$5 to $10", "c"]


def test_bad_arguments_of_an_evaluation_are_refused() -> None:
    with refused("classes"):
        Evaluation(0)
    with refused("top_n"):
        Evaluation(3, 1.5)  # type: ignore[arg-type]
    with refused(""):
        Evaluation(3).add(np.zeros((2, 3)), [0], [0.0, 0.0])
    for targets in ([0, 3], [0, -1], [0.5, 1.0], ["a", "b"]):
        with refused("targets"):
            Evaluation(3).add(np.zeros((2, 3)), targets, np.zeros(2))
    with refused("figure", "acuracy"):
        Evaluation(3).figure("acuracy")


Row = tuple[list[float], int, float]  # scores, target, loss
Samples = tuple[int, list[Row]]
quick = settings(deadline=None, max_examples=40, derandomize=True)


@st.composite
def samples(draw: st.DrawFn) -> Samples:
    """Draw the number of classes, and rows. Ties are common, some scores are NaN, and sums of losses are exact."""
    classes = draw(st.integers(1, 5))
    score = st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 1.0, 2.0, math.nan])
    scores = st.lists(score, min_size=classes, max_size=classes)
    row = st.tuples(scores, st.integers(0, classes - 1), st.integers(-(10**9), 10**9).map(float))
    return classes, draw(st.lists(row, max_size=30))


def evaluate(classes: int, rows: list[tuple[int, Row]], top_n: int = 2) -> Evaluation:
    """Evaluate numbered rows."""
    evaluation = Evaluation(classes, top_n)
    scores = np.array([scores for _, (scores, _, _) in rows]).reshape(len(rows), classes)
    targets = np.array([target for _, (_, target, _) in rows], np.int64)
    evaluation.add(scores, targets, [loss for _, (_, _, loss) in rows], [number for number, _ in rows])
    return evaluation


def ranked(scores: list[float]) -> list[int]:
    """Return the classes from best to worst; none if a score is NaN."""
    if any(math.isnan(score) for score in scores):
        return []
    return sorted(range(len(scores)), key=lambda k: (-scores[k], k))


@quick
@example((3, []), 2)
@example((3, [([0.5, 0.5, 0.5], 2, 1.0)]), 2)
@given(samples(), st.integers(1, 6))
def test_figures_of_any_scores_follow_from_their_definitions(drawn: Samples, top_n: int) -> None:
    classes, rows = drawn
    evaluation = evaluate(classes, [*enumerate(rows)], top_n)
    assert evaluation.samples == len(rows)
    assert evaluation.confusion.trace() == sum(ranked(scores)[:1] == [target] for scores, target, _ in rows)
    assert evaluation.top_n_hits == sum(target in ranked(scores)[:top_n] for scores, target, _ in rows)
    if rows:
        assert evaluation.accuracy == evaluation.confusion.trace() / len(rows)
        assert evaluation.loss == sum(loss for _, _, loss in rows) / len(rows)
    else:
        assert all(evaluation.to_dict()[name] is None for name in Evaluation.FIGURES)
    support = [sum(target == k for _, target, _ in rows) for k in range(classes)]
    assert [row["support"] for row in evaluation.per_class()] == support
    assert json.loads(json.dumps(evaluation.to_dict(), allow_nan=False)) == evaluation.to_dict()


@quick
@given(samples(), st.lists(st.integers(0, 120), max_size=4), st.randoms(use_true_random=False))
def test_samples_split_and_merged_in_any_order_equal_the_whole(drawn: Samples, cuts: list[int], random: Any) -> None:
    """There are more mistakes than are kept. Ties are frequent, and the smaller sample number decides."""
    classes, rows = drawn
    numbered = list(enumerate(rows * 4))
    whole, merged = evaluate(classes, numbered), Evaluation(classes, 2)
    firsts = [(number, target, scores, ranked(scores)[:1]) for number, (scores, target, _) in numbered]
    wrong = [(-scores[k], number, target, k) for number, target, scores, first in firsts for k in first if k != target]
    assert whole.mistakes == sorted(wrong)[:24]
    random.shuffle(numbered)
    for start, stop in pairwise([0, *sorted(cuts), len(numbered)]):
        merged.merge(evaluate(classes, numbered[start:stop]).pack())
    assert merged.to_dict() == whole.to_dict()
