"""The sentence of advice: which of the measured costs it is about, and what it says."""

from __future__ import annotations

import pytest

from cupynet.training import Spent, advise
from cupynet.training.advice import MOST_RARELY, STANDS_OUT, WANTED, rarer, share_at


def spent(averaging=None, data=None, compute=None, samples=None) -> Spent:
    """100 seconds of each worker; what is neither averaging nor data is computing, but for what is given."""
    workers = max(len(each) for each in (averaging or (), data or (), compute or ()))
    averaging, data = averaging or (0.0,) * workers, data or (0.0,) * workers
    rest = [100 - a - d for a, d in zip(averaging, data, strict=True)]
    compute = rest if compute is None else list(compute)
    samples = [1000] * workers if samples is None else list(samples)
    return Spent([100.0] * workers, compute, list(data), list(averaging), samples, [0] * workers)


@pytest.mark.parametrize(
    ("measured", "frequency", "sentence"),
    [
        (spent(averaging=(31, 33)), 1, "averaging costs 31 % of the time: frequency 8 would cost 5 %"),
        (spent(averaging=(31, 33)), 3, "averaging costs 31 % of the time: frequency 24 would cost 5 %"),
        (spent(averaging=(31, 33)), "epoch", "averaging costs 31 % of the time: larger batches make it rarer"),
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
def test_each_sentence(measured, frequency, sentence):
    assert advise(measured, frequency) == sentence


def test_the_greatest_cost_is_told():
    assert advise(spent(averaging=(15, 15), data=(30, 30)), 3).startswith("waiting for batches costs 30 %")
    assert advise(spent(averaging=(30, 30), data=(15, 15)), 3).startswith("averaging costs 30 %")


def test_what_the_others_wait_for_a_slow_worker_is_no_cost_of_averaging():
    """The last one to come waits for nobody; a lower frequency would help none of them."""
    assert "worker 1 is 2.0 times slower" in advise(spent(averaging=(50, 1), compute=(49, 98)), 1)


def test_a_worker_with_more_to_do_is_not_slow():
    measured = spent(averaging=(50, 1), compute=(49, 98), samples=(500, 1000))
    assert advise(measured, 1).startswith("nothing stands out")
    idle = spent(averaging=(98, 1), compute=(0, 98), samples=(0, 1000))  # without a batch all the time
    assert advise(idle, 1).startswith("nothing stands out")


def test_stages_of_a_pipeline_are_compared_with_their_like():
    """Workers 0 and 2 are the first stages of two replicas, 1 and 3 the second."""
    measured = spent(averaging=(50, 1, 50, 1), compute=(49, 98, 49, 98))
    assert "slower" in advise(measured, 1)
    assert "slower" not in advise(measured, 1, stages=2)
    measured = spent(averaging=(50, 1, 50, 1), compute=(49, 98, 98, 98))
    assert "worker 2 is 2.0 times slower" in advise(measured, 1, stages=2)
    assert (
        advise(spent(averaging=(0, 0)), 1, stages=2) == "nothing stands out: 100 % is computing or waiting for a stage"
    )


@pytest.mark.parametrize(("cores", "where"), [(2, "2 cores"), (1, "1 core")])
def test_workers_that_take_turns_on_the_cores_are_told_so(cores, where):
    found = advise(spent(averaging=(60,) * 8), 1, cores=cores)
    assert found == f"averaging costs 60 % of the time: 8 workers share {where}"
    assert "frequency" in advise(spent(averaging=(60,) * 8), 1, cores=8)


@pytest.mark.parametrize("share", [STANDS_OUT, 0.31, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("frequency", [1, 3, 50])
def test_the_frequency_that_is_advised_is_the_lowest_that_costs_what_is_wanted(share, frequency):
    """By its own model: an average takes as long, and there are as many fewer of them."""
    other = rarer(share, frequency)
    average, iteration = share * frequency, 1 - share  # seconds of one average and one iteration, up to a factor
    assert share_at(share, frequency, other) == pytest.approx(average / (average + other * iteration))
    assert share_at(share, frequency, other - 1) > WANTED
    assert share_at(share, frequency, other) <= WANTED or other == MOST_RARELY
    assert share_at(share, frequency, frequency) == pytest.approx(share)


def test_nothing_was_trained():
    nothing = Spent([0.0], [0.0], [0.0], [0.0], [0], [0])
    assert advise(nothing) == "nothing stands out: 0 % of the time is computing"


def test_no_sentence_wraps():
    """The table of a run has 65 columns for it."""
    for measured, frequency, cores in (
        (spent(averaging=(99.9,) * 64), 50, None),
        (spent(averaging=(99.9,) * 64), 50, 2),
        (spent(averaging=(99.9, 99.9)), None, None),
        (spent(data=(99.0, 99.0)), 3, None),
        (spent(compute=(1,) * 63 + (90,)), 3, None),
    ):
        sentence = advise(measured, frequency, cores=cores)
        assert not sentence.startswith("nothing") and len(sentence) <= 65, sentence
