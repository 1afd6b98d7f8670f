"""Cost model of data-parallel averaging: predicts throughput on several machines from measurements on one.

    iteration = computing + averaging / frequency

Computing time is interpolated between a single worker and one worker per core. Averaging time is the cost on one
machine, including waiting for other workers, plus the cost of links between machines. With W workers, c per machine,
vectors of n bytes are exchanged all-to-all twice, to sum chunks and to distribute the sums. A few bytes are exchanged
twice more. With latency alpha and bandwidth B (Hockney 1994):

    links = 4 alpha + 2 c (W - c) / W n / B

If there are more workers than cores, they take turns. Stragglers on other machines are not modeled. Times are in
seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXCHANGES = 4  # chunks in both directions, the finite check, and the stop consensus


@dataclass(frozen=True)
class Link:
    """A connection between machines: bytes per second per direction, and the latency of a small message in seconds."""

    bandwidth: float
    latency_s: float

    @classmethod
    def of(cls, value: str | Mapping[str, float]) -> Link:
        """Return a link from its name in `LINKS`, or from `bandwidth_gbit_s` and `latency_us`."""
        if isinstance(value, str):
            return LINKS[value]
        return cls(value["bandwidth_gbit_s"] * 1e9 / 8, value["latency_us"] * 1e-6)


# Nominal bandwidths, and latencies of small messages between two programs: through the kernel's network stack for
# Ethernet at 1 and 10 Gbit/s, without it for RDMA at 100 Gbit/s and NVLink 4 (one direction).
LINKS = {
    "wan": Link(0.1e9 / 8, 50e-3),
    "1gbe": Link(1e9 / 8, 50e-6),
    "10gbe": Link(10e9 / 8, 25e-6),
    "100gbe": Link(100e9 / 8, 5e-6),
    "nvlink": Link(450e9, 5e-6),
}


@dataclass(frozen=True)
class Costs:
    """Measurements on one machine.

    Attributes:
        batch_size: images per iteration of a replica.
        alone_s: seconds per iteration of a single worker, without averaging.
        busy_s: seconds per iteration with one worker per core, without averaging.
        average_s: seconds per averaging step of these workers.
        size: bytes to average.
        cores: cores or GPUs of the machine.
    """

    batch_size: int
    alone_s: float
    busy_s: float
    average_s: float
    size: float
    cores: int


@dataclass(frozen=True)
class Forecast:
    """Predicted throughput of `workers` that are averaged every `frequency` iterations.

    Attributes:
        computing_s, averaging_s: seconds per iteration.
        images_per_s: throughput of all replicas.
        efficiency: throughput relative to the same number of independent workers.
    """

    workers: int
    frequency: int
    machines: int
    computing_s: float
    averaging_s: float
    images_per_s: float
    efficiency: float


def forecast(
    costs: Costs, link: Link, workers: int, frequency: int, cores: int | None = None, machines: int | None = None
) -> Forecast:
    """Predict the throughput of `workers` that are averaged every `frequency` iterations.

    Args:
        link: connection between machines.
        cores: cores per machine; by default, as many as the measured machine has.
        machines: number of machines; None for as many as the workers need.
    """
    cores = cores or costs.cores
    machines = -(-workers // cores) if machines is None else min(machines, workers)
    each = -(-workers // machines)
    turns = max(1.0, each / cores)
    busy = (min(each, costs.cores) - 1) / (costs.cores - 1) if costs.cores > 1 else 0.0
    computing_s = (costs.alone_s + (costs.busy_s - costs.alone_s) * busy) * turns
    average_s = 0.0 if workers == 1 else costs.average_s * turns
    if machines > 1:
        share = each * (workers - each) / workers
        average_s += EXCHANGES * link.latency_s + 2 * share * costs.size / link.bandwidth
    iteration_s = computing_s + average_s / frequency
    return Forecast(
        workers=workers,
        frequency=frequency,
        machines=machines,
        computing_s=computing_s,
        averaging_s=average_s / frequency,
        images_per_s=workers * costs.batch_size / iteration_s,
        efficiency=costs.alone_s / iteration_s,
    )
