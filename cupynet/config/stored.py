"""The settings stored in `.hydra/` of a run, which are untrusted input.

Stored files may contain only plain values: no code, no references, no environment variables. Stored Hydra settings,
`trusted_modules` and --config-dir are ignored.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cupynet.config.composing import GROUPS, composed, settings_of
from cupynet.config.instantiate import build_as, class_of
from cupynet.config.messages import refusal
from cupynet.config.overrides import PARSER, name_of, parseable, values_of, without
from cupynet.config.removed import IGNORED, KEYS, translated
from cupynet.config.resume import is_inside
from cupynet.config.schema import Settings
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.settings import flat
from cupynet.core.wording import listed, one_line, shown, written
from cupynet.runs.layout import HYDRA, OVERRIDES, SETTINGS

STORED_OVERRIDE = re.compile(r"(~|\+\+?|)([\w./]+)(=.*|)", re.DOTALL)  # prefix, key, and value
FILES = re.compile(r"[\w/-]*|\[[\w/,-]*\]|\{.*\}", re.DOTALL)  # the value of a group: files, or a mapping of settings
OF_ENVIRONMENT = re.compile(r"\$\{cupynet\.env:\w+,(true|false|\d{1,9})\}")  # written by earlier versions
MAX_BYTES = 1 << 20
MAX_DEPTH = 64


def load(
    run_folder: str | Path,
    overrides: Sequence[str] = (),
    trusted_modules: Iterable[str] = (),
    folder: Path | None = None,
) -> Settings:
    """Read the settings of a run and apply overrides.

    Args:
        overrides: settings (`batch_size=512`) or files of groups (`data=synthetic`).
        trusted_modules: modules with classes that may be used. The list stored with the run is ignored.
        folder: the argument of --config-dir.

    Raises:
        ConfigError: there are no settings, or they are invalid.
        DataError: a file is damaged, or contains references.
    """
    path = Path(run_folder) / SETTINGS
    if not path.is_file():
        raise ConfigError(f"{run_folder}: not a run folder, because {path} is missing")
    stored = translated(_plain(path))
    stored.pop("fast_dev_run", None)  # of a smoke test of an earlier version
    stored["trusted_modules"] = list(trusted_modules)
    config: DictConfig = OmegaConf.structured(Settings)
    try:
        config.merge_with(stored)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {refusal(error, Settings)}. The run may be from another version") from error
    if missing := sorted(OmegaConf.missing_keys(config)):
        raise DataError(f"{path}: is damaged, because it lacks {listed(missing, 'and')}")
    OmegaConf.set_struct(config, True)
    try:
        parsed = PARSER.parse_overrides(list(overrides))
        for each in sorted(parsed, key=lambda each: each.key_or_group not in GROUPS):  # files first, like Hydra
            if each.key_or_group == "experiment":
                _require_experiment(str(each.value()), run_folder)
            else:
                _change(config, each, folder)
    except (HydraException, OmegaConfBaseException) as error:
        raise refusal(error, Settings) from error
    return settings_of(config, overrides, Settings)


def _require_experiment(name: str, run_folder: str | Path) -> None:
    """Raise ConfigError unless the run was started with this experiment."""
    then = stored_settings(run_folder)[1].get("experiment")
    if name != str(then):
        started = "without one" if then is None else f"with {written(then)}"
        raise ConfigError(f"the run was started {started}. Change its settings one by one", "experiment", name)


def _change(config: DictConfig, override: Override, folder: Path | None) -> None:
    key, value = override.key_or_group, override.value()
    if override.is_sweep_override() or (override.is_delete() and value is not None):
        raise ConfigError(f"{override.input_line}: only single settings can be changed here, as key=value")
    if _is_file(key, value):
        config[key] = composed([str(override.input_line)], folder)[key]
    elif not override.is_delete():
        OmegaConf.update(config, key, value, merge=True, force_add=override.is_add() or override.is_force_add())
    elif OmegaConf.select(config, key) is not None:
        OmegaConf.update(config, key, None)


def _is_file(key: str, value: object) -> bool:
    """Return True if an override selects files of a configuration group."""
    return key in GROUPS and isinstance(value, str | list)


def overrides_of(folder: str | Path, schema: type[Settings] = Settings) -> list[str]:
    """Return the stored overrides of a job, without overrides of Hydra settings; empty if there are none."""
    path = Path(folder) / OVERRIDES
    if not path.is_file():
        return []
    found = _read(path)
    known = {*(each.name for each in fields(schema)), *GROUPS}
    kept = []
    for each in found if isinstance(found, list) else [found]:
        match = STORED_OVERRIDE.fullmatch(str(each))
        prefix, former, value = match.groups() if match else ("", "", "")
        key = KEYS.get(former, former)
        if key.startswith(("hydra", "callbacks.nonfinite")) or key in IGNORED or key == "fast_dev_run":
            continue
        if key.partition(".")[0] not in known or (key in GROUPS and not FILES.fullmatch(value[1:])):
            raise DataError(f"{path}: {one_line(each)}: not a setting of a run")
        kept.append(f"{prefix}{key}{value}")
    return kept


def changed_overrides(folder: str | Path, changes: Sequence[str]) -> list[str]:
    """Return the stored overrides of a job after `changes`. Other files of a group also replace its settings."""
    parsed = PARSER.parse_overrides([*changes])
    replaced = [each.key_or_group for each in parsed if _is_file(each.key_or_group, each.value())]
    merged = [each.key_or_group for each in parsed if each.key_or_group in GROUPS and isinstance(each.value(), dict)]
    kept = without(overrides_of(folder), *({*map(name_of, changes)} - {*merged}))
    return [*(each for each in kept if not name_of(each).startswith(tuple(f"{key}." for key in replaced))), *changes]


def stored_settings(folder: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the stored settings of a run by dotted key, and the selected file of each group."""
    settings = translated(_plain(Path(folder) / SETTINGS))
    path = Path(folder) / HYDRA
    chosen: Any = _read(path) if path.is_file() else {}
    for key in ("hydra", "runtime", "choices"):
        chosen = chosen.get(key) if isinstance(chosen, dict) else None
    choices = chosen if isinstance(chosen, dict) else {}
    return flat(settings), {name: str(choices[name]) for name in GROUPS if choices.get(name) is not None}


