"""Compose settings: merge conf/ and overrides into the schema, resolve references, and validate."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, TypeVar, cast

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cupynet.config.instantiate import arguments, for_chosen_classes
from cupynet.config.messages import refusal
from cupynet.config.overrides import PARSER, name_of, quoted, values_of
from cupynet.config.schema import Settings, read
from cupynet.core.checks import one_of
from cupynet.core.errors import ConfigError
from cupynet.core.settings import flat
from cupynet.core.wording import listed, shown, written

S = TypeVar("S", bound=Settings)

GROUPS = ("backend", "memory", "data", "model", "loss", "optimizer", "parallel", "callbacks", "experiment")


def register(schema: type[Settings]) -> None:
    """Register `schema` as the first entry of the defaults list in conf/config.yaml."""
    ConfigStore.instance().store(name="spine", node=schema, provider="cupynet")


register(Settings)


def conf_folder() -> Path:
    """Return conf/, which is inside the package in a wheel, and next to it in the repository."""
    package = Path(__file__).resolve().parents[1]
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), package / "conf")


def own_folder() -> Path | None:
    """Return the argument of --config-dir in the running command, or None."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else ()
    return next((Path(each.path) for each in sources if each.provider == "command-line"), None)


def compose(overrides: Sequence[str] = (), folder: Path | None = None) -> Settings:
    """Compose and validate the settings of a run. `folder` is the argument of --config-dir, or None."""
    try:
        config = composed(overrides, folder)
    except (HydraException, OmegaConfBaseException) as error:
        raise refusal(error, Settings) from error
    return settings_of(config, overrides, Settings)


def composed(overrides: Sequence[str], folder: Path | None) -> DictConfig:
    more = [] if folder is None else [f"hydra.searchpath=[{quoted(folder.absolute())}]"]
    repository, running = ConfigStore.instance().repo, GlobalHydra.instance().hydra
    spine = repository["spine.yaml"]  # the schema registered by the running command
    register(Settings)
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
            return hydra.compose("config", overrides=[*opened(overrides), *more])
    finally:
        repository["spine.yaml"] = spine
        GlobalHydra.instance().clear()
        if running is not None:
            GlobalHydra.instance().initialize(running)


def settings_of(config: DictConfig, overrides: Sequence[str], schema: type[S]) -> S:
    """Convert a composed configuration to validated settings."""
    try:
        ours = config
        if "hydra" in config:
            ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = cast("dict[str, Any]", OmegaConf.to_container(ours, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise as_typed(refusal(error, schema), config, overrides) from error
    name_schedule(plain, overrides)
    asked = [*map(name_of, overrides), *values_of(overrides)]
    for_chosen_classes(plain, asked)
    data = plain.get("data")
    if isinstance(data, dict) and data.get("fallback") == "auto" and {"data", "data._target_"} & {*asked}:
        data["fallback"] = None  # explicitly chosen data have no fallback
    return read(schema, plain)


RATE = "optimizer.learning_rate"


def opened(overrides: Sequence[str]) -> list[str]:
    """Make schedules in overrides replace the optimizer's default schedule instead of merging with it."""
    for each in overrides:
        _check_group(each)
    return [f"++{each}" if each.startswith(f"{RATE}=") and "{" in each else each for each in overrides]


def _check_group(override: str) -> None:
    """Raise ConfigError for a group that is set to null, a bool or a number, such as `callbacks=null`."""
    group, _, value = override.partition("=")
    with suppress(HydraException):  # raised again, and reported, by Hydra
        if group in GROUPS and isinstance(PARSER.parse_override(override).value(), int | float | None):
            names = sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))
            raise ConfigError(f"must be one of {listed(names)}, the files of conf/{group}", group, value)


def name_schedule(plain: dict[str, Any], overrides: Sequence[str]) -> None:
    """Replace the name of a schedule in `plain`, as in `optimizer.learning_rate=cosine`, with its class.

    If the schedule sets no rate, it takes the rate in the optimizer's file.
    """
    optimizer: Any = plain.get("optimizer")
    node = optimizer.get("learning_rate") if isinstance(optimizer, dict) else None
    node = {"name": node} if isinstance(node, str) else node
    if not isinstance(node, dict) or "name" not in node:
        return
    from cupynet.optim.schedules import NAMES, required  # a slow import

    kind, by_class = NAMES[one_of(RATE, node["name"], NAMES)], {each.__name__: each for each in NAMES.values()}
    asked = {each.removeprefix(f"{RATE}.").partition(".")[0] for each in values_of(overrides) if each.startswith(RATE)}
    before = by_class.get(str(node.get("_target_")).rpartition(".")[2])
    merged = {"name", "_target_", *(arguments(before)[0] if before else ())}
    given = {key: value for key, value in node.items() if key not in merged or key in asked - {"name"}}
    if missing := [each for each in required(kind) if each not in given]:
        form = written({"name": node["name"], **dict.fromkeys(required(kind), "...")})
        raise ConfigError(f"requires {listed(missing, 'and')}. Set {RATE}={form}", RATE, node["name"])
    if kind.highest is not None and kind.highest not in given:
        kept = [each for each in overrides if re.match(r"\W*(optimizer|experiment)\b", each) and RATE not in each]
        rate = composed(kept, own_folder()).optimizer.get("learning_rate")
        while isinstance(rate, Mapping):
            own = by_class.get(str(rate.get("_target_")).rpartition(".")[2])
            rate = None if own is None or own.highest is None else rate.get(own.highest)
        if not isinstance(rate, int | float):
            raise ConfigError("is missing, and the optimizer's file has none. Set it", f"{RATE}.{kind.highest}")
        given[kind.highest] = rate
    optimizer["learning_rate"] = {"_target_": f"cupynet.optim.{kind.__name__}", **given}


def overrides_of_jobs(sweep: DictConfig) -> list[list[str]]:
    """Return the overrides of all jobs of a sweep in order, or [] if only its sweeper can enumerate them."""
    hydra = sweep.hydra
    fixed = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
    if not hydra.sweeper._target_.endswith(".BasicSweeper"):
        return []
    try:
        choices = [
            [f"{each.get_key_element()}={value}" for value in each.sweep_string_iterator()]
            if each.is_sweep_override()
            else [str(each.input_line)]
            for each in PARSER.parse_overrides([*fixed, *hydra.overrides.task])
        ]
    except HydraException:  # for example glob(...), which only Hydra can expand
        return []
    return [[*job] for job in product(*choices)]


def as_typed(error: ConfigError, config: DictConfig, overrides: Sequence[str]) -> ConfigError:
    """Name the setting or environment variable that the invalid setting refers to, if any."""
    variable = r"\$\{(?:oc\.decode:\$\{)?oc\.env:(\w+)(?:,[^{}]*)?\}+"
    unresolved = flat(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)))
    reference = re.fullmatch(rf"\$\{{(\w[\w.]*)\}}|{variable}", str(unresolved.get(error.setting)))
    if reference is None or error.setting in values_of(overrides) or (reference[2] or "PATH") not in os.environ:
        return error
    if reference[2] and error.value is None:  # from OmegaConf, which describes the reference
        reason = f"is not a valid value of {error.setting}"
        return ConfigError(reason, reference[2], shown(os.environ[reference[2]]))
    return ConfigError(error.reason, reference[1] or reference[2], error.value)
