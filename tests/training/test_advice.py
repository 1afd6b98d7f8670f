"""Advice after a run: the cost that it names, and whether the network has learned."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest

from cupynet.training import Evaluation, Spent, advise, unlearned
from cupynet.training.advice import FEW_ITERATIONS

Seconds: TypeAlias = Sequence[float]


def spent(
    averaging: Seconds = (),
    data: Seconds = (),
    compute: Seconds = (),
    samples: Sequence[int] = (),
    waiting: Seconds = (),
) -> Spent:
    """Return 100 seconds of each worker, with the remaining time spent computing by default."""
    workers = max(map(len, (averaging, data, compute, waiting)))
    averaging, data, waiting = (each or [0.0] * workers for each in (averaging, data, waiting))
    rest = [100 - a - d - w for a, d, w in zip(averaging, data, waiting, strict=True)]
    counts = [*samples] or [1000] * workers
    return Spent([100.0] * workers, [*compute] or rest, [*data], [*averaging], [*waiting], counts, [0] * workers)


NOTHING = "nothing stands out:"
UNEVEN, STAGES = {"averaging": (50, 1), "compute": (49, 98)}, {"stages": 2}


@pytest.mark.parametrize(
    ("measured", "options", "words"),
    [
        (spent(averaging=(31, 33)), {}, "averaging 31 %"),
        (spent(data=(20, 3)), {}, "prefetch_buffer 20 %"),
        (spent(averaging=(15, 15), data=(30, 30)), {}, "prefetch_buffer 30 %"),
        (spent(averaging=(28, 28, 28, 1), compute=(70, 70, 70, 98)), {}, "worker 3 1.4 times"),
        (spent(**UNEVEN), {}, "worker 1 2.0 times"),  # worker 0 waits for worker 1
        (spent(averaging=(4, 6)), {}, f"{NOTHING} 95 % computing"),
        (Spent([0.0], [0.0], [0.0], [0.0], [0.0], [0], [0]), {}, f"{NOTHING} 0 % computing"),
        # a single replica has no averages to save
        (spent(averaging=(14,)), {}, NOTHING),
        (spent(averaging=(14, 14)), STAGES, NOTHING),
        (spent(averaging=(14,) * 4), STAGES, "averaging 14 %"),
        # a worker with more samples is not slow
        (spent(**UNEVEN, samples=(500, 1000)), {}, NOTHING),
        (spent(averaging=(98, 1), compute=(0, 98), samples=(0, 1000)), {}, NOTHING),
        # ranks 0 and 2 are the first stages of two replicas, ranks 1 and 3 their second stages
        (spent(averaging=(50, 1, 50, 1), compute=(49, 98, 49, 98)), STAGES, NOTHING),
        (spent(averaging=(50, 1, 50, 1), compute=(49, 98, 98, 98)), STAGES, "rank 2 2.0 times"),
        (spent(waiting=(30, 50)), STAGES, "stages 40 %"),
        (spent(waiting=(4, 6)), STAGES, NOTHING),
        # few iterations per epoch come first
        (spent(averaging=(40, 40)), {"iterations": FEW_ITERATIONS}, "workers=1,"),
        (spent(averaging=(40, 40)), {"iterations": FEW_ITERATIONS + 1}, "averaging 40 %"),
        (spent(averaging=(0,)), {"iterations": 1}, NOTHING),
        (spent(averaging=(60,) * 8), {"cores": 2}, "8 workers 2 cores"),
        (spent(averaging=(60,) * 8), {"cores": 8}, "average less often"),
        (spent(averaging=(60,) * 8), {"scheduled": False}, "parallel=averaging"),
    ],
)
def test_the_advice_after_a_run_names_its_greatest_cost(measured: Spent, options: dict[str, Any], words: str) -> None:
    assert set(words.split()) <= set(advise(measured, **options).split())


def evaluated(right: int, wrong: int, classes: int = 10, commonest: int = 0) -> Evaluation:
    """Return an evaluation on as many images of each class, plus `commonest` of class 0."""
    found, n = Evaluation(classes), right + wrong
    labels = np.concatenate([np.arange(n - commonest) % classes, np.zeros(commonest, int)])
    answers = np.where(np.arange(n) < right, labels, (labels + 1) % classes)
    found.add(np.eye(classes)[answers], labels, np.full(n, 99.0))
    return found


@pytest.mark.parametrize(
    ("evaluation", "learned"),
    [
        (evaluated(128, 872), False),
        (evaluated(129, 871), True),
        (evaluated(550, 450, commonest=500), False),
        (evaluated(600, 400, commonest=500), True),
        (evaluated(9, 1), True),
        (evaluated(8, 0, classes=2), True),  # too few images to tell
        (evaluated(3, 0, classes=1), True),  # with one class, or without images, there is no advice
        (Evaluation(3), True),
    ],
)
def test_a_network_no_better_than_a_constant_has_not_learned(evaluation: Evaluation, learned: bool) -> None:
    """The size of the loss does not matter: the network may be overconfident."""
    assert (unlearned(evaluation) is None) == learned
