"""The page of one run: what its folder shows, from the result down to the files. (Long: a section after the other.)"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupynet import __version__
from cupynet.checks import amount, percent
from cupynet.report import about, pictures
from cupynet.report.curves import SECONDS
from cupynet.report.folder import Seen, finite, mapping, numbers
from cupynet.report.page import (
    Entry,
    Markup,
    bars,
    chart,
    charts,
    document,
    element,
    facts,
    header,
    join,
    mark,
    section,
    table,
    tiles,
)

REFRESH_S = 5  # of a page whose run goes on
MOST_CLASSES = 200  # rows of the table of classes
MISTAKES = "The guess, the score it was made with, and what the image is."


def page(seen: Seen, drawn: Sequence[tuple[Any, Markup]], missing: str = "") -> str:
    """The page. drawn: its charts, each with its SVG; missing: why there are none."""
    said = element("p", missing, class_="notice") if missing and not drawn else ""
    figures = charts(chart(each.title, svg, each.legend(), each.note) for each, svg in drawn)
    body = (
        _head(seen),
        _tiles(seen),
        section("Curves", join([said, figures]), anchor="curves"),
        section("Evaluation", _evaluation(seen), note=_evaluated(seen), anchor="evaluation"),
        section("Most confident mistakes", _mistakes(seen), note=MISTAKES, anchor="mistakes"),
        section("Time", _time(seen), note="Where each worker's time in rounds went.", anchor="time"),
        section("Network", about.network(seen), anchor="network"),
        section("Settings", about.settings(seen), anchor="settings"),
        section("Machine", about.machine(seen), anchor="machine"),
        section("Files", about.files(seen), anchor="files"),
        element("footer", f"Made by cupynet {__version__} at {time.strftime('%Y-%m-%d %H:%M:%S')} from {seen.run}."),
    )
    return document(_title(seen), *body, refresh_s=REFRESH_S if seen.running else None)


# what became of it ------------------------------------------------------------------------------------------------


def state(seen: Seen) -> tuple[str, str, str]:
    """What became of a run: a word, the kind of mark it gets, and a sentence (or nothing)."""
    done, whole = _epochs(seen), _asked(seen)
    of = f"{done} of {whole} epochs" if whole is not None else f"{done} epoch{'s' * (done != 1)}"
    stopped = seen.text("stopped_by") or ""
    if seen.running:
        return "running", "live", f"{of} complete. This page reads itself again every {REFRESH_S} seconds."
    if not seen.summary:
        if seen.errors:
            diverged = "not finite" in seen.errors[-1] or "diverged" in seen.errors[-1]
            return ("diverged" if diverged else "failed"), "bad", seen.errors[-1].partition(": ")[2]
        left = "; its last checkpoint can be gone on with" if seen.checkpoints else ""
        return "killed", "bad", f"The run ended without a result, after {of}{left}."
    if _last_iteration(seen) > (seen.number("iterations") or math.inf):
        return "killed", "bad", "The run was gone on with, and killed: the results are those from before."
    reason = seen.text("stop_reason")
    if reason == "diverged":
        return "diverged", "bad", f"{stopped}: these are the best weights before."
    if reason == "early":
        return "stopped early", "good", f"After {of}: {stopped}."
    if reason is not None or stopped:
        return "stopped", "warn", f"After {of}: {stopped}."
    return "finished", "good", ""


def _last_iteration(seen: Seen) -> float:
    rows = [*seen.reports[-1:], *seen.epochs[-1:]]
    return max((finite(row.get("iteration")) or 0.0 for row in rows), default=0.0)


def _epochs(seen: Seen) -> int:
    """Complete epochs."""
    last = finite(seen.epochs[-1].get("epoch")) if seen.epochs else None
    return int(last if last is not None else finite(seen.summary.get("epochs")) or 0)


def _asked(seen: Seen) -> int | None:
    """How many epochs were asked for."""
    asked = finite(seen.start.get("epochs"))
    return None if asked is None else int(asked)


def _accuracy(seen: Seen) -> tuple[str, float] | None:
    """The split and the accuracy that tell how good it is: of the summary, else of the last epoch that has one."""
    for split in ("test", "validation"):
        found = finite(seen.summary.get(f"{split}_accuracy")) if not seen.running else None
        if found is not None:
            return split, found
    for row in reversed(seen.epochs):
        for split in ("test", "validation"):
            found = finite(row.get(f"{split}_accuracy"))
            if found is not None:
                return split, found
    return None


def _dataset(seen: Seen) -> str:
    return seen.text("dataset") or "a run"


def _title(seen: Seen) -> str:
    found, word = _accuracy(seen), state(seen)[0]
    if seen.running:
        whole = _asked(seen)
        now = _epochs(seen) + 1
        return f"{_dataset(seen)}: epoch {now if whole is None else min(now, whole)}{f'/{whole}' if whole else ''}"
    return (
        f"{_dataset(seen)}: {word}" if found is None else f"{_dataset(seen)}: {percent(found[1])} {found[0]} accuracy"
    )


def _head(seen: Seen) -> Markup:
    word, kind, sentence = state(seen)
    marks = [mark(word, kind)]
    if seen.summary.get("fallback", seen.start.get("fallback")) is True:
        marks.append(mark(f"fallback data: {_dataset(seen)}, not what was asked for", "bad"))
    marks += [mark(text) for text in (seen.text("backend"), seen.text("dtype")) if text]
    workers = seen.number("workers")
    if workers is not None:
        marks.append(mark(f"{workers:.0f} worker{'s' * (workers != 1)}"))
    commit = seen.text("commit")
    if commit:
        dirty = commit.endswith("-dirty")
        marks.append(mark(f"commit {commit.partition('-')[0][:10]}"))
        marks += [mark("uncommitted changes", "warn")] if dirty else []
    started = seen.text("started")
    over = f"cupynet · {'/'.join(seen.run.folder.resolve().parts[-2:])}{f' · started {started}' if started else ''}"
    notices = [element("p", sentence, class_=f"notice {kind}")] if sentence else []
    if seen.running:
        whole = _asked(seen)
        done = _progress(seen)
        if whole and done is not None:
            notices.append(element("progress", max=f"{whole}", value=f"{min(done, whole):.3f}", aria_label="progress"))
        notices.append(element("p", f"Refreshed at {time.strftime('%H:%M:%S')}.", class_="said"))
    notices += [element("p", f"cannot be read: {text}", class_="notice warn") for text in seen.damaged]
    return join([header(_title(seen), marks=marks, over=over), *notices])


def _progress(seen: Seen) -> float | None:
    """Epochs so far, with the part of the one that goes on."""
    done, last = _epochs(seen), _last_iteration(seen)
    at = finite(seen.epochs[-1].get("iteration")) if seen.epochs else None
    if not done or not at:
        return float(done)
    return done + max(min((last - at) / (at / done), 1.0), 0.0)


# figures ----------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Seconds as people say them: 45.2 s, 12 min 5 s, 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def clock(seconds: float) -> str:
    """Seconds in few characters: 45.2 s, 12:05 min, 3:20 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60:,}:{minutes % 60:02} h"


