"""Advice on training speed, and a warning if the network has hardly learned."""

from __future__ import annotations

import math

import numpy as np

from cupynet.core.wording import counted, percent
from cupynet.training.evaluation import Evaluation
from cupynet.training.events import Spent

MIN_SHARE = 0.10  # minimum fraction of the time for an overhead to be reported
FEW_ITERATIONS = 5  # with at most this many iterations per epoch, several workers make too few updates
SLOWDOWN = 1.25  # minimum ratio of seconds per sample for a straggler, above the noise of a shared machine
Z_THRESHOLD = 3.0  # standard deviations above chance; an untrained network exceeds this once in 700 runs


def advise(
    spent: Spent,
    *,
    iterations: int | None = None,
    stages: int = 1,
    cores: int | None = None,
    scheduled: bool = True,
) -> str:
    """Return advice on the largest overhead, or say that nothing stands out.

    stages: number of ranks per replica.
    cores: number of CPU cores that the workers share; None on GPUs.
    scheduled: False if replicas exchange gradients or updates in every iteration.
    """
    ranks = len(spent.rounds_s)
    if ranks > stages and iterations is not None and iterations <= FEW_ITERATIONS:
        return f"only {counted(iterations, 'iteration')} per epoch: try workers=1, or a smaller batch_size"
    data = f"waiting for batches takes {percent(spent.data, 0)} of the time: raise prefetch_buffer"
    found = [(spent.data, data), _straggler(spent, stages)]
    if ranks > stages:
        remedy = "average less often" if scheduled else "parallel=averaging averages less often"
        if cores is not None and ranks > cores:
            remedy = f"{ranks} {'workers' if stages == 1 else 'stages'} on {cores} core{'s' * (cores > 1)}"
        found.append((spent.averaging, f"averaging takes {percent(spent.averaging, 0)} of the time: {remedy}"))
    if stages > 1:
        waiting = float(np.mean(spent.share("waiting_s")))
        found.append((waiting, f"stages wait {percent(waiting, 0)} of the time"))
    cost, sentence = max(found)
    if cost < MIN_SHARE:
        computing = percent(float(np.mean(spent.share("compute_s"))), 0)
        return f"nothing stands out: {computing} of the time is spent computing"
    return sentence


def _straggler(spent: Spent, stages: int) -> tuple[float, str]:
    """Compare each rank's seconds per sample with the median of the other ranks in its stage."""
    paces = [seconds / max(samples, 1) for seconds, samples in zip(spent.compute_s, spent.samples, strict=True)]
    slowest, ratio = 0, 1.0
    for rank, pace in enumerate(paces):
        others = [paces[peer] for peer in range(rank % stages, len(paces), stages) if peer != rank and paces[peer]]
        if spent.samples[rank] and others and pace / np.median(others) > ratio:
            slowest, ratio = rank, pace / float(np.median(others))
    name = "worker" if stages == 1 else "rank"
    sentence = f"{name} {slowest} takes {ratio:.1f} times as long per sample as the others"
    return 1 - 1 / ratio if ratio >= SLOWDOWN else 0.0, sentence


def unlearned(evaluation: Evaluation) -> str | None:
    """Return a warning if predicting the most frequent class would be about as accurate, otherwise None."""
    samples = evaluation.samples
    share = int((evaluation.confusion.sum(axis=1) + evaluation.undecided).max()) / max(samples, 1)
    deviation = math.sqrt(share * (1 - share) / max(samples, 1))
    chance = share + Z_THRESHOLD * deviation  # at least 1 on so few images that even a perfect accuracy may be chance
    if not 0 < share < 1 or chance >= 1 or evaluation.accuracy > chance:
        return None
    return (
        f"the network has hardly learned: accuracy {percent(evaluation.accuracy)} on {samples:,} images, and "
        f"{percent(share)} by predicting the most frequent class; loss {evaluation.loss:.4g}. Lower learning_rate, or "
        "train longer"
    )
