"""Groups runs that differ only in their seed, and compares the groups."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cupynet.config.sweep_table import shortened
from cupynet.core.checks import one_line
from cupynet.core.terminal import printable
from cupynet.reporting.comparison.runs import ComparedRun

SEED = "seed"
# settings that do not affect results
IDLE = (
    "resume", "trusted_modules", "report_every_iterations",
    *(f"callbacks.{name}" for name in ("history", "progress", "report", "checkpoint")),
)  # fmt: skip
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975)
ABSENT = "-"


class Figure(NamedTuple):
    """The mean of a figure over runs, with the lowest and the highest."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Figure | None:
        """Return None if a run lacks the figure."""
        found = list(values)
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return None
        return cls(math.fsum(known) / len(known), min(known), max(known))


@dataclass
class Group:
    """Finished runs with the same settings, apart from the seed.

    Attributes:
        runs: the runs.
        settings: the settings that differ between groups, as text.
        figures: `accuracy`, `loss`, `images_per_s`, `train_s`, and `time_to` (seconds of training until the target
            accuracy); those that all its runs have.
        speed_up: images/s relative to one worker with otherwise the same settings; None without such a run.
        front: True if no other group is both more accurate and faster to train: the Pareto front.
    """

    runs: list[ComparedRun]
    settings: dict[str, str]
    figures: dict[str, Figure] = field(default_factory=dict)
    speed_up: float | None = None
    front: bool = False

    @property
    def workers(self) -> int:
        return int(self.runs[0].summary["workers"])

    @property
    def name(self) -> str:
        """The settings that differ; without any, the name of the first run."""
        short = shortened(list(self.settings))
        return " ".join(f"{short[key]}={value}" for key, value in self.settings.items()) or self.runs[0].name

    def value(self, name: str) -> float | None:
        """Return a figure: its mean, the speed-up, or `efficiency`, the speed-up per worker."""
        if name in ("speed_up", "efficiency"):
            workers = self.workers if name == "efficiency" else 1
            return None if self.speed_up is None else self.speed_up / workers
        return self.figures[name].mean if name in self.figures else None


@dataclass
class Comparison:
    """All runs side by side.

    Attributes:
        varied: the settings that differ, without the seed.
        groups: of the finished runs.
        others: the runs without a result.
        split: `test` or `validation`: the images whose accuracy is compared.
        target: the accuracy of `time_to`; None if nothing was evaluated.
        shown: folder of a run -> its values of the settings that differ.
    """

    varied: list[str]
    groups: list[Group]
    others: list[ComparedRun]
    split: str
    target: float | None
    shown: dict[str, dict[str, str]] = field(repr=False)

    @property
    def finished(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]


def compared(runs: Sequence[ComparedRun], target: float | None = None) -> Comparison:
    """Compare runs.

    target: an accuracy from 0 to 1; None for the highest of `TARGETS` that half of the runs reached.
    """
    done = [run for run in runs if run.summary and not run.trouble]
    others = [run for run in runs if not run.summary or run.trouble]
    varied = differing(runs)
    validated = bool(done) and all(run.summary["validation_accuracy"] is not None for run in done)
    split = "validation" if validated else "test"
    if target is None:
        target = _usual_target(done, split)
    shown = {str(run.folder): {key: _shown(_value(run, key)) for key in varied} for run in runs}
    gathered: dict[tuple[str, ...], Group] = {}
    for run in done:
        own = shown[str(run.folder)]
        gathered.setdefault(tuple(own.values()), Group([], own)).runs.append(run)
    groups = list(gathered.values())
    for group in groups:
        group.figures = _figures(group.runs, split, target)
    for group in groups:
        group.speed_up = _speed_up(group, groups)
    _mark_front(groups)
    return Comparison(varied, groups, others, split, target, shown)


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the settings in which the runs differ, without the seed.

    If runs chose different files of a configuration group, the group is listed, but not the settings in its files that
    follow from the choice.
    """
    groups = [name for name in dict.fromkeys(name for run in runs for name in run.choices) if _differs(runs, name)]
    every = dict.fromkeys(key for run in runs for key in run.settings)
    keys = [key for key in every if key != SEED and not _is_idle(key) and _differs(runs, key)]
    same_files: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        same_files.setdefault(tuple(run.choices.get(name, "") for name in groups), []).append(run)
    own = [key for key in keys if not groups or any(_differs(some, key) for some in same_files.values())]
    if "workers" in keys and "workers" not in own:
        own.insert(0, "workers")
    return [*groups, *own]


def _is_idle(key: str) -> bool:
    return any(f"{key}.".startswith(f"{idle}.") for idle in IDLE)


def _value(run: ComparedRun, key: str) -> Any:
    return run.choices[key] if key in run.choices else run.settings.get(key, ABSENT)


def _differs(runs: Sequence[ComparedRun], key: str) -> bool:
    return len({json.dumps(_value(run, key), sort_keys=True, default=str) for run in runs}) > 1


def _shown(value: Any) -> str:
    """Format a setting's value as on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        value = json.dumps(value, default=str, separators=(",", ":"))
    return printable(one_line(value))


def _usual_target(runs: Sequence[ComparedRun], split: str) -> float | None:
    best = [max((each.accuracy.get(split, 0.0) for each in run.epochs), default=0.0) for run in runs]
    reached = [target for target in TARGETS if 2 * sum(value >= target for value in best) >= len(best)]
    return reached[-1] if best and reached else None


def _figures(runs: Sequence[ComparedRun], split: str, target: float | None) -> dict[str, Figure]:
    keys = {"accuracy": f"{split}_accuracy", "loss": "test_loss", "images_per_s": "images_per_s", "train_s": "train_s"}
    found = {name: Figure.of(run.summary[key] for run in runs) for name, key in keys.items()}
    if target is not None:
        found["time_to"] = Figure.of(run.time_to(target, split) for run in runs)
    return {name: figure for name, figure in found.items() if figure is not None}


def _speed_up(group: Group, groups: Sequence[Group]) -> float | None:
    """Return the speed-up over one worker with the same settings, except for those of `parallel`."""
    own, settings = group.value("images_per_s"), _apart_from_workers(group)
    single = [
        speed
        for other in groups
        if other.workers == 1 and (speed := other.value("images_per_s")) is not None
        if _apart_from_workers(other) == settings
    ]
    if group.workers == 1 or not single or own is None or min(single) <= 0:
        return None
    return own / (math.fsum(single) / len(single))


def _apart_from_workers(group: Group) -> tuple[Any, ...]:
    run = group.runs[0]
    left_out = ("workers", SEED)
    kept = {
        key: value
        for key, value in run.settings.items()
        if key not in left_out and not key.startswith("parallel.") and not _is_idle(key)
    }
    chosen = {key: value for key, value in run.choices.items() if key not in ("parallel", "experiment")}
    return run.summary["dataset"], run.summary["backend"], json.dumps([kept, chosen], sort_keys=True, default=str)


def judged(groups: Sequence[Group]) -> list[tuple[float, float, Group]]:
    """Return the accuracy and the seconds of training of each group that has both."""
    found = [(group.value("accuracy"), group.value("train_s"), group) for group in groups]
    return [(a, s, group) for a, s, group in found if a is not None and s is not None]


def _mark_front(groups: Sequence[Group]) -> None:
    points = judged(groups)
    for accuracy, seconds, group in points:
        group.front = not any(
            a >= accuracy and s <= seconds and (a > accuracy or s < seconds) for a, s, _ in points
        )  # fmt: skip
