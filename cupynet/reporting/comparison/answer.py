"""Recommends one of the runs, and notes the limits of the comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cupynet.core.checks import counted, kept_out, percent
from cupynet.reporting.comparison.groups import Comparison, Group, judged
from cupynet.reporting.comparison.runs import ComparedRun

CLOSE = 0.001  # accuracy that may be traded for speed


def answer(comparison: Comparison) -> tuple[str, list[str]]:
    """Return a recommendation and notes on it."""
    against, doubts = comparable(comparison)
    candidates = judged(comparison.groups)
    if not candidates:
        return "No run has finished: there is nothing to choose from.", [*against, *doubts]
    if against:
        return "These runs cannot be compared.", [*against, *doubts]
    best = max(candidates, key=lambda each: each[0])
    close = [each for each in candidates if each[0] >= best[0] - CLOSE - 1e-12]
    accuracy, seconds, chosen = min(close, key=lambda each: each[1])
    figures = f"{percent(accuracy)} in {_seconds(seconds)} of training"
    if len(candidates) == 1:
        return f"There is one result, {figures}: compare more runs to choose.", doubts
    text = f"Use {chosen.name}: {figures}"
    if chosen is best[2]:
        text += ", the best accuracy, and nothing within 0.1 points of it is faster."
    else:
        other = f"{percent(best[0])} in {_seconds(best[1])}: {best[2].name}"
        text += f", the fastest within 0.1 points of the best accuracy ({other})."
    return text, [*_chance(comparison, chosen, [group for *_, group in candidates]), *doubts]


def comparable(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Return why the runs cannot be compared, and what makes the comparison doubtful."""
    runs = comparison.finished
    against, doubts = [], []
    data = sorted({run.summary["dataset"] for run in runs})
    if len(data) > 1:
        against.append(f"They were trained on different data: {', '.join(data)}.")
    evaluated = sorted({_images(run, comparison.split) for run in runs})
    if len(evaluated) > 1 and len(data) == 1:
        against.append(f"They were evaluated on different numbers of images: {', '.join(f'{n:,}' for n in evaluated)}.")
    if trials := sum(run.settings.get("fast_dev_run") not in (None, False) for run in runs):
        against.append(f"{_some(trials, len(runs))} made with fast_dev_run, which only tries whether a run works.")
    if fallback := sum(run.summary["fallback"] for run in runs):
        doubts.append(f"{_some(fallback, len(runs))} trained on fallback data, as the data asked for were missing.")
    epochs = sorted({run.summary["epochs"] for run in runs})
    if len(epochs) > 1 and "epochs" not in comparison.varied:
        doubts.append(f"They trained for different numbers of epochs: {', '.join(map(str, epochs))}.")
    commits = {run.summary["commit"] for run in runs}
    if len(commits) > 1:
        doubts.append(f"They were made with {len(commits)} different versions of the program.")
    parts = ("cpu", "cores", "system")
    machines = {tuple(str(run.summary["environment"].get(name)) for name in parts) for run in runs}
    if len(machines) > 1:
        doubts.append(f"They ran on {len(machines)} different machines, or shares of one: times cannot be compared.")
    if crowded := sum(map(_is_oversubscribed, runs)):
        doubts.append(f"{_some(crowded, len(runs))} made with more workers than cores: their speed says little.")
    if count := len(comparison.others):
        doubts.append(f"Left out, without a complete result: {counted(count, 'run')}.")
    return against, doubts


def _chance(comparison: Comparison, chosen: Group, candidates: Sequence[Group]) -> list[str]:
    """Return notes on how far the choice may be due to chance, given the numbers of images and seeds."""
    notes = []
    images, seeds = _images(chosen.runs[0], comparison.split), min(len(group.runs) for group in candidates)
    own, others = chosen.figures["accuracy"], [group for group in candidates if group is not chosen]
    share = own.mean
    if seeds == 1 and images:
        deviation = math.sqrt(max(share * (1 - share), 1 / images) / images)
        points = 200 * math.sqrt(2) * deviation  # two standard errors of a difference
        rivals = sum(abs(group.figures["accuracy"].mean - share) <= points / 100 for group in others)
        if rivals:
            notes.append(
                f"One seed each is too little to tell it from {rivals} other{'s' * (rivals > 1)}: on "
                f"{counted(images, 'image')}, differences below {points:.2g} points are chance; repeat with seed=1,2,3."
            )
    elif seeds > 1:
        ranges = [group.figures["accuracy"] for group in others]
        rivals = sum(each.high >= own.low and each.low <= own.high for each in ranges)
        if rivals:
            notes.append(
                f"Over {seeds} seeds its accuracy ranges from {percent(own.low)} to {percent(own.high)}, which "
                f"overlaps with {rivals} other{'s' * (rivals > 1)}: between these the training time decides."
            )
    if comparison.split == "test" and others:
        runs = [run for group in candidates for run in group.runs]
        trained = min(run.summary["images"] // max(run.summary["epochs"], 1) for run in runs)
        notes.append(
            "This is the accuracy on the test images: to choose by it, hold out other images, "
            f"data.validation={kept_out(trained)}."
        )
    return notes


def _images(run: ComparedRun, split: str) -> int:
    """Return the number of images that a run was evaluated on; 0 if it is not known."""
    count = run.settings.get("data.validation") if split == "validation" else run.test_images
    return count if isinstance(count, int) else 0


def _is_oversubscribed(run: ComparedRun) -> bool:
    cores, on_cpu = run.summary["environment"].get("cores"), all(name == "cpu" for name in run.summary["devices"])
    return on_cpu and isinstance(cores, int) and run.summary["workers"] * run.summary["stages"] > cores


def _some(count: int, of: int) -> str:
    if count == of:
        return "They were" if of > 1 else "It was"
    return f"{count} of {of} runs {'were' if count > 1 else 'was'}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"