def keep(folder: Path, settings: Settings, overrides: Sequence[str] = ()) -> None:
    """Store the settings and the overrides of a run in its folder."""
    from cupynet.core.files import require_folder, write_whole  # slow imports

    require_folder((folder / SETTINGS).parent)
    for name, content in ((SETTINGS, asdict(settings)), (OVERRIDES, list(overrides))):
        write_whole(folder / name, yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())


def job_overrides() -> list[str]:
    return cast("list[str]", OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False))


def check_outputs(settings: Settings, run: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if callbacks would write outside the run or send data, unless `overrides` set this."""
    for key, value, _ in _places(settings, run):
        if not _is_typed(key, overrides):
            allowed = f"To allow this, set {key}=... or repeat its callbacks=..."
            reason = f"the run in {run} would write or send data outside its folder. {allowed}"
            raise ConfigError(reason, key, shown(value, written))


def not_stored(settings: Settings, run: Path) -> list[str]:
    """Return, as overrides, the settings that must be repeated to resume a run."""
    trusted = settings.trusted_modules
    found = [f"trusted_modules={written(trusted)}"] if trusted else []
    places = _places(settings, run)
    return [*found, *(f"{'' if known else '+'}{key}={parseable(value)}" for key, value, known in places)]


def _places(settings: Settings, run: Path) -> Iterator[tuple[str, Any, bool]]:
    """Yield (key, value, whether it is stored) for callback settings that refer to places outside the run folder."""
    for name, part in settings.callbacks.items():
        if not isinstance(part, Mapping):
            continue
        key = f"callbacks.{name}"
        outside: tuple[str, ...] = ()
        with suppress(ConfigError):  # the error is reported when the part is built
            outside = getattr(class_of(part.get("_target_"), key, settings.trusted_modules), "outside", ())
        own = flat({key: part})
        for each, value in ({f"{key}.{setting}": None for setting in outside} | own).items():
            setting = each.rpartition(".")[2]
            if (
                setting in outside
                or (setting == "uri" and value)
                or (setting == "mode" and value == "online")
                or (setting == "path" and value is not None and not is_inside(str(value), run))
            ):
                yield each, value, each in own


def _is_typed(key: str, overrides: Sequence[str]) -> bool:
    """Return True if the command line sets a setting directly, in a mapping, or by a file of its group."""
    given = values_of(overrides)
    return key in given or isinstance(given.get(key.partition(".")[0]), str | list)  # the file replaces stored settings


def check_downloads(settings: Settings, run: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError if data would be downloaded to a stored data.folder that `overrides` do not repeat."""
    from cupynet.data import Source  # a slow import

    source: Any = build_as(Source, settings.data, "data", settings.trusted_modules)  # type: ignore[type-abstract]
    named = settings.data.get("folder")
    if named is not None and getattr(source, "missing", None) and not _is_typed("data.folder", overrides):
        reason = f"the run in {run} would download data to {source.place}. To allow this, set data.folder=..."
        raise ConfigError(reason, "data.folder", one_line(named))


def _read(path: Path) -> Any:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise DataError(f"{path}: must be a plain file of at most {MAX_BYTES} bytes")
    try:
        return _values(path.read_text(encoding="utf-8"))
    except Exception as error:  # from YAML, or because of the encoding or permissions
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


@functools.lru_cache(maxsize=64)  # a command reads the same file several times, and parsing takes 25 ms
def _values(text: str) -> Any:
    """Parse YAML to plain values, which callers must not change. Raise an error for anything unusual."""
    _check_nesting(text)
    found = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    if "\\u0000" in json.dumps(found):  # `dumps` rejects numbers with thousands of digits
        raise ValueError("a value contains a NUL character")
    return found


def _check_nesting(text: str) -> None:
    """Raise ValueError if a YAML text contains aliases or deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):  # OmegaConf's parser; libyaml differs, for example at BOMs
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} levels of nesting are not allowed")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("YAML aliases (*name) are not allowed")  # a short file could expand to gigabytes


def _plain(path: Path) -> dict[str, Any]:
    """Read stored settings, and resolve references of earlier versions. Raise DataError for any others."""
    stored = _read(path)
    if not isinstance(stored, dict):
        raise DataError(f"{path}: is not a configuration")

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: resolved(item) for name, item in value.items()}
        if isinstance(value, list):
            return [resolved(item) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        variable = OF_ENVIRONMENT.fullmatch(value)
        found = yaml.safe_load(variable[1]) if variable else every.get(value[2:-1], value)  # ${key}
        if "${" in str(found):
            raise DataError(f"{path}: {one_line(value):.80}: a stored setting must be a plain value")
        return found

    every = flat(stored)
    return {str(name): resolved(value) for name, value in stored.items()}
