"""Advice after a run: which measured cost it names, and whether the network has learned."""

from __future__ import annotations

import numpy as np
import pytest

from cupynet.parallel import Adaptive, PipelineSpeed
from cupynet.parallel.synchronizers.schedule import Every
from cupynet.training import Evaluation, Spent, advise, unlearned
from cupynet.training.advice import FEW_ROUNDS, MOST_RARELY, STANDS_OUT, WANTED, rarer


def spent(averaging=None, data=None, compute=None, samples=None, waiting=None) -> Spent:
    """100 seconds of each worker; by default the rest of them is computing."""
    workers = max(len(each) for each in (averaging or (), data or (), compute or (), waiting or ()))
    averaging, data, waiting = (each or (0.0,) * workers for each in (averaging, data, waiting))
    rest = [100 - a - d - w for a, d, w in zip(averaging, data, waiting, strict=True)]
    compute = rest if compute is None else list(compute)
    samples = [1000] * workers if samples is None else list(samples)
    return Spent([100.0] * workers, compute, list(data), list(averaging), list(waiting), samples, [0] * workers)


@pytest.mark.parametrize(
    ("measured", "frequency", "sentence"),
    [
        (spent(averaging=(31, 33)), 1, "averaging costs 31 % of the time: frequency 8 would cost 5 %"),
        (spent(averaging=(31, 33)), 3, "averaging costs 31 % of the time: frequency 24 would cost 5 %"),
        (spent(averaging=(31, 33)), Every(3), "averaging costs 31 % of the time: frequency 24 would cost 5 %"),
        (spent(averaging=(31, 33)), Adaptive(0.05), "averaging costs 31 % of the time: larger batches make it rarer"),
        (spent(averaging=(31, 33)), None, "averaging costs 31 % of the time: larger batches make it rarer"),
        (spent(averaging=(60, 60)), 50, "averaging costs 60 % of the time: frequency 100 would cost 43 %"),
        (spent(averaging=(60, 60)), 100, "averaging costs 60 % of the time: larger batches make it rarer"),
        (spent(averaging=(100, 100)), 1, "averaging costs 100 % of the time: frequency 100 would cost 100 %"),
        (spent(data=(20, 3)), 3, "waiting for batches costs 20 % of the time: raise prefetch_buffer"),
        (spent(data=(20,)), None, "waiting for batches costs 20 % of the time: raise prefetch_buffer"),
        (
            spent(averaging=(28, 28, 28, 1), compute=(70, 70, 70, 98)),
            3,
            "worker 3 is 1.4 times slower than the others",
        ),
        (spent(averaging=(4, 6)), 3, "nothing stands out: 95 % of the time is computing"),
        (spent(averaging=(0,)), None, "nothing stands out: 100 % of the time is computing"),
    ],
)
def test_each_advice(measured, frequency, sentence):
    assert advise(measured, frequency) == sentence


def test_the_greatest_cost_is_named():
    assert advise(spent(averaging=(15, 15), data=(30, 30)), 3).startswith("waiting for batches costs 30 %")
    assert advise(spent(averaging=(30, 30), data=(15, 15)), 3).startswith("averaging costs 30 %")


def test_one_worker_has_no_averages_to_save():
    """Its synchronizer may take time all the same; nor has one replica in stages."""
    assert advise(spent(averaging=(14,)), 3) == "nothing stands out: 86 % of the time is computing"
    assert advise(spent(averaging=(14, 14)), 3, stages=2) == "nothing stands out: 86 % of the time is computing"
    assert "averaging costs 14 %" in advise(spent(averaging=(14,) * 4), 3, stages=2)


def test_waiting_for_a_slow_worker_is_not_a_cost_of_averaging():
    """The slow worker itself does not wait, and a lower frequency would not help the others."""
    assert "worker 1 is 2.0 times slower" in advise(spent(averaging=(50, 1), compute=(49, 98)), 1)


def test_a_worker_with_more_samples_is_not_slow():
    measured = spent(averaging=(50, 1), compute=(49, 98), samples=(500, 1000))
    assert advise(measured, 1).startswith("nothing stands out")
    idle = spent(averaging=(98, 1), compute=(0, 98), samples=(0, 1000))  # without a batch all the time
    assert advise(idle, 1).startswith("nothing stands out")


def test_stages_of_a_pipeline_are_compared_with_the_same_stage_of_other_replicas():
    """Ranks 0 and 2 are the first stages of two replicas, 1 and 3 the second."""
    measured = spent(averaging=(50, 1, 50, 1), compute=(49, 98, 49, 98))
    assert "slower" in advise(measured, 1)
    assert "slower" not in advise(measured, 1, stages=2)
    measured = spent(averaging=(50, 1, 50, 1), compute=(49, 98, 98, 98))
    assert advise(measured, 1, stages=2) == "rank 2 is 2.0 times slower than the others"


