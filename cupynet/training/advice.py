"""What the measured times of a run say about how to run it: one sentence."""

from __future__ import annotations

import math
from statistics import fmean, median

from cupynet.training.records import Spent

STANDS_OUT = 0.10  # of the time: what costs less is not worth a word
WANTED = 0.055  # of the time, at most, for averaging at the frequency that is advised: 5 % when rounded
MOST_RARELY = 100  # iterations between averages: beyond that replicas drift apart, and the advice would be a bad one
SLOWER = 1.25  # times as long for the same samples: more than the noise of a shared machine


def advise(spent: Spent, frequency: int | str | None = None, *, stages: int = 1, cores: int | None = None) -> str:
    """What costs most time beside computing, and the way out; or that nothing does.

    Averaging is counted as what it costs the worker that waits least for others: the last one to come does not wait at
    all. The share at another frequency follows from as many averages as that makes, each as long as now.

    Args:
        spent: by each worker, on all of the training.
        frequency: iterations between averages, `epoch` or `end`; None for another rule.
        stages: workers to a replica; workers are compared with those of the same stage.
        cores: that the workers share; None on GPUs.
    """
    found = [_averaging(spent, frequency, cores), _data(spent), _straggler(spent, stages)]
    cost, sentence = max(found)
    if cost < STANDS_OUT:
        what = "of the time is computing" if stages == 1 else "is computing or waiting for a stage"
        return f"nothing stands out: {fmean(spent.share('compute_s')):.0%} {what}".replace("%", " %")
    return sentence.replace("%", " %")


def share_at(share: float, frequency: int, other: int) -> float:
    """The share of the time that averaging would cost every `other` iterations, if it costs `share` every `frequency`.

    With t for an iteration and a for an average, share = a / (a + frequency t).
    """
    averages = share * frequency / other
    return averages / (averages + 1 - share)


def rarer(share: float, frequency: int) -> int:
    """The lowest frequency at which averaging would cost `WANTED` of the time, see `share_at`; 100 at most."""
    if share * frequency >= MOST_RARELY * (1 - share):
        return MOST_RARELY
    return min(math.ceil(share * frequency * (1 - WANTED) / (WANTED * (1 - share))), MOST_RARELY)


def _averaging(spent: Spent, frequency: int | str | None, cores: int | None) -> tuple[float, str]:
    workers, share = len(spent.rounds_s), min(spent.share("averaging_s"))
    said = f"averaging costs {share:.0%} of the time"
    if cores is not None and workers > cores:
        return share, f"{said}: {workers} workers share {cores} core{'s' * (cores > 1)}"
    if isinstance(frequency, int) and share >= STANDS_OUT and frequency < MOST_RARELY:
        other = rarer(share, frequency)
        return share, f"{said}: frequency {other} would cost {share_at(share, frequency, other):.0%}"
    return share, f"{said}: larger batches make it rarer"


def _data(spent: Spent) -> tuple[float, str]:
    share = max(spent.share("data_s"))
    return share, f"waiting for batches costs {share:.0%} of the time: raise prefetch_buffer"


def _straggler(spent: Spent, stages: int) -> tuple[float, str]:
    """The worker that takes longest for a sample, against the median of the others; it costs what they could save."""
    times = zip(spent.compute_s, spent.samples, strict=True)
    paces = [seconds / samples if samples else 0.0 for seconds, samples in times]
    slowest, ratio = 0, 1.0
    for rank, pace in enumerate(paces):
        others = [paces[peer] for peer in range(rank % stages, len(paces), stages) if peer != rank and paces[peer]]
        if others and pace / median(others) > ratio:
            slowest, ratio = rank, pace / median(others)
    cost = 1 - 1 / ratio if ratio >= SLOWER else 0.0
    return cost, f"worker {slowest} is {ratio:.1f} times slower than the others"
