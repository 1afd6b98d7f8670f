"""What a run's figures say about how to run it, in one sentence each: its times, and whether it has learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from cupynet.checks import percent
from cupynet.parallel import Adaptive, PipelineSpeed, PostLocal, When
from cupynet.training.metrics import Evaluation
from cupynet.training.records import Spent

STANDS_OUT = 0.10  # of the time: what costs less is not worth a word
WANTED = 0.055  # of the time, at most, for averaging at the frequency that is advised: 5 % when rounded
MOST_RARELY = 100  # iterations between averages: beyond that replicas drift apart, and the advice would be a bad one
SURELY = 3.0  # standard deviations above chance: a network that knows nothing gets there once in 700 runs
LOST = 0.8  # of the last epoch's training loss: a lower one before it was no chance
BURST = 2.0  # times the loss of who knows nothing: fresh networks are above it, but not so far
SLOWER = 1.25  # times as long for the same samples: more than the noise of a shared machine


def advise(
    spent: Spent,
    frequency: int | str | When | None = None,
    *,
    always: int | None = None,
    speed: PipelineSpeed | None = None,
    stages: int = 1,
    cores: int | None = None,
) -> str:
    """What costs most time beside computing, and the way out; or that nothing does.

    Averaging is counted as what it costs the worker that waits least for others: the last one to come does not wait at
    all. The share at another frequency follows from as many averages as that makes, each as long as now.

    Args:
        spent: by each worker, on all of the training.
        frequency: iterations between averages, `epoch` or `end`, or the rule; None where there is none.
        always: iterations between the averages that are made whatever the frequency, as evaluated epochs end with one;
            None for none.
        speed: of a pipeline, where that was measured.
        stages: ranks to a replica; ranks are compared with those of the same stage.
        cores: that the workers share; None on GPUs.
    """
    if isinstance(frequency, When) and frequency.frequency is not None:
        frequency = frequency.frequency
    found = [_averaging(spent, frequency, always, stages, cores), _data(spent), _straggler(spent, stages)]
    if stages > 1:
        found.append(_pipeline(spent, speed, cores))
    cost, sentence = max(found)
    if cost < STANDS_OUT:
        return f"nothing stands out: {percent(fmean(spent.share('compute_s')), 0)} of the time is computing"
    return sentence


def averages(frequency: int, always: int | None = None) -> float:
    """How many there are per iteration: after every `frequency`, and after every `always`; one where both fall."""
    if always is None:
        return 1 / frequency
    return 1 / frequency + 1 / always - 1 / math.lcm(frequency, always)


def share_at(share: float, frequency: int, other: int, always: int | None = None) -> float:
    """The share of the time that averaging would cost every `other` iterations, if it costs `share` every `frequency`.

    With t for an iteration and a for n averages of it, share = n a / (n a + t).
    """
    cost = share * averages(other, always) / averages(frequency, always)
    return cost / (cost + 1 - share)


def rarer(share: float, frequency: int, always: int | None = None) -> int:
    """The lowest frequency at which averaging would cost `WANTED` of the time, see `share_at`.

    At most 100, and at most `always`, beyond which nothing is to be had.
    """
    most = min(MOST_RARELY, always or MOST_RARELY)
    enough = (other for other in range(frequency + 1, most) if share_at(share, frequency, other, always) <= WANTED)
    return next(enough, most)


def _averaging(
    spent: Spent, frequency: int | str | When | None, always: int | None, stages: int, cores: int | None
) -> tuple[float, str]:
    ranks, share = len(spent.rounds_s), min(spent.share("averaging_s"))
    if ranks <= stages:
        return 0.0, ""  # one replica: what its synchronizer does is no average, and no setting makes it rarer
    said = f"averaging costs {percent(share, 0)} of the time"
    if cores is not None and ranks > cores:
        return share, f"{said}: {_turns(ranks, cores, 'worker' if stages == 1 else 'stage')}"
    if isinstance(frequency, Adaptive):
        return share, f"{said}: raise its target, or most"
    if isinstance(frequency, PostLocal):
        return share, f"averaging costs {percent(share, 0)}: fewer PostLocal epochs, or higher frequency"
    if frequency == "epoch":
        return share, f"{said}: once an epoch is too often"
    if isinstance(frequency, int) and always is not None and frequency >= always:
        return share, f"averaging costs {percent(share, 0)}: larger batches, or evaluate fewer epochs"  # but the last
    if isinstance(frequency, int) and share >= STANDS_OUT and frequency < MOST_RARELY:
        other = rarer(share, frequency, always)
        return share, f"{said}: frequency {other} would cost {percent(share_at(share, frequency, other, always), 0)}"
    return share, f"{said}: larger batches make it rarer"


def _data(spent: Spent) -> tuple[float, str]:
    share = max(spent.share("data_s"))
    return share, f"waiting for batches costs {percent(share, 0)} of the time: raise prefetch_buffer"


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
    if stages > 1:
        return cost, f"rank {slowest} is {ratio:.1f} times slower than others of its stage"
    return cost, f"worker {slowest} is {ratio:.1f} times slower than the others"


def _pipeline(spent: Spent, speed: PipelineSpeed | None, cores: int | None) -> tuple[float, str]:
    """What stages lose by waiting for each other; or that one worker with the whole network would be as fast."""
    ranks, share = len(spent.rounds_s), fmean(spent.share("waiting_s"))
    if speed is not None and speed.speed_up <= 1:
        lost = 1 - speed.speed_up / len(speed.work_s)  # of the time of all stages, to whatever it went
        workers = ranks if cores is None else min(ranks, cores)
        return lost, f"{speed.speed_up:.2f} times one worker: try workers={workers} without a pipeline"
    if cores is not None and ranks > cores:
        return share, f"stages wait {percent(share, 0)} of the time: {_turns(ranks, cores, 'stage')}"
    if speed is not None:
        return share, f"stages wait {percent(share, 0)} of the time: at best {speed.bound:.2f} times one worker"
    return share, f"stages wait for each other {percent(share, 0)} of the time"


def _turns(ranks: int, cores: int, name: str) -> str:
    return f"{ranks} {name}s share {cores} core{'s' * (cores > 1)}"


def unlearned(evaluation: Evaluation, chance: float | None, losses: Sequence[float] = ()) -> str | None:
    """That a network has learned nothing which shows, if so: it is right no oftener than a constant answer may be.

    Whoever always names the commonest class is right on a share p of n images. A network that knows nothing of an image
    is so at most, give or take the root of p (1 - p) / n; it has learned where it is right more than `SURELY` of those
    above p. What says that the steps were too large: a loss that is not finite, that is far above what a network has
    that thinks all classes equally likely, or that has been lower: it had learned something, and lost it.

    Args:
        chance: the loss of such a network, see `Loss.chance`; None where nobody knows it.
        losses: the mean loss of training in each epoch.
    """
    samples, loss = evaluation.samples, evaluation.loss
    share = int((evaluation.confusion.sum(axis=1) + evaluation.undecided).max()) / max(samples, 1)
    if not 0 < share < 1 or evaluation.accuracy > share + SURELY * math.sqrt(share * (1 - share) / samples):
        return None
    beside = "" if chance is None else f", without any knowledge {chance:.4g}"
    lost = len(losses) > 0 and min(losses) < LOST * losses[-1]
    burst = chance is not None and max(loss, *losses, -math.inf) > BURST * chance
    way_out = "train longer, or change learning_rate"
    if lost or burst or not math.isfinite(loss):
        way_out = "lower learning_rate"
    return (
        f"it has not learned: accuracy {percent(evaluation.accuracy)} on {samples:,} images, naming the commonest "
        f"class alone gives {percent(share)}; loss {loss:.4g}{beside}: {way_out}"
    )
