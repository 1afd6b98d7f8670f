"""Groups runs that differ only in the seed and in settings without effect, and compares the groups."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupynet.config import GROUPS
from cupynet.config.equal_settings import SYNCHRONIZER
from cupynet.core.table import ABSENT, shortened
from cupynet.core.terminal import printable
from cupynet.core.wording import one_line
from cupynet.reporting.comparison.runs import ComparedRun

# prefixes of settings that do not affect results, and the seed
IDLE = (
    "seed", "resume", "trusted_modules", "log_every", "metrics",
    *(f"callbacks.{name}" for name in ("history", "progress", "report", "checkpoint")),
)  # fmt: skip
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975)


@dataclass
class Group:
    """Finished runs with equivalent settings apart from the seed, or a single run without a result.

    Attributes:
        settings: the settings that differ between groups, as text; `ABSENT` if one has no effect in this group.
        figures: means over the runs of `accuracy`, `loss`, `images_per_s`, `train_s` and `time_to`, the seconds of
            training until the target accuracy. `accuracy_range` (text) if there are several runs. `speed_up`, the
            throughput relative to a group with one worker, and `efficiency`, the speed-up per worker. Unknown ones are
            omitted.
        front: True if the group is on the Pareto front: no other is both more accurate and faster to train.
    """

    runs: list[ComparedRun]
    settings: dict[str, str]
    figures: dict[str, Any]
    front: bool = False

    @property
    def workers(self) -> int:
        return int(self.runs[0].summary["workers"])

    @property
    def name(self) -> str:
        """The settings that differ and have an effect in this group, or else the name of the first run."""
        short, known = shortened(list(self.settings)), self.settings.items()
        return " ".join(f"{short[key]}={value}" for key, value in known if value != ABSENT) or self.runs[0].name


@dataclass
class Comparison:
    """Comparison of all runs.

    Attributes:
        varied: settings that differ, without the seed.
        others: runs without a result.
        split: data set of the compared accuracy, `test` or `validation`.
        target: accuracy of `time_to`; None if nothing was evaluated.
    """

    varied: list[str]
    groups: list[Group]
    others: list[Group]
    split: str
    target: float | None

    @property
    def finished(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def judged(self) -> list[Group]:
        """Groups with an accuracy."""
        return [group for group in self.groups if "accuracy" in group.figures]


def compared(runs: Sequence[ComparedRun], target: float | None = None) -> Comparison:
    """Compare runs.

    target: accuracy from 0 to 1; None for the highest of `TARGETS` that half of the runs reached.
    """
    done, varied = [run for run in runs if not run.trouble], differing(runs)
    validated = bool(done) and all(run.summary["validation_accuracy"] is not None for run in done)
    comparison = Comparison(varied, [], [], "validation" if validated else "test", target)
    if target is None:
        best = [max((each.accuracy[comparison.split] or 0.0 for each in run.epochs), default=0.0) for run in done]
        reached = [each for each in TARGETS if 2 * sum(value >= each for value in best) >= len(best) > 0]
        comparison.target = max(reached, default=None)
    gathered: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        settings = {key: _text(run, key) for key in varied}
        if run.trouble:
            comparison.others.append(Group([run], settings, {}))
        else:
            same = (*settings.values(), SYNCHRONIZER in run.unused)  # custom synchronizers may affect a single worker
            gathered.setdefault(same, Group([], settings, {})).runs.append(run)
    comparison.groups = list(gathered.values())
    for group in comparison.groups:
        group.figures = _figures(group.runs, comparison)
    _add_speed_up(comparison.groups)
    _mark_front(comparison.judged)
    return comparison


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ between runs, without the seed.

    If runs chose different files of a configuration group, the result contains the group, but not settings that follow
    from this choice. The same applies to classes and the arguments that only one of them has. Of several settings with
    the same values in all runs, only the first is returned.
    """
    names = dict.fromkeys(name for run in runs for name in run.choices)
    groups = [name for name in names if _differs(runs, name) and _differ_below(runs, name)]
    same_files: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        same_files.setdefault(tuple(run.choices.get(name, "") for name in groups), []).append(run)
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.settings) if not key.startswith(IDLE)]
    own = [key for key in keys if any(_differs(some, key) for some in same_files.values())]
    own = [key for key in own if not _follows(runs, key, own)]
    if "workers" not in own and _differs(runs, "workers"):
        own.insert(0, "workers")
    by_values: dict[tuple[str, ...], str] = {}
    for key in (*groups, *own):
        by_values.setdefault(tuple(_text(run, key) for run in runs), key)
    return list(by_values.values())


def _differs(runs: Sequence[ComparedRun], key: str) -> bool:
    return len({_text(run, key) for run in runs if not run.lacks(key)}) > 1


def _follows(runs: Sequence[ComparedRun], key: str, own: Sequence[str]) -> bool:
    """Return True for an argument that only some classes have, with the same value in all runs that use them."""
    known, part = [run for run in runs if key in run.settings], key.rpartition(".")[0]
    return f"{part}._target_" in own and len(known) < len(runs) and not _differs(known, key)


def _differ_below(runs: Sequence[ComparedRun], group: str) -> bool:
    """Return True if settings of a group differ, not only its chosen files. `experiment` has no own settings."""
    if group == "experiment" or group not in GROUPS:
        return True
    keys = {key for run in runs for key in run.settings if key.split(".")[0] == group and not key.startswith(IDLE)}
    return any(_differs(runs, key) for key in keys)


def _text(run: ComparedRun, key: str) -> str:
    """Return a setting, or the chosen file of a group, as on the command line."""
    value: Any = run.choices[key] if key in run.choices else run.settings.get(key, ABSENT)
    if not isinstance(value, str):
        value = json.dumps(value, default=str, sort_keys=True, separators=(",", ":"))
    return printable(one_line(value))


def _figures(runs: Sequence[ComparedRun], comparison: Comparison) -> dict[str, Any]:
    split, target = comparison.split, comparison.target
    keys = {"accuracy": f"{split}_accuracy", "loss": "test_loss", "images_per_s": "images_per_s", "train_s": "train_s"}
    found = {name: [run.summary[key] for run in runs] for name, key in keys.items()}
    if target is not None:
        found["time_to"] = [run.time_to(target, split) for run in runs]
    figures: dict[str, Any] = {name: sum(each) / len(each) for name, each in found.items() if None not in each}
    if len(runs) > 1 and "accuracy" in figures:
        figures["accuracy_range"] = f"{100 * min(found['accuracy']):.2f}-{100 * max(found['accuracy']):.2f}"
    return figures


def _add_speed_up(groups: Sequence[Group]) -> None:
    """Add the speed-up over one worker with the same settings, apart from `parallel` settings."""

    def others(group: Group) -> dict[str, str]:
        return {key: value for key, value in group.settings.items() if not key.startswith(("workers", "parallel"))}

    for group in groups:
        single = [
            each.figures["images_per_s"] for each in groups if each.workers == 1 and others(each) == others(group)
        ]
        if group.workers > 1 and sum(single) > 0:
            group.figures["speed_up"] = group.figures["images_per_s"] * len(single) / sum(single)
            group.figures["efficiency"] = group.figures["speed_up"] / group.workers


def _mark_front(groups: Sequence[Group]) -> None:
    points = [(group.figures["accuracy"], group.figures["train_s"]) for group in groups]
    for group, own in zip(groups, points, strict=True):
        group.front = not any(each != own and each[0] >= own[0] and each[1] <= own[1] for each in points)
