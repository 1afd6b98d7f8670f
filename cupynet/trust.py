"""What settings that stand in a file may not decide: which code runs, whom to trust, where anything is written.

Settings are typed, or they stand in files: in conf/, in a folder that --config-dir names, in that of a run which is
evaluated or gone on with. Parts are only built from classes that are trusted (parts.py), but Hydra has settings of its
own, which name classes and folders too, and it builds those before anybody is asked. So what was composed is looked at
here before anything is made of it. Nothing here knows Hydra: it is given plain values, `${...}` in them as written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from cupynet.checks import one_line
from cupynet.errors import ConfigError, DataError

GATE = {"gate": {"_target_": "cupynet.config.Gate"}}
HANDLERS = (
    "cupynet.exits.Console",
    "cupynet.exits.LogFile",
    "logging.FileHandler",
    "logging.NullHandler",
    "logging.StreamHandler",
)
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
LOG_FILE = re.compile(r"\$\{hydra\.runtime\.output_dir\}/(\w[\w.-]*|\$\{hydra\.job\.name\}\.log)")
MOST_BYTES, MOST_DEPTH, MOST_REFERENCES = 1 << 20, 64, 16  # of a file of settings that a run has stored


def typed(arguments: Sequence[str]) -> tuple[str, ...]:
    """The keys that a command line gives values to."""
    return tuple(
        argument.partition("=")[0].lstrip("+~").partition("@")[0]
        for argument in arguments
        if not argument.startswith("-")
    )


def by_hand(key: str, typed: Collection[str]) -> bool:
    """Whether a setting, something in it or what it is in was typed."""
    return any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in typed)


def check_trusted(modules: Sequence[str], typed: Collection[str]) -> None:
    """Refuse modules that a file would have trusted. ConfigError."""
    if modules and not by_hand("trusted_modules", typed):
        raise ConfigError(
            f"trusted_modules=[{','.join(map(str, modules))}]: stands in a file, and a file does not say whom to "
            "trust: write it on the command line"
        )


def check_hydra(hydra: Mapping[str, Any], typed: Collection[str], plugins: Collection[str]) -> None:
    """Refuse what Hydra is told to build or to write, unless it is what Hydra and conf/ themselves have.

    Args:
        hydra: its settings as composed, nothing in them resolved but the launcher's and the sweeper's.
        typed: the keys of the command line: where things are written may be said there.
        plugins: the classes of launchers and sweepers that are installed.

    Raises:
        ConfigError: names the setting.
    """
    callbacks = hydra.get("callbacks")
    if callbacks != GATE:
        others = (
            {k: v for k, v in callbacks.items() if GATE.get(k) != v} if isinstance(callbacks, Mapping) else callbacks
        )
        raise ConfigError(
            f"hydra.callbacks={one_line(others)}: is not built: only gate is; what watches a run stands in callbacks"
        )
    for name in ("launcher", "sweeper"):
        for key, target in _targets(hydra.get(name), f"hydra.{name}"):
            if key != f"hydra.{name}._target_" or target not in plugins:
                raise ConfigError(f"{key}={one_line(target)}: is not built: only an installed plugin of Hydra is")
    for name in ("hydra_logging", "job_logging"):
        _check_log(hydra.get(name), f"hydra.{name}")
    job = hydra.get("job") or {}
    if job.get("env_set") and not by_hand("hydra.job.env_set", typed):
        raise ConfigError(
            f"hydra.job.env_set={one_line(job['env_set'])}: stands in a file: type it, or set them before"
        )
    if not re.fullmatch(r"\w[\w.-]*", str(job.get("name"))) and not by_hand("hydra.job.name", typed):
        raise ConfigError(f"hydra.job.name={one_line(job.get('name'))}: must be a plain name")
    if hydra.get("output_subdir") not in (".hydra", None) and not by_hand("hydra.output_subdir", typed):
        raise ConfigError(f"hydra.output_subdir={one_line(hydra['output_subdir'])}: stands in a file: type it")
    for key in FOLDERS:
        group, _, name = key.removeprefix("hydra.").partition(".")
        check_folder(key, (hydra.get(group) or {}).get(name), typed)


def check_folder(key: str, folder: Any, typed: Collection[str]) -> None:
    """Refuse a folder without a name: an unset variable of the shell would write into the one where the command was
    started. And one that a file names and that does not lie below that. ConfigError.

    folder: as it was written, or resolved.
    """
    if isinstance(folder, str) and not folder.strip():
        raise ConfigError(f"{key}={one_line(folder)}: must be the name of a folder")
    path = PurePath(str(folder))
    if (".." in path.parts or path.is_absolute() or str(folder).startswith("~")) and not by_hand(key, typed):
        raise ConfigError(
            f"{key}={one_line(folder)}: a file of settings may only name a folder below this one: type {key}=..."
        )


def check_stored(text: str, path: Any, events: Iterator[tuple[str, int]], *, references: int = MOST_REFERENCES) -> None:
    """Refuse a stored file of settings that would unfold into far more than it is. DataError.

    text: its content.
    events: of the file: what each is (`alias`, `begin`, `end` or another), and its line.
    references: how many there may be in it.
    """
    if len(text) > MOST_BYTES:
        raise DataError(f"{path}: expected at most {MOST_BYTES} characters, found {len(text)}")
    if text.count("${") > references:
        raise DataError(f"{path}: expected at most {references} references (${{...}}), found {text.count('${')}")
    depth = 0
    for kind, line in events:
        depth += (kind == "begin") - (kind == "end")
        if kind == "alias":
            raise DataError(f"{path}: line {line} refers to another part (*name), which no run has stored")
        if depth > MOST_DEPTH:
            raise DataError(f"{path}: line {line} is nested more than {MOST_DEPTH} deep")


def check_text(value: Any, key: str = "") -> None:
    """Refuse a character in a setting that ends names for the system, wherever it stands. ConfigError."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            check_text(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_text(item, f"{key}[{index}]")
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{key}={value!r:.80}: must not hold the character NUL")


