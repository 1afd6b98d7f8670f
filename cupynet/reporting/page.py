"""The HTML report of a run. Computes the values for templates/run.html."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.core.checks import finite
from cupynet.core.errors import DivergedError
from cupynet.core.files import load_weights, write_whole
from cupynet.core.version import __version__
from cupynet.core.wording import amount, counted, percent
from cupynet.reporting import charts, pictures
from cupynet.reporting.folder import RunData, read_run, read_text
from cupynet.reporting.render import render

PICTURED = ("Loss", "Accuracy")  # charts in curves.png
MAX_CELLS = 25  # maximum number of classes for which the confusion matrix is shown
MAX_CLASSES = 200  # maximum number of rows in the class table
NONE = "–"


def write_page(folder: str | Path, *, over: bool = False, error: Exception | None = None) -> tuple[Path, str]:
    """Write report.html and curves.png to the folder of a run. For the arguments, see `read_run`.

    Return the path of the page and, if charts cannot be drawn, the reason, otherwise "". Raise ConfigError if it is not
    the folder of a run, or OutputError if a file cannot be written.
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
    """Return all values of the page except the charts."""
    sections = (_tiles, _evaluation, _mistakes, _time, _layers, _settings, _machine)
    values = {build.__name__.strip("_"): data.section(build) for build in sections}
    values |= data.section(_head) or {"title": "a run", "marks": [], "notices": [], "progress": None}
    values["notices"] += [(f"unreadable: {text}", "warn") for text in data.damaged]
    started = f" · started {data.start['started']}" if "started" in data.start else ""
    header = f"cupynet · {'/'.join(data.run.folder.resolve().parts[-2:])}{started}"
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return {**values, "over": header, "footer": f"Created by cupynet {__version__} at {now} from {data.run}."}


# state --------------------------------------------------------------------------------------------------------------


def state(data: RunData) -> tuple[str, str, str]:
    """Return the state of a run as a word, the kind of its badge, and an explanatory sentence or ""."""
    after = f"{_epochs(data)} of {data.start.get('epochs', NONE)} epochs"
    if data.running:
        return "running", "live", f"{after} complete."
    if not _results(data):
        if data.error:
            return "diverged" if data.code == DivergedError.exit_code else "failed", "bad", data.error
        return "killed", "bad", f"The run was killed after {after}. To continue it, use resume={data.run}"
    reason, stopped = data.get("stop_reason"), data.get("stopped_by")
    if not stopped:
        return "finished", "good", ""
    words = {"diverged": ("diverged", "bad"), "early": ("stopped early", "good")}
    return *words.get(reason, ("stopped", "warn")), f"After {after}: {stopped}."


def _epochs(data: RunData) -> int:
    return int(data.epochs[-1]["epoch"] if data.epochs else data.summary.get("epochs", 0))


def _results(data: RunData) -> dict[str, Any]:
    """Return the summary, or {} if the run is training or was resumed after the summary was written."""
    return {} if data.running or data.outdated else data.summary


def _accuracy(data: RunData) -> tuple[str, float | None]:
    """Return the evaluated data and the accuracy for the title, from the summary or the last evaluation."""
    for row in (_results(data), *reversed(data.epochs)):
        for split in ("test", "validation"):
            accuracy = row.get(f"{split}_accuracy")
            if accuracy is not None or row.get(f"{split}_loss") is not None:  # regression has no accuracy
                return split, accuracy
    return "test", None


def _final(data: RunData, split: str) -> dict[str, Any]:
    """Return the evaluation of the final weights; {} if there is none."""
    return _results(data).get(split) or {}


def _head(data: RunData) -> dict[str, Any]:
    word, kind, sentence = state(data)
    dataset, planned = data.get("dataset", "a run"), data.start.get("epochs", 0)
    split, accuracy = _accuracy(data)
    title = f"{dataset}: {word}" if accuracy is None else f"{dataset}: {percent(accuracy)} {split} accuracy"
    if data.running:
        title = f"{dataset}: epoch {min(_epochs(data) + 1, planned)}/{planned}"
    marks = [(word, kind)]
    marks += [(f"fallback data: {dataset} instead of the requested data set", "bad")] if data.get("fallback") else []
    marks += [(text, "plain") for name in ("backend", "dtype") if (text := data.get(name))]
    marks += [(counted(workers, "worker"), "plain")] if (workers := data.get("workers")) else []
    commit, _, changed = (data.get("commit") or "").partition("-")
    marks += [(f"commit {commit[:10]}", "plain")] if commit else []
    marks += [("uncommitted changes", "warn")] if changed else []
    return {
        "title": title,
        "marks": marks,
        "notices": [(sentence, kind)] if sentence else [],
        "progress": (_epochs(data), planned) if data.running and planned else None,
    }


