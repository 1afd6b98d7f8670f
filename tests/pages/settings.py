"""settings.md: every setting, from conf/ and its comments, the schema, and the constructors named by `_target_`."""

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cupynet.config.schema import BenchSettings, PlanSettings, RateSettings, Settings, TuneSettings
from tests.pages.api import anchor, public
from tests.pages.conf import Node, choice, constructor, schema, words, written
from tests.pages.markdown import codes, meaning, table, wrapped
from tests.support.settings import CONF

GROUPS = {
    **{"data": "Data", "model": "Models", "loss": "Losses", "optimizer": "Optimizers", "parallel": "Parallel training"},
    **{"callbacks": "Callbacks", "backend": "Backends", "memory": "Memory"},
}
SCHEMAS = {"find_rate": RateSettings, "tune": TuneSettings, "plan": PlanSettings, "bench": BenchSettings}
TYPES = {**schema(Settings), "parallel.averaging_frequency": "integer ≥ 1, `epoch`, `end`"}
COLUMNS = "setting | type | default | meaning"
Row = tuple[str, str, str, str]


def settings_page() -> Iterator[str]:
    main = written(CONF / "config.yaml")
    defaults = dict(each.split(": ") for each in main.below.pop("defaults").below if ": " in each)
    hydra = Node(below={key: node for key, node in main.below.pop("hydra").below.items() if key in ("run", "sweep")})
    yield from ("## Run", table(COLUMNS, rows("", main, TYPES)))
    for name, title in GROUPS.items():
        yield f"## {title}"
        yield from models() if name == "model" else group(name, defaults[name])
    yield "## Experiments"
    yield "An experiment changes several settings at once. The command line takes precedence."
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        yield from experiment(path)
    folders = dict.fromkeys(["hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir"], "path")
    yield from ("## Folders and sweeps", table(COLUMNS, rows("hydra", hydra, folders)))
    yield from head("hydra/launcher", "processes", written(CONF / "hydra" / "launcher" / "processes.yaml"))
    yield table(COLUMNS, rows("hydra.launcher", written(CONF / "hydra" / "launcher" / "processes.yaml"), {}))
    for name, kind in SCHEMAS.items():
        node = written(CONF / f"{name}.yaml")
        own = Node(below={key: each for key, each in node.below.items() if key not in ("defaults", "hydra")})
        yield from (f"## cupynet {name}", f"[`cupynet {name}`](cli.md#cupynet-{name}) adds or changes these settings:")
        yield table(COLUMNS, rows("", own, schema(kind)))


def rows(key: str, node: Node, types: dict[str, str]) -> Iterator[Row]:
    """Yield a row for every setting below a key, except those that refer to other settings."""
    for name, each in node.below.items():
        below = f"{key}.{name}" if key else name
        if name == "_target_" or each.value.startswith("${parallel."):
            continue
        if each.target or not each.below:
            arguments = constructor(node.target)
            kind = words(arguments[name].annotation) if name in arguments else "part"
            yield f"`{below}`", types.get(below) or kind, default(each), meaning(each.comment)
        yield from rows(below, each, types)


def default(node: Node) -> str:
    environment = re.fullmatch(r"\$\{oc.decode:\$\{oc.env:(\w+),(.*)\}\}", node.value)
    if environment is not None:
        return f"`${environment[1]}`, or `{environment[2]}`"
    return linked(node.target) if node.target else f"`{node.value}`"


def linked(target: str) -> str:
    """Return a class's name with a link to api.md."""
    module, _, name = target.rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    public_name = next((each for each, known in public().items() if known is kind), "")
    return f"[`{name}`](api.md#{anchor(public_name)})" if public_name else f"`{target}`"


def head(group: str, name: str, node: Node, default: str = "", built: str = "") -> Iterator[str]:
    yield f"### {group}={name}{' (default)' * (name == default)}"
    yield wrapped(meaning(node.comment).rstrip(".") + "." + built)


