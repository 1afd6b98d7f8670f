"""Groups of runs that differ only in the seed or in settings without effect, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupynet.config import GROUPS
from cupynet.core.table import shortened
from cupynet.core.terminal import printable
from cupynet.core.wording import one_line
from cupynet.reporting.comparison.runs import ComparedRun

# prefixes of settings that are not compared
IGNORED = (
    "seed", "resume", "trusted_modules", "log_every", "metrics",
    *(f"callbacks.{name}" for name in ("history", "progress", "report", "checkpoint")),
)  # fmt: skip
TARGETS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975)


@dataclass
class Group:
    """Finished runs with equivalent settings except for the seed, or a single run without a result.

    Attributes:
        settings: values, as text, of the settings that differ between groups; None if a setting has no effect here.
        figures: known results. `accuracy`, `loss`, `images_per_s`, `train_s`, `time_to`, the seconds of training
            needed for the target accuracy, and `drift`, the last measured one of several replicas, are means over the
            runs. `accuracy_min` and `accuracy_max` exist if there are several runs. `speed_up` is the throughput
            relative to groups with one worker, and `efficiency` is the speed-up per worker.
        front: True if the group is on the Pareto front of accuracy and training time.
    """

    runs: list[ComparedRun]
    settings: dict[str, str | None]
    figures: dict[str, Any]
    front: bool = False

    @property
    def workers(self) -> int:
        return int(self.runs[0].summary["workers"])

    @property
    def name(self) -> str:
        """The differing settings that have an effect, or the name of the first run if there are none."""
        return self._named(shortened(list(self.settings)))

    @property
    def command(self) -> str:
        """Like `name`, with the full names of settings, as on a command line."""
        return self._named({key: key for key in self.settings})

    def _named(self, names: Mapping[str, str]) -> str:
        own = self.settings.items()
        return " ".join(f"{names[key]}={value}" for key, value in own if value is not None) or self.runs[0].name


@dataclass
class Comparison:
    varied: list[str]  # settings that differ, excluding the seed
    groups: list[Group]
    others: list[Group]  # runs without a result, one per group
    split: str  # evaluated data, `test` or `validation`
    target: float | None  # target accuracy of `time_to`; None if too few runs reached even the lowest of `TARGETS`

    @property
    def finished(self) -> list[ComparedRun]:
        return [run for group in self.groups for run in group.runs]

    @property
    def judged(self) -> list[Group]:
        """Groups with an accuracy."""
        return [group for group in self.groups if "accuracy" in group.figures]


def compared(runs: Sequence[ComparedRun], target: float | None = None) -> Comparison:
    """Compare runs. The default target is the highest of `TARGETS` that at least half of the finished runs reached."""
    finished, varied = [run for run in runs if not run.trouble], differing(runs)
    validated = bool(finished) and all(run.summary["validation_accuracy"] is not None for run in finished)
    comparison = Comparison(varied, [], [], "validation" if validated else "test", target)
    if target is None:
        best = [max((epoch.accuracy[comparison.split] or 0.0 for epoch in run.epochs), default=0.0) for run in finished]
        targets_reached = [each for each in TARGETS if 2 * sum(value >= each for value in best) >= len(best) > 0]
        comparison.target = max(targets_reached, default=None)
    gathered: dict[tuple[Any, ...], Group] = {}
    for run in runs:
        settings = {key: _text(run, key) for key in varied}
        if run.trouble:
            comparison.others.append(Group([run], settings, {}))
        else:
            same = (*settings.values(), run.alone)  # custom synchronizers may affect a single worker
            gathered.setdefault(same, Group([], settings, {})).runs.append(run)
    comparison.groups = list(gathered.values())
    for group in comparison.groups:
        group.figures = _figures(group.runs, comparison)
    _add_speed_up(comparison.groups)
    _mark_front(comparison.judged)
    return comparison


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the settings that differ between runs, excluding the seed.

    These include all differing settings that were given on the command line of some runs but not of others. From the
    rest, those that follow from others are omitted:

    If runs use different files of a configuration group, the group is returned, but not the settings that follow from
    this choice: the settings of the group or, for `experiment`, any setting. Likewise, if classes differ, the setting
    that names the class is returned, but not arguments that only one class has. A part that only some runs have is
    returned by its class. If a setting always has the same value as a group, or as a setting of the object that
    contains its own object (to which it probably refers), it is not returned.
    """
    names = dict.fromkeys(name for run in runs for name in run.choices)
    groups = [name for name in names if _given(runs, name) or (_differs(runs, name) and _differ_below(runs, name))]
    keys = [key for key in dict.fromkeys(key for run in runs for key in run.settings) if not key.startswith(IGNORED)]
    varying = [key for key in keys if any(_differs(same_files, key) for same_files in _by_files(runs, key, groups))]
    given = {key for key in keys if _given(runs, key)}
    varying = [key for key in keys if key in given or (key in varying and not _follows(runs, key, varying))]
    if "workers" not in varying and _differs(runs, "workers"):
        varying.insert(0, "workers")
    found: dict[str, list[str | None]] = {}
    for key in (*groups, *varying):
        values = [_text(run, key) for run in runs]
        equal = [other for other, known in found.items() if known == values]
        if key in given or not any(other in groups or _contains(other, key) for other in equal):
            found[key] = values
    return [*found]


