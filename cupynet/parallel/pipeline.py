"""Pipeline parallelism: partitioning a network into stages, and the 1F1B schedule.

Each batch is split into m micro-batches, so that stages can work at the same time. After a warm-up, each stage
alternates one forward and one backward pass (1F1B or PipeDream-Flush; Narayanan et al. 2021, "Memory-efficient
pipeline-parallel DNN training"). With s = 3 stages, m = 4 micro-batches and passes of equal length:

    time      0   1   2   3   4   5   6   7   8   9  10  11
    stage 1  F1  F2  F3   .   .  B1  F4  B2   .  B3   .  B4     holds at most 3 micro-batches
    stage 2   .  F1  F2   .  B1  F3  B2  F4  B3   .  B4   .     2
    stage 3   .   .  F1  B1  F2  B2  F3  B3  F4  B4   .   .     1

Afterwards, every stage updates its weights. An iteration takes the time of m + s - 1 forward and backward passes of a
stage, compared to m · s without a pipeline. Stage r, counted from 0, holds the activations of at most s - r
micro-batches. training/pipeline_stage.py implements the execution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one, shown
from cupynet.nn import Layer, Sequential

Stages: TypeAlias = "int | str | Sequence[Sequence[str]]"


class Pipeline:
    """Pipeline settings.

    Args:
        stages: number of stages, balanced by multiply-adds; or `auto`, one for each device or CPU core of a replica,
            but at most one for each layer with weights; or the layer names of each stage, such as
            `[["conv1", "pool1"], ["dense1"]]`.
        micro_batches: micro-batches per batch, at most the batch size. More micro-batches keep the stages busier, but
            add overhead.
    """

    def __init__(self, stages: Stages = "auto", micro_batches: int = 4) -> None:
        self.stages = _stages(stages)
        self.micro_batches = integer("micro_batches", micro_batches, 1)

    @property
    def count(self) -> int | None:
        """Number of stages; None if it depends on the devices or cores."""
        return len(self.stages) if isinstance(self.stages, list) else self.stages

    def max_stages(self, network: Layer) -> int:
        """Return the maximum number of stages with `auto`. Raise ConfigError if the built network cannot be split."""
        chain = _chain(network)
        names, groups = [name for name, _ in chain], chain.together()
        for layer in network.walk():
            if layer.syncs_replicas:
                raise ConfigError(
                    f"layer '{layer.path}' synchronizes replicas in every pass, which pipelines do not support. "
                    "Set sync=false, or train without a pipeline"
                )
        if isinstance(self.stages, list):
            if [name for stage in self.stages for name in stage] != names or [] in self.stages:
                reason = f"must list every layer once, in the order of the network: {', '.join(names)}"
                raise ConfigError(reason, "stages", shown(self.stages))
        elif self.stages is not None and self.stages > len(groups):
            text = " | ".join(" ".join(group) for group in groups)
            reason = f"this network can be split into at most {len(groups)} stages: {text}. Use fewer, or auto"
            raise ConfigError(reason, "stages", str(self.stages))
        layers = dict(chain)
        return max(1, sum(any(layers[name].declared for name in group) for group in groups))

    def partition(self, network: Layer, stages: int) -> list[list[str]]:
        """Split a built network into stages and return the layer names of each. Raise ConfigError if impossible.

        Fused layers stay together, unless stages are listed explicitly.
        """
        self.max_stages(network)
        if isinstance(self.stages, list):
            return [list(names) for names in self.stages]
        chain = _chain(network)
        groups, layers = chain.together(), dict(chain)
        work = [sum(training_work(layers[name]) for name in group) for group in groups]
        sent = [layers[group[-1]].output.features for group in groups]
        ends = balance_stages(work, sent, stages)
        return [
            [name for group in groups[start:end] for name in group]
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def describe(self, layers: Sequence[Sequence[str]]) -> str:
        return f"{' | '.join(' '.join(names) for names in layers)}, {self.micro_batches} micro-batches"

    def speed(
        self,
        layers: list[list[str]],
        batch_size: int,
        compute_s: Sequence[float],
        samples: Sequence[int],
        iteration_s: float,
    ) -> dict[str, Any]:
        """Return the measured speed-up over sequential stages, and its upper bound, as plain numbers.

        `speed_up` is the compute time of a batch, summed over all stages, divided by the time of an iteration. `bound`
        is (total work / work of the slowest stage) · m / (m + s - 1). Unequal stages can exceed the bound slightly,
        because faster stages fill and drain the pipeline sooner.

        Args:
            compute_s, samples: compute time in seconds and number of samples, by rank.
            iteration_s: seconds per iteration with full batches.
        """
        stages, micro_batches = len(layers), min(self.micro_batches, batch_size)
        passes = sum(samples[::stages]) / batch_size * micro_batches
        work_s = [sum(compute_s[stage::stages]) / passes for stage in range(stages)]
        total = sum(work_s)
        return {
            "layers": layers,
            "micro_batches": micro_batches,
            "work_s": work_s,
            "round_s": iteration_s,
            "bound": total / max(work_s) * micro_batches / (micro_batches + stages - 1),
            "speed_up": total * micro_batches / iteration_s,
        }


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[bool]:
    """Yield the passes of stage `stage` (from 0): True for a forward pass, False for a backward pass."""
    ahead = min(stages - 1 - stage, micro_batches)  # forward passes before the first gradient arrives
    for number in range(micro_batches):
        yield True
        if number >= ahead:
            yield False
    for _ in range(ahead):
        yield False


def parts(samples: int, micro_batches: int) -> list[slice]:
    """Split a batch into nonempty micro-batches of nearly equal size."""
    count = min(samples, micro_batches)
    return [slice(samples * i // count, samples * (i + 1) // count) for i in range(count)]


def training_work(layer: Layer) -> int:
    """Return the multiply-adds per sample of a training step: forward pass, weight gradients and input gradients."""
    return sum(sublayer.multiply_adds() * (3 if sublayer.needs_dx else 2) for sublayer in layer.walk())


def balance_stages(work: Sequence[float], sent: Sequence[float], stages: int) -> list[int]:
    """Partition consecutive pieces of `work`, minimizing the largest stage. Return the end index of each stage.

    Ties are broken by the amount of data sent between stages. `sent[i]` is the amount if a stage ends after piece i.
    """
    cumulative = [0.0, *accumulate(work)]

    def fitting(bound: float) -> list[int]:
        """Return the partition with stages of at most `bound` that sends the least data; [] if there is none."""
        cuts: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # pieces so far -> amount sent, ends of stages
        for _ in range(stages):
            cuts = {
                end: min(
                    (traffic + (sent[end - 1] if end < len(work) else 0), [*ends, end])
                    for start, (traffic, ends) in cuts.items()
                    if start < end and cumulative[end] - cumulative[start] <= bound
                )
                for end in range(1, len(work) + 1)
                if any(start < end and cumulative[end] - cumulative[start] <= bound for start in cuts)
            }
        return cuts.get(len(work), (0, []))[1]

    sizes = sorted({after - start for i, start in enumerate(cumulative) for after in cumulative[i + 1 :]})
    return fitting(sizes[bisect_left(sizes, True, key=lambda bound: bool(fitting(bound)))])


def _stages(value: Stages) -> int | list[list[str]] | None:
    """Validate the argument `stages`. Return None for `auto`."""
    if value == "auto":
        return None
    if isinstance(value, str) or not isinstance(value, Sequence):
        return integer("stages", value, 1, ", auto, or a list of layer names for each stage")
    return [[*names] if isinstance(names, Sequence) and not isinstance(names, str) else [names] for names in value]


def _chain(network: Layer) -> Sequential:
    if not isinstance(network, Sequential):
        raise ConfigError(
            f"a pipeline requires a Sequential network, but this network is {one(type(network).__name__)}. Put its "
            "parts into a Sequential, or train without a pipeline"
        )
    return network