def group(name: str, default: str) -> Iterator[str]:
    """Yield a group's section: the settings that most choices share, then each choice."""
    files = {path.stem: choice(name, path.stem) for path in sorted((CONF / name).glob("*.yaml"))}
    files = {default: files.pop(default), **files}
    own = {stem: [*rows(name, node, TYPES)] for stem, node in files.items()}
    if len(files) == 1:
        yield from (wrapped(meaning(files[default].comment)), table(COLUMNS, own[default]))
        return
    common = [
        row
        for row, number in Counter(row for found in own.values() for row in found).items()
        if 2 * number > len(files)
    ]
    missing = {
        row: [stem for stem, found in own.items() if row[0] not in {each[0] for each in found}] for row in common
    }
    if common:
        yield "Most options share these settings. Each option below lists only the settings that differ."
    yield table(
        COLUMNS, ((*row[:3], row[3] + f" (not in {codes(missing[row])})" * bool(missing[row])) for row in common)
    )
    for stem, node in files.items():
        yield from head(name, stem, node, default, f" Class: {linked(node.target)}." if node.target else "")
        yield table(COLUMNS, (row for row in own[stem] if row not in common))


def models() -> Iterator[str]:
    """Yield the arguments of each kind of layer, then the layers of each network."""
    files = {path.stem: choice("model", path.stem) for path in sorted((CONF / "model").glob("*.yaml"))}
    files = {"lenet": files.pop("lenet"), **files}
    comments: dict[str, dict[str, str]] = {}
    for _, layer in (each for node in files.values() for each in layers("model", node)):
        known = comments.setdefault(layer.target, {})
        known |= {name: known.get(name) or each.comment for name, each in layer.below.items() if name != "_target_"}
    yield "The arguments of a layer are settings too: `model.layers.conv1.filters=32` changes `conv1`."
    for target, found in comments.items():
        shown = {name: each for name, each in constructor(target).items() if name in found}
        yield f"### Arguments of {target.rpartition('.')[2]}" * bool(shown)
        yield table(
            COLUMNS.replace("setting", "argument"),
            (
                (f"`{name}`", words(each.annotation), as_yaml(each.default), meaning(found[name]))
                for name, each in shown.items()
            ),
        )
    for stem, node in files.items():
        yield from head("model", stem, node, "lenet")
        yield table(
            "layer | class | arguments that are not defaults",
            ((f"`{key}`", linked(each.target), changed(each)) for key, each in layers("model", node)),
        )


def layers(key: str, node: Node) -> Iterator[tuple[str, Node]]:
    for name, each in node.below.items():
        if each.target:
            yield f"{key}.{name}", each
        yield from layers(f"{key}.{name}", each)


def as_yaml(value: Any) -> str:
    """Return a Python default as YAML; "" for a required argument."""
    return "" if value is inspect.Parameter.empty else f"`{yaml.safe_dump(value).splitlines()[0]}`"


def changed(layer: Node) -> str:
    arguments = constructor(layer.target)
    given = {name: each.value for name, each in layer.below.items() if name in arguments and not each.below}
    different = [f"{name}={value}" for name, value in given.items() if yaml.safe_load(value) != arguments[name].default]
    return f"`{' '.join(different)}`" * bool(different)


def experiment(path: Path) -> Iterator[str]:
    """Yield an experiment's description and the settings that it changes."""
    node = written(path)
    chosen = [each[10:].replace(": ", "=") for each in node.below.pop("defaults").below if each != "_self_"]
    yield from head("experiment", path.stem, node)
    yield wrapped(f"Sets `{' '.join([*chosen, *assigned(node)])}`.")


def assigned(node: Node, above: str = "") -> Iterator[str]:
    """Yield the settings below a node in command-line syntax."""
    for name, each in node.below.items():
        part = "{" + ",".join(f"{key}:{value.value}" for key, value in each.below.items()) + "}"
        own = [f"{above}{name}={part if each.target else each.value}"]
        yield from assigned(each, f"{above}{name}.") if each.below and not each.target else own
