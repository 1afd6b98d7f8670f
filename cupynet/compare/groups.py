"""Runs that differ in their seed alone, as one: its figures, and what they are beside those of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupynet.checks import one_line
from cupynet.compare.found import Found
from cupynet.runs import Summary
from cupynet.sweeps.table import shortened

SEED = "seed"
# what does not change what a run comes to
IDLE = (
    "resume", "trusted_modules", "report_every_iterations",
    *(f"callbacks.{name}" for name in ("history", "progress", "report", "checkpoint")),
)  # fmt: skip
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975)
ABSENT = "-"


@dataclass(frozen=True)
class Figure:
    """A mean over runs, with the lowest and the highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """None where a run has none."""
        found = list(values)
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return None
        return cls(math.fsum(known) / len(known), min(known), max(known))


@dataclass
class Group:
    """Runs that were asked for the same, but for the seed.

    Attributes:
        runs: that came to their end.
        settings: what differs between groups: key -> value as it is shown.
        accuracy, loss, images_per_s, train_s: of them.
        time_to: seconds of training until the accuracy that was asked about; None where one never reached it.
        speed_up: images/s over those of one worker with otherwise the same settings; None where there was no such run.
        front: whether no other is both faster trained and more accurate.
    """

    runs: list[Found]
    settings: dict[str, str]
    accuracy: Figure | None = None
    loss: Figure | None = None
    images_per_s: Figure | None = None
    train_s: Figure | None = None
    time_to: Figure | None = None
    speed_up: float | None = None
    front: bool = False

    @property
    def workers(self) -> int:
        return summary_of(self.runs[0]).workers

    @property
    def efficiency(self) -> float | None:
        """The speed-up for each worker."""
        return None if self.speed_up is None else self.speed_up / self.workers

    @property
    def name(self) -> str:
        """What is its own, else where it is."""
        short = shortened(list(self.settings))
        return " ".join(f"{short[key]}={value}" for key, value in self.settings.items()) or self.runs[0].name


@dataclass
class Comparison:
    """All runs beside each other.

    Attributes:
        varied: the settings that differ, the seed left out.
        groups: of those that came to their end; others: those that did not.
        split: `test` or `validation`: what accuracy is meant.
        target: the accuracy that `time_to` is about; None where none was evaluated.
    """

    varied: list[str]
    groups: list[Group]
    others: list[Found]
    split: str
    target: float | None
    shown: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)  # run's name -> its own settings

    @property
    def finished(self) -> list[Found]:
        return [run for group in self.groups for run in group.runs]


def compared(runs: Sequence[Found], target: float | None = None) -> Comparison:
    """The runs as groups with figures. target: an accuracy, 0..1; None for one that half of them reached."""
    done = [run for run in runs if run.summary is not None and not run.trouble]
    others = [run for run in runs if run.summary is None or run.trouble]
    varied = differing(runs)
    validated = bool(done) and all(summary_of(run).validation_accuracy is not None for run in done)
    split = "validation" if validated else "test"
    shown = {str(run.folder): {key: _shown(_value(run, key)) for key in varied} for run in runs}
    gathered: dict[tuple[str, ...], Group] = {}
    for run in done:
        own = shown[str(run.folder)]
        gathered.setdefault(tuple(own.values()), Group([], own)).runs.append(run)
    groups = list(gathered.values())
    if target is None:
        target = _usual_target(done, split)
    for group in groups:
        _measure(group, split, target)
    for group in groups:
        group.speed_up = _speed_up(group, groups)
    _mark_front(groups)
    return Comparison(varied, groups, others, split, target, shown)


def summary_of(run: Found) -> Summary:
    assert run.summary is not None
    return run.summary