def _given(runs: Sequence[ComparedRun], key: str) -> bool:
    """Return True if a setting or group was given on the command line of some runs, and differs in others."""
    known = [run for run in runs if not run.trouble or key in run.settings or key in run.choices]
    typed = {run.typed.get(key) for run in known}
    return len(typed) > 1 and len({_text(run, key) for run in known}) > 1


def _by_files(runs: Sequence[ComparedRun], key: str, groups: Sequence[str]) -> Iterable[Sequence[ComparedRun]]:
    """Split runs by the files of those `groups` that may set `key`."""
    above = [name for name in groups if name in ("experiment", key.split(".")[0])]
    same_files: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run in runs:
        same_files.setdefault(tuple(run.choices.get(name, "") for name in above), []).append(run)
    return same_files.values()


def _contains(setting: str, key: str) -> bool:
    """Return True if the object of a setting also contains the object of `key`: a.b contains a.c.d."""
    above = setting.rpartition(".")[0]
    return bool(above) and key.startswith(f"{above}.") and key.count(".") > setting.count(".")


def _differs(runs: Sequence[ComparedRun], key: str) -> bool:
    return len({_text(run, key) for run in runs if not run.lacks(key)}) > 1


def _follows(runs: Sequence[ComparedRun], key: str, varying: Sequence[str]) -> bool:
    """Return True for a setting that some runs lack, if its value follows from a varying class that contains it."""
    parts, texts = key.split("."), [_text(run, key) for run in runs]
    classes = {".".join((*parts[:count], "_target_")) for count in range(1, len(parts))} - {key}
    chosen = [[_text(run, name) for run in runs] for name in varying if name in classes]
    missing = any(key not in run.settings for run in runs)
    # the class determines the value: there are no more pairs than classes
    return missing and any(len({*zip(names, texts, strict=True)}) == len({*names}) for names in chosen)


def _differ_below(runs: Sequence[ComparedRun], group: str) -> bool:
    """Return True if the settings of a group differ, not only its files, or if there are none."""
    if group == "experiment" or group not in GROUPS:
        return True
    keys = {key for run in runs for key in run.settings if key.split(".")[0] == group and not key.startswith(IGNORED)}
    return any(_differs(runs, key) for key in keys)


def _text(run: ComparedRun, key: str) -> str | None:
    """Return the value of a setting, or the chosen file of a group, as text for the command line; None if unknown."""
    if key not in run.choices and key not in run.settings:
        return None
    value: Any = run.choices[key] if key in run.choices else run.settings[key]
    if not isinstance(value, str):
        value = json.dumps(value, default=str, sort_keys=True, separators=(",", ":"))
    return printable(one_line(value))


def _figures(runs: Sequence[ComparedRun], comparison: Comparison) -> dict[str, Any]:
    split, target = comparison.split, comparison.target
    keys = {"accuracy": f"{split}_accuracy", "loss": "test_loss", "images_per_s": "images_per_s", "train_s": "train_s"}
    if runs[0].summary["workers"] > 1:
        keys["drift"] = "drift"
    values = {name: [run.summary[key] for run in runs] for name, key in keys.items()}
    if target is not None:
        values["time_to"] = [run.time_to(target, split) for run in runs]
    figures: dict[str, Any] = {name: sum(column) / len(column) for name, column in values.items() if None not in column}
    if len(runs) > 1 and "accuracy" in figures:
        figures |= {"accuracy_min": min(values["accuracy"]), "accuracy_max": max(values["accuracy"])}
    return figures


def _add_speed_up(groups: Sequence[Group]) -> None:
    """Add the speed-up over one worker with the same settings; only settings in `parallel` may differ."""

    def others(group: Group) -> dict[str, str | None]:
        return {key: value for key, value in group.settings.items() if not key.startswith(("workers", "parallel"))}

    for group in groups:
        single = [
            other.figures["images_per_s"] for other in groups if other.workers == 1 and others(other) == others(group)
        ]
        if group.workers > 1 and sum(single) > 0:
            group.figures["speed_up"] = group.figures["images_per_s"] * len(single) / sum(single)
            group.figures["efficiency"] = group.figures["speed_up"] / group.workers


def _mark_front(groups: Sequence[Group]) -> None:
    points = [(group.figures["accuracy"], group.figures["train_s"]) for group in groups]
    for group, point in zip(groups, points, strict=True):
        group.front = not any(other != point and other[0] >= point[0] and other[1] <= point[1] for other in points)
