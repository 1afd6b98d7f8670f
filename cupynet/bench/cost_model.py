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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXCHANGES = 4  # the vector's chunks there and back; whether all are finite; whether to stop


@dataclass(frozen=True)
class Link:
    """A connection between two machines.

    Attributes:
        name: shown to users.
        bandwidth: bytes per second in each direction.
        latency_s: seconds of an empty message.
    """

    name: str
    bandwidth: float
    latency_s: float

    @classmethod
    def of(cls, value: str | Mapping[str, float]) -> Link:
        """Return a link by its name in `LINKS`, or from `bandwidth_gbit_s` and `latency_us`."""
        if isinstance(value, str):
            return LINKS[value]
        gigabits, microseconds = value["bandwidth_gbit_s"], value["latency_us"]
        return cls(f"{gigabits:g} Gbit/s, {microseconds:g} us", gigabits * 1e9 / 8, microseconds * 1e-6)


# Nominal bandwidths; latencies of a small message between two programs, with the kernel's network stack (Ethernet at 1
# and 10 Gbit/s) or without (100 Gbit/s with RDMA; NVLink 4, one direction).
LINKS = {
    "wan": Link("wan", 0.1e9 / 8, 50e-3),
    "1gbe": Link("1gbe", 1e9 / 8, 50e-6),
    "10gbe": Link("10gbe", 10e9 / 8, 25e-6),
    "100gbe": Link("100gbe", 100e9 / 8, 5e-6),
    "nvlink": Link("nvlink", 450e9, 5e-6),
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
class Cluster:
    """The machines to forecast for.

    Attributes:
        link: between machines.
        cores: workers that a machine runs at once.
        machines: number of machines; None for as many as the workers need.
    """

    link: Link
    cores: int
    machines: int | None = None


@dataclass(frozen=True)
class Forecast:
    """The speed of `workers` that are averaged every `frequency` iterations.

    Attributes:
        machines: number of machines.
        turns: workers per core, at least 1.
        computing_s, averaging_s: seconds of one iteration.
        images_per_s: of all replicas.
        efficiency: images_per_s relative to the same number of workers that each run alone.
    """

    workers: int
    frequency: int
    machines: int
    turns: float
    computing_s: float
    averaging_s: float
    images_per_s: float
    efficiency: float


def forecast(costs: Costs, cluster: Cluster, workers: int, frequency: int) -> Forecast:
    """Return the speed of `workers` on `cluster`, averaged every `frequency` iterations."""
    machines = -(-workers // cluster.cores) if cluster.machines is None else min(cluster.machines, workers)
    each = -(-workers // machines)
    turns = max(1.0, each / cluster.cores)
    busy = (min(each, costs.cores) - 1) / (costs.cores - 1) if costs.cores > 1 else 0.0
    computing_s = (costs.alone_s + (costs.busy_s - costs.alone_s) * busy) * turns
    average_s = 0.0 if workers == 1 else costs.average_s * turns
    if machines > 1:
        share = each * (workers - each) / workers
        average_s += EXCHANGES * cluster.link.latency_s + 2 * share * costs.size / cluster.link.bandwidth
    iteration_s = computing_s + average_s / frequency
    return Forecast(
        workers=workers,
        frequency=frequency,
        machines=machines,
        turns=turns,
        computing_s=computing_s,
        averaging_s=average_s / frequency,
        images_per_s=workers * costs.batch_size / iteration_s,
        efficiency=costs.alone_s / iteration_s,
    )


def recommended(found: Sequence[Forecast], within: float = 0.05) -> Forecast:
    """Return the forecast with the lowest frequency that is within 5 % of the fastest: replicas stay closest."""
    best = max(each.images_per_s for each in found)
    near = [each for each in found if each.images_per_s >= (1 - within) * best]
    return min(near, key=lambda each: each.frequency)