def differing(runs: Sequence[Found]) -> list[str]:
    """The settings that not all runs have alike; the seed, which makes runs repetitions, is none of them.

    Where runs took different files of a group, that is the setting, and what follows from it is none more.
    """
    groups = [name for name in dict.fromkeys(name for run in runs for name in run.choices) if _differs(runs, name)]
    keys = [
        key
        for key in dict.fromkeys(key for run in runs for key in run.settings)
        if key != SEED and not any(f"{key}.".startswith(f"{idle}.") for idle in IDLE) and _differs(runs, key)
    ]
    # what runs with the same files have alike follows from the files
    kinds: dict[tuple[str, ...], list[Found]] = {}
    for run in runs:
        kinds.setdefault(tuple(run.choices.get(name, "") for name in groups), []).append(run)
    own = [key for key in keys if not groups or any(_differs(alike, key) for alike in kinds.values())]
    if "workers" in keys and "workers" not in own:
        own.insert(0, "workers")
    return [*groups, *own]


def _value(run: Found, key: str) -> Any:
    return run.choices[key] if key in run.choices else run.settings.get(key, ABSENT)


def _differs(runs: Sequence[Found], key: str) -> bool:
    return len({json.dumps(_value(run, key), sort_keys=True, default=str) for run in runs}) > 1


def _shown(value: Any) -> str:
    """A setting's value as a command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return one_line(json.dumps(value, default=str, separators=(",", ":")))
    return one_line(value)


def accuracy_of(summary: Summary, split: str) -> float | None:
    """Of the test or of the validation images."""
    return summary.validation_accuracy if split == "validation" else summary.test_accuracy


def _usual_target(runs: Sequence[Found], split: str) -> float | None:
    """The highest of some round accuracies that at least half of the runs reached; None where there is none."""
    best = [max((each.accuracy.get(split, 0.0) for each in run.epochs), default=0.0) for run in runs]
    reached = [target for target in TARGETS if 2 * sum(value >= target for value in best) >= len(best)]
    return reached[-1] if best and reached else None


def _measure(group: Group, split: str, target: float | None) -> None:
    found = [summary_of(run) for run in group.runs]
    group.accuracy = Figure.of(accuracy_of(summary, split) for summary in found)
    group.loss = Figure.of(summary.test_loss for summary in found)
    group.images_per_s = Figure.of(summary.images_per_s for summary in found)
    group.train_s = Figure.of(summary.train_s for summary in found)
    if target is not None:
        group.time_to = Figure.of(run.time_to(target, split) for run in group.runs)


def _speed_up(group: Group, groups: Sequence[Group]) -> float | None:
    """Over one worker with the same settings, in which how replicas are kept together is of no account."""
    alike = [
        other.images_per_s.mean
        for other in groups
        if other.workers == 1
        and other.images_per_s is not None
        and _apart_from_workers(other) == _apart_from_workers(group)
    ]
    own = group.images_per_s
    if group.workers == 1 or not alike or own is None or min(alike) <= 0:
        return None
    return own.mean / (math.fsum(alike) / len(alike))


def _apart_from_workers(group: Group) -> tuple[Any, ...]:
    run, found = group.runs[0], summary_of(group.runs[0])
    kept = {
        key: value for key, value in run.settings.items() if key not in ("workers", SEED) and key[:9] != "parallel."
    }
    kept = {key: value for key, value in kept.items() if not any(f"{key}.".startswith(f"{idle}.") for idle in IDLE)}
    chosen = {key: value for key, value in run.choices.items() if key not in ("parallel", "experiment")}
    return found.dataset, found.backend, json.dumps([kept, chosen], sort_keys=True, default=str)


def _mark_front(groups: Sequence[Group]) -> None:
    """The Pareto front: of these nobody is better in both accuracy and time."""
    judged = [(g, g.accuracy.mean, g.train_s.mean) for g in groups if g.accuracy is not None and g.train_s is not None]
    for group, accuracy, seconds in judged:
        group.front = not any(
            a >= accuracy and s <= seconds and (a > accuracy or s < seconds) for _, a, s in judged
        )  # fmt: skip


def ordered(groups: Sequence[Group], key: Callable[[Group], Any], *, falling: bool) -> list[Group]:
    """Groups by a figure or a setting; those that have none come last."""
    known = [group for group in groups if key(group) is not None]
    return [*sorted(known, key=key, reverse=falling), *(group for group in groups if key(group) is None)]
