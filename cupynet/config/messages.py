"""Convert errors from Hydra and OmegaConf to ConfigError."""

from __future__ import annotations

import os
import re
import shlex

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from cupynet.config.schema import Settings, rules
from cupynet.core.errors import ConfigError, causes
from cupynet.core.wording import listed, nearest, one_line

KEY = re.compile(r"[+~]*[\w.@/:-]+")
GROUP_FILE = re.compile(r"((?:hydra/)?[^/]+)/(.*)")  # in data//tmp, the name is /tmp
SYNTAX = {*"[]{},'\"\\"}  # a value that contains one of these may be a mistyped list, mapping or quoted string


def refusal(error: BaseException, schema: type[Settings]) -> ConfigError:
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        quotable = KEY.fullmatch(key.strip()) and value and not SYNTAX & {*value}
        example = shlex.quote(f'{key.strip()}="{os.path.expanduser(value.strip())}"') if quotable else ""
        reason = f"must be key=value, with quotes around special characters: {example or one_line(error.message)}"
        return ConfigError(f"{error.override}: {reason}")
    if isinstance(error, MissingConfigException) and (file := GROUP_FILE.fullmatch(error.missing_cfg_file or "")):
        group, name = file.groups()
        own = "; for your own images, set data=folder data.folder=..." * (group == "data" and "/" in name)
        reason = f"there is no such file in conf/{group}{own or nearest(name, error.options or ())}"
        return ConfigError(reason, group, name)
    all_errors = list(causes(error))
    ours = next((each for each in all_errors if isinstance(each, ConfigError)), None)
    if ours is not None:  # raised by a resolver
        return ours
    found = next((each for each in all_errors if isinstance(each, OmegaConfBaseException) and each.full_key), None)
    if found is None:
        return ConfigError(one_line(error))
    key = str(found.full_key)
    if key == "experiment" and _file(error).startswith("experiment/"):  # the file's settings are below this key
        return ConfigError(f"{_file(error)}the file must begin with the line # @package _global_")
    if isinstance(found, ConfigKeyError | ConfigAttributeError):
        reason = f"there is no setting '{key}'{_hint(found, key, schema)}"
    elif isinstance(found, MissingMandatoryValue):
        reason = "must not be empty. Choose a file of this group, or remove the setting"
    elif "is not a ListConfig" in str(found.msg):
        return ConfigError(f"must be a list: {key}=[{found.value}]", f"{_file(error)}{key}", str(found.value))
    elif "is not Optional" in str(found.msg):
        reason = "must not be null. Set a value, or remove the setting"
    else:
        reason = one_line((found.msg or str(found)).partition("full_key:")[0])
    return ConfigError(reason, f"{_file(error)}{key}")


def _file(error: BaseException) -> str:
    """Return the file named in a Hydra error, with a colon, or "" for the command line."""
    text = one_line(error)
    return f"{text.split(chr(39))[1]}: " if text.startswith("In '") else ""


def _hint(error: OmegaConfBaseException, key: str, schema: type[Settings]) -> str:
    above, parent = key.rpartition(".")[0], error.parent_node
    groups = parent.items_ex(resolve=False) if isinstance(parent, DictConfig) else ()
    inside = {known for known, _ in rules(schema) if known.endswith(f".{key}")}  # as in averaging_frequency=3
    inside |= {f"{name!s}.{key}" for name, group in groups if isinstance(group, DictConfig) and group and key in group}
    if inside:
        return f"; did you mean {listed(map(repr, sorted(inside)))}?"
    known = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
    return nearest(key, [f"{above}.{name}" if above else name for name in known])
