"""The page of a run: what its folder holds, as plain values for templates/run.html."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupynet import __version__
from cupynet.core.checks import amount, percent
from cupynet.core.files import write_whole
from cupynet.reporting import charts, pictures
from cupynet.reporting.folder import (
    RunData,
    config_text,
    example_images,
    finite,
    first_filters,
    mapping,
    numbers,
    read_run,
    rows_of,
    texts,
)
from cupynet.reporting.render import render

PICTURED = ("Loss", "Accuracy")  # the charts in curves.png
MAX_CLASSES = 200  # rows of the table of classes
MAX_FILES = 60
NONE = "–"


def write_page(folder: str | Path, *, over: bool = False, error: str = "") -> tuple[Path, str]:
    """Write report.html and curves.png of a run.

    Args:
        folder: of the run.
        over: the run has ended, even if its process still holds the folder.
        error: the error that ended it, if that is not in the log yet.

    Returns:
        The path of the page, and why it has no charts; "" if it has them, or if there is nothing to draw yet.

    Raises:
        ConfigError: `folder` is not the folder of a run.
        OutputError: a file cannot be written.
    """
    data = read_run(folder, over=over, error=error)
    drawn = charts.run_charts(data)
    figures, missing = charts.figures(drawn)
    curves = [chart for chart in drawn if chart.title in PICTURED and chart.shown]
    if curves and not missing:
        write_whole(data.run.curves_path, charts.png(curves))
    write_whole(data.run.report_path, render("run.html", **page_values(data), charts=figures, missing=missing))
    return data.run.report_path, missing


def page_values(data: RunData) -> dict[str, Any]:
    """Return everything that the page shows but its charts."""
    counts = _confusion(data)
    names = _class_names(data, counts)
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return {
        "evaluation": None if counts is None else pictures.confusion(counts, names),
        "evaluated": _evaluated(data),
        "classes": [] if counts is None else _classes(data, names),
        "mistakes": _mistakes(data, names),
        "time": _time(data),
        "layers": _layers(data),
        "filters": _filters(data),
        "settings": _settings(data),
        "machine": _machine(data),
        "files": _files(data),
        "tiles": _tiles(data),
        "footer": f"Made by cupynet {__version__} at {now} from {data.run}.",
        **_head(data),  # last: it names the files that could not be read
    }


# state --------------------------------------------------------------------------------------------------------------


def state(data: RunData) -> tuple[str, str, str]:
    """Return the state of a run in a word, the kind of mark it gets, and a sentence about it (or nothing)."""
    done, asked = _epochs(data), finite(data.start.get("epochs"))
    after = f"{done} epoch{'s' * (done != 1)}" if asked is None else f"{done} of {asked:.0f} epochs"
    stopped = data.text("stopped_by")
    if data.running:
        return "running", "live", f"{after} complete."
    resumed = _last_iteration(data) > (data.number("iterations") or math.inf)  # since the results were saved
    if data.error and (resumed or not data.summary):
        diverged = "not finite" in data.error or "diverged" in data.error
        return "diverged" if diverged else "failed", "bad", data.error
    if not data.summary:
        kept = any(path.name[5:].isdecimal() for path in data.run.checkpoints_path.glob("step-*"))
        left = " It can be resumed from its last checkpoint." if kept else ""
        return "killed", "bad", f"The run ended without a result, after {after}.{left}"
    if resumed:
        return "killed", "bad", "The run was resumed and then killed: the results are those from before."
    reason = data.text("stop_reason")
    if reason == "diverged":
        return "diverged", "bad", f"{stopped}: these are the best weights before."
    if reason == "early":
        return "stopped early", "good", f"After {after}: {stopped}."
    if reason or stopped:
        return "stopped", "warn", f"After {after}: {stopped}."
    return "finished", "good", ""


def _last_iteration(data: RunData) -> float:
    rows = [*data.reports[-1:], *data.epochs[-1:]]
    return max((finite(row.get("iteration")) or 0.0 for row in rows), default=0.0)


def _epochs(data: RunData) -> int:
    """Return the number of complete epochs."""
    last = finite(data.epochs[-1].get("epoch")) if data.epochs else None
    return int(last if last is not None else finite(data.summary.get("epochs")) or 0)


def _accuracy(data: RunData) -> tuple[str, float] | None:
    """Return the split and the accuracy that the page leads with: the summary's, or that of the last evaluation."""
    for row in ({} if data.running else data.summary, *reversed(data.epochs)):
        for split in ("test", "validation"):
            found = finite(row.get(f"{split}_accuracy"))
            if found is not None:
                return split, found
    return None