SLOW = PipelineSpeed([["a"], ["b"]], 4, [3e-3, 4e-3], 33e-3)  # 0.85 times one worker
FAST = PipelineSpeed([["a"], ["b"]], 4, [3e-3, 4e-3], 20e-3)  # 1.40 times, bound 1.40


@pytest.mark.parametrize(
    ("waiting", "speed", "cores", "sentence"),
    [
        ((30, 50), FAST, None, "stages wait 40 % of the time: at best 1.40 times one worker"),
        ((30, 50), FAST, 2, "stages wait 40 % of the time: at best 1.40 times one worker"),
        ((30, 50), SLOW, 2, "0.85 times one worker: try 2 workers without a pipeline"),
        ((1, 2), SLOW, None, "0.85 times one worker: try 2 workers without a pipeline"),
        ((30, 50), None, None, "stages wait 40 % of the time"),
        ((4, 6), FAST, None, "nothing stands out: 95 % of the time is computing"),
    ],
)
def test_the_cost_of_a_pipeline(waiting, speed, cores, sentence):
    assert advise(spent(waiting=waiting), 3, speed=speed, stages=2, cores=cores) == sentence


def test_evaluated_epochs_average_at_any_frequency():
    costly = spent(averaging=(40, 40))
    assert advise(costly, 3) == "averaging costs 40 % of the time: frequency 35 would cost 5 %"
    assert "frequency 19 would cost 10 %" in advise(costly, 3, rounds=19)
    assert "frequency 35 would cost 5 %" in advise(costly, 3, rounds=19, evaluated_every=2)
    assert advise(costly, 19, rounds=19).endswith("larger batches make it rarer")


def test_few_rounds_per_epoch_come_first():
    costly = spent(averaging=(40, 40))
    assert "workers=1" in advise(costly, 3, rounds=FEW_ROUNDS) and "only 1 round an" in advise(costly, 3, rounds=1)
    assert "workers=1" not in advise(costly, 3, rounds=FEW_ROUNDS + 1)
    assert "workers=1" not in advise(spent(averaging=(0,)), 3, rounds=1)  # it is one worker


@pytest.mark.parametrize(("cores", "where"), [(2, "2 cores"), (1, "1 core")])
def test_oversubscribed_cores_are_named(cores, where):
    found = advise(spent(averaging=(60,) * 8), 1, cores=cores)
    assert found == f"averaging costs 60 % of the time: 8 workers on {where}"
    assert "frequency" in advise(spent(averaging=(60,) * 8), 1, cores=8)


@pytest.mark.parametrize(("share", "frequency"), [(STANDS_OUT, 1), (0.31, 3), (0.9, 50), (0.999, 3), (1.0, 1)])
def test_the_advised_frequency_is_the_lowest_that_is_cheap_enough(share, frequency):
    other, then = rarer(share, frequency)
    average, iteration = share * frequency, 1 - share  # seconds of one average and one iteration, up to a factor
    assert then == pytest.approx(average / (average + other * iteration))
    assert average / (average + (other - 1) * iteration) > WANTED
    assert frequency < other <= MOST_RARELY and (then <= WANTED or other == MOST_RARELY)


def test_no_advice_without_training():
    nothing = Spent([0.0], [0.0], [0.0], [0.0], [0.0], [0], [0])
    assert advise(nothing) == "nothing stands out: 0 % of the time is computing"


# Whether it has learned -----------------------------------------------------------------------------------------------


def evaluated(right: int, wrong: int, loss: float, classes: int = 10, commonest: int = 0) -> Evaluation:
    """So many right and wrong answers, on evenly many images of each class, and more of one."""
    found, n = Evaluation(classes), right + wrong
    labels = np.concatenate([np.arange(n - commonest) % classes, np.zeros(commonest, int)])
    answers = np.where(np.arange(n) < right, labels, (labels + 1) % classes)
    found.add(np.eye(classes)[answers], labels, np.full(n, loss))
    return found


@pytest.mark.parametrize(
    ("right", "wrong", "commonest"),
    [(100, 900, 0), (128, 872, 0), (550, 450, 500), (5, 5, 3), (0, 1000, 0)],
)
def test_a_network_no_better_than_a_constant_has_not_learned(right, wrong, commonest):
    assert unlearned(evaluated(right, wrong, 2.0, commonest=commonest)) is not None


@pytest.mark.parametrize(
    ("right", "wrong", "commonest"), [(129, 871, 0), (600, 400, 500), (9, 1, 0), (1000, 0, 0), (1091, 8909, 0)]
)
def test_a_better_network_has_learned(right, wrong, commonest):
    """However large its loss: it may be too sure of itself."""
    assert unlearned(evaluated(right, wrong, 99.0, commonest=commonest)) is None


def test_no_advice_about_learning_with_one_class():
    assert unlearned(evaluated(3, 0, 0.0, classes=1)) is None
    assert unlearned(Evaluation(3)) is None
