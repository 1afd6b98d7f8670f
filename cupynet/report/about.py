"""What was run, for the page of a run: its network, settings, machine and files."""

from __future__ import annotations

import shlex
from typing import Any

from cupynet.checks import amount
from cupynet.report import pictures
from cupynet.report.folder import Seen, finite, mapping, texts
from cupynet.report.page import Markup, command, element, facts, folded, join, table

MOST_FILES = 60


def layers(seen: Seen) -> list[dict[str, Any]]:
    """The rows of the table of layers."""
    found = seen.start.get("layers")
    return [mapping(row) for row in found] if isinstance(found, list) else []


def network(seen: Seen) -> Markup:
    """The layers, and the filters of the first convolution."""
    body: list[Markup] = []
    known = layers(seen)
    if known:
        columns = ("layer", "kind", "settings", "output", "parameters", "multiply-adds")
        rows = []
        for layer in known:
            name = str(layer.get("layer", ""))
            inside = (len(name) - len(name.lstrip())) // 2
            first = element("span", name.strip(), style=f"padding-left:{1.2 * min(inside, 20):.1f}em")
            rows.append((first, *(str(layer.get(key, "")) for key in columns[1:])))
        body.append(table(columns, rows, numbers=(4, 5)))
    if seen.filters is not None:
        name, weights = seen.filters
        shown = pictures.filters(weights, name)
        if shown:
            kernel, count = " x ".join(map(str, weights.shape[:2])), weights.shape[3]
            said = f"{name}: {count} filters of {kernel}. Orange is positive, blue negative; each by its own largest."
            body.append(element("h3", "What the first convolution looks for", style="margin-top:1.5rem"))
            body += [shown, element("p", said, class_="said")]
    return join(body)


def repeat(seen: Seen) -> str | None:
    """The command line that makes this run again; None where it is not known."""
    if seen.overrides is None:
        return None
    settings = [setting for setting in seen.overrides if not setting.startswith("resume=")]
    processes = finite(seen.start.get("processes"))
    words = ["python", "-m", "cupynet.train"]
    if processes is not None:
        words = ["mpiexec", "-n", f"{processes:.0f}", *words]
    if seen.config_dir is not None:
        words.append(f"--config-dir={seen.config_dir}")
    return shlex.join([*words, *settings])


def settings(seen: Seen) -> Markup:
    """What differs from the defaults, the command that repeats it, and everything."""
    body: list[Markup] = []
    again = repeat(seen)
    if seen.overrides:
        body.append(facts(_setting(setting) for setting in seen.overrides))
    elif seen.overrides is not None:
        body.append(element("p", "The defaults."))
    if again is not None:
        body += [element("h3", "To run it again", style="margin-top:1.2rem"), command(again)]
    rows = [
        ("seed", seen.number("seed")),
        ("batch size per worker", seen.number("batch_size")),
    ]
    known = [(name, f"{value:.0f}") for name, value in rows if value is not None]
    kept = seen.text("synchronizer")
    known += [("replicas", kept)] if kept else []
    body.append(facts(known))
    if seen.config:
        body.append(folded("All settings (.hydra/config.yaml)", command(seen.config)))
    return join(body) if any(body) else Markup("")


def _setting(setting: str) -> tuple[Markup, str]:
    key, _, value = setting.partition("=")
    return element("code", key), value


def machine(seen: Seen) -> Markup:
    """The machine and the versions that the run was made with."""
    environment = seen.mapping("environment")
    rows: list[tuple[str, str]] = [("devices", ", ".join(dict.fromkeys(seen.strings("devices"))))]
    for name in ("cpu", "cores", "system", "python"):
        value = environment.get(name)
        rows.append((name, str(value) if isinstance(value, str | int) else ""))
    blas = environment.get("blas")
    for each in blas if isinstance(blas, list) else []:
        words = (mapping(each).get(key) for key in ("internal_api", "version", "architecture"))
        threads = mapping(each).get("num_threads")
        rows.append(("BLAS", " ".join(str(word) for word in words if word) + f", {threads} threads"))
    rows.append(("CPU flags", " ".join(texts(environment.get("cpu_flags")))))
    versions = environment.get("versions")
    said = ", ".join(f"{name} {value}" for name, value in mapping(versions).items() if value)
    rows += [("versions", said), ("commit", seen.text("commit") or "")]
    return facts([row for row in rows if row[1]]) if any(value for _, value in rows) else Markup("")


def files(seen: Seen) -> Markup:
    """What else is in the folder."""
    rows = []
    try:
        for path in sorted(seen.run.folder.iterdir()):
            if path.name.startswith(".") and path.name != ".hydra":
                continue
            size = "folder" if path.is_dir() else amount(path.lstat().st_size)  # a link may lead nowhere
            rows.append((element("code", path.name + "/" * path.is_dir()), size))
    except OSError:
        return Markup("")
    return table((), rows[:MOST_FILES], numbers=(1,))