def _head(data: RunData) -> dict[str, Any]:
    word, kind, sentence = state(data)
    dataset, asked, found = data.text("dataset") or "a run", finite(data.start.get("epochs")), _accuracy(data)
    if data.running:
        now = _epochs(data) + 1
        title = f"{dataset}: epoch {now}" if not asked else f"{dataset}: epoch {min(now, asked):.0f}/{asked:.0f}"
    else:
        title = f"{dataset}: {word}" if found is None else f"{dataset}: {percent(found[1])} {found[0]} accuracy"
    marks = [(word, kind)]
    if data.get("fallback") is True:
        marks.append((f"fallback data: {dataset}, not the data set asked for", "bad"))
    marks += [(text, "plain") for name in ("backend", "dtype") if (text := data.text(name))]
    workers = data.number("workers")
    if workers is not None:
        marks.append((f"{workers:.0f} worker{'s' * (workers != 1)}", "plain"))
    commit = data.text("commit")
    if commit:
        marks.append((f"commit {commit.partition('-')[0][:10]}", "plain"))
        marks += [("uncommitted changes", "warn")] if commit.endswith("-dirty") else []
    started = data.text("started")
    over = f"cupynet · {'/'.join(data.run.folder.resolve().parts[-2:])}{f' · started {started}' if started else ''}"
    notices = [(sentence, kind)] if sentence else []
    return {
        "title": title,
        "over": over,
        "marks": marks,
        "notices": notices + [(f"cannot be read: {text}", "warn") for text in data.damaged],
        "progress": (min(_epochs(data), asked), asked) if data.running and asked else None,
    }


# numbers ------------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Format a duration: 45.2 s, 12:05 min, 3:20 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60:,}:{minutes % 60:02} h"