def _tiles(seen: Seen) -> Markup:
    """The figures at the top. (Over 40 lines: one after the other.)"""
    rows: list[tuple[str, str, str]] = []
    found, last = _accuracy(seen), (seen.epochs or [{}])[-1]
    test = mapping(seen.summary.get("test"))
    if found is not None:
        split, accuracy = found
        more = []
        if not seen.running and finite(test.get("f1")) is not None:
            more.append(f"macro F1 {finite(test.get('f1')):.4f}")
        validation = finite(seen.summary.get("validation_accuracy"))
        if not seen.running and validation is not None and split == "test":
            more.append(f"validation {percent(validation)}")
        rows.append((f"{split} accuracy", percent(accuracy), ", ".join(more)))
        ended = None if seen.running else finite(seen.summary.get(f"{split}_loss"))  # of the weights that were kept
        loss = finite(last.get(f"{split}_loss")) if ended is None else ended
        trained = finite(last.get("loss"))
        if loss is not None:
            rows.append((f"{split} loss", f"{loss:.4g}", "" if trained is None else f"training {trained:.4g}"))
    elif seen.reports:
        loss = finite(seen.reports[-1].get("loss"))
        rows.append(("training loss", "–" if loss is None else f"{loss:.4g}", "worker 0, last report"))
    speed = seen.number("images_per_s")
    if speed is None and seen.reports:
        speed = finite(seen.reports[-1].get("images_per_s"))
    if speed is not None:
        workers = seen.number("workers")
        each = f"{speed / workers:,.0f} per worker" if workers and workers > 1 else "images per second"
        rows.append(("training speed", f"{speed:,.0f}/s", each))
    wall, train = seen.number("wall_s"), seen.number("train_s")
    if wall is not None and not seen.running:
        rows.append(("time", clock(wall), "" if train is None else f"{clock(train)} of it training"))
    done = _epochs(seen)
    iterations = _last_iteration(seen) or seen.number("iterations") or 0
    rows.append(("epochs", f"{done}{f' of {_asked(seen)}' if _asked(seen) else ''}", f"{iterations:,.0f} iterations"))
    parameters = seen.number("parameters")
    if parameters is not None:
        layers = [row for row in about.layers(seen) if row.get("kind")]
        rows.append(("parameters", _thousands(parameters), f"{len(layers)} layers" if layers else ""))
    return tiles(rows)


