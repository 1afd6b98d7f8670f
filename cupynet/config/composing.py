"""From overrides to settings: conf/ is merged into the schema, resolved, and validated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cupynet.config.instantiate import for_chosen_classes
from cupynet.config.messages import message
from cupynet.config.removed import refuse_removed
from cupynet.config.resume import quoted
from cupynet.config.schema import Group, Settings, read, without_stand_in
from cupynet.core.checks import refusal, shown, written
from cupynet.core.errors import ConfigError

S = TypeVar("S", bound=Settings)

GROUPS = ("backend", "memory", "data", "model", "loss", "optimizer", "parallel", "callbacks", "experiment")
CONFIG_DIR = ("-cd", "--config-d")  # how the option may be shortened


def names(schema: type[Settings]) -> list[str]:
    """The names of the settings."""
    return [each.name for each in fields(schema)]


def spine(schema: type[Settings]) -> DictConfig:
    """The schema that conf/config.yaml is merged into."""
    spine: DictConfig = OmegaConf.structured(_thawed(schema))
    return spine


_thawed_of: dict[type[Group], type] = {}  # OmegaConf compares classes by identity


def _thawed(kind: type[Group]) -> type:
    """A dataclass, and its groups, in a form that OmegaConf can merge into.

    It is not frozen, which OmegaConf treats as read-only. Two types become Any, and are checked by the rule of the
    setting: `bool`, as which OmegaConf 2.3 accepts 2, and unions, into which it cannot merge.
    """
    if kind in _thawed_of:
        return _thawed_of[kind]
    hints, members = get_type_hints(kind), []
    for each in fields(kind):
        hint = _thawed(each.metadata["group"]) if "group" in each.metadata else hints[each.name]
        union = isinstance(hint, UnionType) and len(set(get_args(hint)) - {type(None)}) > 1
        default = field(default=each.default, default_factory=each.default_factory)
        members.append((each.name, Any if union or hint is bool else hint, default))
    _thawed_of[kind] = make_dataclass(kind.__name__, members, kw_only=True)
    return _thawed_of[kind]


def register(schema: type[Settings]) -> None:
    """Make `schema` the one that conf/config.yaml begins with."""
    ConfigStore.instance().store(name="spine", node=spine(schema), provider="cupynet")


register(Settings)


def of_environment(name: str, default: bool | int) -> bool | int:
    """An environment variable, of the type of `default`, which is used if it is unset or empty. ConfigError."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    found: bool | int | None
    if isinstance(default, bool):
        found = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
    else:
        found = int(text) if re.fullmatch(r"[+-]?[0-9]{1,30}", text) else None
    if found is None:
        what = "true or false" if isinstance(default, bool) else "an integer"
        raise refusal(name, shown(text, str), f"must be {what}, or unset for {written(default)}")
    return found


OmegaConf.register_new_resolver("cupynet.env", of_environment, replace=True)


def conf_folder() -> Path:
    """conf/: inside the package in a wheel, beside it in the repository."""
    package = Path(__file__).resolve().parents[1]
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), package / "conf")


def own_folder(arguments: Sequence[str]) -> Path | None:
    """The folder that --config-dir names on a command line; None if there is none."""
    found = None
    for place, option in enumerate(arguments):
        name, _, value = option.partition("=")
        if name.startswith(CONFIG_DIR):
            found = Path(value or next(iter(arguments[place + 1 :]), ""))
    return found


@contextmanager
def global_hydra() -> Iterator[None]:
    """Context in which `hydra.initialize_config_dir` can be used inside a running command."""
    before = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().clear()
        if before is not None:
            GlobalHydra.instance().initialize(before)


def compose(overrides: Sequence[str] = (), folder: Path | None = None) -> Settings:
    """The settings of a run with these overrides. ConfigError.

    folder: with more configuration files, as --config-dir.
    """
    refuse_removed(overrides)
    more = [] if folder is None else [f"hydra.searchpath=[{quoted(folder.absolute())}]"]
    repository = ConfigStore.instance().repo
    before = repository["spine.yaml"]  # of the running command
    register(Settings)
    try:
        with global_hydra(), hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            config = hydra.compose("config", overrides=[*overrides, *more])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(message(error, Settings)) from error
    finally:
        repository["spine.yaml"] = before
    return settings_of(config, overrides, Settings)


def settings_of(config: DictConfig, overrides: Sequence[str], schema: type[S]) -> S:
    """The composed configuration as plain, valid values. ConfigError."""
    try:
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = cast("dict[str, Any]", OmegaConf.to_container(ours, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(message(error, schema)) from error
    _refuse_nul(plain)
    asked = [(each.key_or_group, each.value()) for each in OverridesParser.create().parse_overrides(list(overrides))]
    return read(schema, without_stand_in(for_chosen_classes(plain, asked), dict(asked)))


def _refuse_nul(value: Any, key: str = "") -> None:
    """Refuse NUL in any text: it ends file names for the system. ConfigError."""
    if isinstance(value, Mapping | list):
        for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_nul(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{key}={value!r:.80}: must not hold the character NUL")


def flat(values: Mapping[str, Any], leave_out: Sequence[str] = (), above: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, leave_out, f"{key}.")
        elif key not in leave_out:
            found[key] = value
    return found