# numbers ------------------------------------------------------------------------------------------------------------


def clock(seconds: float) -> str:
    """Format a duration: `45.2 s`, `12:05 min`, `3:20 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60:,}:{minutes % 60:02} h"


def _tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Return the tiles at the top of the page, each with its name, value and remark."""
    summary, last = _results(data), (data.epochs or [{}])[-1]
    split, accuracy = _accuracy(data)
    final = _final(data, split)
    loss = final.get("loss", summary.get(f"{split}_loss")) if final else last.get(f"{split}_loss")
    speed = summary.get("images_per_s") or (data.rows or [{}])[-1].get("images_per_s")
    per_worker = None if speed is None else speed / data.get("workers", 1)
    epochs = f"{_epochs(data)} of {data.start.get('epochs', NONE)}"
    tiles = [
        (f"{split} accuracy", _shown(accuracy, percent), _shown(final.get("f1"), "macro F1 {:.4f}".format)),
        (f"{split} loss", _shown(loss, "{:.4g}".format), _shown(last.get("loss"), "training {:.4g}".format)),
        ("training speed", _shown(speed, "{:,.0f}/s".format), _shown(per_worker, "{:,.0f} per worker".format)),
        *((f"{split} {name}", _shown(value, "{:.4g}".format), "") for name, value in _metrics(data, split).items()),
        ("time", _shown(summary.get("wall_s"), clock), f"training {_shown(summary.get('train_s'), clock)}"),
        ("epochs", epochs, counted(data.last_iteration, "iteration")),
        ("parameters", _shown(data.get("parameters"), "{:,}".format), ""),
    ]
    return [tile for tile in tiles if tile[1]]


def _metrics(data: RunData, split: str) -> dict[str, Any]:
    """Return the metrics of the last evaluation other than loss and accuracy, by name."""
    row: dict[str, Any] = next((row for row in reversed(data.epochs) if f"{split}_loss" in row), {})
    columns = [name for name in charts.metrics_of([row]) if name.startswith(split)]
    metrics = {name.partition("_")[2]: finite(row[name]) for name in columns}
    final = _final(data, split)
    known = {**final, **(final.get("metrics") or {})}
    return {name: known.get(name) for name in {**metrics, **(final.get("metrics") or {})}} if final else metrics


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "" if value is None else form(value)


def _time(data: RunData) -> dict[str, Any] | None:
    """Return the times by worker and activity, and the total times of the run, or None without results."""
    summary = _results(data)
    spent = summary.get("spent") or {}
    parts = [(spent[key], name, color) for key, name, color in charts.SECONDS if any(spent.get(key, ()))]
    bars = []
    for worker, seconds in enumerate(spent.get("rounds_s", ())[: charts.MAX_WORKERS]):
        shares = [(name, color, times[worker] / max(seconds, 1e-9)) for times, name, color in parts]
        shares.append((*charts.OTHER, max(1.0 - sum(share for *_, share in shares), 0.0)))
        bars.append((f"worker {worker}", shares))
    labels = (("compile_s", "compiling"), ("train_s", "training"), ("evaluate_s", "evaluating"), ("wall_s", "all"))
    facts = [(name, clock(value)) for key, name in labels if (value := summary.get(key)) is not None]
    facts += [("sent between workers", amount(sent))] if (sent := summary.get("bytes_sent")) else []
    legend = [(name, color, False) for _, name, color in parts] + [(*charts.OTHER, False)]
    return {"bars": bars, "legend": legend, "facts": facts, "advice": summary.get("advice")} if facts else None


# evaluation ---------------------------------------------------------------------------------------------------------


