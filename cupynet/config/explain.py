"""One line for an error of the composition: the setting as it was written, what is wrong, what would be right.

Hydra and OmegaConf tell most of what happened by the class of an error and by the key that it carries; what they only
put into words is recognized by `WORDS`. Nothing here decides what is wrong: an unknown error is told as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from cupynet.checks import guess, listed, nearest, one_line
from cupynet.errors import ConfigError
from cupynet.settings import Settings, refused, rules

GROUPS = ("backend", "memory", "data", "model", "loss", "optimizer", "parallel", "callbacks", "experiment")

# What Hydra 1.3 says only in words, made one line -> what it means here. A pattern catches the override or its key;
# one that catches nothing is about a group that was given something other than the name of a file.
WORDS = (
    (
        r"Ambiguous value for argument '(?P<override>.+?)' 1\. ",
        "{override}: several values need -m, to try each; for a list write {key}=[{value}], for a text quotes",
    ),
    (r"Sweep parameters '(?P<override>.+)' requires --multirun", "{override}: several values need -m, to try each"),
    (
        r"Could not append to config\. An item is already at '(?P<key>.+?)'",
        "{override}: there is a setting '{key}' already; write it without the +",
    ),
    (
        r"Could not delete from config\. '(?P<key>.+?)' does not exist",
        "{override}: there is no setting '{key}' to take out",
    ),
    (
        r"Multiple values for (?P<key>[\w/]+)\. To override a value",
        "{override}: there is a choice of {key} already; write it without the +: {key}={value}",
    ),
    (
        r"Config group override must be a string or a list\.",
        "{override}: must be the name of a file in conf/{key}{none}",
    ),
)
IN_FILE = re.compile(r"In '(?P<file>[^']+)': \w+ raised while composing config:")  # the class is in __context__


def explain(error: BaseException, overrides: Sequence[str], schema: type[Settings] = Settings) -> str:
    """The line. overrides: what was written on the command line; schema: the settings that were composed."""
    if isinstance(error, OverrideParseException):
        reason = error.message.splitlines()[0]
        reason = "" if reason.startswith("Error parsing") else f": {reason}"
        return f"{error.override}: is not written as key=value, or has special characters without quotes{reason}"
    nameless = next((each for each in overrides if each.lstrip("+~").startswith("=")), None)
    if nameless is not None:
        return f"{nameless}: is not written as key=value: there is no key"
    if isinstance(error, MissingConfigException):
        return _no_such_file(error, overrides)
    if isinstance(error, OSError):  # met by Hydra at the folder or the log of a run
        path = error.filename or _folder()
        return f"the run's folder cannot be written: {path}{path and ': '}{error.strerror or one_line(error)}"
    ours = next((each for each in _causes(error) if isinstance(each, ConfigError)), None)
    if ours is not None:  # raised where a reference was resolved
        return one_line(ours)
    text = one_line(error)
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        file = IN_FILE.match(text)
        line = _keyed(cause, str(cause.full_key), () if file else overrides, schema)
        return f"{file['file']}: {line}" if file else line
    return _worded(text, overrides) or text


def _folder() -> str:
    """The folder of the run, or of the sweep, that Hydra is at; "" where there is none yet."""
    if not HydraConfig.initialized():
        return ""
    now = HydraConfig.get()
    return str(now.sweep.dir if now.mode == RunMode.MULTIRUN else now.run.dir)


def _no_such_file(error: MissingConfigException, overrides: Sequence[str]) -> str:
    """The line for a file of a group that is not there; of one in a list Hydra does not say which others there are."""
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    options = error.options
    asked = next((each for each in overrides if each.startswith(f"{group}=[")), None)
    if asked is not None and not options:
        folders = re.findall(r"path=file://(.+)", str(error))  # the end of the message: where Hydra has looked
        options = [path.stem for folder in folders for path in Path(folder, group).glob("*.yaml")]
    if not options or not group:
        return one_line(str(error).partition("\n")[0])
    return f"{asked or f'{group}={name}'}: there is no '{name}' in conf/{group}{nearest(name, options)}"


def _worded(text: str, overrides: Sequence[str]) -> str:
    """The line for what one of `WORDS` recognizes, else ""."""
    for pattern, line in WORDS:
        found = re.match(pattern, text)
        if found is None:
            continue
        caught = found.groupdict()
        for override in overrides:
            key, _, value = override.lstrip("+~").partition("=")
            no_file = key in GROUPS and (value == "null" or not value[:1].isalpha())
            if caught.get("override") == override or caught.get("key", "" if no_file else None) in (key, ""):
                none = "; leave it out for none" if (key, value) == ("experiment", "null") else ""
                return line.format(override=override, key=key, value=value, none=none)
    return ""


def _keyed(error: OmegaConfBaseException, key: str, overrides: Sequence[str], schema: type[Settings]) -> str:
    """The line for an error that knows its key."""
    ruled = key.partition("[")[0]  # devices[1] falls under the rule of devices
    told = [o for o in overrides if o.lstrip("+~").startswith((f"{ruled}=", f"{ruled}.")) or o == f"~{ruled}"]
    wrong = [o for o in told if refused(schema, ruled, _value(o, ruled))]  # of a setting written twice, the refused one
    written = ["", *told, *wrong][-1]
    asked = written.lstrip("+~")
    if isinstance(error, ConfigKeyError | ConfigAttributeError):
        return f"{asked or key}: there is no setting '{key}'{_hint(error, key, schema)}"
    if isinstance(error, MissingMandatoryValue):
        if key in GROUPS:
            return f"{key}: is missing; choose it with {key}=... (--help lists them)"
        return f"{asked or key}: is missing: {'write a value, or leave it out' if asked else f'give it with {key}=...'}"
    if isinstance(error, ConfigTypeError) and written.startswith("~"):
        return f"{written}: every run has this setting: {key}=... changes it, nothing takes it out"
    if isinstance(error, InterpolationResolutionError) and _refers_to_nothing(error):
        place = asked or f"{key}={_raw(error)}"
        return f"{place}: refers to a setting that is not there: write a value, or the name of a setting"
    reason = one_line((error.msg or str(error)).partition("full_key:")[0])
    rule = refused(schema, ruled, _value(written, ruled))
    if reason.startswith("Cannot merge DictConfig with ListConfig"):
        text = asked.partition("=")[2]
        list_wanted = isinstance(_value(written, ruled), Mapping)
        reason = rule or (f"must be a list: {key}=[{text}]" if list_wanted else "must be a mapping: {name: value}")
    if isinstance(error, InterpolationResolutionError):
        return f"{asked or key}: {reason}" + (f"; {rule}" if rule else "")
    if isinstance(error, ValidationError):
        return f"{asked or ruled}: {rule or reason}"
    return f"{asked or key}: {reason}"


def _value(override: str, key: str) -> Any:
    """What an override gives to the setting `key`; its text where Hydra cannot read it or the key is another."""
    own, _, text = override.lstrip("+~").partition("=")
    try:
        return OverridesParser.create().parse_override(override).value() if own == key else text
    except HydraException:
        return text


def _refers_to_nothing(error: BaseException) -> bool:
    """Whether an interpolation names what is not there, or something inside what was made null (a type error)."""
    kinds = (InterpolationKeyError, InterpolationToMissingValueError, ConfigTypeError)
    return any(isinstance(each, kinds) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came of, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _hint(error: OmegaConfBaseException, key: str, schema: type[Settings]) -> str:
    """What may have been meant by a key that is not there."""
    if key == "experiment":
        return "; does the file begin with '# @package _global_'?"
    if key == "hydra.launcher.jobs":
        return "; with hydra/launcher=processes there is"
    inside = [known for known, _ in rules(schema) if known.endswith(f".{key}")]  # averaging_frequency=3
    if inside:
        return f"; did you mean {listed(repr(name) for name in inside)}?"
    above, parent = key.rpartition(".")[0], error.parent_node
    known = [str(name) for name in parent if name != "hydra"] if isinstance(parent, DictConfig) else []
    if above == "parallel.pipeline" and not known:
        return "; replicas are whole: parallel=pipeline cuts them into stages"
    hint = nearest(key, [f"{above}.{name}" if above else name for name in known])
    # an argument that the file does not list: of another class, which was chosen by its `_target_`
    last, own = key.rpartition(".")[2], [name for name in known if name != "_target_"]
    strange = len(own) < len(known) and not guess(last, known)
    return f"{nearest(last, own)}; for an argument of another class write ++{key}=..." if strange else hint


def _raw(error: OmegaConfBaseException) -> str:
    """The value as it stands in the configuration, ${} and all."""
    node = error.parent_node
    plain = OmegaConf.to_container(node, resolve=False) if node is not None else {}
    return one_line(plain[error.key]) if isinstance(plain, dict | list) and error.key is not None else "${...}"
