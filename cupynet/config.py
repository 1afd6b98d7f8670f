"""The door: how settings come in from the command line, conf/ and a finished run, and how a command leaves.

The only file that imports Hydra and OmegaConf, and over 300 lines long for that; behind it there are plain values
(`Settings`) and typed errors. What cannot work is refused before any work and before a folder is made: one line that
names the setting, exit code 2.

Hydra 1.3 composes a run, calls `on_run_start` of its callbacks, and only then makes the run's folder: `Gate` stands
there. Hydra swallows what callbacks raise unless it is no `Exception`, so a refusal travels past it as `_Leave`. Errors
of the composition come out of `hydra.main` as they are when HYDRA_FULL_ERROR is 1; otherwise Hydra prints them itself.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from cupynet.errors import ConfigError, DataError, Interrupted, OutputError
from cupynet.exits import BROKEN_PIPE, stdout_is_gone, tell
from cupynet.parts import build
from cupynet.settings import RULES, Settings, nearest, one_line, size, validate

__all__ = ["Settings", "build", "load", "run", "size", "validate"]

Task = Callable[[Settings, Path], "float | None"]  # one job: its settings and the folder it writes to
Check = Callable[[Settings], object]  # raises ConfigError for settings that cannot work together

_log = logging.getLogger("cupynet")
_GROUPS = ("backend", "memory", "data", "model", "optimizer", "parallel", "callbacks", "experiment")


def _names(schema: type[Settings]) -> list[str]:
    return [each.name for each in fields(schema)]


def _spine(schema: type[Settings] = Settings) -> DictConfig:
    """The typed root that conf/config.yaml is merged into (OmegaConf takes frozen for read-only)."""
    spine: DictConfig = OmegaConf.structured(schema)
    OmegaConf.set_readonly(spine, None)
    return spine


def _register(schema: type[Settings]) -> None:
    ConfigStore.instance().store(name="spine", node=_spine(schema), provider="cupynet")


_register(Settings)


def conf_folder() -> Path:
    """conf/ inside the package, where a wheel has it, else beside it, where the repository has it."""
    package = Path(__file__).resolve().parent
    return next((folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()), package / "conf")


def run(task: Task, check: Check, config_name: str = "config", schema: type[Settings] = Settings) -> None:
    """Be a command: compose the settings the command line asks for, refuse what cannot work, do the job or the sweep.

    check: the deep checks of the command, after names, types and values are found good and before a folder is made (in
    a sweep: when the job starts).
    task: its result goes to Hydra's sweeper. Relative paths stay relative to where the command was started.

    Returns when all went well, else leaves the process (SystemExit) with the exit code of the first job that failed:
    that of a `CupynetError`, which is told in one line, or 1 for a bug, which is told with its traceback.
    """
    global _door
    door = _door = _Door(task, check, schema)
    _register(schema)
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        code = _enter(door, config_name)
    finally:
        _door = None
        _register(Settings)
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
    if stdout_is_gone() and not door.codes:  # jobs that did their work count as done, whoever was listening
        code = BROKEN_PIPE
    if code:
        raise SystemExit(code)


def _enter(door: _Door, config_name: str) -> int | str:
    """Give the command to Hydra; the exit code."""
    overrides = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for option in sys.argv[1:]:
        if (
            option.startswith("--")
            and "=" in option
            and option[2:].partition("=")[0].partition(".")[0] in _names(door.schema)
        ):
            return tell(ConfigError(f"{option}: settings are written without dashes: {option[2:]}"))
    try:
        hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=config_name)(door.job_function())()
    except _Leave as left:
        return tell(left.args[0])
    except BrokenPipeError as error:
        return tell(error)
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        # jobs hand their errors to the door: an OSError out here met Hydra at the folder or the log of a run
        failure = error.__cause__ if isinstance(error.__cause__, OSError) else error
        if isinstance(failure, OSError) and not isinstance(failure, HydraException):
            return tell(OutputError(f"the run's folder cannot be written: {failure}"))
        return tell(ConfigError(_explain(error, overrides)))
    except BaseException as error:
        return tell(error)
    return next((code for code in door.codes if code), 0)


class _Leave(BaseException):
    """Carries an error (its only argument) out past Hydra, which holds back the exceptions of callbacks."""


class Gate(Callback):
    """Hydra's callback that refuses a run, or a sweep, whose folder does not exist yet (conf/config.yaml lists it)."""

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        if _door is not None:
            _door.admit(config)

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Compose every job of the sweep: a name or type that is wrong in one is wrong on the command line."""
        if config.hydra.sweeper.get("_target_") != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
            return  # another sweeper chooses its jobs on the way
        asked = _asked(config)
        loader = GlobalHydra.instance().config_loader()
        swept = [f"{key}={values}" for key, values in (config.hydra.sweeper.get("params") or {}).items()]
        try:
            parsed = OverridesParser.create(loader).parse_overrides([*swept, *asked])
            jobs = BasicSweeper.split_arguments(parsed, None)[0]
        except Exception as error:
            raise _Leave(ConfigError(_explain(error, asked))) from error
        for overrides in jobs:
            try:
                loader.load_sweep_config(config, list(overrides))
            except Exception as error:
                raise _Leave(ConfigError(_explain(error, overrides))) from error


class _Door:
    """One use of `run`: what it lets in, and how its jobs ended."""

    def __init__(self, task: Task, check: Check, schema: type[Settings]) -> None:
        self.task = task
        self.schema = schema
        self.check = check
        self.admitted = False
        self.codes: list[int | str] = []  # one per job that has ended

    def admit(self, config: DictConfig) -> None:
        """Check a single run before Hydra makes its folder."""
        try:
            HydraConfig.instance().set_config(config)  # for ${hydra:...}; Hydra itself does it only later
            self.check(_settings(config, _asked(config), self.schema))
        except Exception as error:
            raise _Leave(error) from error
        self.admitted = True

    def job_function(self) -> Callable[[DictConfig], float | None]:
        @functools.wraps(self.task)  # Hydra names the job after the module of the function it finds underneath
        def job(config: DictConfig) -> float | None:
            return self._job(config)

        return job

    def _job(self, config: DictConfig) -> float | None:
        """Do one job. Hydra never sees it fail: it would print lines of its own and leave with 1, whatever it was."""
        now = HydraConfig.get()
        sweep = now.mode == RunMode.MULTIRUN
        try:
            settings = _settings(config, _asked(HydraConfig.instance().cfg), self.schema)
            if not self.admitted:
                self.check(settings)
            result = self.task(settings, Path(now.runtime.output_dir))
            self.codes.append(0)
            return result
        except BaseException as error:
            self.codes.append(tell(error, _log, f"job {now.job.num}: " if sweep else ""))
            if sweep and isinstance(error, KeyboardInterrupt | Interrupted):  # meant for the whole sweep
                raise _Leave(SystemExit(self.codes[-1])) from error
            return None


_door: _Door | None = None  # Hydra makes its callbacks itself: this is how `Gate` finds the door it belongs to


def _asked(config: Any) -> list[str]:
    """The overrides as they were written: reading them like any setting would fill in what stands in ${}."""
    return cast("list[str]", OmegaConf.to_container(config.hydra.overrides.task, resolve=False))


def _settings(config: DictConfig, overrides: Sequence[str] = (), schema: type[Settings] = Settings) -> Settings:
    """The composed configuration as plain, valid values; ConfigError."""
    try:
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain: Any = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(_explain(error, overrides)) from error
    for name, value in plain.items():
        if name not in _names(schema):
            raise ConfigError(f"{name}={one_line(value)}: there is no setting '{name}'{nearest(name, _names(schema))}")
    settings = schema(**plain)
    validate(settings)
    return settings


def load(run_folder: str | Path, overrides: Sequence[str] = (), trusted_modules: Iterable[str] = ()) -> Settings:
    """The settings of a finished run, from its `.hydra/config.yaml`, with single ones changed (`batch_size=512`).

    A stored configuration names classes to build but never who is trusted: its own trusted_modules are left out, and
    only the caller's count (the argument, or an override). ConfigError; DataError for a file that cannot be read.
    """
    path = Path(run_folder) / ".hydra" / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run_folder}: is not the folder of a run: there is no {path}")
    try:
        stored = OmegaConf.load(path)
    except Exception as error:  # YAML, encoding, permissions
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error
    if not isinstance(stored, DictConfig):
        raise DataError(f"{path}: is not a configuration")
    stored["trusted_modules"] = list(trusted_modules)
    try:
        config: DictConfig = _spine()
        config.merge_with(stored)
        OmegaConf.set_struct(config, True)
        for each in OverridesParser.create().parse_overrides(list(overrides)):
            if each.is_delete() or each.is_sweep_override():
                raise ConfigError(f"{each.input_line}: only single settings can be changed here, as key=value")
            file = each.value()
            if each.key_or_group in _GROUPS and isinstance(file, str):
                config[each.key_or_group] = _group_file(each.key_or_group, file)
                continue
            added = each.is_add() or each.is_force_add()
            OmegaConf.update(config, each.key_or_group, each.value(), merge=True, force_add=added)
        return _settings(config, overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error, overrides)) from error


def _group_file(group: str, name: str) -> Any:
    """What `group=name` on a command line stands for: the composed content of conf/<group>/<name>.yaml."""
    with hydra.initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return hydra.compose("config", overrides=[f"{group}={name}"])[group]


def _explain(error: BaseException, overrides: Sequence[str]) -> str:
    """One line for an error of the composition: the setting as it was written, what is wrong, what would be right."""
    text = one_line(error)
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        reason = "" if reason.startswith("Error parsing") else f": {reason}"
        return f"{error.override}: is not written as key=value, or has special characters without quotes{reason}"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if error.options is None or not group:
            return one_line(str(error).partition("\n")[0])
        return f"{group}={name}: there is no '{name}' in conf/{group}{nearest(name, error.options)}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        place = f"{text[4:].partition(chr(39))[0]}: " if text.startswith("In '") else ""  # a file of conf/
        return place + _explain_key(cause, str(cause.full_key), () if place else overrides)
    for override in overrides:
        key, _, value = override.partition("=")
        if text.startswith(f"Ambiguous value for argument '{override}'"):
            return (
                f"{override}: several values need -m, to try each; for a list write {key}=[{value}], for a text quotes"
            )
        if text.startswith(f"Sweep parameters '{override}'"):
            return f"{override}: several values need -m, to try each"
        if text.startswith("Could not append") and f"'{key[1:]}'" in text:
            return f"{override}: there is a setting '{key[1:]}' already; write it without the +"
        if text.startswith("Config group override must") and key.lstrip("+~") in _GROUPS:
            return f"{override}: must be the name of a file in conf/{key.lstrip('+~')}"
    return text


def _explain_key(error: OmegaConfBaseException, key: str, overrides: Sequence[str]) -> str:
    """The same for an error that knows its key."""
    ruled = key.partition("[")[0]  # devices[1] is ruled with devices
    asked = next((o.lstrip("+~") for o in overrides if o.lstrip("+~").startswith((f"{ruled}=", f"{ruled}."))), None)
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        above, parent = key.rpartition(".")[0], error.parent_node
        known = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
        full = [f"{above}.{name}" if above else name for name in known]
        inside = [known for known in RULES if known.endswith(f".{key}")]  # averaging_frequency=3
        hint = f"; did you mean '{inside[0]}'?" if inside else nearest(key, full)
        hint = "; does the file begin with '# @package _global_'?" if key == "experiment" else hint
        return f"{asked or key}: there is no setting '{key}'{hint}"
    if isinstance(error, MissingMandatoryValue):
        return f"{key}: is missing" + (f"; choose it with {key}=... (--help lists them)" if key in _GROUPS else "")
    reason = one_line((error.msg or str(error)).partition("full_key:")[0])
    rule = RULES[ruled]((asked or "").partition("=")[2]) if ruled in RULES else None
    if isinstance(error, InterpolationResolutionError):
        return f"{asked or key}: {reason}" + (f"; {rule}" if rule else "")
    if isinstance(error, ValidationError):
        return f"{asked or ruled}: {rule or reason}"
    return f"{asked or key}: {reason}"
