"""Pipelines: a network split into stages, one per worker, through which micro-batches pass.

This file determines the split and the order of each stage's work; training/pipeline_stage.py executes it.

A batch is cut into m micro-batches, so that a stage can work on one while the next stage works on the one before.
Each stage alternates one forward with one backward pass as soon as it can (PipeDream-Flush of Narayanan et al. 2021,
"Memory-efficient pipeline-parallel DNN training"; this schedule is called 1F1B). With s = 3 stages, m = 4 micro-batches
and passes of equal length:

    time      0   1   2   3   4   5   6   7   8   9  10  11
    stage 1  F1  F2  F3   .   .  B1  F4  B2   .  B3   .  B4     holds 3 micro-batches at most
    stage 2   .  F1  F2   .  B1  F3  B2  F4  B3   .  B4   .     2
    stage 3   .   .  F1  B1  F2  B2  F3  B3  F4  B4   .   .     1

Every stage then updates its weights. A round takes as long as m + s - 1 forward and backward passes of a stage; one
worker with the whole network takes m · s of them. Stage r of s (from 0) holds the activations of at most s - r
micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from cupynet.core.checks import integer
from cupynet.core.errors import ConfigError
from cupynet.core.wording import shown
from cupynet.nn import Layer, Sequential

Stages: TypeAlias = "int | str | Sequence[Sequence[str]]"


class Pipeline:
    """Settings of a pipeline, for any network.

    Args:
        stages: the number of stages, balanced by counted multiplications; `auto` for as many as there are devices, or
            cores of a CPU, per replica, but no more than layers with weights; or the names of the layers of each stage,
            `[["conv1", "pool1"], ["dense1"]]`.
        micro_batches: number of micro-batches per batch, at most its examples. More micro-batches keep the stages
            busier; larger ones are computed faster.

    Raises:
        ConfigError: an argument is invalid.
    """

    def __init__(self, stages: Stages = "auto", micro_batches: int = 4) -> None:
        self.stages = _stages(stages)
        self.micro_batches = integer("micro_batches", micro_batches, 1)

    @property
    def count(self) -> int | None:
        """The number of stages; None if it depends on the devices or cores."""
        return len(self.stages) if isinstance(self.stages, list) else self.stages

    def most(self, network: Layer) -> int:
        """Return the most stages of this built network if the number is open. ConfigError if it cannot be cut."""
        chain = _chain(network)
        names, together = [name for name, _ in chain], chain.together()
        for layer in network.walk():
            if layer.syncs_replicas:
                raise ConfigError(
                    f"layer '{layer.path}' exchanges data with the other replicas in every pass, which a pipeline "
                    "cannot do: set sync=false, or train without a pipeline"
                )
        if isinstance(self.stages, list):
            if [name for stage in self.stages for name in stage] != names or [] in self.stages:
                reason = f"name every layer once, in the network's order: {', '.join(names)}"
                raise ConfigError(reason, "stages", shown(self.stages))
        elif self.stages is not None and self.stages > len(together):
            shown_together = " | ".join(" ".join(group) for group in together)
            reason = f"this network has at most {len(together)} ({shown_together}): use fewer, or auto"
            raise ConfigError(reason, "stages", str(self.stages))
        layers = dict(chain)
        return max(1, sum(any(layers[name].declared for name in group) for group in together))

    def cut(self, network: Layer, stages: int) -> list[list[str]]:
        """Return the names of the layers of each of `stages` stages of a built network.

        Fused layers stay together, unless the layers of each stage were given. ConfigError if it cannot be cut.
        """
        self.most(network)
        if isinstance(self.stages, list):
            return [list(names) for names in self.stages]
        chain = _chain(network)
        together, layers = chain.together(), dict(chain)
        work = [sum(training_work(layers[name]) for name in group) for group in together]
        sent = [layers[group[-1]].output.features for group in together]
        ends = balanced(work, sent, stages)
        return [
            [name for group in together[start:end] for name in group]
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def describe(self, layers: Sequence[Sequence[str]]) -> str:
        """Describe the stages with these layers in a few words."""
        return f"{' | '.join(' '.join(names) for names in layers)}, {self.micro_batches} micro-batches"

    def speed(
        self,
        layers: list[list[str]],
        batch_size: int,
        compute_s: Sequence[float],
        samples: Sequence[int],
        round_s: float,
    ) -> dict[str, Any]:
        """Return the measured speed-up over running the stages one after the other, and its bound, for JSON.

        `speed_up` is the work of all stages for a batch divided by the time of a round. `bound` is (total work /
        slowest stage) · m / (m + s - 1). Unequal stages can exceed it slightly, because the pipeline fills and drains
        at the pace of the faster ones.

        Args:
            layers: the names of the layers of each stage.
            batch_size: examples of a whole batch.
            compute_s, samples: seconds of computing and number of samples of each rank, in rank order.
            round_s: seconds of a round with whole batches.
        """
        stages, micro_batches = len(layers), min(self.micro_batches, batch_size)
        passes = sum(samples[::stages]) / batch_size * micro_batches
        work_s = [sum(compute_s[stage::stages]) / passes for stage in range(stages)]
        total = sum(work_s)
        return {
            "layers": layers,
            "micro_batches": micro_batches,
            "work_s": work_s,
            "round_s": round_s,
            "bound": total / max(work_s) * micro_batches / (micro_batches + stages - 1),
            "speed_up": total * micro_batches / round_s,
        }


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[bool]:
    """Yield the passes of stage `stage` (from 0) in order: True for a forward pass, False for a backward pass.

    Both take the micro-batches in order.
    """
    ahead = min(stages - 1 - stage, micro_batches)  # forward passes before the first gradient arrives
    for number in range(micro_batches):
        yield True
        if number >= ahead:
            yield False
    for _ in range(ahead):
        yield False


def parts(samples: int, micro_batches: int) -> list[slice]:
    """Cut a batch of `samples` examples into parts, none empty, whose sizes differ by at most one."""
    count = min(samples, micro_batches)
    return [slice(samples * i // count, samples * (i + 1) // count) for i in range(count)]


def training_work(layer: Layer) -> int:
    """Return the multiply-adds of a training step per example: forward, gradients of the weights and of the input.

    layer: built, in the whole network.
    """
    return sum(each.multiply_adds() * (3 if each.needs_dx else 2) for each in layer.walk())


def balanced(work: Sequence[float], sent: Sequence[float], stages: int) -> list[int]:
    """Cut consecutive pieces into stages so that the largest stage is as small as possible; return the stages' ends.

    The largest stage limits the speed of a pipeline. Among equal splits the one that sends the least data is used, and
    the first of those.

    Args:
        work: of each piece.
        sent: by each piece to the next, if that is in another stage.
        stages: the number of stages, at most that of pieces.
    """
    before = [0.0, *accumulate(work)]

    def fitting(bound: float) -> list[int]:
        """Return the split that sends the least data, with no stage larger than `bound`; [] if there is none."""
        cuts: dict[int, tuple[float, list[int]]] = {0: (0, [])}  # pieces so far -> amount sent, ends of stages
        for _ in range(stages):
            cuts = {
                end: min(
                    (traffic + (sent[end - 1] if end < len(work) else 0), [*ends, end])
                    for start, (traffic, ends) in cuts.items()
                    if start < end and before[end] - before[start] <= bound
                )
                for end in range(1, len(work) + 1)
                if any(start < end and before[end] - before[start] <= bound for start in cuts)
            }
        return cuts.get(len(work), (0, []))[1]

    sizes = sorted({after - start for i, start in enumerate(before) for after in before[i + 1 :]})
    return fitting(sizes[bisect_left(sizes, True, key=lambda bound: bool(fitting(bound)))])


def _stages(given: Stages) -> int | list[list[str]] | None:
    """Check the argument `stages`; return None for `auto`. ConfigError."""
    if given == "auto":
        return None
    if isinstance(given, str) or not isinstance(given, Sequence):
        return integer("stages", given, 1, ", auto, or a list of layer names for each stage")
    return [list(names) if isinstance(names, Sequence) else [names] for names in given]


def _chain(network: Layer) -> Sequential:
    """Return the network if it can be cut. ConfigError."""
    if not isinstance(network, Sequential):
        raise ConfigError(
            f"a pipeline needs a Sequential, and this network is one {type(network).__name__}: name its parts in a "
            "Sequential, or train without a pipeline"
        )
    return network
