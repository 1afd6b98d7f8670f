"""Resume with a different number of workers.

All workers start from the mean of the replicas (in a pipeline, of the replicas of their stage). The synchronizer
chooses the weights, such as the number of samples since the last averaging step. Optimizer and synchronizer states are
averaged too, and callbacks may merge their states. An interrupted epoch continues after the last iteration that the new
number of workers, W, would have completed: no batch is skipped, and up to W - 1 batches are repeated. Additional
workers start with empty statistics. Counts of removed workers go to the first replica, but their times are lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupynet.core.errors import ConfigError
from cupynet.parallel import Synchronizer
from cupynet.training.clock import Statistics
from cupynet.training.state_tree import Tree

# counts of a worker, by part of its state (see `Statistics.state`)
COUNTS = {
    "clock": ("samples", "bytes_sent"),
    "epoch_start": ("samples", "bytes_sent"),
    "losses": ("samples", "unread", "epoch_samples", "epoch_losses", "hits", "epoch_hits"),
}


def resized(
    states: Sequence[Tree],
    size: int,
    stages: int,
    synchronizer: Synchronizer,
    callbacks: Mapping[str, Any],
    *,
    joint: bool = False,
) -> list[Tree]:
    """Convert saved states, in rank order, to states of `size` workers.

    callbacks: maps saved names to callbacks.
    joint: see `LossScaler`.
    """
    before, after = len(states) // stages, size // stages
    means = [_of_stage(states[stage::stages], before, after, synchronizer) for stage in range(stages)]
    merged = [_of_callbacks(states[stage::stages], callbacks) for stage in range(stages)]
    made = []
    for rank in range(size):
        replica, stage = divmod(rank, stages)
        own = states[rank] if replica < before else {**states[stage], **Statistics().state()}
        if replica == 0:
            own = _with_counts(own, states[size + stage :: stages])
        scaling = means[stage]["scaling"]
        if scaling and not joint:  # otherwise, all replicas skip the same steps
            skipped = 0 if replica else sum(state["scaling"]["skipped"] for state in states[stage::stages])
            scaling = {**scaling, "skipped": skipped}
        callbacks_state = {**own["callbacks"], **merged[stage]}
        made.append({**own, **means[stage], "scaling": scaling, "callbacks": callbacks_state})
    return made


def _with_counts(own: Tree, removed: Sequence[Tree]) -> Tree:
    """Add the counts of removed workers to a worker's own."""
    counted = {
        part: {**own[part], **{name: sum(each[part][name] for each in (own, *removed)) for name in names}}
        for part, names in COUNTS.items()
    }
    return {**own, **counted}


def trained_again(states: Sequence[Tree], size: int, stages: int) -> int:
    """Return the number of batches of the interrupted epoch that `size` workers repeat."""
    before, after = len(states) // stages, size // stages
    return int(states[0]["trainer"]["round"]) * before % after


def shares(states: Sequence[Tree], synchronizer: Synchronizer) -> list[float]:
    """Return the weight of each replica in the mean. The weights sum to 1."""
    try:
        weights = [synchronizer.merge(state["synchronizer"])[0] for state in states]
    except KeyError as missing:
        reason = f"with another synchronizer, without {missing}, which {type(synchronizer).__name__} needs"
        raise ConfigError(f"the checkpoint was saved {reason}") from None
    total = sum(weights)
    return [weight / total if total else 1 / len(states) for weight in weights]


def mean(trees: Sequence[Any], weights: Sequence[float]) -> Any:
    """Average float arrays that have the same shape in all trees. Take everything else from the first tree."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {name: mean([tree.get(name, first[name]) for tree in trees], weights) for name in first}
    same = all(isinstance(tree, np.ndarray) and tree.shape == first.shape for tree in trees[1:])
    if not isinstance(first, np.ndarray) or first.dtype.kind != "f" or not same:
        return first
    total = np.zeros(first.shape, np.float64)
    for tree, weight in zip(trees, weights, strict=True):
        if weight:  # 0 * NaN is NaN
            total += weight * tree.astype(np.float64)
    return total.astype(first.dtype)


def _of_stage(states: Sequence[Tree], before: int, after: int, synchronizer: Synchronizer) -> Tree:
    weights = shares(states, synchronizer)
    position = dict(states[0]["trainer"])
    passed = position["iteration"] - position["span_start"]  # iterations that the old workers completed
    position["span_start"] = position["iteration"] - round(passed * before / after)
    position["round"] = position["round"] * before // after
    position["deal"] = np.array([*position["deal"][:-1], after][: len(position["deal"])], np.int64)
    replicas = [state["replica"] for state in states]
    scaling = min((state["scaling"] for state in states), key=lambda scaling: scaling.get("scale", 0.0))
    return {
        "trainer": position,
        "replica": {**mean(replicas, weights), "updates": max(each["updates"] for each in replicas)},
        "synchronizer": synchronizer.merge(mean([state["synchronizer"] for state in states], weights))[1],
        "schedule": states[0]["schedule"],
        "measured": states[0]["measured"],
        "scaling": scaling,
    }


def _of_callbacks(states: Sequence[Tree], callbacks: Mapping[str, Any]) -> Tree:
    merged = {}
    for name, callback in callbacks.items():
        saved = [state["callbacks"][name] for state in states if name in state["callbacks"]]
        if saved and callback.every_rank:
            merged[name] = callback.merge(saved)
    return {name: state for name, state in merged.items() if state is not None}
