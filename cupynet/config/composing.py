"""From overrides to settings: conf/ is merged into the typed root and comes out as plain, valid values."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
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

from cupynet import trust
from cupynet.checks import refusal, shown, written
from cupynet.config.explain import explain
from cupynet.errors import ConfigError
from cupynet.parts import for_chosen_classes
from cupynet.resume import quoted
from cupynet.settings import Group, Settings, read, without_stand_in

S = TypeVar("S", bound=Settings)


def names(schema: type[Settings]) -> list[str]:
    return [each.name for each in fields(schema)]


def spine(schema: type[Settings]) -> DictConfig:
    """The typed root that conf/config.yaml is merged into."""
    spine: DictConfig = OmegaConf.structured(_thawed(schema))
    return spine


_thawed_of: dict[type[Group], type] = {}  # OmegaConf tells a class from a second one made alike


def _thawed(kind: type[Group]) -> type:
    """The dataclass, and the groups in it, as OmegaConf can work with them.

    Not frozen, which OmegaConf takes for read-only; and what OmegaConf 2.3 gets wrong is left to the rule of the
    setting: `bool`, for which it takes 2 too, and unions, with which it cannot merge (an AssertionError of its own).
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
    ConfigStore.instance().store(name="spine", node=spine(schema), provider="cupynet")


register(Settings)


def of_environment(name: str, default: bool | int) -> bool | int:
    """What the environment says, of the type of `default`, which counts where it says nothing. ConfigError."""
    text = os.environ.get(name, "").strip()
    if not text:  # as scripts leave a variable that they have no value for
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
    """conf/ inside the package, where a wheel has it, else beside it, where the repository has it."""
    package = Path(__file__).resolve().parents[1]
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), package / "conf")


def compose(overrides: Sequence[str] = (), folder: Path | None = None) -> Settings:
    """The settings that such a command line asks for, without a run. ConfigError.

    folder: of more files, as --config-dir names one.
    """
    more = [] if folder is None else [f"hydra.searchpath=[{quoted(folder.absolute())}]"]
    store = ConfigStore.instance()
    before = store.repo["spine.yaml"], GlobalHydra.instance().hydra  # of a command that is at its door
    register(Settings)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            config = hydra.compose("config", overrides=[*overrides, *more])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, overrides)) from error
    finally:
        store.repo["spine.yaml"], GlobalHydra.instance().hydra = before
    return settings_of(config, overrides, Settings, trust.typed(overrides))


def asked_in(config: Any) -> list[str]:
    """The overrides as they were written: reading them like any setting would fill in what stands in ${}."""
    return cast("list[str]", OmegaConf.to_container(config.hydra.overrides.task, resolve=False))


def settings_of(config: DictConfig, overrides: Sequence[str], schema: type[S], typed: Sequence[str]) -> S:
    """The composed configuration as plain, valid values; ConfigError. typed: the keys that no file gave."""
    try:
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = cast("dict[str, Any]", OmegaConf.to_container(ours, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, overrides, schema)) from error
    trust.check_text(plain)
    trust.check_trusted(plain.get("trusted_modules") or (), typed)
    asked = [(each.key_or_group, each.value()) for each in OverridesParser.create().parse_overrides(list(overrides))]
    for key, value in asked:
        node = OmegaConf.select(config, key) if value == {} else None
        if isinstance(node, DictConfig) and len(node):
            raise ConfigError(
                f"{key}={{}}: takes nothing out of what is there: ~{key}.{next(iter(node))!s} takes one out"
            )
    return read(schema, without_stand_in(for_chosen_classes(plain, asked), dict(asked)))


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
