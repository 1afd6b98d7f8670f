"""Recommendation of one of the compared runs, with caveats."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cupynet.core.checks import finite
from cupynet.core.wording import listed, percent
from cupynet.reporting.comparison.groups import Comparison, Group
from cupynet.reporting.comparison.runs import ComparedRun
from cupynet.reporting.comparison.table import seconds

CLOSE = 0.001  # accuracy that may be traded for speed
NOISE = 0.05  # smaller relative differences of training time are considered noise
FILES = ("data.file", "data.folder", "data.test_images", "data.test_labels")  # settings that name test images
MAX_EQUALS = 3  # maximum number of equally good groups to name


class Answer(NamedTuple):
    """Recommendation and caveats, and the recommended group if there is one."""

    text: str
    notes: list[str]
    chosen: Group | None = None


def answer(comparison: Comparison) -> Answer:
    """Recommend the most accurate of the fastest groups whose accuracy is close to the best."""
    candidates = comparison.judged
    if not candidates:
        return Answer("No run has finished, so there is nothing to compare.", [])
    runs = [run for group in candidates for run in group.runs]
    data = sorted({_data(run, comparison.split) for run in runs})
    if len(data) > 1:
        return Answer("These runs cannot be compared.", [f"They were evaluated on different data: {', '.join(data)}."])
    best = max(candidates, key=lambda group: group.figures["accuracy"])
    minimum = best.figures["accuracy"] - CLOSE - 1e-12
    accurate = [group for group in candidates if group.figures["accuracy"] >= minimum]
    fastest = min(accurate, key=lambda group: group.figures["train_s"])
    equal = [group for group in accurate if group.figures["train_s"] <= (1 + NOISE) * fastest.figures["train_s"]]
    chosen = max(equal, key=lambda group: (group.figures["accuracy"], -group.figures["train_s"]))
    compromise = f"among the fastest within 0.1 percentage points of the best accuracy ({_result(best)}: {best.name})"
    reason = "the best accuracy" if chosen is best else compromise
    text = f"Use {chosen.command}: {_result(chosen)} of training, {reason}."
    if len(candidates) == 1:
        text = f"There is only one result: {_result(chosen)} of training. Compare more runs to get a recommendation."
    notes = _notes(comparison, chosen)
    others = [group.name for group in equal if group is not chosen]
    if others:
        ellipsis = ", ..." * (len(others) > MAX_EQUALS)
        notes.insert(0, f"Equally good within measurement noise: {', '.join(others[:MAX_EQUALS])}{ellipsis}.")
    return Answer(text, notes, chosen)


def _result(group: Group) -> str:
    return f"{percent(group.figures['accuracy'])} in {seconds(group.figures['train_s'])}"


def _notes(comparison: Comparison, chosen: Group) -> list[str]:
    runs, notes, share = comparison.finished, [], chosen.figures["accuracy"]
    images = _images(chosen.runs[0], comparison.split)
    if len(comparison.judged) > 1:
        if len({run.summary["seed"] for run in chosen.runs}) == 1 and images > 0:
            error = math.sqrt(max(share * (1 - share), 1 / images) / images)  # standard error of the accuracy
            points = 100 * 2 * math.sqrt(2) * error  # two standard errors of a difference
            notes.append(
                f"On {images:,.0f} images, differences below {points:.2g} points may be due to chance. "
                "Repeat with seed=1,2,3."
            )
        if comparison.split == "test":
            notes.append(
                "These are test accuracies. To choose settings, hold out validation images with data.validation."
            )
    own = [run.settings for run in runs if "data.timeout_s" not in run.unused]  # downloads are verified
    if read := [key for key in FILES if len({str(settings.get(key)) for settings in own}) > 1]:
        notes.insert(0, f"The runs differ in {listed(read, 'and')}. Compare them only if their test images are equal.")
    if any(run.summary["fallback"] for run in runs):
        notes.append("Some runs used fallback data, because the requested data were missing.")
    if len({_origin(run) for run in runs}) > 1:
        notes.append("The runs used different machines or versions of cupynet.")
    return notes


def _data(run: ComparedRun, split: str) -> str:
    """Describe the evaluated images of a run. The seed selects validation images, and generates synthetic ones."""
    data = f"{run.summary['dataset']} ({_images(run, split):,.0f} images)"
    seeded = run.summary["dataset"] == "synthetic" or (split == "validation" and run.settings.get("data.validation"))
    return f"{data} with data.seed={run.settings.get('data.seed')}" if seeded else data


def _images(run: ComparedRun, split: str) -> float:
    """Return the number of images in the evaluation of a run, or 0 if it is unknown."""
    test: dict[str, Any] = run.summary["test"] or {}
    if split == "validation":  # earlier versions store only the setting
        return finite(run.summary.get("validation_samples") or run.settings.get("data.validation")) or 0
    return finite(test.get("samples")) or 0


def _origin(run: ComparedRun) -> str:
    environment = run.summary["environment"]
    return str([run.summary["commit"], *(environment.get(name) for name in ("cpu", "cores", "system"))])
