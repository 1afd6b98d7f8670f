from __future__ import annotations

import copy
import time

import numpy as np

from cupynet.parallel import Synchronizer
from cupynet.parallel.synchronizers.replica_view import distance
from cupynet.training.replica import Replica


def warm_up(replica: Replica, batch_size: int, synchronizer: Synchronizer | None = None) -> float:
    """Compile or load all kernels with a step on a copy of the replica. Return the time in seconds.

    The time is also added to the replica's clock. With a `synchronizer`, this also warms up averaging, and all workers
    must call it.
    """
    began, backend = time.perf_counter(), replica.backend
    backend.prepare()
    optimizer = copy.copy(replica.optimizer)
    optimizer.state = {}  # `init` fills it
    optimizer.learning_rate = copy.deepcopy(replica.optimizer.learning_rate)
    optimizer.learning_rate.begin_fit(0, 1, epoch=1, epochs=1)
    scratch = Replica(replica.model.replicate(backend), optimizer, replica.accumulation_steps)
    with np.errstate(over="ignore", invalid="ignore"):
        replica.rehearse(scratch, batch_size)
        if synchronizer is not None and replica.groups.replicas.size > 1:
            _average(replica, scratch, synchronizer)
    backend.synchronize()
    seconds = time.perf_counter() - began
    replica.clock.compile_s += seconds
    return seconds


def _average(replica: Replica, scratch: Replica, synchronizer: Synchronizer) -> None:
    groups = replica.groups
    with groups.world.traffic.uncounted():
        groups.replicas.allreduce_mean([*synchronizer.shared(scratch), *scratch.params.running], 1.0)
    distance(replica.backend, [(scratch.params.master, replica.params.master)])
