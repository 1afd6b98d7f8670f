"""How fast workers would be together: from what one machine measures to any number of them, by arithmetic alone.

    iteration = computing + waiting for the slowest + communication, each per iteration of a replica

Computing is measured (`Costs`), between one worker alone and all cores at work. Waiting is the expected maximum of as
many independent sums of measured spread (Blom 1958). Communication is what was measured on one machine plus, between
machines, the latency-bandwidth model (Hockney 1994): a message of n bytes takes alpha + n / B. A replica cut into
stages takes (m + s - 1) slots of its slowest stage for m micro-batches (Huang et al. 2019).

Two all-reduces of n bytes are known, for W workers on machines that hold c each and have one link each:

    chunks  what `mpi.py` does: every worker sends each of the others its chunk, sums its own, and sends that to all;
            the messages leave at once:  2 (c (W - c) / W n / B + alpha + (W - 1) o)
    ring    what NCCL does (Patarasuk and Yuan 2009):  2 (W - 1) / W n / B + 2 (W - 1) alpha

A ring sends the fewest bytes over a link that several workers share, chunks wait for the fewest latencies. o is what a
message costs the program that handles it. Nothing here is measured or random, and nothing knows a network: times are
seconds, sizes bytes. (Over 300 lines: the model is read in one piece.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from cupynet.errors import ConfigError
from cupynet.parallel.pipeline import balanced

MESSAGE_S = 5e-6  # o: what it takes Python to send and to receive one more message
MEETINGS = 2  # small gathers that go with every average: are all finite, does anybody wish to stop
SMALL = 64  # bytes of one worker's part of those


@dataclass(frozen=True)
class Link:
    """A connection: what a message costs however short it is, and what each of its bytes costs.

    Attributes:
        name: for people.
        bandwidth: bytes per second, in each direction at once; infinite for none to pay for.
        latency_s: seconds of an empty message.
    """

    name: str
    bandwidth: float
    latency_s: float

    @classmethod
    def of(cls, value: str | Mapping[str, float]) -> Link:
        """A link by its name in `LINKS`, or of `bandwidth_gbit_s` and `latency_us`. ConfigError for another name."""
        if isinstance(value, str):
            if value not in LINKS:
                raise ConfigError(f"link={value!r}: must be one of {', '.join(LINKS)}")
            return LINKS[value]
        gigabits, microseconds = value["bandwidth_gbit_s"], value["latency_us"]
        return cls(f"{gigabits:g} Gbit/s, {microseconds:g} us", gigabits * 1e9 / 8, microseconds * 1e-6)

    def send_s(self, size: float) -> float:
        """Seconds until a message of `size` bytes has arrived."""
        return self.latency_s + size / self.bandwidth


# Nominal bandwidths; latencies of a small message between two programs, the kernel's network stack included where
# there is one (Ethernet at 1 and 10 Gbit/s), or not (100 Gbit/s with RDMA; NVLink 4, one direction).
LINKS = {
    "wan": Link("wan", 0.1e9 / 8, 50e-3),
    "1gbe": Link("1gbe", 1e9 / 8, 50e-6),
    "10gbe": Link("10gbe", 10e9 / 8, 25e-6),
    "100gbe": Link("100gbe", 100e9 / 8, 5e-6),
    "nvlink": Link("nvlink", 450e9, 5e-6),
}


@dataclass(frozen=True)
class Step:
    """One step of the network (a layer, or two that are computed as one), as a stage is made of them.

    Attributes:
        name: of its layers.
        seconds: forwards and backwards for one micro-batch, on one core.
        weights: bytes of its weights.
        output: bytes of what it hands on for one micro-batch; the gradient that comes back is as large.
    """

    name: str
    seconds: float
    weights: int
    output: int


@dataclass(frozen=True)
class Sharing:
    """What it costs to keep the replicas of one machine together once, in one mode.

    Attributes:
        local_s: seconds of a worker, all cores at work, with nothing to wait for.
        size: bytes that an all-reduce is of; or, where `gathered`, that every worker sends to every other.
        decode_s: seconds that it takes to make use of what one more worker than these `workers` has sent.
    """

    local_s: float
    size: float
    gathered: bool = False
    decode_s: float = 0.0
    workers: int = 2


@dataclass(frozen=True)
class Costs:
    """What was measured on one machine.

    Attributes:
        batch_size: images per iteration of a replica.
        alone_s: one iteration of one worker alone: loading, gradients, update, callbacks; no communication.
        busy_s: the same where every core has a worker.
        step_s: of `alone_s`, gradients and update.
        spread_s: standard deviation of the time of an iteration.
        cores: how many were at work for `busy_s` (cores, or GPUs).
        local: the link between two workers of this machine; `across`: between two machines, where that was measured.
        average, gradients, threshold: each way of sharing, once; None where it was not measured.
        steps: of the network, for one micro-batch.
        micro_batches: how many micro-batches `steps` cut a batch into.
    """

    batch_size: int
    alone_s: float
    busy_s: float
    step_s: float
    spread_s: float
    cores: int
    local: Link
    average: Sharing
    gradients: Sharing
    threshold: Sharing | None = None
    steps: Sequence[Step] = ()
    micro_batches: int = 4
    across: Link | None = None

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Costs:
        """Costs that went through `dataclasses.asdict` and JSON."""
        kinds = {"local": Link, "across": Link, "average": Sharing, "gradients": Sharing, "threshold": Sharing}
        parts = {name: kind(**stored[name]) for name, kind in kinds.items() if stored[name] is not None}
        return cls(**{**stored, **parts, "steps": [Step(**each) for each in stored["steps"]]})

    @property
    def alone_images_per_s(self) -> float:
        """Of one worker alone: what efficiency is measured by."""
        return self.batch_size / self.alone_s


@dataclass(frozen=True)
class Place:
    """Workers on machines: `each` of the `machines` holds so many, and they take `turns` on its cores."""

    machines: int
    each: int
    cores: int

    @property
    def turns(self) -> float:
        """How many workers share a core; at least 1. Threads and processes share cores evenly, not in whole turns."""
        return max(1.0, self.each / self.cores)

    @property
    def at_work(self) -> int:
        """How many workers compute at one moment, on all machines."""
        return self.machines * min(self.each, self.cores)


@dataclass(frozen=True)
class Cluster:
    """What there is to run on.

    Attributes:
        link: between machines.
        cores: of each machine: as many workers run there without taking turns (GPUs, where those compute).
        machines: how many there are; None for as many as the workers fill.
        algorithm: how vectors are averaged between machines, one of `checks.ALL_REDUCES`.
    """

    link: Link
    cores: int
    machines: int | None = None
    algorithm: str = "chunks"

    def place(self, workers: int) -> Place:
        """Workers spread as evenly as they can be, on no more machines than they fill."""
        machines = -(-workers // self.cores) if self.machines is None else min(self.machines, workers)
        return Place(machines, -(-workers // machines), self.cores)


@dataclass(frozen=True)
class Forecast:
    """How fast `workers` would be in one mode.

    Attributes:
        mode: `averaging`, `gradients`, `threshold`, `pipeline` or `hybrid`.
        frequency: iterations between averages; None where that is no choice.
        workers: all of them; `stages` of them hold a replica together (1: each holds its own).
        machines: how many they are spread over.
        images_per_s: of all replicas.
        efficiency: images_per_s over what as many workers would do that each ran as one alone does.
        computing_s, waiting_s, communication_s: of one iteration; waiting includes a pipeline's bubble.
        bytes_sent: by one worker in one iteration, to workers of the same machine too.
    """

    mode: str
    workers: int
    images_per_s: float
    efficiency: float
    computing_s: float
    waiting_s: float
    communication_s: float
    bytes_sent: float
    machines: int
    frequency: int | None = None
    stages: int = 1

    @property
    def iteration_s(self) -> float:
        """Seconds of one iteration, everything included."""
        return self.computing_s + self.waiting_s + self.communication_s

    @property
    def communication(self) -> float:
        """The share of its time that a worker spends on communication."""
        return self.communication_s / self.iteration_s

    @property
    def name(self) -> str:
        """The mode in words."""
        if self.mode == "averaging":
            return f"averaging every {self.frequency}" if self.frequency != 1 else "averaging, each iteration"
        if self.mode == "pipeline":
            return f"pipeline of {self.stages} stages"
        if self.mode == "hybrid":
            return f"hybrid {self.workers // self.stages}x{self.stages}, every {self.frequency}"
        return {"gradients": "gradients, exact"}.get(self.mode, f"gradients, {self.mode}")


# the parts of a round -------------------------------------------------------------------------------------------------


def slowest(workers: int) -> float:
    """The expected maximum of `workers` standard normal variables (Blom 1958): 0 for one, 3.2 for 1,024."""
    return NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))


def waiting_s(spread_s: float, workers: int, frequency: int) -> float:
    """Seconds per iteration that workers which meet every `frequency` iterations wait for the slowest of them."""
    return spread_s * slowest(workers) / math.sqrt(frequency)


def all_reduce_s(cluster: Cluster, place: Place, size: float) -> float:
    """Seconds on the links between machines to average `size` bytes of every worker; 0 on one machine."""
    if place.machines == 1:
        return 0.0
    link, each, workers = cluster.link, place.each, place.machines * place.each
    if cluster.algorithm == "ring":
        return 2 * (workers - 1) / workers * size / link.bandwidth + 2 * (workers - 1) * link.latency_s
    return 2 * (link.send_s(each * (workers - each) / workers * size) + (workers - 1) * MESSAGE_S)


def all_gather_s(cluster: Cluster, place: Place, size: float) -> float:
    """Seconds on the links until every worker has `size` bytes of every other: messages that all leave at once."""
    if place.machines == 1:
        return 0.0
    each, workers = place.each, place.machines * place.each
    return cluster.link.send_s(each * (workers - each) * size) + (workers - 1) * MESSAGE_S


def sharing_s(sharing: Sharing, cluster: Cluster, place: Place) -> float:
    """Seconds to keep all replicas together once: on each machine, on the links, and the small gathers with it."""
    if place.machines * place.each == 1:
        return 0.0
    exchange = all_gather_s if sharing.gathered else all_reduce_s
    met = (MEETINGS + sharing.gathered) * all_gather_s(cluster, place, SMALL)
    # what was measured on one machine (copies, sums, meetings) is paid on each, also by one worker of its own
    local_s = sharing.local_s + sharing.decode_s * max(place.machines * place.each - sharing.workers, 0)
    return local_s * place.turns + exchange(cluster, place, sharing.size) + met


def computing_s(costs: Costs, place: Place) -> float:
    """Seconds of one iteration's own work, with as many workers beside it on the machine as `place` has."""
    beside = (min(place.each, place.cores) - 1) / (place.cores - 1) if place.cores > 1 else 0.0
    return (costs.alone_s + (costs.busy_s - costs.alone_s) * beside) * place.turns


