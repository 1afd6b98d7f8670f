"""Which of the runs to use, in a sentence or two, and what the figures cannot tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cupynet.checks import counted, kept_out, percent
from cupynet.compare.found import Found
from cupynet.compare.groups import Comparison, Figure, Group, summary_of

CLOSE = 0.001  # of accuracy: what is given away for speed


def answer(comparison: Comparison) -> tuple[str, list[str]]:
    """What to use, and what is to be known of it; both from the figures alone."""
    against, doubts = comparable(comparison)
    judged = [group for group in comparison.groups if group.accuracy is not None and group.train_s is not None]
    if not judged:
        return "No run came to its end: there is nothing to choose from.", [*against, *doubts]
    if against:
        return "These runs cannot be compared.", [*against, *doubts]
    if len(judged) == 1:
        return f"There is one result, {_figures(judged[0])}: compare more runs to choose.", doubts
    best = max(judged, key=lambda group: _of(group.accuracy))
    close = [group for group in judged if _of(group.accuracy) >= _of(best.accuracy) - CLOSE - 1e-12]
    chosen = min(close, key=lambda group: _of(group.train_s))
    if chosen is best:
        text = (
            f"Use {chosen.name}: {_figures(chosen)}, the best accuracy, and nothing within 0.1 points of it is faster."
        )
    else:
        text = (
            f"Use {chosen.name}: {_figures(chosen)}, the fastest within 0.1 points of the best accuracy "
            f"({percent(_of(best.accuracy))} in {_seconds(_of(best.train_s))}: {best.name})."
        )
    return text, [*_chance(comparison, chosen, judged), *doubts]


def comparable(comparison: Comparison) -> tuple[list[str], list[str]]:
    """Why these runs cannot be compared, and what makes the comparison doubtful."""
    runs = comparison.finished
    found = [summary_of(run) for run in runs]
    against, doubts = [], []
    data = sorted({each.dataset for each in found})
    if len(data) > 1:
        against.append(f"They were made on different data: {', '.join(data)}.")
    tested = sorted({_tested(run, comparison.split) for run in runs})
    if len(tested) > 1 and len(data) == 1:
        against.append(f"They were judged by different numbers of images: {', '.join(f'{n:,}' for n in tested)}.")
    stand_in = sum(each.fallback for each in found)
    if stand_in:
        doubts.append(f"{_runs(stand_in, len(found))} made on data that stand in for those that could not be had.")
    tried = sum(run.settings.get("fast_dev_run") not in (None, False) for run in runs)
    if tried:
        against.append(f"{_runs(tried, len(found))} made with fast_dev_run, which tries whether a run works at all.")
    epochs = sorted({each.epochs for each in found})
    if len(epochs) > 1 and "epochs" not in comparison.varied:
        doubts.append(f"They trained for different numbers of epochs: {', '.join(map(str, epochs))}.")
    commits = {each.commit for each in found}
    if len(commits) > 1:
        doubts.append(f"They were made with {len(commits)} different versions of the program.")
    machines = {tuple(str(each.environment.get(name)) for name in ("cpu", "cores", "system")) for each in found}
    if len(machines) > 1:
        doubts.append(f"They ran on {len(machines)} different machines, or shares of one: times cannot be compared.")
    crowded = sum(_crowded(run) for run in runs)
    if crowded:
        doubts.append(f"{_runs(crowded, len(found))} made with more workers than cores: their speed says little.")
    if comparison.others:
        count = len(comparison.others)
        doubts.append(
            f"{count} run{'s' * (count > 1)} did not come to the end, and {'are' if count > 1 else 'is'} left out."
        )
    return against, doubts


def _chance(comparison: Comparison, chosen: Group, judged: Sequence[Group]) -> list[str]:
    """What chance may have done to the choice: how many images judged, and how many seeds."""
    said = []
    images = _tested(chosen.runs[0], comparison.split)
    seeds = [len(group.runs) for group in judged]
    if min(seeds) == 1 and images:
        share = _of(chosen.accuracy)
        points = 200 * math.sqrt(
            2 * max(share * (1 - share), 1 / images) / images
        )  # two standard errors of a difference
        rivals = [g for g in judged if g is not chosen and abs(_of(g.accuracy) - share) <= points / 100]
        if rivals:
            said.append(
                f"One seed each is too little to tell it from {len(rivals)} other{'s' * (len(rivals) > 1)}: on "
                f"{counted(images, 'image')}, differences below {points:.2g} points are chance; repeat with seed=1,2,3."
            )
    elif min(seeds) > 1 and chosen.accuracy is not None:
        low = chosen.accuracy.low
        rivals = [
            g for g in judged if g is not chosen and g.accuracy is not None and g.accuracy.high >= low
            and g.accuracy.low <= chosen.accuracy.high
        ]  # fmt: skip
        if rivals:
            said.append(
                f"Over {min(seeds)} seeds its accuracy lies in {percent(low)} to {percent(chosen.accuracy.high)}, "
                f"which overlaps with {len(rivals)} other{'s' * (len(rivals) > 1)}: between these the time decides."
            )
    if comparison.split == "test" and len(judged) > 1:
        trained = min(
            summary_of(run).images // max(summary_of(run).epochs, 1) for group in judged for run in group.runs
        )
        said.append(
            "Accuracy is that of the test images: who chooses by it should hold others out, "
            f"data.validation={kept_out(trained)}."
        )
    return said


def _tested(run: Found, split: str) -> int:
    """How many images a run was judged by; 0 where that is not known."""
    if split == "validation":
        count = run.settings.get("data.validation")
    else:
        count = (summary_of(run).test or {}).get("samples")
    return count if isinstance(count, int) else 0


def _crowded(run: Found) -> bool:
    found = summary_of(run)
    cores = found.environment.get("cores")
    on_cpu = all(str(device) == "cpu" for device in found.devices)
    return on_cpu and isinstance(cores, int) and found.workers * found.stages > cores


def _runs(count: int, of: int) -> str:
    if count == of:
        return "They were" if of > 1 else "It was"
    return f"{count} of {of} runs {'were' if count > 1 else 'was'}"


def _figures(group: Group) -> str:
    return f"{percent(_of(group.accuracy))} in {_seconds(_of(group.train_s))} of training"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:,.0f} s"


def _of(figure: Figure | None) -> float:
    assert figure is not None
    return figure.mean