def _tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Return the figures at the top: name, figure, and a remark."""
    rows = []
    summary = {} if data.running else data.summary  # of a run that was resumed it is that from before
    found, last = _accuracy(data), (data.epochs or [{}])[-1]
    if found is not None:
        split, accuracy = found
        f1, validation = finite(mapping(summary.get("test")).get("f1")), finite(summary.get("validation_accuracy"))
        more = [] if f1 is None else [f"macro F1 {f1:.4f}"]
        more += [] if validation is None or split != "test" else [f"validation {percent(validation)}"]
        rows.append((f"{split} accuracy", percent(accuracy), ", ".join(more)))
        losses = (finite(row.get(f"{split}_loss")) for row in (summary, last))
        loss, trained = next((each for each in losses if each is not None), None), finite(last.get("loss"))
        if loss is not None:
            rows.append((f"{split} loss", f"{loss:.4g}", "" if trained is None else f"training {trained:.4g}"))
    elif data.reports:
        loss = finite(data.reports[-1].get("loss"))
        rows.append(("training loss", NONE if loss is None else f"{loss:.4g}", "worker 0, last report"))
    speed, workers = data.number("images_per_s"), data.number("workers")
    if speed is None and data.reports:
        speed = finite(data.reports[-1].get("images_per_s"))
    if speed is not None:
        each = f"{speed / workers:,.0f} per worker" if workers and workers > 1 else "images per second"
        rows.append(("training speed", f"{speed:,.0f}/s", each))
    wall, train = finite(summary.get("wall_s")), finite(summary.get("train_s"))
    if wall is not None:
        rows.append(("time", clock(wall), "" if train is None else f"{clock(train)} of it training"))
    done, asked = f"{_epochs(data)}", finite(data.start.get("epochs"))
    iterations = _last_iteration(data) or data.number("iterations") or 0
    rows.append(("epochs", f"{done} of {asked:.0f}" if asked else done, f"{iterations:,.0f} iterations"))
    parameters, layers = data.number("parameters"), [row for row in _layers(data) if row["kind"]]
    if parameters is not None:
        rows.append(("parameters", _thousands(parameters), f"{len(layers)} layers" if layers else ""))
    return rows


def _thousands(count: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def _time(data: RunData) -> dict[str, Any]:
    """Return how each worker spent its time, and the times of the whole run."""
    spent = mapping(data.summary.get("spent"))
    whole = numbers(spent.get("rounds_s"))
    parts = [(numbers(spent.get(key)), name, colour) for key, name, colour in charts.SECONDS]
    parts = [part for part in parts if len(part[0]) == len(whole) and any(part[0])]
    bars = []
    for worker, seconds in enumerate(whole[: charts.MAX_WORKERS] if parts else []):
        shares = [(name, colour, found[worker] / seconds if seconds else 0.0) for found, name, colour in parts]
        shares.append((*charts.OTHER, 1.0 - sum(share for *_, share in shares)))
        bars.append((f"worker {worker}", [(name, colour, min(max(share, 0.0), 1.0)) for name, colour, share in shares]))
    known = (("compile_s", "compiling"), ("train_s", "training"), ("evaluate_s", "evaluating"), ("wall_s", "all"))
    facts = [(name, clock(value)) for key, name in known if (value := finite(data.summary.get(key))) is not None]
    sent = data.number("bytes_sent")
    facts += [("sent between workers", amount(round(sent)))] if sent else []
    legend = [charts.Entry(name, colour) for _, name, colour in parts] + [charts.Entry(*charts.OTHER)]
    return {"bars": bars, "legend": legend, "facts": facts, "advice": data.text("advice")}


# evaluation ---------------------------------------------------------------------------------------------------------


def _tested(data: RunData) -> dict[str, Any]:
    """Return the evaluation on the test images; empty if there is none yet, or if validation images judge."""
    return {} if data.running else mapping(data.summary.get("test"))


def _last_evaluated(data: RunData) -> dict[str, Any]:
    """Return the row of the last epoch that was evaluated."""
    return next((row for row in reversed(data.epochs) if "confusion" in row), {})


def _confusion(data: RunData) -> Any:
    """Return the confusion matrix of the test, or else of the last evaluated epoch; None if there is none."""
    rows = (_tested(data) or _last_evaluated(data)).get("confusion")
    table = [numbers(row) for row in rows] if isinstance(rows, list) else []
    if not table or any(len(row) != len(table) for row in table) or min(map(min, table)) < 0:
        return None
    return np.array(table, np.float64).astype(np.int64)


def _class_names(data: RunData, counts: Any) -> list[str]:
    """Return the names of the classes, or their numbers if they have no names."""
    names, classes = texts(data.get("class_names")), 0 if counts is None else len(counts)
    return names if len(names) == classes else [str(index) for index in range(classes)]


def _evaluated(data: RunData) -> str:
    """Say which evaluation is shown."""
    test = _tested(data)
    if test:
        samples = finite(test.get("samples"))
        which = "" if samples is None else f"On {samples:,.0f} test images. "
    else:
        row = _last_evaluated(data)
        split, epoch = "validation" if "validation_accuracy" in row else "test", finite(row.get("epoch"))
        which = "" if epoch is None else f"After epoch {epoch:,.0f}, on {split} images. "
    return f"{which}Rows: the actual class; columns: the prediction."


def _classes(data: RunData, names: list[str]) -> list[list[str]]:
    """Return the rows of the table of classes."""
    rows = []
    for index, row in enumerate(rows_of(_tested(data).get("per_class"))[:MAX_CLASSES]):
        figures = [finite(row.get(name)) for name in ("precision", "recall", "f1")]
        support = finite(row.get("support")) or 0
        name = names[index] if index < len(names) else str(index)
        rows.append([name, *(NONE if each is None else f"{each:.4f}" for each in figures), f"{support:,.0f}"])
    return rows


def _mistakes(data: RunData, names: list[str]) -> list[dict[str, Any]]:
    """Return the most confident mistakes, with their images if there are as many."""

    def name(value: Any) -> str:
        index = finite(value)
        return names[int(index)] if index is not None and 0 <= index < len(names) else str(value)

    rows, images, found = rows_of(_tested(data).get("mistakes")), example_images(data), []
    for index, row in enumerate(rows):
        confidence, sample = finite(row.get("confidence")), str(row.get("sample"))
        label, guess = name(row.get("label")), name(row.get("guess"))
        score = NONE if confidence is None else f"{confidence:.3g}"
        if confidence is not None and 0 <= confidence <= 1:
            score = percent(confidence, 1)
        image = None
        if images is not None and len(images) == len(rows):
            image = pictures.example(images[index], f"sample {sample}, {label} taken for {guess}")
        found.append({"sample": sample, "label": label, "guess": guess, "confidence": score, "image": image})
    return found


# the run ------------------------------------------------------------------------------------------------------------


def _layers(data: RunData) -> list[dict[str, Any]]:
    """Return the rows of the table of layers; nested layers have an indented name."""
    columns = ("kind", "settings", "output", "parameters", "multiply-adds")
    rows = []
    for row in rows_of(data.start.get("layers")):
        name = str(row.get("layer", ""))
        depth = min((len(name) - len(name.lstrip())) // 2, 20)
        rows.append({"name": name.strip(), "depth": depth, **{key: str(row.get(key, "")) for key in columns}})
    return rows


def _filters(data: RunData) -> dict[str, Any] | None:
    """Return the filters of the first convolution."""
    found = first_filters(data)
    if found is None:
        return None
    name, weights = found
    height, width, _, count = weights.shape
    picture = pictures.filters(weights, name)
    return picture and {"picture": picture, "text": f"{name}: {count} filters of {height} x {width}"}


def repeat(data: RunData, settings: list[str]) -> str:
    """Return the command line that repeats this run."""
    processes = finite(data.start.get("processes"))
    words = [] if processes is None else ["mpiexec", "-n", f"{processes:.0f}"]
    words += ["cupynet", "train"]
    folder = data.start.get("config_dir")
    words += [f"--config-dir={folder}"] if isinstance(folder, str) else []
    return shlex.join([*words, *(setting for setting in settings if not setting.startswith("resume="))])


def _settings(data: RunData) -> dict[str, Any]:
    """Return what differs from the defaults, the command that repeats the run, and all settings."""
    given = data.start.get("overrides")
    known = isinstance(given, list)
    rows = (("seed", "seed"), ("batch size per worker", "batch_size"))
    facts = [(name, f"{value:.0f}") for name, key in rows if (value := data.number(key)) is not None]
    facts += [("replicas", kept)] if (kept := data.text("synchronizer")) else []
    return {
        "given": [setting.partition("=")[::2] for setting in texts(given)] if known else None,
        "command": repeat(data, texts(given)) if known else None,
        "facts": facts,
        "config": config_text(data),
    }


def _machine(data: RunData) -> list[tuple[str, str]]:
    """Return the machine and the versions that the run used."""
    environment = mapping(data.get("environment"))
    rows = [("devices", ", ".join(dict.fromkeys(texts(data.get("devices")))))]
    for name in ("cpu", "cores", "system", "python"):
        value = environment.get(name)
        rows.append((name, str(value) if isinstance(value, str | int) else ""))
    for each in rows_of(environment.get("blas")):
        words = (each.get(key) for key in ("internal_api", "version", "architecture"))
        rows.append(("BLAS", " ".join(str(word) for word in words if word) + f", {each.get('num_threads')} threads"))
    rows.append(("CPU flags", " ".join(texts(environment.get("cpu_flags")))))
    versions = mapping(environment.get("versions")).items()
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions if value)))
    return [row for row in [*rows, ("commit", data.text("commit"))] if row[1]]


def _files(data: RunData) -> list[tuple[str, str]]:
    """Return the names and sizes of what else is in the folder."""
    rows = []
    try:
        for path in sorted(data.run.folder.iterdir()):
            if path != data.run.report_path and (not path.name.startswith(".") or path.name == ".hydra"):
                folder = path.is_dir()
                rows.append((path.name + "/" * folder, "folder" if folder else amount(path.lstat().st_size)))
    except OSError:
        return []
    return rows[:MAX_FILES]
