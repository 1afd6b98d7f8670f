"""The warm-up: kernels are compiled or loaded before training, by a step on a copy of the replica."""

from __future__ import annotations

import copy
import time

import numpy as np

from cupynet.parallel import Synchronizer
from cupynet.parallel.synchronizers.replica_view import distance
from cupynet.training.replica import Replica, moved


def warm_up(replica: Replica, batch_size: int, synchronizer: Synchronizer | None = None) -> float:
    """Compile or load every kernel that training needs; return the seconds, and count them in the replica's clock.

    Args:
        synchronizer: that of the replica, for the kernels of averages. Then every worker calls it.
    """
    began, backend = time.perf_counter(), replica.backend
    backend.prepare()
    optimizer = copy.copy(replica.optimizer)
    optimizer.state = {}  # `init` creates a new one
    optimizer.learning_rate = copy.deepcopy(replica.optimizer.learning_rate)
    optimizer.learning_rate.span(0, 1, epoch=1, epochs=1)
    scratch = Replica(replica.model.replicate(backend), optimizer, replica.accumulate)
    with np.errstate(over="ignore", invalid="ignore"):  # training finds weights that are not finite
        replica.rehearse(scratch, batch_size)
        for vector in scratch.params.vectors:
            moved(vector, vector)  # a fit ends with it
        if synchronizer is not None and replica.groups.replicas.size > 1:
            _average(replica, scratch, synchronizer)
    backend.synchronize()
    seconds = time.perf_counter() - began
    replica.clock.compile_s += seconds
    return seconds


def _average(replica: Replica, scratch: Replica, synchronizer: Synchronizer) -> None:
    """Average the copies of all replicas and measure their distance. No traffic is counted."""
    groups = replica.groups
    with groups.world.traffic.uncounted():
        groups.replicas.allreduce_mean([*synchronizer.shared(scratch), *scratch.params.running], 1.0)
    distance(replica.backend, [(scratch.params.master, replica.params.master)])
