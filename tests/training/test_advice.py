"""Advice after a run: the cost that it names, and whether the network has learned."""

from collections.abc import Sequence

import numpy as np
import pytest

from cupynet.training import Evaluation, Spent, advise, unlearned
from cupynet.training.advice import FEW_ITERATIONS


def spent(
    averaging: Sequence[float] = (),
    data: Sequence[float] = (),
    compute: Sequence[float] = (),
    samples: Sequence[int] = (),
    waiting: Sequence[float] = (),
) -> Spent:
    """Return 100 seconds of each worker, with the remaining time spent computing by default."""
    workers = max(map(len, (averaging, data, compute, waiting)))
    averaging, data, waiting = (each or [0.0] * workers for each in (averaging, data, waiting))
    rest = [100 - a - d - w for a, d, w in zip(averaging, data, waiting, strict=True)]
    counts = [*samples] or [1000] * workers
    return Spent([100.0] * workers, [*compute] or rest, [*data], [*averaging], [*waiting], counts, [0] * workers)


def nothing_stands_out(measured: Spent, stages: int = 1) -> bool:
    return advise(measured, stages=stages).startswith("nothing stands out")


@pytest.mark.parametrize(
    ("measured", "figures"),
    [
        (spent(averaging=(31, 33)), "averaging 31 %"),
        (spent(data=(20, 3)), "prefetch_buffer 20 %"),
        (spent(averaging=(15, 15), data=(30, 30)), "prefetch_buffer 30 %"),
        (spent(averaging=(28, 28, 28, 1), compute=(70, 70, 70, 98)), "worker 3 1.4 times"),
        (spent(averaging=(50, 1), compute=(49, 98)), "worker 1 2.0 times"),  # worker 0 waits for worker 1
        (spent(averaging=(4, 6)), "95 % computing"),
        (Spent([0.0], [0.0], [0.0], [0.0], [0.0], [0], [0]), "0 % computing"),
    ],
)
def test_the_greatest_cost_is_named(measured: Spent, figures: str) -> None:
    assert set(figures.split()) <= set(advise(measured).split())


def test_one_worker_has_no_averages_to_save() -> None:
    """Its synchronizer may still take time. A single replica in stages has no averages either."""
    assert nothing_stands_out(spent(averaging=(14,)))
    assert nothing_stands_out(spent(averaging=(14, 14)), stages=2)
    assert not nothing_stands_out(spent(averaging=(14,) * 4), stages=2)


def test_a_worker_with_more_samples_is_not_slow() -> None:
    assert nothing_stands_out(spent(averaging=(50, 1), compute=(49, 98), samples=(500, 1000)))
    assert nothing_stands_out(spent(averaging=(98, 1), compute=(0, 98), samples=(0, 1000)))


def test_stages_of_a_pipeline_are_compared_with_the_same_stage_of_other_replicas() -> None:
    """Ranks 0 and 2 are the first stages of two replicas, ranks 1 and 3 their second stages."""
    assert "slower" not in advise(spent(averaging=(50, 1, 50, 1), compute=(49, 98, 49, 98)), stages=2)
    slow = spent(averaging=(50, 1, 50, 1), compute=(49, 98, 98, 98))
    assert "rank 2 is 2.0 times slower" in advise(slow, stages=2)


def test_the_cost_of_a_pipeline() -> None:
    assert "40 %" in advise(spent(waiting=(30, 50)), stages=2)
    assert nothing_stands_out(spent(waiting=(4, 6)), stages=2)


def test_few_rounds_per_epoch_come_first() -> None:
    costly = spent(averaging=(40, 40))
    assert "workers=1" in advise(costly, iterations=FEW_ITERATIONS)
    assert "workers=1" not in advise(costly, iterations=FEW_ITERATIONS + 1)
    assert "workers=1" not in advise(spent(averaging=(0,)), iterations=1)  # there is only one worker


def test_oversubscribed_cores_are_named() -> None:
    assert "2 cores" in advise(spent(averaging=(60,) * 8), cores=2)
    assert "cores" not in advise(spent(averaging=(60,) * 8), cores=8)


def evaluated(right: int, wrong: int, loss: float, classes: int = 10, commonest: int = 0) -> Evaluation:
    """Return an evaluation on as many images of each class, plus `commonest` of class 0."""
    found, n = Evaluation(classes), right + wrong
    labels = np.concatenate([np.arange(n - commonest) % classes, np.zeros(commonest, int)])
    answers = np.where(np.arange(n) < right, labels, (labels + 1) % classes)
    found.add(np.eye(classes)[answers], labels, np.full(n, loss))
    return found


@pytest.mark.parametrize(
    ("right", "wrong", "commonest", "learned"),
    [(128, 872, 0, False), (129, 871, 0, True), (550, 450, 500, False), (600, 400, 500, True), (9, 1, 0, True)],
)
def test_a_network_no_better_than_a_constant_has_not_learned(
    right: int, wrong: int, commonest: int, learned: bool
) -> None:
    """The size of the loss does not matter: the network may be overconfident."""
    assert (unlearned(evaluated(right, wrong, 99.0, commonest=commonest)) is None) == learned


def test_no_advice_about_learning_with_one_class() -> None:
    assert unlearned(evaluated(3, 0, 0.0, classes=1)) is None
    assert unlearned(Evaluation(3)) is None
