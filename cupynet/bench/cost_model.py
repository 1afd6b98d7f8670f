"""A model of data-parallel averaging: how fast replicas are on any number of machines, from measurements on one.

    iteration = computing + averaging / frequency

Computing is interpolated between one worker alone and a machine with a worker on every core. Averaging is its cost on
one machine, where workers also wait for each other, plus that of the links between machines. There W workers, c on
each machine, exchange vectors of n bytes all-to-all, once to sum chunks and once to distribute them, and twice a few
bytes (Hockney 1994, latency alpha and bandwidth B):

    links = 4 alpha + 2 c (W - c) / W n / B

Workers beyond the cores take turns. Stragglers on other machines are not modelled. Times are seconds, sizes bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EXCHANGES = 4  # the vector's chunks there and back; whether all are finite; whether to stop


@dataclass(frozen=True)
class Link:
    """A connection between two machines: bytes per second in each direction, seconds of an empty message."""

    bandwidth: float
    latency_s: float

    @classmethod
    def of(cls, value: str | Mapping[str, float]) -> Link:
        """Return a link by its name in `LINKS`, or from `bandwidth_gbit_s` and `latency_us`."""
        if isinstance(value, str):
            return LINKS[value]
        return cls(value["bandwidth_gbit_s"] * 1e9 / 8, value["latency_us"] * 1e-6)


# Nominal bandwidths; latencies of a small message between two programs, with the kernel's network stack (Ethernet at 1
# and 10 Gbit/s) or without (100 Gbit/s with RDMA; NVLink 4, one direction).
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
        alone_s: an iteration of one worker alone, without averaging.
        busy_s: an iteration with a worker on every core, without averaging.
        average_s: one average of these workers.
        size: bytes that are averaged.
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
    """The speed of `workers` that are averaged every `frequency` iterations.

    Attributes:
        machines: number of machines.
        computing_s, averaging_s: seconds of one iteration.
        images_per_s: of all replicas.
        efficiency: images_per_s relative to the same number of workers that each run alone.
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
    """Return the speed of `workers`, averaged every `frequency` iterations.

    Args:
        link: between machines.
        cores: workers that a machine runs at once; None for as many as the measured machine.
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