def cut(seconds: Sequence[float], stages: int) -> list[list[int]]:
    """Steps in `stages` contiguous groups, none empty, whose slowest is as fast as can be; ConfigError if too many.

    As `Pipeline` cuts, which goes by counted work where this goes by measured seconds.
    """
    count = len(seconds)
    if not 1 <= stages <= count:
        raise ConfigError(f"stages={stages}: the network has {count} steps to be cut between: at most {count}")
    ends = balanced(seconds, [0.0] * count, stages)
    return [list(range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Schedule:
    """One batch through a pipeline: seconds of work, of the bubble around it, and of messages; and the widest stage."""

    working_s: float
    bubble_s: float
    messages_s: float
    sent: float  # bytes, by the stage that sends most
    weights: int  # bytes, of the stage that has most


def schedule(costs: Costs, stages: int, link: Link, place: Place) -> Schedule:
    """(m + s - 1) slots of the slowest stage; messages travel beside the work unless they take longer than it.

    The work of the loop around the network (`alone_s` less the whole network's) is every stage's own. Where stages take
    turns on cores, nothing is faster than the work of all of them shared out to those.
    """
    m, groups = costs.micro_batches, cut([step.seconds for step in costs.steps], stages)
    slow = computing_s(costs, place) / costs.alone_s / place.turns  # how much cores at work slow each other down
    work = [sum(costs.steps[i].seconds for i in group) * slow for group in groups]
    edges = [costs.steps[group[-1]].output for group in groups[:-1]]
    around = max(costs.alone_s - m * sum(step.seconds for step in costs.steps), 0.0) * slow * place.turns
    slot = max(work)
    one_way = max((link.send_s(edge) for edge in edges), default=0.0)
    late = max(2 * one_way - slot, 0.0)  # of a message forwards and one backwards in a slot, what work does not hide
    path = (m + stages - 1) * slot
    shared_out = m * sum(work) / stages * place.turns
    sent = m * max((sum(edges[max(i - 1, 0) : i + 1]) for i in range(stages)), default=0)
    return Schedule(
        working_s=m * slot + around,
        bubble_s=max(path, shared_out) - m * slot,
        messages_s=(m + stages - 1) * late + 2 * sum(link.send_s(edge) for edge in edges) if edges else 0.0,
        sent=sent,
        weights=max(sum(costs.steps[i].weights for i in group) for group in groups),
    )


# the modes ------------------------------------------------------------------------------------------------------------


def data_parallel(costs: Costs, cluster: Cluster, workers: int, mode: str, frequency: int = 1) -> Forecast:
    """Replicas on batches of their own: `averaging` every `frequency` iterations, or `gradients` or `threshold`."""
    sharing: Sharing = {"averaging": costs.average}.get(mode) or getattr(costs, mode)
    place = cluster.place(workers)
    communication = sharing_s(sharing, cluster, place) / frequency
    sent = sharing.size * ((workers - 1) if sharing.gathered else 2 * (workers - 1) / workers) / frequency
    waited = waiting_s(costs.spread_s, place.at_work, frequency)
    return _forecast(
        costs, mode, workers, (computing_s(costs, place), waited, communication), sent, place.machines,
        replicas=workers, frequency=frequency if mode == "averaging" else None,
    )  # fmt: skip


def pipeline(costs: Costs, cluster: Cluster, stages: int) -> Forecast:
    """One replica cut into as many stages as there are workers."""
    place = cluster.place(stages)
    link = costs.local if place.machines == 1 else cluster.link
    plan = schedule(costs, stages, link, place)
    parts = (plan.working_s, plan.bubble_s, plan.messages_s)
    return _forecast(costs, "pipeline", stages, parts, plan.sent, place.machines, replicas=1, stages=stages)


def hybrid(costs: Costs, cluster: Cluster, workers: int, stages: int, frequency: int) -> Forecast:
    """`workers / stages` replicas of `stages` stages, each stage averaged among the replicas; ConfigError otherwise."""
    if workers % stages:
        raise ConfigError(f"workers={workers}: cannot be shared out to replicas of {stages} stages")
    replicas, place = workers // stages, cluster.place(workers)
    plan = schedule(costs, stages, costs.local if place.each >= stages else cluster.link, place)
    whole = sum(step.weights for step in costs.steps) or 1
    # stages of one machine share its link, so its averages take the bytes of all of them; else those of the widest
    share = 1.0 if place.each >= stages else plan.weights / whole
    apart = Place(place.machines if place.each >= stages else replicas, max(place.each // stages, 1), place.cores)
    local_s = costs.average.local_s * plan.weights / whole * place.turns / apart.turns
    average = Sharing(local_s, costs.average.size * share)
    communication = sharing_s(average, cluster, apart) * (replicas > 1) / frequency
    waited = waiting_s(costs.spread_s, max(place.at_work // stages, 1), frequency)
    sent = plan.sent + costs.average.size * plan.weights / whole * 2 * (replicas - 1) / replicas / frequency
    parts = (plan.working_s, plan.bubble_s + waited, plan.messages_s + communication)
    return _forecast(
        costs, "hybrid", workers, parts, sent, place.machines, replicas=replicas, stages=stages, frequency=frequency
    )


def _forecast(
    costs: Costs,
    mode: str,
    workers: int,
    parts: tuple[float, float, float],
    sent: float,
    machines: int,
    *,
    replicas: int,
    **more: Any,
) -> Forecast:
    rate = replicas * costs.batch_size / sum(parts)
    efficiency = rate / (workers * costs.alone_images_per_s)
    return Forecast(mode, workers, rate, efficiency, *parts, bytes_sent=sent, machines=machines, **more)


def fits(mode: str, workers: int, stages: int, steps: int) -> bool:
    """Whether `workers` can work in a mode; `stages` of each replica in hybrid mode, `steps` that the network has."""
    if mode == "pipeline":
        return 1 < workers <= steps
    return mode != "hybrid" or (1 < stages <= steps and workers > stages and workers % stages == 0)


def what_fits(mode: str, stages: int, steps: int) -> str:
    """The numbers of workers that can work in a mode, in words, see `fits`."""
    if mode in ("pipeline", "hybrid") and steps < 2:
        return f"{mode} takes a network of several steps"
    if mode == "pipeline":
        return f"pipeline takes 2{f' to {steps}' * (steps > 2)} workers, one for a step of this network at most"
    if mode != "hybrid":
        return f"{mode} takes any number"
    if 1 < stages <= steps:
        return f"hybrid takes {2 * stages}, {3 * stages}, {4 * stages} ... workers, replicas of stages={stages}"
    return f"hybrid takes stages=2{f' to {steps}' * (steps > 2)}, one for a step of this network at most"


def forecasts(
    costs: Costs, cluster: Cluster, workers: int, modes: Sequence[str], frequencies: Sequence[int], stages: int
) -> list[Forecast]:
    """Every mode that `workers` can work in, in the order of `modes`."""
    found: list[Forecast] = []
    for mode in modes:
        if mode == "averaging":
            found += [data_parallel(costs, cluster, workers, mode, each) for each in frequencies]
        elif not fits(mode, workers, stages, len(costs.steps)):
            continue
        elif mode == "pipeline":
            found.append(pipeline(costs, cluster, workers))
        elif mode == "hybrid":
            found += [hybrid(costs, cluster, workers, stages, each) for each in frequencies]
        elif mode == "gradients" or (mode == "threshold" and costs.threshold is not None):
            found.append(data_parallel(costs, cluster, workers, mode))
    return found


def recommended(found: Sequence[Forecast], within: float = 0.05) -> Forecast:
    """The forecast to follow: of the replicas' modes that are within 5 % of the fastest, the one nearest to exactness.

    Exact gradients are one worker on a larger batch; the seldomer an average, the further from it; an encoding loses
    bits. A replica in stages counts only where nothing else is there to choose.
    """
    near = [each for each in found if each.stages == 1] or list(found)
    best = max(each.images_per_s for each in near)
    near = [each for each in near if each.images_per_s >= (1 - within) * best]
    return min(near, key=lambda each: (each.mode == "threshold", each.frequency or 1, -each.images_per_s))