def check_path_of_parts(parts: Mapping[str, Any], run: PurePath, typed: Collection[str]) -> None:
    """Refuse parts of a stored run, by name, that would write outside its folder, or send anything. ConfigError."""
    for name, part in parts.items():
        given = part if isinstance(part, Mapping) else {}
        for setting, value in (("uri", given.get("uri")), ("mode", given.get("mode") == "online" and "online")):
            key = f"callbacks.{name}.{setting}"
            if value and not by_hand(key, typed):
                raise ConfigError(
                    f"{key}={one_line(value)}: the run in {run} would write elsewhere: type {key}=... if it may"
                )
        path = given.get("path")
        key = f"callbacks.{name}.path"
        if path is None or by_hand(key, typed):
            continue
        inside = PurePath(str(path))
        if ".." in inside.parts or run not in inside.parents:
            raise ConfigError(
                f"{key}={one_line(path)}: the run in {run} would write outside its folder: type {key}=... if it may"
            )


def _targets(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Each `_target_` in a node, with its key."""
    if isinstance(node, Mapping):
        for name, item in node.items():
            if name == "_target_":
                yield f"{key}._target_", item
            else:
                yield from _targets(item, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            yield from _targets(item, f"{key}[{index}]")


def _check_log(node: Any, key: str, above: str = "") -> None:
    """Refuse factories, unknown handlers and files outside the run's folder in settings for `logging`. ConfigError."""
    if isinstance(node, Mapping):
        for name, item in node.items():
            here = f"{key}.{name}"
            if name == "class":
                good = above == "handlers" and item in HANDLERS
            elif name == "filename":
                good = LOG_FILE.fullmatch(str(item)) is not None
            else:
                good = name not in ("()", "factory", ".", "target", "queue", "listener")
            if not good:
                raise ConfigError(f"{here}={one_line(item)}: is not what a log of a run may be made of")
            if name not in ("class", "filename"):
                _check_log(item, here, key.rpartition(".")[2])
    elif isinstance(node, list | tuple):
        for index, item in enumerate(node):
            _check_log(item, f"{key}[{index}]")
    elif isinstance(node, str) and ("${" in node or "://" in node) and node not in STREAMS:
        raise ConfigError(f"{key}={one_line(node)}: is not what a log of a run may be made of")
