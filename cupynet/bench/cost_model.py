"""Cost model of data-parallel averaging: predicts throughput on several machines from measurements on one.

    iteration = computation + averaging / frequency

Computation time is interpolated between a single worker and one worker per core. Averaging time is the time on one
machine, including waiting for other workers, plus the time on the links between machines. W workers, c per machine,
exchange vectors of n bytes all-to-all twice (reduce-scatter and all-gather). A third exchange, the check for finite
values, carries only a few bytes. With latency alpha and bandwidth B (Hockney 1994):

    links = 3 alpha + 2 c (W - c) / W · n / B

Every ten iterations, workers also agree on whether to stop, which takes alpha. If cores are oversubscribed, times grow
in proportion. Stragglers on other machines are not modeled. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cupynet.training.consensus import AGREE_EVERY

EXCHANGES = 3  # reduce-scatter, all-gather, and the check for finite values


@dataclass(frozen=True)
class Link:
    """A connection between machines: bandwidth per direction in bytes/s, and latency of a small message in seconds."""

    bandwidth: float
    latency_s: float

    @classmethod
    def of(cls, value: str | Mapping[str, float]) -> Link:
        """Return a link from its name in `LINKS`, or from `bandwidth_gbit_s` and `latency_us`."""
        if isinstance(value, str):
            return LINKS[value]
        return cls(value["bandwidth_gbit_s"] * 1e9 / 8, value["latency_us"] * 1e-6)


# Nominal bandwidth per direction, and latency of small messages between two processes: a wide-area network, TCP over 1
# and 10 Gbit/s Ethernet, RDMA at 100 Gbit/s, and NVLink 4.
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
        average_s: seconds per averaging step with one worker per core.
        size: size of the averaged vectors in bytes.
        cores: number of cores or GPUs of the machine.
    """

    batch_size: int
    alone_s: float
    busy_s: float
    average_s: float
    size: float
    cores: int


@dataclass(frozen=True)
class Forecast:
    """Predicted throughput. Times are per iteration. efficiency: relative to independent workers."""

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
    """Predict the throughput of this number of workers.

    cores: per machine, by default as measured. machines: by default enough for one worker per core.
    """
    cores = cores or costs.cores
    machines = -(-workers // cores) if machines is None else min(machines, workers)
    per_machine = -(-workers // machines)
    oversubscription = max(1.0, per_machine / cores)
    utilization = (min(per_machine, costs.cores) - 1) / (costs.cores - 1) if costs.cores > 1 else 0.0
    computing_s = (costs.alone_s + (costs.busy_s - costs.alone_s) * utilization) * oversubscription
    average_s, consensus_s = (0.0 if workers == 1 else costs.average_s * oversubscription), 0.0
    if machines > 1:
        consensus_s = link.latency_s / AGREE_EVERY
        share = per_machine * (workers - per_machine) / workers
        average_s += EXCHANGES * link.latency_s + 2 * share * costs.size / link.bandwidth
    averaging_s = average_s / frequency + consensus_s
    iteration_s = computing_s + averaging_s
    return Forecast(
        workers=workers,
        frequency=frequency,
        machines=machines,
        computing_s=computing_s,
        averaging_s=averaging_s,
        images_per_s=workers * costs.batch_size / iteration_s,
        efficiency=costs.alone_s / iteration_s,
    )
