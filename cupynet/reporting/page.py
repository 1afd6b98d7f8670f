"""The page of a run: plain values from its folder for templates/run.html."""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np

from cupynet.core.checks import amount, percent
from cupynet.core.files import write_whole
from cupynet.core.version import __version__
from cupynet.reporting import charts, pictures
from cupynet.reporting.folder import RunData, config_path, read_arrays, read_run, read_text
from cupynet.reporting.render import render

PICTURED = ("Loss", "Accuracy")  # the charts in curves.png
MAX_CLASSES = 200  # rows of the table of classes
MAX_FILES = 60
NONE = "–"


def write_page(folder: str | Path, *, over: bool = False, error: str = "") -> tuple[Path, str]:
    """Write report.html and curves.png of a run.

    Args:
        folder: of the run.
        over: the run has ended, even if its process still locks the folder.
        error: the error that ended it, if it is not in the log yet.

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
    """Return all values of the page except the charts."""
    sections = {
        "evaluation": _evaluation,
        "mistakes": _mistakes,
        "time": _time,
        "layers": _layers,
        "filters": _filters,
        "settings": _settings,
        "machine": _machine,
        "files": _files,
        "tiles": _tiles,
    }
    found = {name: data.section(name, build) for name, build in sections.items()}
    found |= data.section("head", _head) or {"title": "a run", "marks": [], "notices": [], "progress": None}
    found["notices"] += [(f"cannot be read: {text}", "warn") for text in data.damaged]
    started = data.start.get("started")
    over = f"cupynet · {'/'.join(data.run.folder.resolve().parts[-2:])}{f' · started {started}' if started else ''}"
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return {**found, "over": over, "footer": f"Made by cupynet {__version__} at {now} from {data.run}."}


# state --------------------------------------------------------------------------------------------------------------


def state(data: RunData) -> tuple[str, str, str]:
    """Return the state of a run in a word, its kind of mark, and a sentence about it or ""."""
    done, asked = _epochs(data), data.start.get("epochs")
    after = f"{done} epoch{'s' * (done != 1)}" if asked is None else f"{done} of {asked} epochs"
    if data.running:
        return "running", "live", f"{after} complete."
    resumed = _last_iteration(data) > data.get("iterations", math.inf)  # since the results were saved
    if data.error and (resumed or not data.summary):
        diverged = "not finite" in data.error or "diverged" in data.error
        return "diverged" if diverged else "failed", "bad", data.error
    if not data.summary:
        kept = any(path.name[5:].isdecimal() for path in data.run.checkpoints_path.glob("step-*"))
        left = " It can be resumed from its last checkpoint." if kept else ""
        return "killed", "bad", f"The run ended without a result, after {after}.{left}"
    if resumed:
        return "killed", "bad", "The run was resumed and then killed: the results are those from before."
    reason, stopped = data.get("stop_reason"), data.get("stopped_by", "")
    if reason == "diverged":
        return "diverged", "bad", f"{stopped}: these are the best weights before."
    if reason == "early":
        return "stopped early", "good", f"After {after}: {stopped}."
    if reason or stopped:
        return "stopped", "warn", f"After {after}: {stopped}."
    return "finished", "good", ""


def _last_iteration(data: RunData) -> int:
    return max((row["iteration"] for row in (*data.reports[-1:], *data.epochs[-1:])), default=0)


def _epochs(data: RunData) -> int:
    """Return the number of complete epochs."""
    return int(data.epochs[-1]["epoch"] if data.epochs else data.summary.get("epochs", 0))


def _results(data: RunData) -> dict[str, Any]:
    """Return the summary; nothing while the run trains, because then the summary predates the resume."""
    return {} if data.running else data.summary


def _accuracy(data: RunData) -> tuple[str, float] | None:
    """Return the split and the accuracy of the title, from the summary or the last evaluation."""
    for row in (_results(data), *reversed(data.epochs)):
        for split in ("test", "validation"):
            if row.get(f"{split}_accuracy") is not None:
                return split, row[f"{split}_accuracy"]
    return None


def _head(data: RunData) -> dict[str, Any]:
    word, kind, sentence = state(data)
    dataset, asked, found = data.get("dataset", "a run"), data.start.get("epochs"), _accuracy(data)
    if data.running:
        now = _epochs(data) + 1
        title = f"{dataset}: epoch {min(now, asked)}/{asked}" if asked else f"{dataset}: epoch {now}"
    else:
        title = f"{dataset}: {word}" if found is None else f"{dataset}: {percent(found[1])} {found[0]} accuracy"
    marks = [(word, kind)]
    if data.get("fallback"):
        marks.append((f"fallback data: {dataset}, not the data set asked for", "bad"))
    marks += [(text, "plain") for name in ("backend", "dtype") if (text := data.get(name))]
    if workers := data.get("workers"):
        marks.append((f"{workers} worker{'s' * (workers != 1)}", "plain"))
    if commit := data.get("commit"):
        marks.append((f"commit {commit.partition('-')[0][:10]}", "plain"))
        marks += [("uncommitted changes", "warn")] if commit.endswith("-dirty") else []
    return {
        "title": title,
        "marks": marks,
        "notices": [(sentence, kind)] if sentence else [],
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
    summary, found, last = _results(data), _accuracy(data), (data.epochs or [{}])[-1]
    report = (data.reports or [{}])[-1]
    if found is not None:
        split, accuracy = found
        f1, validation = (summary.get("test") or {}).get("f1"), summary.get("validation_accuracy")
        more = [] if f1 is None else [f"macro F1 {f1:.4f}"]
        more += [] if validation is None or split != "test" else [f"validation {percent(validation)}"]
        rows.append((f"{split} accuracy", percent(accuracy), ", ".join(more)))
        losses = (row.get(f"{split}_loss") for row in (summary, last))
        loss, trained = next((each for each in losses if each is not None), None), last.get("loss")
        if loss is not None:
            rows.append((f"{split} loss", f"{loss:.4g}", "" if trained is None else f"training {trained:.4g}"))
    elif data.reports:
        loss = report.get("loss")
        rows.append(("training loss", NONE if loss is None else f"{loss:.4g}", "worker 0, last report"))
    speed, workers = data.get("images_per_s", report.get("images_per_s")), data.get("workers", 1)
    if speed is not None:
        each = f"{speed / workers:,.0f} per worker" if workers > 1 else "images per second"
        rows.append(("training speed", f"{speed:,.0f}/s", each))
    wall, train = summary.get("wall_s"), summary.get("train_s")
    if wall is not None:
        rows.append(("time", clock(wall), "" if train is None else f"{clock(train)} of it training"))
    done, asked = f"{_epochs(data)}", data.start.get("epochs")
    iterations = _last_iteration(data) or data.get("iterations", 0)
    rows.append(("epochs", f"{done} of {asked}" if asked else done, f"{iterations:,} iterations"))
    parameters, layers = data.get("parameters"), [row for row in _layers(data) if row["kind"]]
    if parameters is not None:
        rows.append(("parameters", _thousands(parameters), f"{len(layers)} layers" if layers else ""))
    return rows


def _thousands(count: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count}"


def _time(data: RunData) -> dict[str, Any] | None:
    """Return the time of each worker by activity, and the times of the run."""
    spent = data.summary.get("spent") or {}
    parts = [(spent[key], name, colour) for key, name, colour in charts.SECONDS if any(spent.get(key, ()))]
    bars = []
    for worker, seconds in enumerate(spent.get("rounds_s", ())[: charts.MAX_WORKERS] if parts else ()):
        shares = [(name, colour, found[worker] / seconds if seconds else 0.0) for found, name, colour in parts]
        shares.append((*charts.OTHER, max(1.0 - sum(share for *_, share in shares), 0.0)))
        bars.append((f"worker {worker}", shares))
    known = (("compile_s", "compiling"), ("train_s", "training"), ("evaluate_s", "evaluating"), ("wall_s", "all"))
    facts = [(name, clock(value)) for key, name in known if (value := data.summary.get(key)) is not None]
    if sent := data.get("bytes_sent"):
        facts.append(("sent between workers", amount(sent)))
    legend = [(name, colour, False) for _, name, colour in parts] + [(*charts.OTHER, False)]
    advice = data.get("advice")
    return {"bars": bars, "legend": legend, "facts": facts, "advice": advice} if bars or facts or advice else None


# evaluation ---------------------------------------------------------------------------------------------------------


def _evaluation(data: RunData) -> dict[str, Any] | None:
    """Return the confusion matrix and the table of classes, of the test or the last evaluation."""
    test = _results(data).get("test")
    row = test or next((row for row in reversed(data.epochs) if "confusion" in row), None)
    if row is None or not row.get("confusion"):
        return None
    counts = np.array(row["confusion"], np.int64)
    names = _class_names(data, len(counts))
    if test:
        which = f"On {test['samples']:,} test images."
    else:
        which = f"After epoch {row['epoch']:,}, on {'validation' if 'validation_accuracy' in row else 'test'} images."
    classes = []
    for name, each in zip(names, row.get("per_class", ())[:MAX_CLASSES], strict=False):
        figures = [NONE if each[key] is None else f"{each[key]:.4f}" for key in ("precision", "recall", "f1")]
        classes.append([name, *figures, f"{each['support']:,}"])
    note = f"{which} Rows: the actual class; columns: the prediction."
    return {"note": note, "classes": classes, **pictures.confusion(counts, names)}


def _class_names(data: RunData, classes: int) -> list[str]:
    """Return the names of the classes, or their numbers if they have no names."""
    names = data.get("class_names", ())
    return list(map(str, names if len(names) == classes else range(classes)))


def _mistakes(data: RunData) -> list[dict[str, Any]]:
    """Return the most confident mistakes, with their images if these are complete."""
    test = _results(data).get("test") or {}
    rows, names = test.get("mistakes") or (), _class_names(data, len(test.get("confusion") or ()))
    images, found = (data.read(data.run.examples_path, read_arrays) or {}).get("images", ()), []
    for index, row in enumerate(rows):
        label, guess, confidence = names[row["label"]], names[row["guess"]], row["confidence"]
        score = NONE if confidence is None else f"{confidence:.3g}"
        if confidence is not None and 0 <= confidence <= 1:
            score = percent(confidence, 1)
        image = None
        if len(images) == len(rows):
            image = pictures.example(images[index], f"sample {row['sample']}, {label} taken for {guess}")
        found.append({"sample": row["sample"], "label": label, "guess": guess, "confidence": score, "image": image})
    return found


# the run ------------------------------------------------------------------------------------------------------------


def _layers(data: RunData) -> list[dict[str, Any]]:
    """Return the rows of the table of layers; nested layers have an indented name."""
    columns = ("kind", "settings", "output", "parameters", "multiply-adds")
    rows = []
    for row in data.start.get("layers") or ():
        name = row["layer"]
        depth = (len(name) - len(name.lstrip())) // 2
        rows.append({"name": name.strip(), "depth": depth, **{key: row.get(key, "") for key in columns}})
    return rows


def _filters(data: RunData) -> dict[str, Any] | None:
    """Return the filters (K_h, K_w, C, O) of the first convolution, in the order of the layers."""
    weights = data.read(data.run.weights_path, read_arrays) or {}
    order = [row["layer"] for row in data.start.get("layers") or ()]  # a nested layer's name begins with a space

    def place(name: str) -> tuple[int, str]:
        layer = name.split(".")[0]
        return order.index(layer) if layer in order else len(order), name

    name = min((name for name, array in weights.items() if array.ndim == 4), key=place, default=None)
    picture = None if name is None else pictures.filters(weights[name], name)
    if name is None or picture is None:
        return None
    height, width, _, count = weights[name].shape
    return {"picture": picture, "text": f"{name}: {count} filters of {height} x {width}"}


def _settings(data: RunData) -> dict[str, Any]:
    """Return the overrides, the command that repeats the run, and all settings."""
    given = data.start.get("overrides")
    rows = (("seed", "seed"), ("batch size per worker", "batch_size"), ("replicas", "synchronizer"))
    return {
        "given": None if given is None else [setting.partition("=")[::2] for setting in given],
        "command": None if given is None else repeat(data, given),
        "facts": [(name, value) for name, key in rows if (value := data.get(key)) is not None],
        "config": data.read(config_path(data.run), read_text),
    }


def repeat(data: RunData, settings: list[str]) -> str:
    """Return the command line that repeats this run."""
    processes, folder = data.start.get("processes"), data.start.get("config_dir")
    words = [] if processes is None else ["mpiexec", "-n", str(processes)]
    words += ["cupynet", "train"] + ([] if folder is None else [f"--config-dir={folder}"])
    return shlex.join([*words, *(setting for setting in settings if not setting.startswith("resume="))])


def _machine(data: RunData) -> list[tuple[str, str]]:
    """Return the machine and the versions that the run used."""
    environment = data.get("environment", {})
    rows = [("devices", ", ".join(dict.fromkeys(data.get("devices", ()))))]
    rows += [(name, str(environment.get(name, ""))) for name in ("cpu", "cores", "system", "python")]
    for each in environment.get("blas", ()):
        words = (each.get(key) for key in ("internal_api", "version", "architecture"))
        rows.append(("BLAS", " ".join(word for word in words if word) + f", {each.get('num_threads')} threads"))
    rows.append(("CPU flags", " ".join(environment.get("cpu_flags", ()))))
    versions = environment.get("versions", {}).items()
    rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions if value)))
    return [row for row in [*rows, ("commit", data.get("commit"))] if row[1]]


def _files(data: RunData) -> list[tuple[str, str]]:
    """Return the names and sizes of the files in the folder."""
    rows = []
    for path in sorted(data.run.folder.iterdir())[:MAX_FILES]:
        if path != data.run.report_path and (not path.name.startswith(".") or path.name == ".hydra"):
            folder = path.is_dir()
            rows.append((path.name + "/" * folder, "folder" if folder else amount(path.lstat().st_size)))
    return rows
