"""The charts of one run: what its history says, as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from cupynet.report.charts import Chart, Line
from cupynet.report.folder import Seen, finite, mapping, numbers

MOST_WORKERS = 4  # that have a line of their own name
MOST_LAYERS = 5  # those that are furthest apart
SECONDS = (
    ("compute_s", "computing", 0),
    ("averaging_s", "averaging", 1),
    ("data_s", "data", 2),
    ("waiting_s", "waiting", 3),
)


def of(seen: Seen) -> list[Chart]:
    """The charts that have something to show."""
    drawn = (_loss(seen), _accuracy(seen), _learning_rate(seen), _divergence(seen), _speed(seen), _time(seen))
    return [chart for chart in drawn if chart.shown]


def column(rows: Sequence[dict[str, Any]], name: str) -> list[float | None]:
    """One value of each row, None where it is no finite number."""
    return [finite(row.get(name)) for row in rows]


def _at(rows: Sequence[dict[str, Any]], name: str = "iteration") -> list[float]:
    """Where rows stand on the horizontal axis."""
    return [math.nan if value is None else value for value in column(rows, name)]


def _loss(seen: Seen) -> Chart:
    reports, epochs = seen.reports, seen.epochs
    lines = [Line("worker 0", _at(reports), column(reports, "loss"), 5, 1.2, faint=True)]
    lines += _workers(epochs)
    lines.append(
        Line("all replicas, since the last average", _at(reports), column(reports, "score_after_averaging"), 0)
    )
    lines.append(Line("training, by epoch", _at(epochs), column(epochs, "loss"), 2, points=True))
    for split, colour in (("validation", 3), ("test", 1)):
        lines.append(Line(split, _at(epochs), column(epochs, f"{split}_loss"), colour, 2.0, points=True))
    return Chart("Loss", "iteration", "loss (nats for softmax)", [line for line in lines if line.y], log=True)


def _workers(epochs: Sequence[dict[str, Any]]) -> list[Line]:
    """The training loss of each worker by epoch; of many, all as one name."""
    losses = [numbers(row.get("losses")) for row in epochs]
    count = max(map(len, losses), default=0)
    if count < 2:
        return []
    return [
        Line(
            None if worker else "each worker, by epoch",
            _at(epochs),
            [found[worker] if worker < len(found) else None for found in losses],
            4,
            1.2,
            dashed=True,
        )
        for worker in range(min(count, 64))
    ]


def _accuracy(seen: Seen) -> Chart:
    epochs = seen.epochs
    lines = [
        Line(split, _at(epochs, "epoch"), column(epochs, f"{split}_accuracy"), colour, 2.0, points=True)
        for split, colour in (("test", 1), ("validation", 3))
    ]
    return Chart("Accuracy", "epoch", "accuracy (%)", lines, percent=True)


def _learning_rate(seen: Seen) -> Chart:
    reports = seen.reports
    rows = reports if len(reports) > 1 else seen.epochs
    return Chart(
        "Learning rate",
        "iteration",
        "learning rate",
        [Line(None, _at(rows), column(rows, "learning_rate"), 0)],
        zero=True,
    )


def _divergence(seen: Seen) -> Chart:
    """How far replicas are apart, in all and where most."""
    reports = [row for row in seen.reports if finite(row.get("divergence")) is not None]
    layers: dict[str, float] = {}
    for row in reports:
        for name, value in mapping(row.get("divergence_by_layer")).items():
            layers[str(name)] = max(layers.get(str(name), 0.0), finite(value) or 0.0)
    most = sorted(layers, key=lambda name: -layers[name])[:MOST_LAYERS]
    order = [name for name in layers if name in most]
    lines = [
        Line(name, _at(reports), column([mapping(row.get("divergence_by_layer")) for row in reports], name), 1 + i, 1.1)
        for i, name in enumerate(order)
    ]
    lines.append(Line("all weights", _at(reports), column(reports, "divergence"), 0, 2.2))
    note = "The largest distance of a replica from the mean, relative to the mean, before an average."
    return Chart("Replica divergence", "iteration", "relative distance", lines, log=True, note=note)


def _speed(seen: Seen) -> Chart:
    reports, epochs = seen.reports, seen.epochs
    rates = [_per_s(row) for row in epochs]
    lines = [
        Line("since the last report", _at(reports), column(reports, "images_per_s"), 5, 1.2, faint=True),
        Line("of the epoch", _at(epochs), rates, 0, 2.0, points=True),
    ]
    return Chart("Throughput", "iteration", "images/s, all replicas", lines, zero=True)


def _per_s(row: dict[str, Any]) -> float | None:
    found = finite(row.get("images_per_s"))
    if found is not None:
        return found
    samples, seconds = finite(row.get("samples")), finite(row.get("train_s"))
    return samples / seconds if samples is not None and seconds else None


def _time(seen: Seen) -> Chart:
    """What an epoch's seconds went to, in the mean over its workers."""
    epochs = [row for row in seen.epochs if finite(row.get("train_s")) and numbers(row.get("compute_s"))]
    lines, whole = [], [finite(row.get("train_s")) or 0.0 for row in epochs]
    rest = list(whole)
    for name, said, colour in SECONDS:
        means = [math.fsum(found) / max(len(found), 1) for found in (numbers(row.get(name)) for row in epochs)]
        rest = [left - mean for left, mean in zip(rest, means, strict=True)]
        if any(mean > 0 for mean in means):
            lines.append(Line(said, _at(epochs, "epoch"), means, colour))
    if lines:
        lines.append(Line("other", _at(epochs, "epoch"), [max(left, 0.0) for left in rest], 4))
    return Chart("Where the time of an epoch goes", "epoch", "seconds", lines, zero=True, stacked=True)