def _evaluation(data: RunData) -> dict[str, Any] | None:
    """Return the confusion matrix and class table of the final weights, otherwise of the last epoch, or None."""
    split = next((split for split in ("test", "validation") if _final(data, split)), None)
    final = None if split is None else _final(data, split)
    row = final or next((row for row in reversed(data.epochs) if "confusion" in row), None)
    if row is None or not row.get("confusion"):
        return None
    counts = np.array(row["confusion"], np.int64)
    names = _class_names(data, len(counts))
    matrix = pictures.confusion(counts, names) if len(counts) <= MAX_CELLS else None
    if final:
        caption = f"On {final['samples']:,} {split} images."
    else:
        split = "validation" if "validation_accuracy" in row else "test"
        caption = f"After epoch {row['epoch']:,}, on {split} images."
    classes = []
    for name, scores in zip(names, row.get("per_class", ())[:MAX_CLASSES], strict=False):
        figures = [NONE if scores[key] is None else f"{scores[key]:.4f}" for key in ("precision", "recall", "f1")]
        classes.append([name, *figures, f"{scores['support']:,}"])
    return {"which": caption, "classes": classes, "names": names, "matrix": matrix}


def _class_names(data: RunData, classes: int) -> list[str]:
    names = data.get("class_names", ())
    return list(map(str, names if len(names) == classes else range(classes)))


def _mistakes(data: RunData) -> list[dict[str, Any]]:
    """Return the most confident mistakes with their images, or [] if images are missing."""
    test = _results(data).get("test") or {}
    rows, names = test.get("mistakes") or (), _class_names(data, len(test.get("confusion") or ()))
    images, mistakes = (data.read(data.run.examples_path, load_weights) or {}).get("images", ()), []
    for row, image in zip(rows, images, strict=True) if len(images) == len(rows) else ():
        label, guess, confidence = names[row["label"]], names[row["guess"]], row["confidence"] or 0.0
        score = percent(confidence, 1) if 0 <= confidence <= 1 else f"{confidence:.3g}"
        picture = pictures.example(image, f"sample {row['sample']}, {label} predicted as {guess}")
        mistakes.append(
            {"image": picture, "guess": guess, "confidence": score, "label": label, "sample": row["sample"]}
        )
    return mistakes


# the run ------------------------------------------------------------------------------------------------------------


def _layers(data: RunData) -> list[list[str]]:
    """Return the rows of the layer table. Nested layers are indented."""
    columns = ("kind", "settings", "output", "parameters", "multiply-adds")
    rows = data.start.get("layers") or ()
    return [[row["layer"].replace("  ", "\u2003"), *(row.get(name, "") for name in columns)] for row in rows]


def _settings(data: RunData) -> dict[str, Any]:
    """Return the overrides, the command that repeats the run, and all settings."""
    overrides = data.start.get("overrides")
    rows = (("seed", "seed"), ("batch size per worker", "batch_size"), ("replicas", "synchronizer"))
    return {
        "given": None if overrides is None else [setting.partition("=")[::2] for setting in overrides],
        "command": None if overrides is None else repeat(data, overrides),
        "changed": bool(data.start.get("changed")),
        "facts": [(name, value) for name, key in rows if (value := data.get(key)) is not None],
        "config": data.read(data.run.settings_path, read_text),
    }


def repeat(data: RunData, settings: list[str]) -> str:
    """Return the command line that repeats this run."""
    processes, folder = data.start.get("processes"), data.start.get("config_dir")
    words = [] if processes is None else ["mpiexec", "-n", str(processes)]
    words += ["cupynet", "train"] + ([] if folder is None else [f"--config-dir={folder}"])
    return shlex.join([*words, *(setting for setting in settings if not setting.startswith("resume="))])


def _machine(data: RunData) -> list[tuple[str, str]]:
    environment = data.get("environment", {})
    rows = [("devices", ", ".join(dict.fromkeys(data.get("devices", ()))))]
    rows += [(name, environment.get(name)) for name in ("cpu", "cores", "system", "python")]
    for library in environment.get("blas", ()):
        rows.append(
            ("BLAS", " ".join(str(library.get(key, "")) for key in ("internal_api", "version", "architecture")))
        )
    rows.append(("CPU flags", " ".join(environment.get("cpu_flags", ()))))
    versions = environment.get("versions", {}).items()
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions if value)))
    return [row for row in [*rows, ("commit", data.get("commit"))] if row[1]]
