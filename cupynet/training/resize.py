"""Resuming with another number of workers: their states, computed from those of a checkpoint.

All begin with the mean of the replicas, weighted as in their next average: by the samples that each has seen since the
last one. Optimizer state and the state of synchronizers (momentum, residuals) are averaged in the same way. A stage of
a pipeline begins with the mean of the same stage.

An interrupted epoch continues after the last round that W new workers would have completed. No batch is left out, and
up to W - 1 batches are trained again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupynet.parallel import Synchronizer
from cupynet.training.clock import Losses
from cupynet.training.state_tree import Tree

COMMON = ("rounds_s", "evaluate_s", "images", "timed_s", "timed_images")  # of a clock: equal on all workers


def regrouped(states: Sequence[Tree], size: int, stages: int, synchronizer: Synchronizer) -> list[Tree]:
    """Return the states of `size` workers, replicas of `stages` each, computed from those of others.

    synchronizer: determines the weight of a replica in the mean, and its state afterwards.
    """
    before, after = len(states) // stages, size // stages
    means = [_of_stage(states[stage::stages], before, after, synchronizer) for stage in range(stages)]
    made = []
    for rank in range(size):
        replica, stage = divmod(rank, stages)
        own = replica < before
        source = states[replica * stages + stage] if own else states[stage]
        state = copy.deepcopy({**means[stage], "callbacks": {**source["callbacks"], **_known(states)}})
        for name in ("clock", "epoch_start"):
            state[name] = source[name] if own else _new_clock(source[name])
        start = source["since"]["start"]
        since = {**source["since"], "start": start if own else _new_clock(start)}
        state["since"] = since if own else {**since, "samples": 0, "losses": 0.0}
        state["losses"] = _losses([Losses(**each["losses"]) for each in states[rank::size]])
        if state["scaling"] and not synchronizer.shares_gradients:  # else all count the same steps
            state["scaling"]["skipped"] = source["scaling"]["skipped"] if own else 0
        made.append(state)
    return made


def trained_again(states: Sequence[Tree], size: int, stages: int) -> int:
    """Return the number of batches of the interrupted epoch that `size` workers train on again."""
    before, after = len(states) // stages, size // stages
    return int(states[0]["trainer"]["round"]) * before % after


def shares(states: Sequence[Tree], synchronizer: Synchronizer) -> list[float]:
    """Return the weight of each replica in the mean of all; their sum is 1."""
    weights = [synchronizer.merge(state["synchronizer"])[0] for state in states]
    total = sum(weights)
    return [weight / total if total else 1 / len(states) for weight in weights]


def mean(trees: Sequence[Any], counted: Sequence[float]) -> Any:
    """Return the mean of float arrays that have the same shape in all trees; all else is from the first tree."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: mean([tree.get(name, first[name]) for tree in trees], counted) for name in first}
    same = all(isinstance(tree, np.ndarray) and tree.shape == first.shape for tree in trees[1:])
    if not isinstance(first, np.ndarray) or first.dtype.kind != "f" or not same:
        return first
    total = np.zeros(first.shape, np.float64)
    for tree, share in zip(trees, counted, strict=True):
        if share:  # 0 x NaN is NaN
            total += share * tree.astype(np.float64)
    return total.astype(first.dtype)


def _of_stage(states: Sequence[Tree], before: int, after: int, synchronizer: Synchronizer) -> Tree:
    """Return the state that all replicas of one stage, or of the whole network, have in common."""
    counted = shares(states, synchronizer)
    position = dict(states[0]["trainer"])
    passed = position["iteration"] - position["span_start"]  # in rounds of the former workers
    position["span_start"] = position["iteration"] - round(passed * before / after)
    position["round"] = position["round"] * before // after
    position["deal"] = np.array([*position["deal"][:-1], after][: len(position["deal"])], np.int64)
    replicas = [state["replica"] for state in states]
    return {
        "trainer": position,
        "replica": {**mean(replicas, counted), "updates": max(each["updates"] for each in replicas)},
        "synchronizer": synchronizer.merge(mean([state["synchronizer"] for state in states], counted))[1],
        "schedule": states[0]["schedule"],
        "own": {},
        "measured": states[0]["measured"],
        "scaling": min((state["scaling"] for state in states), key=lambda scaling: scaling.get("scale", 0.0)),
    }


def _known(states: Sequence[Tree]) -> Tree:
    """Return the batches that `NonFinite` left out on any worker."""
    found = [state["callbacks"]["NonFinite"] for state in states if "NonFinite" in state["callbacks"]]
    if not found:
        return {}
    every = np.concatenate([each["skipped"] for each in found])
    return {"NonFinite": {**found[0], "skipped": np.unique(every, axis=0).reshape(-1, 2)}}


def _losses(found: Sequence[Losses]) -> Tree:
    """Return the losses of the interrupted epoch, summed over the former workers that one worker replaces."""
    losses = found[0] if found else Losses()
    for other in found[1:]:
        losses.epoch_samples += other.epoch_samples + other.samples
        losses.epoch_losses += other.epoch_losses + other.unread
    return losses.state()


def _new_clock(clock: Mapping[str, Any]) -> Tree:
    """Return the clock of an additional worker: the common figures, and 0 for its own."""
    return {name: value if name in COMMON else type(value)(0) for name, value in clock.items()}