def _thousands(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _time(seen: Seen) -> Markup:
    """Each worker's shares, and how a run's whole time was spent."""
    spent = mapping(seen.summary.get("spent"))
    whole = numbers(spent.get("rounds_s"))
    parts = [(numbers(spent.get(name)), said, colour) for name, said, colour in SECONDS]
    parts = [part for part in parts if len(part[0]) == len(whole) and any(part[0])]
    body: list[Markup] = []
    if whole and parts:
        entries = [*(Entry(said, colour) for _, said, colour in parts), Entry("other", 4)]
        rows = []
        for worker, seconds in enumerate(whole):
            shares = [found[worker] / seconds if seconds else 0.0 for found, _, _ in parts]
            rows.append((f"worker {worker}", [*shares, max(1.0 - sum(shares), 0.0)]))
        body.append(bars(rows[:64], entries))
    names = (("compile_s", "compiling"), ("train_s", "training"), ("evaluate_s", "evaluating"), ("wall_s", "all"))
    times = [(said, duration(value)) for name, said in names if (value := finite(seen.summary.get(name))) is not None]
    sent = seen.number("bytes_sent")
    if sent:
        times.append(("sent between workers", amount(round(sent))))
    if times:
        body.append(facts(times))
    advice = seen.text("advice")
    if advice:
        body.append(element("p", element("strong", "Advice: "), advice, class_="notice"))
    return join(body)


# evaluation -------------------------------------------------------------------------------------------------------


def _names(seen: Seen, classes: int) -> list[str]:
    """What the classes are called; their numbers where they have no names."""
    names = seen.strings("class_names")
    return names if len(names) == classes else [str(index) for index in range(classes)]


def _confusion(seen: Seen) -> Any:
    """The confusion matrix of the test, or while there is none that after the last epoch; None where none is one."""
    rows = (_tested(seen) or _last_evaluated(seen)).get("confusion")
    table = [numbers(row) for row in rows] if isinstance(rows, list) else []
    if not table or any(len(row) != len(table) for row in table) or min(map(min, table)) < 0:
        return None
    return np.array(table, np.float64).astype(np.int64)


def _tested(seen: Seen) -> dict[str, Any]:
    """What the result came to on the test images; empty while there is none, and where others alone judge."""
    return {} if seen.running else mapping(seen.summary.get("test"))


def _last_evaluated(seen: Seen) -> dict[str, Any]:
    """The row of the last epoch after which there was an evaluation; an empty one where there was none."""
    return next((row for row in reversed(seen.epochs) if "confusion" in row), {})


def _evaluated(seen: Seen) -> str:
    test = _tested(seen)
    if not test:
        row = _last_evaluated(seen)
        split, epoch = "validation" if "validation_accuracy" in row else "test", finite(row.get("epoch"))
        after = "" if epoch is None else f"After epoch {epoch:,.0f}, on {split} images. "
        return f"{after}Rows: what an image is; columns: the guess."
    samples = finite(test.get("samples"))
    return "" if samples is None else f"On {samples:,.0f} test images. Rows: what an image is; columns: the guess."


def _evaluation(seen: Seen) -> Markup:
    """The confusion matrix and the figures of each class."""
    counts = _confusion(seen)
    if counts is None:
        return Markup("")
    names = _names(seen, len(counts))
    rows = []
    classes = _tested(seen).get("per_class")
    for index, row in enumerate(classes[:MOST_CLASSES] if isinstance(classes, list) else []):
        figures = [finite(mapping(row).get(name)) for name in ("precision", "recall", "f1")]
        support = finite(mapping(row).get("support")) or 0
        name = names[index] if index < len(names) else str(index)
        rows.append((name, *("–" if each is None else f"{each:.4f}" for each in figures), f"{support:,.0f}"))
    head = ("class", "precision", "recall", "F1", "images")
    each = table(head, rows, numbers=(1, 2, 3, 4)) if rows else ""
    return element("div", element("div", pictures.confusion(counts, names)), element("div", each), class_="columns")


def _mistakes(seen: Seen) -> Markup:
    rows, images = mapping(seen.summary.get("test")).get("mistakes"), seen.examples
    if not isinstance(rows, list) or not rows or seen.running:
        return Markup("")
    counts = _confusion(seen)
    names = _names(seen, 0 if counts is None else len(counts))

    def name(value: Any) -> str:
        index = finite(value)
        return names[int(index)] if index is not None and 0 <= index < len(names) else str(value)

    told = []
    for row in map(mapping, rows):
        confidence = finite(row.get("confidence"))
        said = "–" if confidence is None else percent(confidence, 1) if 0 <= confidence <= 1 else f"{confidence:.3g}"
        told.append((str(row.get("sample")), name(row.get("label")), name(row.get("guess")), said))
    return pictures.mistakes(images if images is not None and len(images) == len(told) else None, told)
